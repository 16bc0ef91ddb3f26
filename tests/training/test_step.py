"""The compiled steps: the same at any number of steps a call; evaluation that counts exactly."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers.data import augment


class Counter(keras.layers.Layer):
    """Keeps variables that are not trained, and counts its calls in each mode."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.whole = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="whole", dtype="int32"
        )
        self.seed = keras.random.SeedGenerator(1)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        self.whole.assign_add(1)
        return inputs + 0 * tf.cast(keras.random.uniform([], seed=self.seed), inputs.dtype)


def counting(num_classes, image_shape):
    layers = [keras.layers.Flatten(), Counter(), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input(image_shape), *layers, keras.layers.Dense(num_classes)])


def in_bfloat16(num_classes, image_shape):
    """A model whose logits are bfloat16."""
    flat = keras.layers.Flatten(dtype="float32")
    head = keras.layers.Dense(num_classes, dtype="mixed_bfloat16")
    return keras.Sequential([keras.Input(image_shape), flat, head])


@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16"])
def test_every_precision_trains(dtype):
    loop = tiny.Loop(tiny.options("unused", dtype=dtype, num_towers=2, max_steps=40))
    first = loop()["loss"]
    for _ in range(3):
        last = loop(13)["loss"]
    assert last < 0.8 * first
    kernel = loop.masters.model.trainable_variables[0]
    assert kernel.value.dtype == ("float64" if dtype == "float64" else "float32")


def test_logits_in_bfloat16_are_trained_on_and_evaluated_in_float32():
    loop = tiny.Loop(
        tiny.options("unused", model="tests.training.test_step:in_bfloat16", num_towers=2)
    )
    model = loop.masters.model
    assert model(tf.zeros([1, *tiny.IMAGE_SHAPE])).dtype == "bfloat16"
    images, labels = tiny.arrays(40)
    evaluate = loop.run.task.eval_sums
    sums = evaluate((images, labels), tf.ones([40]))
    logits = tf.cast(model(tf.image.per_image_standardization(images)), tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    assert float(sums["raw"]["loss"]) == pytest.approx(float(tf.reduce_sum(losses)), rel=1e-5)
    assert np.isfinite(loop(3)["loss"])


def test_layers_variables_are_assigned_once_a_step_and_not_in_evaluation():
    options = tiny.options(
        "unused", model="tests.training.test_step:counting", num_towers=3, ema_decay=0.5
    )
    loop = tiny.Loop(options)
    loop(2)
    after_two = loop.state()
    counter = "model/sequential/counter/"
    assert after_two[counter + "calls"] == 2 and after_two[counter + "whole"] == 2
    assert after_two["average/sequential/counter/calls"] > 0

    evaluate = loop.run.task.eval_sums
    images, labels = tiny.arrays(7)
    first, again = (evaluate((images, labels), tf.ones([7])) for _ in range(2))
    tiny.assert_identical(loop.state(), after_two)
    assert float(first["ema"]["loss"]) == float(again["ema"]["loss"])


class NamesNoType(keras.layers.Layer):
    """Draws and makes constants in Keras' floatx, forward and when it is called again backward."""

    def call(self, inputs):
        assert keras.config.floatx() == inputs.dtype
        drawn = keras.random.uniform((1, 1), seed=7) + keras.ops.zeros((1,))
        return keras.remat(lambda x: x * (keras.ops.ones((1,)) + drawn))(inputs)


def of_no_type(num_classes, image_shape, head=""):
    layers = [keras.layers.Flatten(), NamesNoType(), keras.layers.Dense(5)]
    last = keras.layers.Dense(num_classes, dtype=head or None)
    return keras.Sequential([keras.Input(image_shape), *layers, last])


def test_float64_is_there_for_layers_that_name_no_type():
    options = tiny.options(
        "unused", dtype="float64", model="tests.training.test_step:of_no_type", num_towers=2,
        ema_decay=0.5, model_args="head=float32",
    )  # fmt: skip
    loop = tiny.Loop(options)
    assert np.isfinite(loop(2)["loss"])
    evaluate = loop.run.task.eval_sums
    sums = evaluate(tiny.arrays(7), tf.ones([7]))
    assert np.isfinite(sums["raw"]["loss"]) and np.isfinite(sums["ema"]["loss"])
    assert keras.config.floatx() == "float32"
    assert keras.config.dtype_policy().name == "float32"


# ------------------------------------------------------------------- Losses that layers add


class AddsLosses(keras.layers.Layer):
    """Adds a mean over the slice, a value for each unit, and nothing of its own in evaluation."""

    def call(self, inputs, training=False):
        if training:
            self.add_loss(0.3 * tf.reduce_mean(inputs**2))
            self.add_loss([0.2 * tf.reduce_mean(tf.sin(inputs), axis=0), tf.reduce_mean(inputs)])
        return inputs


def adding(num_classes, image_shape):
    layers = keras.layers
    inner = [layers.Dense(5, "tanh", activity_regularizer="l2"), AddsLosses()]
    head = layers.Dense(num_classes, activity_regularizer="l1", kernel_regularizer="l2")
    return keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), keras.Sequential(inner), head]
    )


def by_keras(loop, rate):
    """Return the weights after a step of plain Keras with the whole batch, and its loss."""
    model, options = loop.masters.model, loop.run.options
    batches = loop.run.data.train.train_batches(options.batch_size, seed=options.seed)
    images, labels, draws = tiny.flat(next(iter(batches)))
    inputs = augment.train_images(images, draws, options.augment, dtype=tf.float64)
    with tf.GradientTape() as tape:
        logits = model(inputs, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses) + sum(tf.reduce_sum(added) for added in model.losses)
    weights = [v.value for v in model.trainable_variables]
    gradients = tape.gradient(loss, weights)
    paths = [f"model/{v.path}" for v in model.trainable_variables]
    new = [w - rate * g for w, g in zip(weights, gradients, strict=True)]
    return {p: v.numpy() for p, v in zip(paths, new, strict=True)}, float(loss)


@pytest.mark.parametrize(
    "num_towers, batch_size, more", [(2, 7, {"accumulate_steps": 2}), (3, 2, {})]
)
def test_losses_that_layers_add_are_trained_on(num_towers, batch_size, more):
    options = tiny.options(
        "unused", dtype="float64", model="tests.training.test_step:adding", optimizer="sgd",
        schedule="constant", learning_rate=0.125, num_towers=num_towers, batch_size=batch_size,
        **more,
    )  # fmt: skip
    loop = tiny.Loop(options)
    expected, loss = by_keras(loop, 0.125)
    metrics = loop()
    assert metrics["loss"] + metrics["penalty"] == pytest.approx(loss, rel=1e-6)
    state = loop.state()
    tiny.assert_close({name: state[name] for name in expected}, expected, 1e-10)

    images, labels = tiny.arrays(7)
    sums = loop.run.task.eval_sums((images, labels), tf.ones([7]))
    inputs = augment.eval_images(images, options.augment, dtype=tf.float64)
    logits = loop.masters.model(inputs, training=False)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    assert float(sums["raw"]["loss"]) == pytest.approx(float(tf.reduce_sum(losses)), rel=1e-9)


def test_the_loss_scale_is_that_of_added_losses_too():
    given = dict(model="tests.training.test_step:adding", optimizer="sgd", num_towers=2)
    plain, scaled = (
        tiny.Loop(tiny.options("unused", dtype=dtype, **given))
        for dtype in ("float32", "mixed_float16")
    )
    scaled.masters.loss_scale.assign(64)  # no overflow
    assert scaled()["loss"] == pytest.approx(plain()["loss"], rel=1e-2)
    expected = {n: v for n, v in plain.state().items() if n.startswith("model/")}
    tiny.assert_close({n: scaled.state()[n] for n in expected}, expected, 1e-2)
