"""What several tests of the data sets share."""

import importlib.machinery
import sys
import types

import pytest

from towers import data


@pytest.fixture
def load(monkeypatch):
    """Load what a function `mine:load` returns."""
    module = types.ModuleType("mine")
    module.__spec__ = importlib.machinery.ModuleSpec("mine", loader=None)
    monkeypatch.setitem(sys.modules, "mine", module)

    def call(result, **given):
        module.load = result if callable(result) else lambda: result
        return data.load("mine:load", **given)

    return call
