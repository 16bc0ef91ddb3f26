"""What several tests of the data sets share."""

import dataclasses
import importlib.machinery
import sys
import types

import pytest

from tests.data import tiny_cifar10
from towers import data
from towers.data import cifar, cifar10, cifar100, svhn


@pytest.fixture
def publish(monkeypatch):
    """Change what is known of the published data sets of a module."""

    def change(module, **changes):
        for name, known in module.SETS.items():
            monkeypatch.setitem(module.SETS, name, dataclasses.replace(known, **changes))

    return change


@pytest.fixture
def tiny(monkeypatch, publish, tmp_path):
    """Expect few records in each file of the CIFARs, and download from nowhere."""
    num = tiny_cifar10.NUM
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", num)
    monkeypatch.setattr(cifar100, "RECORDS", {"train": num, "test": num // 2})
    sources = {(tmp_path / "no-such-archive.tar.gz").as_uri(): "0" * 32}
    for module in cifar10, cifar100, svhn:
        publish(module, sources=sources, max_bytes=cifar.MAX_PICKLE * num * cifar.PICTURE_BYTES)


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
