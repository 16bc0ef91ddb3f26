"""What a builder's own users are told of: examples that see each other, places, tables, clips."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder

pytestmark = pytest.mark.run
X = np.random.default_rng(0).normal(size=(7, 4))
ops = keras.ops


@tf.custom_gradient
def clipped_by_norm(x):
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 1.0)


@tf.custom_gradient
def normalised(x):
    return x * 1.0, lambda upstream: upstream / (1e-6 + tf.reduce_max(tf.abs(upstream)))


@tf.custom_gradient
def by_sign(x):
    return tf.identity(x), lambda upstream: tf.sign(upstream)


@tf.custom_gradient
def halved(x):
    return tf.identity(x), lambda upstream: upstream / 2


class Layer(keras.layers.Layer):
    def __init__(self, fn):
        super().__init__(name="suspect")
        self.fn = fn
        self.weight = self.add_weight(shape=(4, 4), name="weight")
        self.shift = self.add_weight(shape=(), name="shift")

    def call(self, x):
        return self.fn(self, x)


def of_inputs(fn):
    return lambda layer, x: fn(ops.matmul(x, layer.weight))


def of_weight(fn):
    return lambda layer, x: ops.matmul(x, fn(layer.weight.value))


TABLES = []  # a table lives as long as somebody holds it


def counted(layer, x):
    TABLES.append(tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0))
    keys = tf.cast(x[:, 0] > 0, tf.int64)
    TABLES[-1].insert(keys, TABLES[-1].lookup(keys) + 1)
    return x


def in_a_queue(layer, x):
    TABLES.append(tf.queue.FIFOQueue(100, [tf.float64], [[4]]))
    with tf.control_dependencies([TABLES[-1].enqueue_many([tf.cast(x, tf.float64)])]):
        return tf.identity(x)


MIXED, PLACE, NUMBER = (f"{said}: layer suspect" for said in (
    "mixed examples", "place in the batch", "batch size",
))  # fmt: skip
BACKWARD, TABLE = "backward pass: .* weight", "changes a table or a queue"
FUNCTIONS = {
    "softmax over the batch": (MIXED, of_inputs(lambda x: ops.softmax(x, axis=0))),
    "the next example": (MIXED, of_inputs(lambda x: x + ops.roll(x, 1, axis=0))),
    "share of the largest": (MIXED, of_inputs(lambda x: x / ops.max(ops.abs(x)))),
    "range": (PLACE, of_inputs(lambda x: x * tf.range(tf.shape(x)[0], dtype=x.dtype)[:, None])),
    "every other": (PLACE, of_inputs(lambda x: x * np.tile([1, 2], 50)[: x.shape[0], None])),
    "the first": (PLACE, of_inputs(lambda x: ops.concatenate([x[:1] * 2, x[1:]], axis=0))),
    "number": (NUMBER, of_inputs(lambda x: x / x.shape[0])),
    "root": (NUMBER, of_inputs(lambda x: x * ops.sqrt(ops.cast(ops.shape(x)[0], x.dtype)))),
    "above five": (NUMBER, of_inputs(lambda x: x * 2 if x.shape[0] > 5 else x)),
    "table": (TABLE, counted),
    "queue": (TABLE, in_a_queue),
    "clipped, of inputs": (BACKWARD, of_inputs(clipped_by_norm)),
    "normalised, of inputs": (BACKWARD, of_inputs(normalised)),
    "clipped, of a weight": (BACKWARD, of_weight(clipped_by_norm)),
    "normalised, of a weight": (BACKWARD, of_weight(normalised)),
    "sign, of a weight": (BACKWARD, of_weight(by_sign)),
}
INNOCENT = {
    "plain": of_inputs(ops.tanh),
    "silu": of_inputs(tf.nn.silu),  # has a gradient of its own
    "halved": of_weight(halved),
    "sign, of inputs": of_inputs(by_sign),
    # The gradient of the shift is nothing but rounding.
    "shifted": lambda layer, x: ops.softmax(halved(ops.matmul(x, layer.weight)) + layer.shift),
}


def told(fn, way, compiled=True):
    """Return what a builder of two towers says of a layer that it calls."""
    lines = []
    layer, x = Layer(fn), tf.constant(X, keras.backend.floatx())
    towers = TowerBuilder(["/cpu:0", "/cpu:1"], on_doubt=lines.append)

    def by_gradients(x):
        def losses(x):
            return tf.reduce_sum(layer(x), axis=1)

        return towers.gradients(losses, layer.trainable_variables, x)

    def by_concat(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(towers.concat(layer, x))
        return tape.gradient(loss, layer.trainable_variables)

    step = {"gradients": by_gradients, "concat": by_concat}[way]
    tf.function(step).get_concrete_function(x) if compiled else step(x)
    return lines


@pytest.mark.parametrize(
    "way", [pytest.param("gradients", marks=pytest.mark.extended), "concat"]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_builder_says_what_towers_cannot_compute(name, way, float64):
    said, fn = FUNCTIONS[name]
    lines = told(fn, way)
    assert len(lines) == 1, lines
    assert re.search(said, lines[0]), lines


@pytest.mark.parametrize("name", INNOCENT)
def test_nothing_is_said_of_what_is_exact(name, float64):
    assert told(INNOCENT[name], "concat") == []


def test_it_says_so_eagerly(float64):
    assert told(FUNCTIONS["softmax over the batch"][1], "concat", compiled=False)
