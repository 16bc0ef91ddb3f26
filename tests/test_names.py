"""A run may have any name that the system takes: what is written there is read there."""

import os

import numpy as np
import pytest

import towers
from tests import tiny
from tests.test_files import refusal
from towers import cli
from towers.monitoring import events

FLAGS = "--model=tests.tiny:dense", "--dataset=tests.tiny:images", "--augment=none"
NAMES = {
    "brackets": "lr[0.1]",
    "negated": "[!a]",
    "stars": "a*b?",
    "backslash": r"a\b",
    "quotes": 'it\'s "x" `y` $HOME',
    "unicode": "\u00fc\u6f22\U0001f600",
    "dash": "-x",
    "percent": "100%s%d",
    "braces": "{a,b}#c:d=e",
    "levels": "/".join(["level"] * 200),
    "long": "n" * 255,
    "long in bytes": "\u6f22" * 85,
}


def towers_of(name, verb, *flags):
    return cli.main([verb, f"--train_dir={name}", *flags])


@pytest.mark.parametrize("kind", NAMES)
def test_what_is_written_is_read(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    name = NAMES[kind]
    steps = "--batch_size=7", "--checkpoint_every_steps=3", "--log_every_steps=1"
    assert towers_of(name, "train", *FLAGS, *steps, "--max_steps=4") == 0
    assert towers_of(name, "train", "--max_steps=6") == 0
    assert "at step 4 of 6" in capsys.readouterr().out
    assert cli.main(["train", f"--flagfile={name}/flags.cfg"]) == 0
    assert "has all its 6 steps" in capsys.readouterr().out
    assert list(events.read(tmp_path / name / "train")) == list(range(6))
    assert towers_of(name, "evaluate") == 0
    saved = tiny.saved(tmp_path / name) if kind == "dash" else {}  # plain TensorFlow reads that
    for variable in towers.load(name).variables:
        if saved:
            stored = saved[f"model.S{variable.path.replace('/', '.S')}"]
            assert np.array_equal(stored, variable.numpy())
    assert towers_of(name, "export", "--format=weights") == 0
    if kind in ("brackets", "negated", "stars", "backslash"):
        assert towers_of(name, "export", "--format=saved_model") == 2
        assert "TensorFlow cannot load a SavedModel from a path with" in capsys.readouterr().err
        assert towers_of(name, "export", "--format=saved_model", "--output=plain/model") == 0


@pytest.mark.parametrize("kind", ["long", "long in bytes"])
def test_an_old_run_whose_name_leaves_no_room_is_not_moved_aside(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    name = NAMES[kind]
    os.mkdir(name)
    (tmp_path / name / "flags.cfg").touch()
    assert "cannot be moved to" in refusal(name, overwrite=True)
    assert "File name too long; name another --train_dir" in refusal(name, overwrite=True)


def test_a_path_that_leaves_no_room_for_names_in_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    room = os.pathconf("/", "PC_PATH_MAX") - len(str(tmp_path))
    name = "/".join(["d" * 99] * (room // 100 - 1))
    assert "File name too long; name another --train_dir" in refusal(name)
