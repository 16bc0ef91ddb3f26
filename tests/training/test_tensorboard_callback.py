"""What TensorBoard gets of a fit over towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import towers
from tests import runs
from towers.monitoring.event_writer import read_scalars
from towers.training.parallelize import unparallelize

pytestmark = pytest.mark.run

X = np.random.RandomState(0).normal(size=(10, 3))
Y = X.sum(axis=1, keepdims=True)


def make(num_towers):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2), keras.layers.Dense(1)])
    towers.parallelize(model, devices=[f"/cpu:{i}" for i in range(num_towers)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
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


def test_a_tower_without_an_example_has_no_points(float64, tmp_path):
    board = towers.callbacks.TowerBoard(tmp_path, every_steps=1)
    make(4).fit(X[:3], Y[:3], verbose=0, callbacks=[board])
    seen = {path.name for path in (tmp_path / "train").iterdir() if path.is_dir()}
    assert seen == {"tower_0", "tower_1", "tower_2"}


def test_no_number_depends_on_it(float64, tmp_path):
    seen, plain = make(2), make(2)
    board, before = towers.callbacks.TowerBoard(tmp_path, every_steps=3), seen.train_step
    assert fit(seen, board) == fit(plain)
    for one, other in zip(seen.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert list(read_scalars(tmp_path / "train")) == [0, 3]
    fit(seen)
    assert vars(seen)["train_step"] == before


def test_a_fit_that_resumes_writes_each_point_once(tmp_path):
    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 4:
                raise KeyboardInterrupt

    def callbacks():
        resume = keras.callbacks.BackupAndRestore(tmp_path / "resume", save_freq=1)
        return towers.callbacks.TowerBoard(tmp_path, every_steps=1), resume

    with pytest.raises(KeyboardInterrupt):
        fit(make(2), *callbacks(), Kill(), epochs=3, validation=None)
    fit(make(2), *callbacks(), epochs=3, validation=None)
    assert list(read_scalars(tmp_path / "train")) == [0, 1, 2, 4, 5, 6, 7]


def test_a_model_without_towers_is_refused(tmp_path):
    model = unparallelize(make(2))
    with pytest.raises(towers.InputError, match="parallelize"):
        fit(model, towers.callbacks.TowerBoard(tmp_path))


def test_a_file_in_place_of_the_folder_is_told_before_training(tmp_path):
    (tmp_path / "file").touch()
    model = make(2)
    with pytest.raises(towers.InputError, match="log_dir=.*/file is a file; name a folder"):
        fit(model, towers.callbacks.TowerBoard(tmp_path / "file"))
    assert int(model.optimizer.iterations) == 0
