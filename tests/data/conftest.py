"""What several tests of the data sets share."""

import dataclasses
import importlib.machinery
import sys
import types

import pytest

from tests.data import cifar_files
from towers import data
from towers.data import cifar, shapes


@pytest.fixture
def publish(monkeypatch):
    """Change what is known of a published data set."""

    def change(name, **changes):
        known = dataclasses.replace(cifar.SETS[name], **changes)
        monkeypatch.setitem(cifar.SETS, name, known)

    return change


@pytest.fixture
def tiny(publish, tmp_path):
    """Expect few records in each file of the CIFARs, and download from nowhere."""
    archive = dict(url=(tmp_path / "no-such-archive.tar.gz").as_uri(), md5="0" * 32)
    for name, known in cifar.SETS.items():
        publish(name, **archive, num_records=cifar_files.records(known))


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
