"""`fit` over towers of programs with unusual data, functions and outputs: a table of each kind.

They have the numbers of one device, and nothing is said; or they run on one device, with a line.
"""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import fits
from tests.fits import layer_of, of_step
from tests.runs import rare, released
from towers import TowerBuilder

pytestmark = pytest.mark.run
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(7, 5)), RANDOM.normal(size=(7, 1))
ARRAYS = {"x": X, "y": Y, "batch_size": 4, "shuffle": False}  # batches of 4 and of 3
layers, ops = keras.layers, keras.ops


def compiled(model, loss="mse"):
    model.compile("sgd", loss)
    return model


def network(*made, shape=(5,), **options):
    return compiled(keras.Sequential([keras.Input(shape, **options), *made]))


def dense(size=1, **options):
    return functools.partial(layers.Dense, size, **options)


def of_dataset(dataset):
    return {"x": dataset, "shuffle": False}


def rows_of(shape, x):
    """Return a function that gives batches of 4 and 3 of which only a shape is known."""

    def make():
        yield from ((x[:4], Y[:4]), (x[4:], Y[4:]))

    signature = tf.TensorSpec(shape, tf.float64), tf.TensorSpec([None, 1], tf.float64)
    return lambda: of_dataset(tf.data.Dataset.from_generator(make, output_signature=signature))


def compare(build, given, num_towers=3):
    """Return what differs from plain Keras, and the lines that are told of the towers."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected, found = fits.fit(build, given()), fits.fit(build, given(), num_towers)
    lines = [str(one.message) for one in told if "/towers/" in one.filename]
    return fits.differences(expected, found), lines


# Data of unknown lengths.

SERIES, IMAGES = RANDOM.normal(size=(12, 3)), RANDOM.normal(size=(7, 9, 9, 3))


def windows_of_a_series():
    series = SERIES[:, :2], SERIES[:, 2:]
    make = keras.utils.timeseries_dataset_from_array
    return of_dataset(make(*series, 6, batch_size=4, shuffle=False))


def by_name():
    spec = {name: tf.TensorSpec([None, None], tf.float64) for name in "ab"}

    def make():
        for rows in (slice(4), slice(4, 7)):
            yield {"a": X[rows], "b": X[rows, :2]}, Y[rows]

    signature = spec, tf.TensorSpec([None, 1], tf.float64)
    return of_dataset(tf.data.Dataset.from_generator(make, output_signature=signature))


def named_inputs():
    a, b = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    joined = layers.Concatenate()([a, layers.Dense(3, activation="tanh")(b)])
    return compiled(keras.Model({"a": a, "b": b}, layers.Dense(1)(joined)))


def built_by_a_call():
    model = of_step(
        lambda self, x, y: tf.reduce_mean((self.two(self.one(x)) - y) ** 2),
        one=dense(3, activation="tanh"), two=dense(),
    )  # fmt: skip
    model.two(model.one(X[:2]))
    return model


UNKNOWN = {
    "windows": (
        lambda: network(layers.Flatten(), layers.Dense(1), shape=(6, 2)), windows_of_a_series
    ),
    "longer than a kernel": (
        lambda: network(layers.Conv1D(3, 5), layers.GlobalMaxPooling1D(), layers.Dense(1),
                        shape=(None, 2)),
        windows_of_a_series,
    ),
    "by name": (named_inputs, by_name),
    "built by a call": (built_by_a_call, rows_of([None, None], X)),
    "images of any size": (
        lambda: network(layers.Conv2D(4, 3, 2), layers.Conv2D(4, 3, 2),
                        layers.GlobalAveragePooling2D(), layers.Dense(1), shape=(None, None, 3)),
        rows_of([None, None, None, 3], IMAGES),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", released(UNKNOWN, "windows", "built by a call"))
def test_lengths_that_are_unknown_come_from_what_the_model_takes(name):
    assert compare(*UNKNOWN[name]) == ({}, [])


def in_windows_of_five():
    """Return a model that takes no other length, and does not say so."""
    return of_step(
        lambda self, x, y: tf.reduce_mean((self.layer(x) - y) ** 2),
        layer=lambda: layer_of(
            lambda self, x: self.out(ops.reshape(x, (-1, 5, 1))[:, :2, 0]), out=dense()
        ),
    )


def test_a_length_that_nothing_else_tells_comes_from_the_first_batch():
    assert compare(in_windows_of_five, rows_of([None, None], X), 2) == ({}, [])


@pytest.mark.filterwarnings("ignore:.*unbuilt state:UserWarning")  # it has no build()
def test_a_length_that_nothing_tells_is_asked_for(float64):
    model = towers.parallelize(in_windows_of_five(), devices=["/cpu:0", "/cpu:1"])
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    with pytest.warns(UserWarning, match="runs on one device.*tf.ensure_shape"):
        step.get_concrete_function(*(tf.TensorSpec([None, n], tf.float64) for n in (None, 1)))


# Gradients of what comes from around the towers.


def arrays():
    return ARRAYS


def mean_square(x):
    return tf.reduce_mean(x**2)


def hidden():
    return network(layers.Dense(4, activation="tanh"), layers.Dense(1))


def with_scaled_weights(self, x, y):
    weights = [w.value * (1 + self.scale) for w in self.net.trainable_variables]
    return mean_square(self.net.stateless_call(weights, [], x)[0] - y)


def after_a_step(self, x, y):
    """The loss at the weights after a step, whose gradient goes through that step."""
    weights = [w.value for w in self.net.trainable_variables]
    with tf.GradientTape() as tape:
        loss = mean_square(self.net(x) - y)
    steps = zip(weights, tape.gradient(loss, weights), strict=True)
    return mean_square(self.net.stateless_call([w - 0.1 * g for w, g in steps], [], x)[0] - y)


def in_an_attribute(self, x, y):
    self.layer.shift = tf.tanh(self.scale) * tf.ones([5], x.dtype)
    return mean_square(self.layer(x) - y)


def slope_forward(self, x, y):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        outputs = self.net(x)
    return mean_square(outputs - y) + mean_square(accumulator.jvp(outputs))


def with_scale(step, **parts):
    def build():
        model = of_step(step, **parts)
        model.scale = model.add_weight(shape=(), name="scale")
        return model

    return build


AROUND = {
    "scaled weights": with_scale(with_scaled_weights, net=hidden),
    "an attribute": with_scale(
        in_an_attribute,
        layer=lambda: layer_of(lambda self, x: self.out(x + self.shift), out=dense()),
    ),
    "after a step": lambda: of_step(after_a_step, net=hidden),
    "forward mode": lambda: of_step(slope_forward, net=hidden),
}


@pytest.mark.parametrize("name", released(AROUND, "scaled weights", "forward mode"))
def test_gradients_go_to_what_towers_take_from_around_them(name):
    assert compare(AROUND[name], arrays) == ({}, [])


# Functions that XLA compiles, of tf.Variables.


def by_xla(fn):
    """Return a layer that calls a function compiled by XLA, and another."""
    return network(layers.Lambda(tf.function(fn, jit_compile=True)), layers.Dense(1))


def looks_up_rows():
    table = tf.Variable(np.arange(6.0).reshape(2, 3))
    return by_xla(lambda x: tf.gather(table, tf.cast(x[:, 0] > 0, tf.int32)))


def in_a_loop():
    matrix = tf.Variable(np.eye(5) * 0.9)
    product = tf.function(lambda x: x @ matrix, jit_compile=True)
    loop = layer_of(lambda _, x: tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, product(y)), (0, product(x)))[1])  # fmt: skip
    return network(loop, layers.Dense(1))


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


COMPILED = {f.__name__: f for f in (looks_up_rows, in_a_loop, trains_its_variable)}


@pytest.mark.parametrize("name", released(COMPILED, "trains_its_variable"))
def test_functions_that_xla_compiles_read_variables_of_another_device(name):
    assert compare(COMPILED[name], arrays) == ({}, [])


# Outputs whose shape the values tell.

TOKENS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0], [7, 0, 0, 0], [8, 1, 0, 0],
                   [2, 2, 2, 2], [1, 0, 0, 0]])  # fmt: skip


def tokens():
    return ARRAYS | {"x": TOKENS}


def ragged_tokens():
    rows = tf.RaggedTensor.from_tensor(TOKENS, padding=0)
    return of_dataset(tf.data.Dataset.from_tensor_slices((rows, Y)).batch(4))


def of_layer(call, **parts):
    """Return a function that makes a model whose loss is made of all outputs of a layer."""
    step = lambda self, x, y: mean_square(self.layer(x)) + tf.reduce_sum(y)  # noqa: E731
    return lambda: of_step(step, layer=lambda: layer_of(call, **parts))


def cut_at_the_longest(self, x):
    return self.table(x[:, : tf.reduce_max(tf.reduce_sum(tf.cast(x > 0, tf.int32), 1))])


TABLE = {"table": lambda: layers.Embedding(9, 3)}
BY_VALUES = {
    "cut at the longest": (of_layer(cut_at_the_longest, **TABLE), tokens, "how long"),
    "padded": (of_layer(lambda self, x: self.table(x.to_tensor()), **TABLE), ragged_tokens,
               "how long"),
    "masked": (of_layer(lambda self, x: tf.boolean_mask(self.table(x), x > 0), **TABLE), tokens,
               "how many rows"),
    "chosen": (of_layer(lambda self, x: tf.boolean_mask(self.out(x), x[:, 0] > 0), out=dense()),
               arrays, "how many rows"),
    "different": (
        of_layer(lambda self, x: self.table(tf.unique(tf.reshape(x, [-1]))[0]), **TABLE), tokens,
        "how many rows",
    ),
    "squeezed": (of_layer(lambda self, x: ops.squeeze(self.out(x)), out=dense()), arrays,
                 "axis=-1"),
}  # fmt: skip


@pytest.mark.parametrize("name", released(BY_VALUES, "chosen", "padded", "squeezed"))
def test_outputs_whose_shape_the_values_tell_are_made_on_one_device(name):
    build, given, words = BY_VALUES[name]
    differences, lines = compare(build, given)
    assert differences == {}
    assert ["runs on one device" in line and words in line for line in lines] == [True]


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


# Arguments of which each tower takes all.


def dataset_of_arrays():
    return of_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))


def with_table(call, rows=6, **parts):
    """Return a function that makes a model whose layer is given a table that is trained."""

    def step(self, x, y):
        table = tf.tanh(self.table) if rows else self.table
        return mean_square(self.layer(x, table) - y)

    def build():
        model = of_step(step, layer=lambda: layer_of(call, **parts))
        model.table = model.add_weight(shape=(rows or 5, 5), name="table")
        return model

    return build


def to_prototypes(_, x, table):
    return tf.reduce_sum((x[:, tf.newaxis] - table) ** 2, axis=-1)


def attends(self, x, table):
    return self.out(tf.nn.softmax(x @ table, axis=-1) @ table)


def along_edges(self, x, edges):
    """A layer of a graph: what an edge says are places in the batch."""
    return x + tf.math.unsorted_segment_sum(tf.gather(x, edges[0]), edges[1], tf.shape(x)[0])


def with_edges():
    edges = tf.constant([[0, 1, 2], [2, 0, 1]])
    step = lambda self, x, y: mean_square(self.layer(self.out(x), edges) - y)  # noqa: E731
    return of_step(step, layer=lambda: layer_of(along_edges), out=dense())


def static(size):
    return lambda: of_dataset(tf.data.Dataset.from_tensor_slices((X[:size], Y[:size])).batch(
        size, drop_remainder=True))  # fmt: skip


WHOLE = {
    "prototypes": (with_table(to_prototypes), dataset_of_arrays),
    "a square matrix": (with_table(attends, 5, out=dense()), dataset_of_arrays),
    "given first": (with_table(lambda self, table, x: tf.matmul(table, x, transpose_b=True)),
                    static(7)),
}  # fmt: skip


@pytest.mark.parametrize("name", released(WHOLE, "prototypes"))
def test_an_argument_that_has_no_row_for_each_example_is_taken_whole(name):
    assert compare(*WHOLE[name], num_towers=2) == ({}, [])


def test_examples_that_are_mixed_are_the_reason_and_not_a_table_beside_them():
    build = with_table(lambda _, x, table: x @ table + tf.math.reduce_std(x, axis=0), 5)
    differences, (line, *_) = compare(build, dataset_of_arrays, 2)
    assert differences == {}
    assert "runs on one device" in line and "mixed examples" in line and "rows" not in line


def test_examples_that_are_mixed_by_a_weight_of_the_step_are_told_of():
    """A trial with a weight of 1 would leave out what is mixed."""
    step = lambda self, x, y: mean_square(  # noqa: E731
        self.layer(x, tf.cast(tf.shape(x)[1], x.dtype) / 9) - y
    )
    mixed = lambda _, x, weight: weight * x + (1 - weight) * tf.reverse(x, [0])  # noqa: E731
    _, lines = compare(lambda: of_step(step, layer=lambda: layer_of(mixed)), arrays)
    assert ["mixed examples" in line for line in lines][:1] == [True]


@pytest.mark.parametrize("given", [dataset_of_arrays, rare(static(7))])
def test_places_in_the_batch_are_not_divided(given):
    differences, lines = compare(with_edges, given, 2)
    assert differences == {}
    assert [" and " in line and "runs on one device" in line for line in lines][:1] == [True]


class Pair(tf.experimental.BatchableExtensionType):
    a: tf.Tensor
    b: tf.Tensor


@pytest.mark.parametrize("beside", [rare(False), True], ids=["alone", "beside a tensor"])
def test_an_extension_type_runs_on_one_device_with_a_line(beside):
    def call(layer, x=None, pair=None):
        found = layer.part(pair.a) + layer.part(pair.b)
        return found if x is None else found + layer.part(x)

    def step(model, pair, y):
        output = model.own(pair.a, pair=pair) if beside else model.own(pair=pair)
        return tf.reduce_mean((output - y) ** 2)

    def build():
        model = of_step(step, own=lambda: layer_of(call, part=lambda: layers.Dense(1)))
        model.own.part.build((None, 5))
        model.own.built = model.built = True
        return model

    def given():
        data = (Pair(a=X, b=X[::-1].copy()), Y)
        return of_dataset(tf.data.Dataset.from_tensor_slices(data).batch(4))

    differences, lines = compare(build, given, 2)
    told = [line for line in lines if "one device" in line]
    assert differences == {} and len(told) == 1 and "Pair is an ExtensionType" in told[0]
