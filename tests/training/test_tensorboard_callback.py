"""What TensorBoard gets of a fit over towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import towers
from tests import fits, runs
from tests.tensorboard_server import read_scalars
from towers.training.step.on_towers import unparallelize

pytestmark = pytest.mark.run

X = np.random.RandomState(0).normal(size=(10, 3))
Y = X.sum(axis=1, keepdims=True)


def make(num_towers, *more, optimizer=None):
    keras.utils.set_random_seed(1)
    own = keras.layers.Dense(2), *more, keras.layers.Dense(1)
    model = keras.Sequential([keras.Input([3]), *own])
    if num_towers:
        towers.parallelize(model, devices=[f"/cpu:{i}" for i in range(num_towers)])
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model


def fit(model, *callbacks, epochs=2, validation=(X, Y)):
    given = dict(batch_size=5, shuffle=False, validation_data=validation, verbose=0)
    return model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **given).history


def norm_of(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    return float(tf.linalg.global_norm(tape.gradient(loss, model.trainable_variables)))


@runs.by_the_clock
def test_each_tower_is_seen(float64, tmp_path):
    model = make(2)
    expected = [norm_of(model, X[:3], Y[:3]), norm_of(model, X[3:5], Y[3:5])]
    history = fit(model, towers.callbacks.TowerBoard(tmp_path, every_steps=1))
    points = read_scalars(tmp_path / "train")
    assert list(points) == [0, 1, 2, 3]
    first = [read_scalars(tmp_path / "train" / f"tower_{i}")[0] for i in range(2)]
    norms = [tower["tower/gradient_norm"] for tower in first]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    assert first[0]["tower/step_seconds"] > 0 and first[1]["tower/memory_mib"] > 0
    assert points[1]["loss"] == pytest.approx(history["loss"][0])
    assert points[3]["progress/epoch"] == 1.5
    assert points[1]["speed/examples_per_second"] > 0 and points[1]["learning_rate"] > 0
    evaluated = read_scalars(tmp_path / "eval")
    assert evaluated[4]["validation/loss"] == pytest.approx(history["val_loss"][1])
    # The page has a layout, and the graph of a step.
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    graph = tf.compat.v1.GraphDef.FromString(accumulator.Graph().SerializeToString())
    devices = {node.device for node in graph.node if node.name.startswith("tower_1/")}
    assert "/device:CPU:1" in devices
    assert any("custom_scalars" in tag for tag in accumulator.Tags()["tensors"])


class Interrupted(Exception):
    pass


def resumable(num_towers, folder, interrupt=False):
    """Train 3 epochs of 3 steps, if not interrupted after the second step of the second."""

    def after_step(batch, logs):
        if interrupt and int(model.optimizer.iterations) == 5:
            raise Interrupted

    with fits.in_float64():
        tanh, norm = keras.layers.Activation("tanh"), keras.layers.BatchNormalization()
        model = make(num_towers, tanh, norm, optimizer=keras.optimizers.Adam(0.05))
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
        last = keras.callbacks.LambdaCallback(on_train_batch_end=after_step)
        boards = [towers.callbacks.TowerBoard(folder, every_steps=1)] if num_towers else []
        given = dict(batch_size=4, epochs=3, shuffle=False, verbose=0)
        history = model.fit(X, Y, **given, callbacks=[*boards, backup, last]).history
    return history, [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def test_a_fit_resumes_on_other_towers_as_plain_keras_does_and_has_each_point_once(tmp_path):
    ends = {}
    for name, numbers in {"plain": (0, 0), "towers": (2, 3)}.items():
        with pytest.raises(Interrupted):
            resumable(numbers[0], tmp_path / name, interrupt=True)
        ends[name] = resumable(numbers[1], tmp_path / name)
    (history, variables), (wanted, wanted_variables) = ends["towers"], ends["plain"]
    assert len(history["loss"]) == len(wanted["loss"]) == 2  # the second epoch is repeated
    for name, values in wanted.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-9)
    for one, other in zip(variables, wanted_variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert list(read_scalars(tmp_path / "towers/train")) == list(range(10))


def test_what_cannot_be_had_is_told_before_training(tmp_path):
    (tmp_path / "file").touch()
    model = make(2)
    with pytest.raises(towers.InputError, match="log_dir=.*name another log_dir"):
        fit(model, towers.callbacks.TowerBoard(tmp_path / "file"))
    with pytest.raises(towers.InputError, match="parallelize"):
        fit(unparallelize(model), towers.callbacks.TowerBoard(tmp_path))
    assert int(model.optimizer.iterations) == 0
