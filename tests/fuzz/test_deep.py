"""Folders within folders, more than Python calls functions within functions."""

import os
import shutil

import pytest

from towers import cli
from towers.commands.predict import inputs
from towers.commands.tensorboard import command
from towers.errors import InputError


@pytest.fixture
def deep(tmp_path, monkeypatch):
    """Stand in a folder with a chain of folders, whose whole name no system call takes."""
    monkeypatch.chdir(tmp_path)
    for _ in range(1500):
        os.mkdir("a")
        os.chdir("a")
    os.chdir(tmp_path)
    yield
    while os.path.isdir("a"):  # shutil.rmtree is recursive, too
        if os.path.isdir("a/a"):
            os.rename("a/a", "b")
        shutil.rmtree("a")
        if os.path.isdir("b"):
            os.rename("b", "a")


def test_they_are_refused_in_one_line(deep):
    with pytest.raises(InputError, match="too many folders within folders"):
        command.start(cli.parse("tensorboard", ["--train_dir=a"]))
    with pytest.raises(InputError, match="too many folders within folders"):
        inputs._files("a")
