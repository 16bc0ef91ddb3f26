"""`towers init`: what it writes runs as it is, by the commands that it prints."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from towers import cli

pytestmark = pytest.mark.unit

NAMES = ["my_data.py", "my_net.py", "my_run.cfg"]


@pytest.fixture(autouse=True)
def modules(folder):
    """Stand in an empty folder, and leave modules as they were."""
    yield
    for name in "my_data", "my_net":
        sys.modules.pop(name, None)


def commands_of(printed):
    return [shlex.split(line) for line in printed.splitlines() if line.startswith("  ")]


def test_it_stands_in_the_current_folder_and_overwrites_nothing(folder, capsys):
    (folder / "my_run.cfg").write_text("mine")
    assert cli.main(["init"]) == 2
    error = "towers: my_run.cfg already exists; name another folder: "
    assert capsys.readouterr().err == f"{error}towers init FOLDER\n"
    assert os.listdir(folder) == ["my_run.cfg"] and Path("my_run.cfg").read_text() == "mine"
    Path("my_run.cfg").unlink()
    assert cli.main(["init"]) == 0
    assert sorted(os.listdir(folder)) == NAMES
    assert all(words[0] == "towers" for words in commands_of(capsys.readouterr().out))


def test_what_it_cannot_do_is_one_line(folder, capsys):
    (folder / "file").touch()
    for words, message in {("a", "b"): "takes one folder", ("file/a",): "Not a directory"}.items():
        assert cli.main(["init", *words]) == 2
        assert message in capsys.readouterr().err
