"""What several tests of the data sets share."""

import importlib.machinery
import sys
import types

import pytest

from tests.data import tiny_cifar10
from towers import data
from towers.data import cifar10


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Expect few records in each file of CIFAR-10, and download from nowhere."""
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", tiny_cifar10.NUM)
    monkeypatch.setattr(cifar10, "URL", (tmp_path / "no-such-archive.tar.gz").as_uri())


@pytest.fixture
def mine(monkeypatch):
    """An importable module `mine`."""
    module = types.ModuleType("mine")
    module.__spec__ = importlib.machinery.ModuleSpec("mine", loader=None)
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


@pytest.fixture
def load(mine):
    """Load what a function `mine:load` returns."""

    def call(result):
        mine.load = lambda: result
        return data.load("mine:load")

    return call
