"""What several tests of the data sets share."""

import importlib.machinery
import sys
import types

import pytest

from towers import data
from towers.data import shapes


@pytest.fixture
def few_shapes(monkeypatch, tmp_path):
    """Draw few of the built-in pictures, and keep them in a folder of the test's."""
    monkeypatch.setattr(shapes, "NUM_TRAIN", 50)
    monkeypatch.setattr(shapes, "NUM_TEST", 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
