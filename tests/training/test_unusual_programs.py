"""`fit` over towers of programs with unusual data, functions and outputs: a table of each kind.

They have the numbers of one device, and nothing is said; or they run on one device, with a line.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import fits
from tests.fits import layer_of, of_step
from towers import TowerBuilder

pytestmark = pytest.mark.run
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(7, 5)), RANDOM.normal(size=(7, 1))
layers, ops = keras.layers, keras.ops


# The data.


def arrays(x=X):
    return {"x": x, "y": Y, "batch_size": 4, "shuffle": False}  # batches of 4 and of 3


def eights():
    x = np.random.default_rng(1).normal(size=(16, 5))
    return {"x": x, "y": x[:, :1], "batch_size": 8}


def of_dataset(dataset):
    return {"x": dataset, "shuffle": False}


def of_slices(x, size=4, **options):
    return of_dataset(tf.data.Dataset.from_tensor_slices((x, Y)).batch(size, **options))


def rows_of(shape, x):
    """Return a function that gives batches of 4 and 3 of which only a shape is known."""

    def make():
        yield from ((x[:4], Y[:4]), (x[4:], Y[4:]))

    signature = tf.TensorSpec(shape, tf.float64), tf.TensorSpec([None, 1], tf.float64)
    return lambda: of_dataset(tf.data.Dataset.from_generator(make, output_signature=signature))


def of_arrays():
    return of_slices(X)


TOKENS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0], [7, 0, 0, 0], [8, 1, 0, 0],
                   [2, 2, 2, 2], [1, 0, 0, 0]])  # fmt: skip


def ragged_tokens():
    return of_slices(tf.RaggedTensor.from_tensor(TOKENS, padding=0))


class Pair(tf.experimental.BatchableExtensionType):
    a: tf.Tensor
    b: tf.Tensor


def pairs():
    return of_slices(Pair(a=X, b=X[::-1].copy()))


# The models.


def compiled(model, loss="mse", optimizer="sgd", **options):
    model.compile(optimizer, loss, **options)
    return model


def network(*made, shape=(5,), **options):
    return compiled(keras.Sequential([keras.Input(shape), *made]), **options)


def dense(size=1, **options):
    return functools.partial(layers.Dense, size, **options)


def mean_square(x):
    return tf.reduce_mean(x**2)


def built_by_a_call():
    model = of_step(
        lambda self, x, y: mean_square(self.two(self.one(x)) - y),
        one=dense(3, activation="tanh"), two=dense(),
    )  # fmt: skip
    model.two(model.one(X[:2]))
    return model


def in_windows_of_five():
    """Return a model that takes no other length, and does not say so."""
    return of_step(
        lambda self, x, y: mean_square(self.layer(x) - y),
        layer=lambda: layer_of(
            lambda self, x: self.out(ops.reshape(x, (-1, 5, 1))[:, :2, 0]), out=dense()
        ),
    )


# Gradients of what comes from around the towers.


def hidden():
    return network(layers.Dense(4, activation="tanh"), layers.Dense(1))


def with_scaled_weights(self, x, y):
    weights = [w.value * (1 + self.scale) for w in self.net.trainable_variables]
    return mean_square(self.net.stateless_call(weights, [], x)[0] - y)


def slope_forward(self, x, y):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        outputs = self.net(x)
    return mean_square(outputs - y) + mean_square(accumulator.jvp(outputs))


def with_weight(step, shape=(), **parts):
    """Return a function that makes a model with a weight of its own, `model.scale`."""

    def build():
        model = of_step(step, **parts)
        model.scale = model.add_weight(shape=shape, name="scale")
        return model

    return build


# Functions that XLA compiles, of tf.Variables.


def trains_its_variable():
    shift = tf.Variable(np.ones(5))
    add = tf.function(lambda x: tf.tanh(x + shift), jit_compile=True)

    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = mean_square(self.layer(x) - y)
        shift.assign_sub(0.1 * tape.gradient(loss, shift))
        return mean_square(self.layer(x) - y)

    make = lambda: layer_of(lambda self, x: self.out(add(x) * add(-x)), out=dense())  # noqa: E731
    return of_step(step, layer=make)


# Outputs whose shape the values tell.


def of_layer(call, **parts):
    """Return a function that makes a model whose loss is made of all outputs of a layer."""
    step = lambda self, x, y: mean_square(self.layer(x)) + tf.reduce_sum(y)  # noqa: E731
    return lambda: of_step(step, layer=lambda: layer_of(call, **parts))


TABLE = {"table": lambda: layers.Embedding(9, 3)}


# Arguments of which each tower takes all.


def with_table(call, rows=6, **parts):
    """Return a function that makes a model whose layer is given a table that is trained."""

    def step(self, x, y):
        table = tf.tanh(self.scale) if rows else self.scale
        return mean_square(self.layer(x, table) - y)

    return with_weight(step, (rows or 5, 5), layer=lambda: layer_of(call, **parts))


def to_prototypes(_, x, table):
    return tf.reduce_sum((x[:, tf.newaxis] - table) ** 2, axis=-1)


def along_edges(self, x, edges):
    """A layer of a graph: what an edge says are places in the batch."""
    return x + tf.math.unsorted_segment_sum(tf.gather(x, edges[0]), edges[1], tf.shape(x)[0])


def with_edges():
    edges = tf.constant([[0, 1, 2], [2, 0, 1]])
    step = lambda self, x, y: mean_square(self.layer(self.out(x), edges) - y)  # noqa: E731
    return of_step(step, layer=lambda: layer_of(along_edges), out=dense())


def of_pairs(beside):
    """Return a function that makes a model of an extension type, perhaps beside a tensor."""

    def call(layer, x=None, pair=None):
        found = layer.part(pair.a) + layer.part(pair.b)
        return found if x is None else found + layer.part(x)

    def step(model, pair, y):
        output = model.own(pair.a, pair=pair) if beside else model.own(pair=pair)
        return mean_square(output - y)

    def build():
        model = of_step(step, own=lambda: layer_of(call, part=dense()))
        model.own.part.build((None, 5))
        model.own.built = model.built = True
        return model

    return build


# What cannot be called with a part of the batch.


def undivided(call):
    def build():
        loss = lambda _, outputs: ops.sum(outputs**2)  # noqa: E731
        body = layers.Dense(6, "relu"), layer_of(call), layers.Dense(1)
        return network(*body, loss=loss)

    return build


def a_number_for_each_pair():
    """Towers of equal slices would join rows of their own pairs."""
    products = layer_of(lambda _, x: ops.matmul(x, ops.transpose(x)))
    loss = lambda _, outputs: ops.mean(outputs**4, axis=-1)  # noqa: E731
    return network(layers.Dense(6), products, loss=loss, optimizer="adam")


# What a step computes from a model that has BatchNorm, under a tape.
def loop(model, x):
    return tf.while_loop(
        lambda i, _: i < 2,
        lambda i, total: (i + 1, total + model(x * total, training=True)),
        (0, tf.ones_like(x[:, :1])),
    )[1]


def in_a_loop():
    step = lambda self, x, y: mean_square(loop(self.net, x) - y)  # noqa: E731
    body = layers.Dense(4, "tanh"), layers.BatchNormalization(), layers.Dense(1)
    return of_step(step, net=lambda: network(*body))


# The table.


class Program(NamedTuple):
    build: Callable
    given: Callable = arrays
    says: str = ""  # why it runs on one device
    num_towers: int = 3


ON_ONE_DEVICE = "runs? on one device"
TOO_FEW, HOW_LONG, HOW_MANY = "sequential", "how long", "how many rows"
MEETING = "train_step of .*: .*BatchNorm"
PROGRAMS = {
    "built by a call": Program(built_by_a_call, rows_of([None, None], X)),
    "as long as the first batch": Program(
        in_windows_of_five, rows_of([None, None], X), num_towers=2
    ),
    "scaled weights": Program(with_weight(with_scaled_weights, net=hidden)),
    "forward mode": Program(lambda: of_step(slope_forward, net=hidden)),
    "XLA trains its variable": Program(trains_its_variable),
    "padded": Program(
        of_layer(lambda self, x: self.table(x.to_tensor()), **TABLE), ragged_tokens, HOW_LONG
    ),
    "chosen": Program(
        of_layer(lambda self, x: tf.boolean_mask(self.out(x), x[:, 0] > 0), out=dense()),
        says=HOW_MANY,
    ),
    "squeezed": Program(
        of_layer(lambda self, x: ops.squeeze(self.out(x)), out=dense()), says="axis=-1"
    ),
    "prototypes": Program(with_table(to_prototypes), of_arrays, num_towers=2),
    "mixed, and not the table beside": Program(
        with_table(lambda _, x, table: x @ table + tf.math.reduce_std(x, axis=0), 5), of_arrays,
        "^(?!.*rows).*mixed examples", 2,
    ),
    "places in the batch": Program(with_edges, of_arrays, " and ", 2),
    "one beside a tensor": Program(of_pairs(True), pairs, "is an ExtensionType", 2),
    "no row for each example": Program(
        undivided(lambda _, x: ops.mean(x, axis=0, keepdims=True)), eights, TOO_FEW, 2
    ),
    "pairs": Program(a_number_for_each_pair, eights, "sequential.*: its output 0", 2),
    "eager": Program(
        lambda: network(layers.Dense(1), optimizer="adam", run_eagerly=True), says="run_eagerly"
    ),
    "a loop": Program(in_a_loop, eights, MEETING, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_numbers_of_one_device_or_run_there_with_a_line(name):
    program = PROGRAMS[name]
    differences, lines = fits.compare(program.build, program.given, program.num_towers)
    assert differences == {}
    assert len(lines) == bool(program.says)
    for line in lines:
        assert re.search(ON_ONE_DEVICE, line) and re.search(program.says, line), line


@pytest.mark.filterwarnings("ignore:.*unbuilt state:UserWarning")  # it has no build()
def test_a_length_that_nothing_tells_is_asked_for(float64):
    model = towers.parallelize(in_windows_of_five(), devices=["/cpu:0", "/cpu:1"])
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    with pytest.warns(UserWarning, match="runs on one device.*tf.ensure_shape"):
        step.get_concrete_function(*(tf.TensorSpec([None, n], tf.float64) for n in (None, 1)))


def test_shapes_that_a_trace_does_not_tell_may_be_by_example():
    half = tf.SparseTensorSpec([None, 5], tf.float64)
    told = []
    builder = TowerBuilder(["/cpu:0", "/cpu:1", "/cpu:2"], on_warning=told.append)

    @tf.function(input_signature=[half])
    def losses(x):
        return builder.gradients(lambda x: tf.sparse.reduce_sum(x, 1), [], x)[0]

    @tf.function(input_signature=[tf.TensorSpec([None, 5], tf.float64)])
    def chosen(x):
        return builder.concat(lambda x: tf.boolean_mask(x, x > 0), x)

    np.testing.assert_allclose(losses(tf.sparse.from_dense(X)), X.sum(1).mean())
    assert not told
    for size in 7, 2, 1:
        np.testing.assert_array_equal(chosen(X[:size]), X[:size][X[:size] > 0])


def test_examples_that_are_mixed_by_a_weight_of_the_step_are_told_of():
    """A trial with a weight of 1 would leave out what is mixed."""
    step = lambda self, x, y: mean_square(  # noqa: E731
        self.layer(x, tf.cast(tf.shape(x)[1], x.dtype) / 9) - y
    )
    mixed = lambda _, x, weight: weight * x + (1 - weight) * tf.reverse(x, [0])  # noqa: E731
    _, lines = fits.compare(lambda: of_step(step, layer=lambda: layer_of(mixed)), arrays)
    assert len(lines) == 1 and "mixed examples" in lines[0]
