"""Histograms: of the values that they name, whatever the model; looking changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.util import tensor_util

from tests import tiny
from tests.runs import rare
from towers.data import augment
from towers.monitoring import histograms, image_summaries
from towers.training.run.setup import prepare

pytestmark = pytest.mark.run


def histograms_of(run):
    """Return a function from a batch to {tag: rows of (left, right, count)}."""
    task = run.task
    draw = histograms.make_histograms(run.builder, task.model, task.gradients, task.inputs)

    def look(batch):
        summary = draw(batch)
        found = {value.tag: tensor_util.make_ndarray(value.tensor) for value in summary.value}
        assert len(found) == len(summary.value)
        for value in summary.value:
            assert value.metadata.plugin_data.plugin_name == "histograms"
            assert found[value.tag].shape == (30, 3)
        return found

    return look


def first_batch(run):
    return tiny.sampler(run).batch(0, 0)


def assert_shows(rows, values):
    """Compare a histogram with the values that it is to be of."""
    values = np.ravel(np.asarray(values, np.float64))
    assert rows[:, 2].sum() == values.size
    assert rows[0, 0] == pytest.approx(values.min(), rel=1e-4, abs=1e-6)
    assert rows[-1, 1] == pytest.approx(values.max(), rel=1e-4, abs=1e-6)
    middle = rows[:, :2].mean(axis=1)
    tolerance = (values.max() - values.min()) / 60 + 1e-6
    assert middle @ rows[:, 2] / values.size == pytest.approx(values.mean(), abs=tolerance)


def gradients_of(run, batch):
    """Return the gradients of one device, by a plain tape."""
    model, ((images, labels), draws) = run.train_state.model, batch
    inputs = augment.train_images(images, draws, run.options.augment)
    with tf.GradientTape() as tape:
        logits = model(inputs, training=False)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_towers": 3}, marks=pytest.mark.graph),
        {"num_towers": 2, "variables": "replicated", "accumulate_steps": 2, "augment": "resnet"},
    ],
)
def test_weights_gathered_gradients_and_activations_are_shown(changes):
    run = prepare(tiny.options("unused", **changes))
    model, batch = run.train_state.model, first_batch(run)
    found = histograms_of(run)(batch)
    names = [v.path for v in model.trainable_variables]
    layers = [layer.path for layer in model.layers]
    kinds = {"weights": names, "gradients": names, "activations": layers}
    assert set(found) == {f"{kind}/{name}" for kind in kinds for name in kinds[kind]}
    for variable, gradient in zip(model.trainable_variables, gradients_of(run, batch), strict=True):
        assert_shows(found[f"weights/{variable.path}"], variable.numpy())
        assert_shows(found[f"gradients/{variable.path}"], gradient)
    values = augment.train_images(batch[0][0], batch[1], run.options.augment)
    for layer in model.layers:
        values = layer(values)
        assert_shows(found[f"activations/{layer.path}"], values)


@pytest.mark.parametrize(
    "changes",
    [
        dict(variables="sharded", dtype="mixed_float16"),
        rare(dict(variables="replicated", batch_norm="local")),
    ],
)
def test_looking_changes_no_variable_and_no_step(changes):
    """Neither at what towers tell of their steps, nor at histograms and pictures between them."""
    given = tiny.options("unused", model="tests.tiny:cnn", num_towers=2, ema_decay=0.5, **changes)
    states = []

    def state(run):
        return {name: v.numpy() for name, v in run.train_state.variables().items()}

    for looks in False, True:
        run = prepare(given)
        loop, look = run.train_loop(telemetry=looks), histograms_of(run)
        batches, step = iter(run.data.train.train_batches(7, seed=0)), 0
        for num_steps in 1, 4:
            if looks:
                before, batch = state(run), tiny.sampler(run).batch(step, 7 * step)
                assert "gradients/sequential/conv2d/kernel" in look(batch)
                image_summaries.seen_by_towers(run.builder, run.options, tiny.flat(batch), 8)
                tiny.assert_identical(state(run), before)
            loop(batches, tf.constant(num_steps))
            step += num_steps
        states.append(state(run))
    assert any("seed" in name for name in states[0])
    tiny.assert_identical(*states)


def test_the_loss_scale_is_not_in_the_gradients():
    run = prepare(tiny.options("unused", dtype="mixed_float16"))
    look, batch = histograms_of(run), first_batch(run)
    first = look(batch)
    run.train_state.loss_scale.assign(2.0**3)
    again = look(batch)
    gradients = [name for name in first if name.startswith("gradients/")]
    assert len(gradients) == 4
    for name in gradients:
        np.testing.assert_allclose(again[name][:, :2], first[name][:, :2], rtol=0.02, atol=1e-3)


class Own(keras.Model):
    """Calls layers twice, nested and in a loop; has sparse gradients, and a weight without use."""

    def __init__(self, num_classes):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.table = keras.layers.Embedding(9, 2)
        self.twice = keras.layers.Dense(4, name="twice")
        self.first = keras.layers.Dense(4, name="first")
        self.inner = keras.Sequential([keras.layers.ReLU(), keras.layers.Dense(6)], name="inner")
        self.looped = keras.layers.Dense(6, name="looped")
        self.head = keras.layers.Dense(num_classes, dtype="float32")
        self.unused = self.add_weight(shape=(3,), name="unused")

    def call(self, inputs):
        rows = tf.cast(tf.abs(self.flatten(inputs)) * 4, tf.int32) % 9
        values = self.first(tf.reduce_mean(self.table(rows), axis=1))
        values = self.looped(self.inner(self.twice(self.twice(values))))
        state = tf.constant(0), values
        loop = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, self.looped(v)), state)
        return self.head(loop[1])


def own(num_classes, image_shape):
    model = Own(num_classes)
    model(tf.zeros([1, *image_shape]))
    return model


def test_of_a_subclassed_model_all_layers_are_caught_and_sparse_gradients_are_shown():
    run = prepare(tiny.options("unused", model=f"{__name__}:own", num_towers=2))
    model, batch = run.train_state.model, first_batch(run)
    found = histograms_of(run)(batch)
    layers = [model.flatten, model.table, model.twice, model.first, model.looped, model.head]
    # A layer without weights that is built by nobody has no path.
    paths = {layer.path or layer.name for layer in (*layers, model.inner, *model.inner.layers)}
    assert {n.removeprefix("activations/") for n in found if n.startswith("activations")} == paths
    flat = model.flatten(augment.train_images(batch[0][0], batch[1], "none"))
    looked_up = model.table(tf.cast(tf.abs(flat) * 4, tf.int32) % 9)
    once = model.twice(model.first(tf.reduce_mean(looked_up, axis=1)))
    assert_shows(found[f"activations/{model.twice.path}"], model.twice(once))
    assert_shows(
        found[f"activations/{model.looped.path}"], model.looped(model.inner(model.twice(once)))
    )
    assert [n.partition("/")[0] for n in found if n.endswith("unused")] == ["weights"]
    rows = found[f"gradients/{model.table.trainable_variables[0].path}"]
    assert rows[:, 2].sum() == 7 * 8 * 8 * 3 * 2
    assert rows[0, 0] < 0 < rows[-1, 1]


@pytest.mark.graph
def test_of_many_values_some_are_taken_and_none_that_is_not_finite(monkeypatch):
    monkeypatch.setattr(histograms, "_MAX_VALUES", 100)
    run = prepare(tiny.options("unused"))
    look, batch = histograms_of(run), first_batch(run)
    found, path = look(batch), run.train_state.model.layers[0].path
    for name in "weights/sequential/dense/kernel", f"activations/{path}":
        assert 50 <= found[name][:, 2].sum() <= 100
    kernel = run.train_state.model.trainable_variables[2]
    values = kernel.numpy()
    values[0, 0], values[1, 1] = np.nan, np.inf
    kernel.assign(values)
    found = look(batch)
    assert_shows(found[f"weights/{kernel.path}"], values[np.isfinite(values)])
    assert "gradients/sequential/dense/kernel" not in found  # NaN all over
    kernel.assign(np.full_like(values, np.nan))
    assert f"weights/{kernel.path}" not in look(batch)
