"""`keras.callbacks.BackupAndRestore` resumes a fit over towers as it resumes plain Keras."""

import signal

import keras
import numpy as np
import pytest

import towers
from tests import fits
from tests.programs import python

pytestmark = pytest.mark.run

X = np.random.RandomState(0).normal(size=(22, 3))
Y = X.sum(axis=1, keepdims=True)


def make(num_towers):
    """Return a model on towers, or with 0 on one device as plain Keras has it."""
    keras.utils.set_random_seed(3)
    own = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([3]), *own])
    if num_towers:
        towers.parallelize(model, num_towers, devices="cpu")
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def fit(num_towers, folder, save_freq, kill=lambda: None):
    """Train 3 epochs of 6 steps; call `kill` after the fourth step of the second."""

    def after_step(batch, logs):
        if int(model.optimizer.iterations) == 10:
            kill()

    with fits.in_float64():
        model = make(num_towers)
        backup = keras.callbacks.BackupAndRestore(folder, save_freq, delete_checkpoint=False)
        last = keras.callbacks.LambdaCallback(on_train_batch_end=after_step)
        given = dict(batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[backup, last])
        history = model.fit(X, Y, **given).history
    return history, [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def interrupted(num_towers, folder, save_freq):
    """Return History and variables of a fit that was interrupted and called again."""

    class Interrupted(Exception):
        pass

    def kill():
        if not done:
            done.append(True)
            raise Interrupted

    done = []
    with pytest.raises(Interrupted):
        fit(num_towers, folder, save_freq, kill)
    return fit(num_towers, folder, save_freq)


def assert_same(found, wanted):
    (history, variables), (wanted_history, wanted_variables) = found, wanted
    assert len(history["loss"]) == len(wanted_history["loss"]) == 2  # the second epoch is repeated
    for name, values in wanted_history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-9)
    for one, other in zip(variables, wanted_variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_it_resumes_as_plain_keras_does(tmp_path, save_freq):
    plain = interrupted(0, tmp_path / "plain", save_freq)
    assert_same(interrupted(2, tmp_path / "towers", save_freq), plain)


PROGRAM = """
import os, signal, sys
from tests.training import test_backup_and_restore as own

own.fit(2, sys.argv[1], 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.process
def test_a_killed_process_resumes_on_another_number_of_towers(tmp_path):
    done = python("-c", PROGRAM, tmp_path / "killed")
    assert done.returncode == -signal.SIGKILL, done.stderr
    plain = interrupted(0, tmp_path / "plain", 3)
    assert_same(fit(3, tmp_path / "killed", 3), plain)
