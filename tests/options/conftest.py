"""A folder of modules to stand in."""

import sys

import pytest


@pytest.fixture
def write(folder):
    """Return `write(name, text)`, which writes a file in that folder."""

    def write(name, text=""):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


@pytest.fixture
def modules(folder, monkeypatch):
    """Stand in a folder on the search path, with installed modules in lib, all forgotten later."""
    before = set(sys.modules)
    for path in folder / "lib/python3/site-packages", folder:
        monkeypatch.syspath_prepend(path)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]
