"""What a rehearsal finds out of a tower function, and what the builder makes of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder
from towers.builder.draws import Layout
from towers.builder.rehearsal import parts_of, rehearse

layers = keras.layers
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2"]
X = np.random.default_rng(0).normal(size=(7, 4, 6)).astype("float32")
SEED = (3, 4)


def uniform(shape):
    return tf.random.stateless_uniform(shape, SEED)


# Where the examples are in a draw: of x [B, 4, 6], in several layouts.
LAYOUTS = {
    "first axis": (lambda x: x + uniform(tf.shape(x)), Layout(0)),
    "second axis": (
        lambda x: x + tf.transpose(uniform([4, tf.shape(x)[0], 6]), [1, 0, 2]),
        Layout(1),
    ),
    "last axis": (lambda x: x + tf.transpose(uniform([6, 4, tf.shape(x)[0]])), Layout(2)),
    "batch * time": (
        lambda x: x + tf.reshape(uniform([4 * tf.shape(x)[0], 6]), tf.shape(x)),
        Layout(0),
    ),
    "time * batch": (
        lambda x: x
        + tf.transpose(tf.reshape(uniform([4 * tf.shape(x)[0], 6]), [4, -1, 6]), [1, 0, 2]),
        Layout(0, 1),
    ),
    "halves * batch * time": (
        lambda x: x + tf.reshape(
            tf.transpose(tf.reshape(uniform([4 * tf.shape(x)[0], 6]), [2, -1, 2, 6]), [1, 0, 2, 3]),
            tf.shape(x),
        ),
        Layout(0, 2),
    ),
    "a mask": (
        lambda x: tf.where(tf.reshape(uniform([24 * tf.shape(x)[0]]), tf.shape(x)) < 0.5, x, 0),
        Layout(0),
    ),
    "a kernel as long as a slice": (lambda x: x @ uniform([6, 6]), Layout(None)),
    "one number": (lambda x: x * uniform([]), Layout(None)),
    "pairs": (lambda x: x + tf.reduce_sum(uniform([tf.shape(x)[0]] * 2)), "untold"),
    "one less": (lambda x: x + tf.reduce_sum(uniform([2 * tf.shape(x)[0] - 1])), "untold"),
    "what is positive": (
        lambda x: x + tf.reduce_sum(uniform([tf.reduce_sum(tf.cast(x > 0, tf.int32))])),
        "untold",
    ),
    "of all examples": (
        lambda x: x + tf.reduce_sum(uniform([4 * tf.shape(x)[0], 6])), "untold",
    ),
}  # fmt: skip


def per_example(fn):
    return lambda x: tf.reduce_sum(tf.sin(fn(x)), axis=[1, 2])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_a_draw_is_found_or_told_of(name):
    """Towers then draw what one device draws, of slices of known and of unknown sizes."""
    fn, layout = per_example(LAYOUTS[name][0]), LAYOUTS[name][1]
    told = []
    builder = TowerBuilder(DEVICES, accumulate_steps=2, on_doubt=told.append)
    (drawn,) = builder.rehearse(fn, tf.constant(X)).draws
    if layout == "untold":
        assert drawn.layout is None
        builder.gradients(fn, [], tf.constant(X))
        assert len(told) == 1 and told[0].startswith("ambiguous draw: ")
        return
    assert drawn.layout == layout and not told
    expected = fn(tf.constant(X))
    some = tf.function(lambda x: builder.gradients(fn, [], x)[0], [tf.TensorSpec([7, 4, 6])])
    anything = tf.function(lambda x: builder.concat(fn, x), [tf.TensorSpec([None, 4, 6])])
    np.testing.assert_allclose(some(X), tf.reduce_mean(expected), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(anything(X), expected, rtol=1e-5, atol=1e-5)


def test_doubts_are_warnings():
    fn = per_example(LAYOUTS["pairs"][0])
    with pytest.warns(UserWarning, match="ambiguous draw"):
        TowerBuilder(DEVICES).gradients(fn, [], tf.constant(X))


def test_one_tower_needs_no_rehearsal():
    calls = []
    builder = TowerBuilder(DEVICES[:1])
    builder.gradients(lambda x: calls.append(0) or x[:, 0, 0], [], tf.constant(X))
    assert len(calls) == 1


def test_the_same_function_made_anew_is_rehearsed_once():
    calls, model = [], layers.Dropout(0.5)

    def make(model):
        return lambda x: calls.append(0) or tf.reduce_sum(model(x, training=True), [1, 2])

    builder = TowerBuilder(DEVICES)
    builder.gradients(make(model), [], tf.constant(X))
    first = len(calls)
    builder.gradients(make(model), [], tf.constant(X))
    assert first > 3 and len(calls) == first + 3
    assert parts_of(make(model), [])[1:] != parts_of(make(layers.Dropout(0.5)), [])[1:]


@pytest.mark.parametrize("multiple, size, few", [(2, 8, 6), (5, 10, 15)])
def test_functions_of_batches_of_some_sizes_only(multiple, size, few):
    def fn(x):
        noise = tf.transpose(uniform([4, tf.shape(x)[0], 6]), [1, 0, 2])
        groups = tf.reshape(x + noise, [x.shape[0] // multiple, multiple, 24])
        return tf.reshape(tf.reduce_sum(tf.sin(groups), 2), [-1])

    x = tf.concat([X, X], axis=0)[:size]
    assert rehearse(fn, [x]).few.size == few
    loss, _ = TowerBuilder(DEVICES[:2]).gradients(fn, [], x)
    np.testing.assert_allclose(loss, tf.reduce_mean(fn(x)), rtol=1e-5)


# ---------------------------------------------------------------------------- State


STATES = {
    "counter of examples": lambda v, x: v.assign_add(tf.cast(tf.shape(x)[0], v.dtype)),
    "counter of calls": lambda v, x: v.assign_add(1),
    "sum": lambda v, x: v.assign_add(tf.reduce_sum(x)),
    "largest": lambda v, x: v.assign(tf.maximum(v.value, tf.reduce_max(x))),
    "smallest": lambda v, x: v.assign(tf.minimum(v.value, tf.reduce_min(x))),
    "moving mean": lambda v, x: v.assign(0.9 * v.value + 0.1 * tf.reduce_mean(x)),
    "sum of means": lambda v, x: v.assign_add(tf.reduce_mean(x)),
    "first": lambda v, x: v.assign(x[0, 0, 0]),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("size", [7, None], ids=["known size", "unknown size"])
def test_state_is_put_together_as_the_function_shows(name, size):
    states = [keras.Variable(0.5, trainable=False) for _ in range(2)]
    steps = []
    for state, num_towers in zip(states, (1, 3), strict=True):
        builder = TowerBuilder(DEVICES[:num_towers])

        def fn(x, state=state):
            STATES[name](state, x)
            return x[:, 0, 0]

        spec = tf.TensorSpec([size, 4, 6])
        steps.append(tf.function(lambda x, b=builder, f=fn: b.gradients(f, [], x), [spec]))
    for step in 0, 1:
        for make_step in steps:
            make_step(X + step)
        np.testing.assert_allclose(states[1], states[0], rtol=1e-5)


def test_whole_numbers_are_added_too():
    histogram = keras.Variable(np.zeros(3, "int64"), dtype="int64", trainable=False)

    def fn(labels):
        histogram.assign_add(tf.math.bincount(labels, minlength=3, dtype=tf.int64))
        return tf.cast(labels, tf.float32)

    TowerBuilder(DEVICES).gradients(fn, [], tf.constant([0, 1, 1, 0, 1, 0, 0]))
    assert histogram.numpy().tolist() == [4, 3, 0]


def test_state_that_cannot_be_put_together_is_named():
    told = []
    last = keras.Variable(0.0, trainable=False, name="last")
    fn = lambda x: (x[:, 0, 0], last.assign(x[-1, 0, 0]))[0]  # noqa: E731
    TowerBuilder(DEVICES, on_doubt=told.append).gradients(fn, [], tf.constant(X))
    assert len(told) == 1 and told[0].startswith("state: the variable last ")
    assert 'aggregation="sum"' in told[0]


# ---------------------------------------------------------------------------- The contract


@pytest.mark.parametrize(
    "losses",
    [
        lambda x: tf.reduce_mean(x, [1, 2], keepdims=True)[:1, 0, 0],
        lambda x: tf.reduce_mean(x, 0)[:, 0],
        lambda x: tf.zeros([3]),  # as long as a slice
        lambda x: tf.cast(x[:, 0, 0], tf.int32),
        lambda x: x[:, 0, 0] > 0,
        lambda x: x[:, :1, 0],
    ],
    ids=["[1]", "axis 0 is gone", "as long as a slice", "integers", "bools", "[b, 1]"],
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
    v = tf.Variable(1.0, name="mine")
    for assign in (
        lambda x: v.assign(x),
        lambda x: v.assign_add(x),
        lambda x: v.scatter_nd_update([[0]], [x]),
    ):
        fn = lambda x: (x[:, 0, 0], assign(2.0))[0]  # noqa: B023, E731
        with pytest.raises(ValueError, match="keras.Variable") as error:
            compiled(lambda x: TowerBuilder(DEVICES).gradients(fn, [], x))(tf.constant(X))  # noqa: B023
        assert "'mine:0'" in str(error.value)
    assert v.numpy() == 1


def test_losses_of_layers_count():
    keras.utils.set_random_seed(0)  # losses of both signs must not cancel
    model = keras.Sequential([keras.Input((4, 6)), layers.Dense(3, activity_regularizer="l2")])

    def fn(x):
        outputs = model(x, training=True)
        return tf.reduce_sum(outputs, [1, 2]) + sum(model.losses)

    weights = model.trainable_variables
    loss, gradients = TowerBuilder(DEVICES).gradients(fn, weights, tf.constant(X))
    with tf.GradientTape() as tape:
        expected = tf.reduce_mean(fn(tf.constant(X)))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, right in zip(
        gradients, tape.gradient(expected, [v.value for v in weights]), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_gradients_through_what_is_recomputed(float64, num_towers):
    """Kernel, BatchNorm and dropout run again in the backward pass, as they ran in the forward."""
    keras.utils.set_random_seed(0)
    dense, norm = layers.Dense(5, dtype="float64"), layers.BatchNormalization(dtype="float64")
    dropout = layers.Dropout(0.5, seed=1, dtype="float64")
    x = tf.constant(X[:, 0].astype("float64"))
    norm(dense(x))
    weights = [*dense.trainable_variables, *norm.trainable_variables]

    def block(x):
        return dropout(tf.tanh(norm(dense(x), training=True)), training=True)

    def losses(block):
        return lambda x: tf.reduce_sum(block(x) ** 2, axis=1)

    def gradients(block, num_towers):
        dropout.seed_generator.state.assign([1, 0])
        builder = TowerBuilder(DEVICES[:num_towers], batch_norm="sync")
        return tf.function(lambda x: builder.gradients(losses(block), weights, x))(x)

    expected = gradients(block, 1)
    found = gradients(tf.recompute_grad(block), num_towers)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_sparse_tensors_are_split():
    dense = np.random.default_rng(1).integers(0, 3, (7, 5)).astype("float32")
    w = tf.Variable(np.ones([5, 1], "float32"))
    fn = lambda x, y: tf.sparse.sparse_dense_matmul(x, w)[:, 0] * y  # noqa: E731
    y = tf.range(7.0)
    for num_towers in 1, 3:
        builder = TowerBuilder(DEVICES[:num_towers])
        for compiled in lambda f: f, tf.function:
            step = compiled(lambda x, y, b=builder: b.gradients(fn, [w], x, y))
            loss, [gradient] = step(tf.sparse.from_dense(dense), y)
            np.testing.assert_allclose(loss, np.mean(dense.sum(1) * np.arange(7)), rtol=1e-6)
            np.testing.assert_allclose(gradient[:, 0], (dense.T * np.arange(7)).mean(1), rtol=1e-5)


def test_assignments_are_caught_by_every_method():
    layer = layers.Dropout(0.5, seed=3)
    plain = layers.Dropout(0.5, seed=3)
    expected = [plain(tf.constant(X), training=True) for _ in range(2)]
    fn = lambda x: layer(x, training=True)  # noqa: E731
    builder = TowerBuilder(DEVICES)
    np.testing.assert_array_equal(tf.concat(builder.map(fn, X), 0), expected[0])
    np.testing.assert_allclose(
        builder.sum(lambda x: tf.reduce_sum(fn(x), 0), X),
        tf.reduce_sum(expected[1], 0), rtol=1e-5, atol=1e-5,
    )  # fmt: skip


# ---------------------------------------------------------------------------- What is not silent


def test_what_is_assigned_is_read_without_its_gradient(float64):
    """As with plain Keras: the power iteration of a spectral norm is no part of the gradient."""
    dense = layers.Dense(3, dtype="float64")
    norm = layers.SpectralNormalization(dense, dtype="float64")
    x = tf.constant(X[:, 0].astype("float64"))
    norm(x)
    before = [v.numpy() for v in norm.variables]

    def fn(x):
        return tf.reduce_sum(norm(x, training=True) ** 2, axis=1)

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(fn(x))
    expected = tape.gradient(loss, [v.value for v in norm.trainable_variables])
    for num_towers in 1, 3:
        for v, value in zip(norm.variables, before, strict=True):
            v.assign(value)
        _, found = TowerBuilder(DEVICES[:num_towers]).gradients(fn, norm.trainable_variables, x)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)


def test_a_function_that_cannot_be_rehearsed_is_told_of():
    told = []
    count = keras.Variable(0, dtype="int64", trainable=False, name="count")
    builder = TowerBuilder(DEVICES, on_doubt=told.append)

    def fn(x):
        count.assign_add(int(x.numpy().shape[0]))  # in eager mode alone
        return tf.reduce_sum(x * uniform(x.shape), [1, 2])

    builder.gradients(fn, [], X)
    assert {line.split(":")[0] for line in told} == {"ambiguous draw", "state"}


def test_a_function_that_draws_otherwise_for_few_examples_is_told_of():
    told = []
    builder = TowerBuilder(DEVICES[:2], on_doubt=told.append)

    def fn(x):
        if x.shape[0] == 4:
            x = x + uniform([1])
        return tf.reduce_sum(x * uniform(tf.shape(x)), [1, 2])

    builder.gradients(fn, [], X)
    assert told and told[0].startswith("ambiguous draw: ")


def test_a_tower_without_examples_leaves_sums_alone():
    total = keras.Variable(0.0, trainable=False)

    def fn(x):
        total.assign_add(tf.reduce_mean(x) * tf.cast(tf.shape(x)[0], tf.float32))
        return x[:, 0, 0]

    step = tf.function(
        lambda x: TowerBuilder(DEVICES).gradients(fn, [], x), [tf.TensorSpec([None, 4, 6])]
    )
    step(X[:2])
    np.testing.assert_allclose(total, X[:2].mean() * 2, rtol=1e-5)


@pytest.mark.parametrize("start", [0, 10**6, 10**8])
def test_a_counter_counts_wherever_it_stands(start):
    count = keras.Variable(start, dtype="int64", trainable=False)
    fn = lambda x: (x[:, 0, 0], count.assign_add(x.shape[0]))[0]  # noqa: E731
    TowerBuilder(DEVICES).gradients(fn, [], X)
    assert count.numpy() == start + 7


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

    builder = TowerBuilder(DEVICES, on_doubt=told.append)
    builder.rehearse(fn, tf.constant(X))
    assert not calls and np.array_equal(generator.state, state)
    kinds = {line.split(":")[0] for line in told}
    assert kinds == {"random op", "python code", "state"}


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: tf.nn.dropout(x, 0.5),
        lambda x: x + tf.random.stateless_gamma((6,), SEED, 2.0),
        lambda x: x + tf.raw_ops.StatelessRandomUniformV2(
            shape=tf.shape(x), key=[1], counter=[1, 2], alg=1
        ),
    ],
    ids=["tf.nn.dropout", "gamma", "a raw op"],
)  # fmt: skip
def test_draws_that_towers_cannot_follow_are_told_of(draw):
    told = []
    builder = TowerBuilder(DEVICES, on_doubt=told.append)
    builder.gradients(lambda x: tf.reduce_sum(draw(x), [1, 2]), [], tf.constant(X))
    assert [line.split(":")[0] for line in told] == ["random op"]


@pytest.mark.parametrize("compiled", [lambda f: f, tf.function], ids=["eager", "function"])
def test_functions_inside_of_a_tower_keep_their_meaning(compiled):
    w = tf.Variable(2.0)
    signed = tf.function(lambda a: a * tf.cast(a.shape.rank + 1, tf.float32), [tf.TensorSpec([])])
    number = tf.function(lambda: 3.0)
    rows = lambda x: tf.vectorized_map(lambda row: w * tf.reduce_sum(row), x)  # noqa: E731
    fn = lambda x: rows(x) * signed(2.0) * tf.cast(number(), tf.float32)  # noqa: E731
    loss, [gradient] = compiled(lambda x: TowerBuilder(DEVICES).gradients(fn, [w], x))(X)
    np.testing.assert_allclose(loss, X.sum((1, 2)).mean() * 12, rtol=1e-5)
    np.testing.assert_allclose(gradient, X.sum((1, 2)).mean() * 6, rtol=1e-5)
