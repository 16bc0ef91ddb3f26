"""What the check tells of functions with a planted fault; it tells nothing of sound ones."""

import functools
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import fits
from towers import TowerBuilder

pytestmark = [pytest.mark.run, pytest.mark.checked]
X = np.random.default_rng(0).normal(size=(7, 4))
ops = keras.ops


def backward(change):
    """Return a function that changes nothing but what goes back through it."""
    return tf.custom_gradient(lambda x: (tf.identity(x), change))


clipped_by_norm = backward(lambda upstream: tf.clip_by_norm(upstream, 1.0))
normalized = backward(lambda upstream: upstream / (1e-6 + tf.reduce_max(tf.abs(upstream))))
by_sign, halved = backward(tf.sign), backward(lambda upstream: upstream / 2)


class Layer(keras.layers.Layer):
    def __init__(self, fn):
        super().__init__(name="suspect")
        self.fn = fn
        self.weight = self.add_weight(shape=(4, 4), name="weight")
        self.table = self.add_weight(shape=(50, 3), name="table")
        self.shift = self.add_weight(shape=(), name="shift")
        self.state = self.add_weight(shape=(4,), name="state", trainable=False)
        self.number = self.add_weight(shape=(), name="number", initializer="zeros", trainable=False)
        self.steps = self.add_weight(
            shape=(), name="steps", dtype="int32", initializer="zeros", trainable=False
        )
        self.norm = OwnMoments(fn) if fn in MOMENTS else None
        if self.norm:
            self.norm.build((None, 4))

    def call(self, x):
        if self.norm:
            return self.norm(ops.matmul(x, self.weight), training=True)
        return self.fn(self, x)


def of_product(fn):
    return lambda layer, x: fn(layer, ops.matmul(x, layer.weight))


def of_inputs(fn):
    return of_product(lambda _, x: fn(x))


def halved_while_large(x):
    return ops.while_loop(lambda x: ops.norm(x) > 50.0, lambda x: (x / 2,), (x,))[0]


def of_weight(fn):
    return lambda layer, x: ops.matmul(x, fn(layer.weight.value))


TABLES = []  # a table lives as long as somebody holds it


def counted(layer, x):
    TABLES.append(tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0))
    keys = tf.cast(x[:, 0] > 0, tf.int64)
    TABLES[-1].insert(keys, TABLES[-1].lookup(keys) + 1)
    return x


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


# Values that are treated otherwise than others, and what is drawn.


def shares(mask):
    """Divide by how many numbers of the batch are not masked."""
    return lambda layer, x: x * ops.cast(mask(x), x.dtype) / ops.sum(ops.cast(mask(x), x.dtype))


def embedded_shares(masked):
    def fn(layer, x):
        mask = ops.cast(ops.not_equal(x, masked), layer.table.dtype)[..., None]
        return ops.take(layer.table, ops.maximum(x, 0), axis=0) * mask / (1 + ops.sum(mask))

    return fn


def filled(is_nan):
    def fn(layer, x):
        known = tf.where(is_nan(x), tf.zeros_like(x), x)
        return tf.where(is_nan(x), tf.reduce_mean(known, axis=0)[None] + 0 * known, known)

    return fn


def rarely(condition):
    return lambda layer, x: tf.cond(tf.reduce_any(condition(x)), lambda: x * 2, lambda: x + 1)


def in_a_branch(layer, x):
    def shrunk():
        return tf.cond(tf.reduce_any(x < -77), lambda: x / tf.reduce_max(x), lambda: x)

    return tf.cond(tf.reduce_any(x > -1e9), shrunk, lambda: x)


def drawing(fn):
    seed = keras.random.SeedGenerator(3)
    return lambda layer, x: fn(x, keras.random.uniform(ops.shape(x), seed=seed, dtype=x.dtype))


def kept_share(x, drawn):
    """Scales what is left of the whole batch, as DropBlock does."""
    mask = ops.cast(drawn > 0.3, x.dtype)
    return x * mask * ops.cast(ops.size(mask), x.dtype) / (1 + ops.sum(mask))


def all_but_the_largest(x, drawn):
    return x * ops.cast(drawn < ops.max(drawn), x.dtype)


def centered_if(condition):
    return of_product(lambda layer, x: ops.where(condition(layer), x - ops.mean(x, 0), x))


def assigned_every_third_step(layer, x):
    layer.steps.assign(layer.steps + 1)
    layer.state.assign(ops.where(ops.equal(layer.steps % 3, 0), ops.median(x, 0), layer.state))
    return x


def noisy_gradient(upstream):
    return upstream + tf.random.normal(tf.shape(upstream), dtype=upstream.dtype)


RANDOM = random.Random(0)
LAYER, PYTHON = "^inexact: layer suspect", "^state in Python: layer suspect"
STATE, NORM = "^inexact: the variable suspect/number", "^inexact: layer .*norm"
WEIGHT, TABLE = "^inexact: the gradient of the weight suspect/", "changes a table or a queue"
FUNCTIONS = {
    "softmax over the batch": (LAYER, of_inputs(lambda x: ops.softmax(x, axis=0))),
    "the next example": (LAYER, of_inputs(lambda x: x + ops.roll(x, 1, axis=0))),
    "every other": (LAYER, of_inputs(lambda x: x * np.tile([1, 2], 50)[: x.shape[0], None])),
    "the first": (LAYER, of_inputs(lambda x: ops.concatenate([x[:1] * 2, x[1:]], axis=0))),
    "number": (LAYER, of_inputs(lambda x: x / x.shape[0])),
    "above five": (LAYER, of_inputs(lambda x: x * 2 if x.shape[0] > 5 else x)),
    "by Python's random": (PYTHON, of_inputs(lambda x: x * RANDOM.random())),
    "branch at a mean": (
        LAYER,
        of_inputs(lambda x: ops.cond(ops.mean(x) > 3, lambda: -x, lambda: x)),
    ),
    "loop to a norm": (LAYER, of_inputs(halved_while_large)),
    "rounded": (STATE, assigned("number", lambda v, x: ops.round(ops.mean(x)))),
    "clipped": (STATE, assigned("number", lambda v, x: v / 2 + ops.clip(ops.mean(x), -5, 5))),
    "mean, read again": (LAYER, read_again("state", lambda v, x: v / 2 + ops.mean(x, 0))),
    "first, read again": (LAYER, read_again("state", lambda v, x: x[0])),
    "moments of the first two": (NORM, MOMENTS[0]),
    "moments by tf.nn": (NORM, MOMENTS[1]),
    "largest deviation": (NORM, MOMENTS[2]),
    "table": (TABLE, counted),
    "clipped, of inputs": (WEIGHT, of_inputs(clipped_by_norm)),
    "normalized, of a weight": (WEIGHT, of_weight(normalized)),
    "sign, of a weight": (WEIGHT, of_weight(by_sign)),
    "a mark": (LAYER, shares(lambda x: x != -9)),
    "token 30": (LAYER, embedded_shares(30)),
    "NaN, by itself": (LAYER, filled(lambda x: x != x)),
    "large": (LAYER, rarely(lambda x: x > 40)),
    "in a branch": (LAYER, in_a_branch),
    "the share of a drawn mask": (LAYER, drawing(kept_share)),
    "the largest number drawn": (LAYER, drawing(all_but_the_largest)),
    "stage 1": (LAYER, centered_if(lambda layer: ops.equal(layer.steps, 1))),
    "below 0": (
        LAYER,
        of_product(lambda layer, x: x + ops.relu(-layer.number - 0.3) * ops.mean(x, 0)),
    ),
    "assigned every third step": ("^inexact: the variable suspect/", assigned_every_third_step),
    "random numbers of a backward pass": ("^random op: ", of_inputs(backward(noisy_gradient))),
    "small gradients": (
        WEIGHT,
        of_weight(backward(lambda up: up * tf.cast(tf.abs(up) > 2e-3, up.dtype))),
    ),
    "text": ("^inexact: ", lambda _, x: (x, tf.strings.as_string(tf.argsort(x[:, 0])))),
}
INNOCENT = {
    "plain": of_inputs(ops.tanh),
    "silu": of_inputs(tf.nn.silu),  # has a gradient of its own
    "halved": of_weight(halved),
    "sign, of inputs": of_inputs(by_sign),
    "exponential": assigned("number", lambda v, x: v / 2 + ops.mean(ops.exp(x * x))),
    "as it was": assigned("state", lambda v, x: v * 1.0),
    "never": assigned("number", lambda v, x: ops.where(v > 1e9, 0.0, v)),
    "in a branch": assigned("number", lambda v, x: ops.cond(v > 1e9, lambda: v / 2, lambda: v * 1)),
    "moments and more": MOMENTS[3],
    "steps, read again": read_again("number", lambda v, x: v + 1),
    "nothing, by a mean": assigned("number", lambda v, x: v + 0 * ops.mean(x)),
    "nothing, by a sum": assigned("number", lambda v, x: v + ops.sum(x * 0.0)),
    "a mark": lambda layer, x: ops.where(x == -9, 0.0, x),
    "token 30": lambda layer, x: ops.take(layer.table, ops.where(x == 30, 1, x), axis=0),
    "NaN": lambda layer, x: tf.where(tf.math.is_nan(x), tf.zeros_like(x), x),
    "noise without its own mean": drawing(lambda x, y: x + y - ops.mean(y, 1, keepdims=True)),
    # The gradient of the shift is nothing but rounding.
    "shifted": lambda layer, x: ops.softmax(halved(ops.matmul(x, layer.weight)) + layer.shift),
    # As of a deep network with the first moments of BatchNorm: rounding is more than a period.
    "huge": of_inputs(
        lambda x: 1e24 * tf.nn.silu(x * (1 + 1e-15 * ops.cast(ops.shape(x)[0], x.dtype)))
    ),
}


def told(fn, tokens=False):
    """Return what the check says of a layer on two towers."""
    layer, x = Layer(fn), tf.constant(X, tf.int32 if tokens else keras.backend.floatx())
    return TowerBuilder(["/cpu:0", "/cpu:1"]).check(layer, layer.trainable_variables, x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_builder_says_what_towers_cannot_compute(name, float64):
    said, fn = FUNCTIONS[name]
    line, *_ = told(fn, "token" in name)
    assert re.search(said, line), line


@pytest.mark.parametrize("name", INNOCENT)
def test_nothing_is_said_of_what_is_exact(name, float64):
    assert told(INNOCENT[name], "token" in name) == []


@pytest.mark.extended
def test_rounding_in_float32_hides_few_faults_and_is_never_taken_for_one():
    hidden = [n for n, (_, fn) in FUNCTIONS.items() if not told(fn, "token" in n)]
    assert len(hidden) <= 2, hidden
    assert [n for n, fn in INNOCENT.items() if told(fn, "token" in n)] == []


def test_fit_tries_a_real_batch():
    """Only real values, whole numbers of a hundred and more, are treated otherwise."""
    x = np.random.default_rng(0).integers(100, 200, size=(14, 4)).astype(float)

    def of_whole(layer, x):
        x = ops.where(ops.floor(x) == x, x / ops.max(ops.floor(x)), x)
        return x * layer.table[0, 0] * layer.weight[0, 0] + layer.shift

    def build():
        model = keras.Sequential([keras.Input((4,)), Layer(of_whole)])
        model.compile("sgd", "mse")
        return model

    with pytest.warns(UserWarning, match="inexact: layer .*suspect"):
        fits.fit(build, {"x": x, "y": np.ones((14, 4)), "batch_size": 7}, 2, epochs=1)
