"""What several tests of the data sets share."""

import dataclasses
import importlib.machinery
import sys
import types

import pytest

from tests.data import cifar_files
from towers import data
from towers.data import cifar, cifar10, cifar100, shapes


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
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", cifar_files.NUM)
    monkeypatch.setattr(cifar100, "RECORDS", cifar_files.NUM_OF_100)
    archive = dict(url=(tmp_path / "no-such-archive.tar.gz").as_uri(), md5="0" * 32)
    max_bytes = cifar.MAX_PICKLE * cifar_files.NUM * cifar.PICTURE_BYTES
    for module in cifar10, cifar100:
        publish(module, **archive, max_bytes=max_bytes)


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
