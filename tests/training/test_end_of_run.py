"""A signal near the end of a run changes nothing: the same command goes on where it was."""

import json
import os
import signal

import keras
import numpy as np
import pytest

import towers
from tests import runs, tiny
from towers.monitoring.monitor import Monitor
from towers.training.callbacks.user_callbacks import Callbacks
from towers.training.run import checkpoint
from towers.training.run.checkpoint_manager import CheckpointManager
from towers.training.step.train_loop import TrainLoop

pytestmark = pytest.mark.run

X, Y = np.random.default_rng(0).normal(size=(2, 40, 4)).astype("float32")
DATA = (X[:28], Y[:28, :1]), (X[28:], Y[28:, :1])
LAST = 10  # in the middle of the fourth epoch


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing handles it."""


class Shrinks(keras.callbacks.Callback):
    """Changes weights by what it is told of an epoch and of the run; records both."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((epoch, logs))
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel * (0.5 + logs["loss"] / 8 + logs["val_loss"] / 8))

    def on_train_end(self, logs=None):
        self.seen.append(("end", logs))
        self.model.layers[0].bias.assign_add([logs["val_loss"]])


def build():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1), keras.layers.Dropout(0.2)])
    model.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.8), "mse")
    return model


def train(folder, seen):
    options = dict(batch_size=7, max_steps=LAST, checkpoint_every_steps=3, keep_checkpoints=1)
    options |= dict(keep_best=True, validation_fraction=0.25, evaluate_every_epochs=1)
    given = dict(model=build, dataset=DATA, callbacks=[Shrinks(seen)], train_dir=folder)
    return towers.train(**given | options)


def left_by(folder):
    """Return what a run leaves, without what depends on the clock."""
    result, clock = runs.result_of(folder), ("examples_per_second", "seconds_to_first_step")
    result = {name: value for name, value in result.items() if name not in (*clock, "train_dir")}
    return result, json.loads((folder / "best.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder, seen = tmp_path_factory.mktemp("undisturbed"), []
    train(folder, seen)
    return folder, seen


def once(monkeypatch, owner, name, happens, when):
    """Let something happen before the first call of a method for which `when(*arguments)`."""
    real, done = getattr(owner, name), []

    def method(*arguments):
        if not done and when(*arguments):
            done.append(1)
            happens()
        return real(*arguments)

    monkeypatch.setattr(owner, name, method)


def in_last_step(monkeypatch, happens):
    now = lambda loop, *_: int(loop.train_state.step) == LAST - 1  # noqa: E731
    once(monkeypatch, TrainLoop, "__call__", happens, now)


def in_last_evaluation(monkeypatch, happens):
    ends = []
    once(monkeypatch, Monitor, "after_step", lambda: None, lambda _, n, *__: ends.append(n))
    once(monkeypatch, Callbacks, "call", happens, lambda _, n, *__: LAST in ends and "test" in n)


def in_last_epoch_end(monkeypatch, happens):
    now = lambda _, hook, *place: (hook, *place[:1]) == ("on_epoch_end", 3)  # noqa: E731
    once(monkeypatch, Callbacks, "call", happens, now)


def in_last_save(monkeypatch, happens):
    """Between the renaming of its two files, when the one before is there no more."""
    saves = []
    once(monkeypatch, CheckpointManager, "_prune", lambda: None, lambda _, n: saves.append(n))
    now = lambda _, to: saves.count(LAST) and str(to).endswith(f"{LAST}.index")  # noqa: E731
    once(monkeypatch, checkpoint.os, "rename", happens, now)


def after_on_train_end(monkeypatch, happens):
    once(
        monkeypatch, CheckpointManager, "close", happens, lambda m: m.place().get("stage") == "end"
    )


PLACES = [
    (in_last_step, signal.SIGTERM),
    (in_last_evaluation, signal.SIGINT),
    (in_last_evaluation, signal.SIGKILL),
    (in_last_epoch_end, signal.SIGTERM),
    (in_last_save, signal.SIGKILL),
    (after_on_train_end, signal.SIGTERM),
]


@pytest.mark.parametrize("place, number", PLACES)
def test_a_signal_near_the_end_changes_nothing(undisturbed, tmp_path, monkeypatch, place, number):
    whole, seen_by_whole = undisturbed

    def happens():
        if number == signal.SIGKILL:
            raise Killed
        os.kill(os.getpid(), number)

    seen = []
    with monkeypatch.context() as patch:
        place(patch, happens)
        try:
            assert train(tmp_path, seen) is None
        except Killed:
            assert number == signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    train(tmp_path, seen)
    assert seen == seen_by_whole
    assert left_by(tmp_path) == left_by(whole)
    for step in {LAST, runs.result_of(whole)["best_step"]}:
        tiny.assert_identical(tiny.saved(tmp_path, step), tiny.saved(whole, step))
