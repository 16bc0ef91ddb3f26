"""A fit that is interrupted anywhere and called again ends as one that never was."""

import contextlib
import functools
import random
import re
import signal
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import runs
from tests.programs import python
from tests.runs import rare
from towers.training.run.checkpoint import find
from towers.training.run.checkpoint_manager import CheckpointManager

pytestmark = pytest.mark.run

layers, ExactResume = keras.layers, towers.callbacks.ExactResume
X = np.random.RandomState(0).normal(size=(22, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
BATCH, STEPS, EPOCHS = 4, 6, 3


class Killed(Exception):
    """Stands for the end of a process."""


class KillAt(keras.callbacks.Callback):
    def __init__(self, epoch, batch=None):
        super().__init__()
        self.at, self.epoch = (epoch, batch), None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            self.kill()

    def on_epoch_end(self, epoch, logs=None):
        if (epoch, None) == self.at:
            self.kill()

    def kill(self):
        raise Killed


class Rows(keras.utils.PyDataset):
    """Batches that Python makes, with noise of NumPy's."""

    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        x = X[i * BATCH : (i + 1) * BATCH]
        return x + np.random.normal(size=x.shape), Y[i * BATCH : (i + 1) * BATCH]


def of_tf_data(endless=False):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    data = data.repeat() if endless else data
    return data.shuffle(22, seed=5).batch(BATCH).prefetch(2)


def generated():
    def rows():
        for i in range(STEPS):
            yield X[i * BATCH : (i + 1) * BATCH], Y[i * BATCH : (i + 1) * BATCH]

    spec = tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32)
    return tf.data.Dataset.from_generator(rows, output_signature=spec)


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "validated": lambda: DATA["arrays"]() | {"validation_data": (X, Y)},
    "steps of arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH, "steps_per_epoch": 2},
    "PyDataset": lambda: {"x": Rows()},
    "tf.data": lambda: {"shuffle": False, "x": of_tf_data()},
    "endless tf.data": lambda: {"shuffle": False, "x": of_tf_data(True), "steps_per_epoch": 4},
    "from_generator": lambda: {"shuffle": False, "x": generated()},
}


def make(num_towers=0, built=True, steps_per_execution=1, use_ema=True):
    keras.utils.set_random_seed(3)
    own = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)]
    model = keras.Sequential([keras.Input([3])] * built + own)
    if num_towers:
        towers.parallelize(model, num_towers, devices="cpu")
    optimizer = keras.optimizers.Adam(0.05, use_ema=use_ema, ema_momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


def fit(model, data="arrays", callbacks=(), epochs=EPOCHS):
    given = DATA[data]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")  # Keras', of from_generator
        return model.fit(**given, epochs=epochs, verbose=0, callbacks=list(callbacks)).history


def state(model):
    return [keras.ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]


@functools.cache
def uninterrupted(data="arrays", also=lambda: [], **options):
    model = make(**options)
    return fit(model, data, also()), state(model)


def assert_as_uninterrupted(model, history, *arguments, **options):
    whole, variables = uninterrupted(*arguments, **options)
    assert history == whole
    for own, wanted in zip(state(model), variables, strict=True):
        np.testing.assert_array_equal(own, wanted)


def interrupted(tmp_path, place, data="arrays", also=lambda: [], **options):
    """Return the model and History of a fit that ended at a place and was called again."""
    model, others = make(**options), also()
    resume = ExactResume(tmp_path, every_steps=1, also=others)
    with pytest.raises(Killed):
        fit(model, data, [*others, resume, KillAt(*place)])
    random.seed(99), np.random.seed(99)
    model, others = make(**options), also()
    return model, fit(model, data, [*others, ExactResume(tmp_path, every_steps=1, also=others)])


def waiting():
    """Return callbacks that are named, and keep what they remember."""
    return [
        keras.callbacks.EarlyStopping("loss", 9, patience=9, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=2, min_delta=9),
    ]


MIDDLE, END = (1, 1), (1, None)  # of an epoch
PLACES = [  # that of arrays in the middle: test_a_schedule_acts_once_an_epoch
    ("PyDataset", END, {"num_towers": 2, "also": waiting}),
    ("tf.data", MIDDLE, {"steps_per_execution": 2}),
]
RARE = [
    ("arrays", (0, 0), {}), ("arrays", (0, 3), {"built": False}), ("validated", MIDDLE, {}),
    ("tf.data", (2, 0), {}), ("arrays", (0, 3), {"num_towers": 2}),
    *((data, MIDDLE, {}) for data in ("steps of arrays", "endless tf.data", "from_generator")),
]  # fmt: skip


def _name(value):  # the same in each process of a session
    return re.sub("<function (.*) at .*>", r"\1", str(value))


@pytest.mark.parametrize("data, place, options", PLACES + [rare(*r) for r in RARE], ids=_name)
def test_it_ends_as_if_it_had_not_been_interrupted(tmp_path, data, place, options):
    found = interrupted(tmp_path, place, data, **options)
    assert_as_uninterrupted(*found, data, **options)


def test_an_order_without_a_seed_is_kept_within_the_epoch(tmp_path):
    seen = []

    class Noting(keras.Model):
        def train_step(self, data):
            tf.py_function(lambda x: seen.extend(x.numpy()[:, 0]), [data[0]], [])
            return {"loss": tf.constant(0.0)}

    def run(*callbacks):
        model = Noting()
        model.compile("sgd")
        model.optimizer.build([])
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=list(callbacks))

    with pytest.raises(Killed):
        run(ExactResume(tmp_path, every_steps=1), KillAt(0, 2))
    before = seen[: 2 * BATCH]  # the third batch had been seen, and not been saved
    seen.clear()
    run(ExactResume(tmp_path))
    rest = seen[BATCH:]  # of the first call nothing counts
    assert sorted(before + rest) == sorted(X[:, 0])


def decaying():
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]


@pytest.mark.parametrize("first", [True, rare(False)])
def test_a_schedule_acts_once_an_epoch(tmp_path, first):
    def callbacks(*others):
        return [*decaying(), *others] if first else [*others, *decaying()]

    with pytest.raises(Killed):
        fit(make(), callbacks=callbacks(ExactResume(tmp_path, 2), KillAt(1, 4)))
    model = make()
    history = fit(model, callbacks=callbacks(ExactResume(tmp_path)))
    assert_as_uninterrupted(model, history, also=decaying)


@pytest.mark.parametrize("every_steps", [0, rare(1), rare(3)])
@pytest.mark.parametrize("data", ["arrays", rare("tf.data"), rare("PyDataset")])
def test_a_fit_that_ended_goes_on_with_more_epochs(tmp_path, data, every_steps):
    for epochs in 1, 2, EPOCHS:
        model = make(use_ema=False)  # at the end of a fit Keras puts averages in place of weights
        history = fit(model, data, [ExactResume(tmp_path, every_steps)], epochs)
    assert_as_uninterrupted(model, history, data, use_ema=False)


def test_a_fit_that_ended_is_not_repeated_nor_goes_on_with_another_model(tmp_path):
    model = make()
    fit(model, callbacks=[ExactResume(tmp_path)])
    again = make()
    fit(again, callbacks=[ExactResume(tmp_path)])
    np.testing.assert_array_equal(state(again)[0], state(model)[0])
    assert len(fit(again)["loss"]) == EPOCHS  # the next fit begins at its own epoch
    with pytest.warns(UserWarning, match="an epoch has 2 steps, and had .*: for other data"):
        resume, part = ExactResume(tmp_path), slice(2 * BATCH)
        make().fit(X[part], Y[part], BATCH, epochs=EPOCHS + 1, verbose=0, callbacks=[resume])
    other = keras.Sequential([keras.Input([3]), layers.Dense(1)])
    other.compile("adam", "mse")
    with pytest.raises(towers.InputError, match="model/0 is float32.* there and float32.* here"):
        fit(other, callbacks=[ExactResume(tmp_path)])
    CheckpointManager(tmp_path / "run", {"step": tf.Variable(5)}, {"model": "m:f"}).save_now(5)
    with pytest.raises(towers.InputError, match="ckpt-5 is of a run of `towers train`"):
        fit(make(), callbacks=[ExactResume(tmp_path / "run")])
    with pytest.raises(towers.InputError, match="every_steps=-1"):
        ExactResume(tmp_path, every_steps=-1)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    with pytest.raises(Killed):
        fit(make(), callbacks=[ExactResume(tmp_path, 1), KillAt(1, 3)])
    assert [step for step, _ in find(tmp_path)] == [8, 9]  # the two newest are kept
    path = tmp_path / "ckpt-9.data-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    model = make()
    with pytest.warns(UserWarning, match="ckpt-9 cannot be read"):
        history = fit(model, callbacks=[ExactResume(tmp_path)])
    assert_as_uninterrupted(model, history)


@pytest.mark.parametrize("again", [rare(False), True])
def test_a_disk_that_fills_up_costs_no_training(tmp_path, again):
    (tmp_path / ".ckpt-2.99.data-00000-of-00001").write_bytes(b"half")
    ends = contextlib.nullcontext() if again else pytest.raises(towers.RunError, match="too large$")
    with runs.small_disk() as limit:
        acts = {1: lambda: limit(500)} | ({2: limit} if again else {})
        act = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: acts.get(epoch, int)())
        with pytest.warns(UserWarning, match="File too large; the fit goes on"), ends:
            fit(make(), callbacks=[act, ExactResume(tmp_path)])
    assert [step for step, _ in find(tmp_path)] == ([12, 18] if again else [])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_data_that_cannot_tell_their_place_are_named(tmp_path):
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    data = of_tf_data().map(lambda x, y: (x + tf.random.uniform([], dtype=x.dtype), y))
    with pytest.warns(UserWarning, match="RandomUniform is stateful"):
        model.fit(data, shuffle=False, verbose=0, callbacks=[ExactResume(tmp_path, 2)])


PROGRAM = """
import os, signal, sys
from tests.training import test_backup_and_restore as own

class Kill(own.KillAt):
    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

resume = own.ExactResume(sys.argv[2], every_steps=2)
own.fit(own.make(int(sys.argv[1])), callbacks=[resume, Kill(1, 3)])
"""


@pytest.mark.process
@pytest.mark.parametrize("num_towers", [rare(2), 0])
def test_a_killed_process_goes_on(tmp_path, capsys, num_towers):
    done = python("-c", PROGRAM, str(num_towers), tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    model = make(num_towers)
    history = fit(model, callbacks=[ExactResume(tmp_path, every_steps=2)])
    assert "goes on at epoch 2, batch 2" in capsys.readouterr().out
    assert_as_uninterrupted(model, history, num_towers=num_towers)


def test_a_file_in_place_of_the_folder_is_told_before_training(tmp_path):
    (tmp_path / "file").touch()
    for callback, flag in (ExactResume, "directory"), (towers.callbacks.TowerBoard, "log_dir"):
        model = towers.parallelize(make(), devices=["/cpu:0"])
        with pytest.raises(towers.InputError, match=f"{flag}=.*/file is a file; name a folder"):
            fit(model, callbacks=[callback(tmp_path / "file")])
        assert int(model.optimizer.iterations) == 0
