"""Checkpoints: whole or passed over, and never too many."""

import os
import re

import numpy as np
import pytest
import tensorflow as tf

from towers.errors import InputError
from towers.training.run.checkpoint import find
from towers.training.run.checkpoint_manager import CheckpointManager

pytestmark = pytest.mark.unit


def variables(value):
    return {
        "model/a/kernel": tf.Variable(np.full([20, 30], float(value))),
        "model/b.c/kernel~2": tf.Variable(np.full([3], value, np.float32)),
        "step": tf.Variable(int(value), dtype=tf.int64),
    }


def opened(folder, value=0.0, keep=3):
    return CheckpointManager(folder, variables(value), {"model": "m:f"}, keep)


def save(folder, *steps, keep=3):
    for step in steps:
        opened(folder, step, keep).save_now(step)


def restored(folder, warn=print):
    """Return the step that is read, and the value that the variables then have."""
    checkpoints = opened(folder, -1.0)
    step = checkpoints.restore(warn)
    values = {float(np.unique(v.numpy()).item()) for v in checkpoints.variables.values()}
    assert len(values) == 1
    return step, values.pop()


DATA = "data-00000-of-00001"
DAMAGES = {
    "data cut short": (DATA, lambda old: old[: len(old) // 2]),
    "data absent": (DATA, lambda old: None),
    "data a pipe": (DATA, lambda old: os.mkfifo),
    "index absent": ("index", lambda old: None),
    "index empty": ("index", lambda old: b""),
    "index of something else": ("index", lambda old: bytes(len(old))),
}


def damage(folder, step, kind):
    suffix, change = DAMAGES[kind]
    path = folder / f"ckpt-{step}.{suffix}"
    new = change(path.read_bytes())
    path.unlink()
    if new is not None:
        path.write_bytes(new) if isinstance(new, bytes) else new(path)


def test_the_newest_is_restored_without_a_state_file_and_of_nothing_comes_none(tmp_path):
    assert opened(tmp_path / "none").restore() is None
    assert not (tmp_path / "none").exists()
    save(tmp_path, 2, 10, 9)
    (tmp_path / "checkpoint").write_text("garbage {{")
    assert restored(tmp_path) == (10, 10.0)
    save(tmp_path, 11, keep=2)
    assert [step for step, _ in find(tmp_path)] == [10, 11]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_line(tmp_path, kind):
    save(tmp_path, 1, 2, 3)
    damage(tmp_path, 3, kind)
    lines = []
    assert restored(tmp_path, lines.append) == (2, 2.0)
    assert len(lines) == 1 and "\n" not in lines[0]
    why = r"ckpt-3(\.index is missing| cannot be read \(.*\S.*\))"
    assert re.fullmatch(rf"{tmp_path}/{why}: skipped", lines[0])
    with pytest.raises(InputError, match=rf"{why}; towers train"):
        restored(tmp_path, None)  # as to evaluate it


def test_a_checkpoint_with_a_place_that_is_none_is_passed_over(tmp_path):
    for step, place in enumerate(
        ({"stage": "end"}, {"stage": 3}, {"other": 1}, {"sums": {"a": []}})
    ):
        manager = opened(tmp_path, step, keep=9)
        manager.place = lambda place=place: place
        manager.save_now(step)
        assert restored(tmp_path) == (0, 0.0)


def test_a_flipped_bit_anywhere_is_seen(tmp_path):
    """Also in what no variable is read from: the names by which TensorFlow's own readers go."""
    save(tmp_path, 1, 2)
    path = tmp_path / f"ckpt-2.{DATA}"
    whole, unseen = path.read_bytes(), []
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        if restored(tmp_path, warn=lambda line: None) != (1, 1.0):
            unseen.append(place)
    assert not unseen


def test_the_newest_are_kept_also_across_restarts(tmp_path):
    for first in 1, 6:
        checkpoints = opened(tmp_path, keep=3)
        checkpoints.restore()
        for step in range(first, first + 5):
            checkpoints.variables["step"].assign(step)
            checkpoints.save_now(step)
    names = {path.name for path in tmp_path.iterdir()}
    kept = {f"ckpt-{n}.{part}" for n in (8, 9, 10) for part in ("index", "data-00000-of-00001")}
    assert names == kept | {"checkpoint"}
    checkpoints.save_now(10)
    assert {path.name for path in tmp_path.iterdir()} == names


def test_what_is_written_beside_training_is_what_was_at_the_save(tmp_path):
    checkpoints = opened(tmp_path, 1.0)
    checkpoints.save(1)
    snapshot = checkpoints.snapshot()
    for variable in checkpoints.variables.values():
        variable.assign_add(tf.ones_like(variable))
    checkpoints.save(2)
    checkpoints.save_now(3, {**snapshot, "step": tf.constant(3, tf.int64)})
    assert [step for step, _ in find(tmp_path)] == [1, 2, 3]
    for step, value in {1: 1.0, 2: 2.0, 3: 1.0}.items():
        assert checkpoints.restore(wanted=step) == step
        assert np.all(checkpoints.variables["model/a/kernel"].numpy() == value)
