"""What an analysis finds out of a tower function, and what the builder makes of it."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder

pytestmark = [pytest.mark.graph, pytest.mark.checked]
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2"]
X = np.random.default_rng(0).normal(size=(7, 4, 6)).astype("float32")
SEED = (3, 4)


def uniform(shape):
    return tf.random.stateless_uniform(shape, SEED)


def rows(x):
    return uniform([4 * tf.shape(x)[0], 6])


def swapped(x):
    return tf.transpose(x, [1, 0, 2])


# Draws of x [B, 4, 6], in several layouts.
LAYOUTS = {
    "first axis": lambda x: x + uniform(tf.shape(x)),
    "second axis": lambda x: x + swapped(uniform([4, tf.shape(x)[0], 6])),
    "last axis": lambda x: x + tf.transpose(uniform([6, 4, tf.shape(x)[0]])),
    "batch * time": lambda x: x + tf.reshape(rows(x), tf.shape(x)),
    "time * batch": lambda x: x + swapped(tf.reshape(rows(x), [4, -1, 6])),
    "a mask": lambda x: tf.where(
        tf.reshape(uniform([24 * tf.shape(x)[0]]), tf.shape(x)) < 0.5, x, 0
    ),
    "a kernel as long as a slice": lambda x: x @ uniform([6, 6]),
    "one number": lambda x: x * uniform([]),
}
UNTOLD = {
    "pairs": lambda x: x + tf.reduce_sum(uniform([tf.shape(x)[0]] * 2)),
    "what is positive": lambda x: (
        x + tf.reduce_sum(uniform([tf.reduce_sum(tf.cast(x > 0, tf.int32))]))
    ),
}
OTHERWISE = {
    "one less": lambda x: x + tf.reduce_sum(uniform([2 * tf.shape(x)[0] - 1])),
    "of all examples": lambda x: x + tf.reduce_sum(rows(x)),
    "halves * batch * time": lambda x: (
        x + tf.reshape(swapped(tf.reshape(rows(x), [2, -1, 12])), tf.shape(x))
    ),
}
WITHOUT_ROWS = {
    "tf.nn.dropout": lambda x: tf.nn.dropout(x, 0.5),
    "gamma": lambda x: x + tf.random.stateless_gamma((6,), SEED, 2.0),
    "a raw op": lambda x: (
        x + tf.raw_ops.StatelessRandomUniformV2(shape=tf.shape(x), key=[1], counter=[1, 2], alg=1)
    ),
}


def per_example(fn):
    return lambda x: tf.reduce_sum(tf.sin(fn(x)), axis=[1, 2])


@pytest.mark.run
@pytest.mark.parametrize("alternate", [False, True])
def test_layouts_of_draws_are_found(alternate):
    """Towers draw what one device draws, of slices of known and of unknown sizes."""
    parts = [
        per_example(draw) for name, draw in LAYOUTS.items() if alternate == (name == "time * batch")
    ]
    fn = lambda x: tf.stack([part(x) for part in parts], axis=1)  # noqa: E731
    losses = lambda x: tf.reduce_sum(fn(x), axis=1)  # noqa: E731
    told = []
    builder = TowerBuilder(DEVICES, accumulate_steps=2, on_warning=told.append)
    expected = fn(tf.constant(X))
    some = tf.function(lambda x: builder.gradients(losses, [], x)[0], [tf.TensorSpec([7, 4, 6])])
    anything = tf.function(lambda x: builder.concat(fn, x), [tf.TensorSpec([None, 4, 6])])
    of_all = tf.reduce_mean(tf.reduce_sum(expected, axis=1))
    np.testing.assert_allclose(some(X), of_all, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(anything(X), expected, rtol=1e-5, atol=1e-5)
    assert not told


def told_of(fn, num_towers=3):
    """Return what is told of a function when it has run on towers."""
    told = []
    TowerBuilder(DEVICES[:num_towers], on_warning=told.append).gradients(fn, [], tf.constant(X))
    return told


@pytest.mark.parametrize("name", [*UNTOLD, *OTHERWISE, *WITHOUT_ROWS])
def test_draws_that_towers_cannot_follow_are_told_of(name):
    told, *_ = told_of(per_example((UNTOLD | OTHERWISE | WITHOUT_ROWS)[name]))
    kinds = dict.fromkeys(UNTOLD, "random numbers: ") | dict.fromkeys(OTHERWISE, "inexact: ")
    assert told.startswith(kinds.get(name, "random op: "))


@pytest.mark.parametrize("name", ["unique", "combined"])
def test_weights_that_are_looked_up_by_unique_numbers_are_told(name):
    weight = keras.Variable(X[:, 0], name="weight")

    def fn(x):
        if name == "combined":
            ids = tf.RaggedTensor.from_tensor(tf.argmax(x, axis=1)).to_sparse()
            return tf.nn.embedding_lookup_sparse(weight.value, ids, None, combiner="mean")[:, 0]
        rows, places = tf.unique(tf.argmax(x[:, 0], axis=1))
        return tf.gather(tf.gather(weight, rows), places)[:, 0]

    (told,) = told_of(fn)
    assert "sparse gradient of the weight weight" in told


def test_a_function_is_analyzed_anew_when_its_model_changes_what_it_does():
    """Noise is for each example or, in a later stage, the same for all."""
    calls, settings = [], types.SimpleNamespace(table={"is_late": [False]})

    def losses(x):
        calls.append(0)
        shape = (1, *x.shape[1:]) if settings.table["is_late"][0] else x.shape
        return tf.reduce_sum(tf.sin(x + uniform(shape)), axis=[1, 2])

    builder = TowerBuilder(DEVICES)
    for is_late in False, True, False:
        settings.table["is_late"] = [is_late]
        calls.clear()
        found = tf.function(lambda x: builder.gradients(losses, [], x)[0])(tf.constant(X))
        num_calls = len(calls)
        np.testing.assert_allclose(found, tf.reduce_mean(losses(X)), rtol=1e-5)
        assert num_calls <= 5 + len(DEVICES)  # two analyses, and the check on two towers


@pytest.mark.parametrize("multiple, size", [(2, 8), (5, 10)])
def test_functions_of_batches_of_some_sizes_only(multiple, size):
    def fn(x):
        noise = tf.transpose(uniform([4, tf.shape(x)[0], 6]), [1, 0, 2])
        groups = tf.reshape(x + noise, [x.shape[0] // multiple, multiple, 24])
        return tf.reshape(tf.reduce_sum(tf.sin(groups), 2), [-1])

    x = tf.concat([X, X], axis=0)[:size]
    loss, _ = TowerBuilder(DEVICES[:2]).gradients(fn, [], x)
    np.testing.assert_allclose(loss, tf.reduce_mean(fn(x)), rtol=1e-5)


# ---------------------------------------------------------------------------- The contract


@pytest.mark.parametrize(
    "losses",
    [
        lambda x: tf.reduce_mean(x, [1, 2], keepdims=True)[:1, 0, 0],
        lambda x: tf.reduce_mean(x, 0)[:, 0],
        lambda x: tf.zeros([3]),  # as long as a slice
        lambda x: tf.cast(x[:, 0, 0], tf.int32),
        lambda x: x[:, :1, 0],
    ],
    ids=["[1]", "axis 0 is gone", "as long as a slice", "integers", "[b, 1]"],
)
@pytest.mark.parametrize("num_towers, size", [(1, 7), (3, None)])
def test_losses_that_are_not_one_for_each_example(losses, num_towers, size):
    builder = TowerBuilder(DEVICES[:num_towers])
    spec = tf.TensorSpec([size, 4, 6])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as error:
        tf.function(lambda x: builder.gradients(losses, [], x)[0], [spec])(X)
    assert "loss_fn must return" in str(error.value)


@pytest.mark.parametrize("compiled", [lambda f: f, tf.function], ids=["eager", "function"])
def test_a_tf_variable_cannot_be_assigned(compiled):
    v, silent = tf.Variable(1.0, name="mine"), TowerBuilder(DEVICES, on_warning=lambda _: None)
    for assign in (
        lambda x: v.assign(x),
        lambda x: v.assign_add(x),
        lambda x: v.scatter_nd_update([[0]], [x]),
    ):
        fn = lambda x: (x[:, 0, 0], assign(2.0))[0]  # noqa: B023, E731
        with pytest.raises(ValueError, match="keras.Variable") as error:
            compiled(lambda x: silent.gradients(fn, [], x))(tf.constant(X))  # noqa: B023
        assert "'mine:0'" in str(error.value)
    assert v.numpy() == 1


# ---------------------------------------------------------------------------- What is not silent


def test_a_function_that_cannot_be_rehearsed_is_told_of():
    count = keras.Variable(0, dtype="int64", trainable=False, name="count")

    def fn(x):
        count.assign_add(int(x.numpy().shape[0]))  # in eager mode alone
        return tf.reduce_sum(x * uniform(x.shape), [1, 2])

    kinds = {line.split(":")[0] for line in told_of(fn)}
    assert kinds == {"not checked", "random numbers", "inexact"}


def test_a_rehearsal_leaves_no_trace():
    """A counter makes it want to run: it must not, where that would be seen."""
    calls, told = [], []
    count = keras.Variable(0.0, trainable=False)
    generator = tf.random.Generator.from_seed(1)
    state = generator.state.numpy()

    def fn(x):
        count.assign_add(float(x.shape[0]))
        tf.py_function(lambda: calls.append(0), [], [])
        return x[:, 0, 0] + generator.uniform([])

    builder = TowerBuilder(DEVICES, on_warning=told.append)
    builder.analyze(fn, tf.constant(X))
    assert not calls and np.array_equal(generator.state, state)
    kinds = {line.split(":")[0] for line in told}
    assert kinds == {"random op", "python code"}
