"""The compiled steps: the same at any number of steps a call; evaluation that counts exactly."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers.data import augment

pytestmark = pytest.mark.run


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


def test_layers_variables_are_assigned_once_a_step_and_not_in_evaluation():
    options = tiny.options(
        "unused", model="tests.training.test_train_loop:counting", num_towers=2, ema_decay=0.5
    )
    loop = tiny.Loop(options)
    loop(2)
    after_two = loop.state()
    counter = "model/sequential/counter/"
    assert after_two[counter + "calls"] == 2 and after_two[counter + "whole"] == 2
    assert after_two["average/sequential/counter/calls"] > 0

    evaluate = loop.run.task.eval_arrays
    images, labels = tiny.arrays(7)
    first, again = (evaluate((images, labels), tf.ones([7])) for _ in range(2))
    tiny.assert_identical(loop.state(), after_two)
    assert first["loss_ema"] == again["loss_ema"] != first["loss"]


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


PRECISIONS = {
    "float64": dict(model="tests.training.test_train_loop:of_no_type", model_args="head=float32"),
    "mixed_bfloat16": {},
    "float32": dict(model="tests.training.test_train_loop:in_bfloat16"),
}


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_every_precision_trains_and_is_evaluated(dtype):
    """In float64 layers that name no type have it; logits in bfloat16 become float32."""
    num_towers = 2 if dtype == "float64" else 1  # whose type is one of the thread
    given = dict(dtype=dtype, num_towers=num_towers, max_steps=40, ema_decay=0.5)
    given |= PRECISIONS[dtype]
    loop = tiny.Loop(tiny.options("unused", **given))
    model = loop.train_state.model
    kernel = model.trainable_variables[0]
    assert kernel.value.dtype == ("float64" if dtype == "float64" else "float32")

    images, labels = tiny.arrays(40)
    found = loop.run.task.eval_arrays((images, labels), tf.ones([40]))
    assert np.isfinite(found["loss"]) and np.isfinite(found["loss_ema"])
    assert keras.config.floatx() == keras.config.dtype_policy().name == "float32"
    if dtype == "float32":
        logits = model(tf.image.per_image_standardization(images))
        assert logits.dtype == "bfloat16"
        logits = tf.cast(logits, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        assert found["loss"] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-5)

    first = loop()["loss"]
    for _ in range(3):
        last = loop(13)["loss"]
    assert last < 0.8 * first
    assert keras.config.floatx() == keras.config.dtype_policy().name == "float32"


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
    l2 = keras.regularizers.L2(2**-6)  # 0.01 would be rounded to float32
    head = layers.Dense(num_classes, activity_regularizer="l1", kernel_regularizer=l2)
    return keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), keras.Sequential(inner), head]
    )


@pytest.mark.graph
def test_losses_that_layers_add_in_training_are_not_those_of_evaluation():
    """That they are trained on, test_optimizer_step tells."""
    options = tiny.options("unused", dtype="float64", model="tests.training.test_train_loop:adding")
    loop = tiny.Loop(options)
    images, labels = tiny.arrays(7)
    found = loop.run.task.eval_arrays((images, labels), tf.ones([7]))
    inputs = augment.eval_images(images, options.augment, dtype=tf.float64)
    logits = loop.train_state.model(inputs, training=False)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    assert found["loss"] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-9)


def test_the_loss_scale_is_that_of_added_losses_too():
    given = dict(model="tests.training.test_train_loop:adding", optimizer="sgd", num_towers=2)
    plain, scaled = (
        tiny.Loop(tiny.options("unused", dtype=dtype, **given))
        for dtype in ("float32", "mixed_float16")
    )
    scaled.train_state.loss_scale.assign(64)  # no overflow
    assert scaled()["loss"] == pytest.approx(plain()["loss"], rel=1e-2)
    expected = {n: v for n, v in plain.state().items() if n.startswith("model/")}
    tiny.assert_close({n: scaled.state()[n] for n in expected}, expected, 1e-2)
