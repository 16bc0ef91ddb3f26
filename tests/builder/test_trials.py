"""What a builder's own users are told of: examples that see each other, places, tables, clips."""

import functools
import itertools
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder
from towers.builder.instrumentation import Tracer

pytestmark = pytest.mark.run
X = np.random.default_rng(0).normal(size=(7, 4))
ops = keras.ops


def backward(change):
    """Return a function that changes nothing but what goes back through it."""
    return tf.custom_gradient(lambda x: (tf.identity(x), change))


clipped_by_norm = backward(lambda upstream: tf.clip_by_norm(upstream, 1.0))
normalised = backward(lambda upstream: upstream / (1e-6 + tf.reduce_max(tf.abs(upstream))))
by_sign, halved = backward(tf.sign), backward(lambda upstream: upstream / 2)


class Layer(keras.layers.Layer):
    def __init__(self, fn):
        super().__init__(name="suspect")
        self.fn = fn
        self.weight = self.add_weight(shape=(4, 4), name="weight")
        self.shift = self.add_weight(shape=(), name="shift")
        self.state = self.add_weight(shape=(4,), name="state", trainable=False)
        self.number = self.add_weight(shape=(), name="number", trainable=False)
        self.norm = OwnMoments(fn) if fn in MOMENTS else None
        if self.norm:
            self.norm.build((None, 4))

    def call(self, x):
        if self.norm:
            return self.norm(ops.matmul(x, self.weight), training=True)
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


def read_again(name, update, again=True):
    """A layer that reads a variable, after it has assigned it or before."""

    def fn(layer, x):
        variable, x = getattr(layer, name), ops.matmul(x, layer.weight)
        y = x + variable
        variable.assign(update(variable, x))
        return x - ops.tanh(variable) if again else y

    return fn


assigned = functools.partial(read_again, again=False)


class OwnMoments(keras.layers.BatchNormalization):
    """Takes its moments by a function of what Keras takes."""

    def __init__(self, moments):
        super().__init__(name="norm")
        self.moments = moments

    def _moments(self, inputs, mask):
        return self.moments(super()._moments(inputs, mask), inputs)


MOMENTS = [
    lambda _, x: (ops.mean(x[:2], 0), ops.var(x[:2], 0)),
    lambda _, x: tf.nn.moments(x, [0]),
    lambda found, x: (found[0], ops.max(ops.abs(x), 0)),
    lambda found, x: (found[0], found[1] + 0.5),
]


RANDOM, COUNTER = random.Random(0), itertools.count(1)
MIXED, PLACE, NUMBER, PYTHON = (f"{said}: layer suspect" for said in (
    "mixed examples", "place in the batch", "batch size", "state in Python",
))  # fmt: skip
OTHERS = "^state: the variable suspect/number is assigned other values"
READ, NORM = "^state: the variable suspect/", "mixed examples: layer norm"
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
    "by Python's random": (PYTHON, of_inputs(lambda x: x * RANDOM.random())),
    "by a counter of Python's": (PYTHON, of_inputs(lambda x: x * next(COUNTER))),
    "branch at a mean": (
        MIXED,
        of_inputs(lambda x: ops.cond(ops.mean(x) > 3.0, lambda: x * 2, lambda: x)),
    ),
    "loop to a norm": (
        MIXED,
        of_inputs(
            lambda x: ops.while_loop(lambda x: ops.norm(x) > 50.0, lambda x: (x / 2,), (x,))[0]
        ),
    ),
    "branch of a sum": (
        MIXED,
        of_inputs(
            lambda x: ops.switch(ops.cast(ops.sum(x) > 9, "int32"), [lambda x: x, lambda x: -x], x)
        ),
    ),
    "rounded": (OTHERS, assigned("number", lambda v, x: ops.round(ops.mean(x)))),
    "clipped": (OTHERS, assigned("number", lambda v, x: v / 2 + ops.clip(ops.mean(x), -5, 5))),
    "mean, read again": (READ + "state", read_again("state", lambda v, x: v / 2 + ops.mean(x, 0))),
    "first, read again": (READ + "state", read_again("state", lambda v, x: x[0])),
    "number, read again": (READ + "number", read_again("number", lambda v, x: v + ops.shape(x)[0])),
    "largest, read again": (READ + "number", read_again("number", lambda v, x: ops.max(x))),
    "moments of the first two": (NORM, MOMENTS[0]),
    "moments by tf.nn": (NORM, MOMENTS[1]),
    "largest deviation": (NORM, MOMENTS[2]),
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
    "exponential": assigned("number", lambda v, x: v / 2 + ops.mean(ops.exp(x * x))),
    "as it was": assigned("state", lambda v, x: v * 1.0),
    "zeros added": assigned("state", lambda v, x: v + ops.zeros(4)),
    "of the least": assigned("number", lambda v, x: ops.maximum(v, -1e9)),
    "never": assigned("number", lambda v, x: ops.where(v > 1e9, 0.0, v)),
    "in a branch": assigned("number", lambda v, x: ops.cond(v > 1e9, lambda: v / 2, lambda: v * 1)),
    "moments and more": MOMENTS[3],
    "steps, read again": read_again("number", lambda v, x: v + 1),
    # The gradient of the shift is nothing but rounding.
    "shifted": lambda layer, x: ops.softmax(halved(ops.matmul(x, layer.weight)) + layer.shift),
    # As of a deep network with the first moments of BatchNorm: rounding is more than a period.
    "huge": of_inputs(
        lambda x: 1e24 * tf.nn.silu(x * (1 + 1e-15 * ops.cast(ops.shape(x)[0], x.dtype)))
    ),
}


def told(fn, compiled=True):
    """Return what a builder of two towers says of a layer that it calls; the zoo has gradients."""
    lines = []
    layer, x = Layer(fn), tf.constant(X, keras.backend.floatx())
    towers = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=lines.append)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(towers.concat(layer, x))
        return tape.gradient(loss, layer.trainable_variables)

    tf.function(step, autograph=False).get_concrete_function(x) if compiled else step(x)
    return lines


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_builder_says_what_towers_cannot_compute(name, float64):
    said, fn = FUNCTIONS[name]
    (line,) = told(fn)
    assert re.search(said, line), line


@pytest.mark.parametrize("name", INNOCENT)
def test_nothing_is_said_of_what_is_exact(name, float64):
    assert told(INNOCENT[name]) == []


def test_it_says_so_eagerly(float64):
    assert told(FUNCTIONS["softmax over the batch"][1], compiled=False)


def nudged(change):
    """A layer that assigns a state a value that examples have a part in, or seem to."""

    def fn(layer, x):
        layer.number.assign(layer.number + change(x))
        return x

    return Layer(fn)


@pytest.mark.parametrize(
    "change, is_told",
    [
        (lambda x: 0 * ops.mean(x), False),
        (lambda x: ops.sum(x * 0.0), False),
        (lambda x: ops.mean(x) * 0.0 + ops.max(x) * 0.0, False),
        (lambda x: ops.cast(ops.any(x > 1e9), x.dtype), False),  # the largest, by examples tried
        (lambda x: ops.cast(ops.any(ops.sqrt(ops.abs(x)) > 1e9), x.dtype), True),
    ],
)
def test_an_assignment_that_changes_nothing_is_no_doubt(change, is_told):
    told, layer = [], nudged(change)
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)
    tf.function(lambda x: builder.concat(layer, x))(tf.constant(X, tf.float32))
    assert bool(told) == is_told, told


def test_a_function_is_traced_five_times_for_all_trials(monkeypatch):
    """For few and more examples, and for two slices and their batch, forward and backward."""
    traced, trace = [], Tracer.trace

    def counted(tracer, size, **options):
        traced.append(size)
        return trace(tracer, size, **options)

    monkeypatch.setattr(Tracer, "trace", counted)
    layer = keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(4, "silu"), keras.layers.ActivityRegularization(0.1),
        keras.layers.Dropout(0.5), nudged(ops.max),
    ])  # fmt: skip
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=lambda _: None)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(builder.concat(lambda x: layer(x, training=True), x))
        return tape.gradient(loss, layer.trainable_variables)

    step(tf.constant(X, tf.float32))
    assert traced == [3, 5, 3, 5, 8]


def test_a_custom_gradient_is_tried_where_a_tape_goes_back():
    """An evaluation need not wait for the trial of it."""
    gone_back, told = [], []

    def clipped(upstream):
        gone_back.append(upstream)
        return tf.clip_by_norm(upstream, 1.0)

    layer = Layer(of_inputs(backward(clipped)))
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)
    x = tf.constant(X, tf.float32)
    tf.function(lambda: builder.concat(layer, x))()
    assert (gone_back, told) == ([], [])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(builder.concat(layer, x) ** 2)
        return tape.gradient(loss, [layer.weight.value])

    step()
    assert len(told) == 1 and "tf.custom_gradient" in told[0]
