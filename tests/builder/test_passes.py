"""What passes through the towers return and refuse; `test_equality` has the numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import PerTower
from towers.builder.tower import TowerBuilder
from towers.errors import InputError

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("float64")]
X = np.random.default_rng(1).normal(size=(13, 6))


def network(norm=True):
    """Return a model with dropout, and with BatchNorm, in which examples meet."""
    keras.utils.set_random_seed(3)
    norms = [keras.layers.BatchNormalization()] if norm else []
    body = keras.layers.Dense(8, "relu"), *norms, keras.layers.Dropout(0.3), keras.layers.Dense(3)
    return keras.Sequential([keras.Input((6,)), *body])


def builder(num_towers, **options):
    return TowerBuilder([f"/cpu:{i}" for i in range(num_towers)], batch_norm="sync", **options)


@pytest.mark.graph
def test_outputs_may_be_of_any_structure_and_type():
    weight = tf.Variable([[2.0], [3.0]], dtype=tf.float64)

    def fn(rows):
        lengths = tf.range(tf.shape(rows)[0])
        ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(rows[:, :1], lengths, axis=0), lengths)
        return {"dense": rows @ weight, "whole": lengths, "ragged": ragged * weight[0]}

    rows = tf.constant(X[:5, :2])
    with tf.GradientTape() as tape:
        found = builder(2, on_warning=lambda line: None).concat(fn, rows)
        loss = tf.reduce_sum(found["dense"] ** 2) + tf.reduce_sum(found["ragged"].flat_values)
    assert found["whole"].numpy().tolist() == [0, 1, 2, 0, 1]
    assert found["ragged"].row_lengths().numpy().tolist() == [0, 1, 2, 0, 1]
    counts = np.array([0, 1, 2, 0, 1])
    expected = 2 * X[:5, :2].T @ X[:5, :2] @ [[2.0], [3.0]] + [[counts @ X[:5, 0]], [0.0]]
    np.testing.assert_allclose(tape.gradient(loss, weight), expected)


@pytest.mark.graph
def test_masks_of_outputs_are_joined():
    layer = keras.layers.Embedding(9, 2, mask_zero=True)
    tokens = tf.constant([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
    layer.build()
    alone = builder(2).concat(layer, tokens)
    with tf.GradientTape() as tape:
        found = builder(2).concat(layer, tokens)
    for each in alone, found:
        assert each._keras_mask.numpy().tolist() == (tokens.numpy() != 0).tolist()
    gradient = tape.gradient(found, layer.trainable_variables[0])
    assert isinstance(gradient, tf.IndexedSlices)
    counts = [[3, 3], *([[1, 1]] * 6), [0, 0], [0, 0]]
    assert tf.convert_to_tensor(gradient).numpy().tolist() == counts


@pytest.mark.graph
@pytest.mark.checked
@pytest.mark.parametrize("take", [lambda x, w: x * w, lambda x, w: tf.gather(w, [0]) * x])
@pytest.mark.parametrize("handed_over", [False, True])
def test_a_tensor_that_is_not_split_has_its_gradient(take, handed_over):
    scale = tf.Variable([2.0])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            w = scale * 3
            fn, others = (take, [PerTower([w, w])]) if handed_over else (lambda x: take(x, w), [])
            loss = tf.reduce_sum(builder(2).concat(fn, x, *others) ** 2)
        return tape.gradient(loss, scale)

    assert step(tf.ones([5, 1])).numpy().tolist() == [5 * 2 * 6 * 3]


@pytest.mark.graph
@pytest.mark.parametrize("compiled", [lambda f: f, tf.function], ids=["eager", "function"])
def test_functions_may_return_outputs_beside_their_losses(compiled):
    weight = tf.Variable([[2.0]], dtype=tf.float64)

    def loss_fn(x):
        outputs = x @ weight
        return tf.reduce_sum(outputs**2, axis=1), {"outputs": outputs}

    x = tf.constant(X[:5, :1])
    for towers in (builder(2), builder(2, accumulate_steps=2)):
        step = compiled(lambda x: towers.gradients(loss_fn, [weight], x))  # noqa: B023
        loss, (gradient,), outputs = step(x)
        np.testing.assert_allclose(loss, np.mean(4 * X[:5, 0] ** 2))
        np.testing.assert_allclose(gradient[0, 0], np.mean(4 * X[:5, 0] ** 2))
        np.testing.assert_allclose(outputs["outputs"], 2 * X[:5, :1])
    *_, alone = builder(2).gradients(lambda x: (x[:, 0], x), [], x)
    np.testing.assert_array_equal(alone, x)


def test_second_derivatives_are_those_of_one_device_or_refused():
    def penalty(towers, norm):
        model = network(norm)

        def call(x):
            return model(x, training=True)

        @tf.function
        def step(x):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    squares = (towers.concat(call, x) if towers else call(x)) ** 2
                loss = tf.reduce_mean(tf.norm(inner.gradient(squares, x), axis=1))
            return outer.gradient(loss, model.trainable_variables[0])

        return step(tf.constant(X))

    np.testing.assert_allclose(penalty(builder(2), False), penalty(None, False), rtol=1e-9)
    with pytest.raises(InputError, match="batch_norm"):
        penalty(builder(2), True)


@pytest.mark.graph
def test_forward_mode_through_variables_of_joined_towers_is_refused():
    w, towers = tf.Variable(tf.ones([3, 1])), builder(2)

    def slope(joined, x):
        with tf.autodiff.ForwardAccumulator(w, tf.ones([3, 1])) as accumulator:
            y = joined(lambda x: x @ w, x)
        return accumulator.jvp(y)

    x = tf.ones([4, 3])
    np.testing.assert_allclose(slope(lambda f, x: tf.concat(towers.map(f, x), 0), x), 3)
    with pytest.raises(InputError, match="`map`"):
        slope(towers.concat, x)


@pytest.mark.graph
@pytest.mark.parametrize("num_towers", [1, 3])
def test_float16_keeps_what_it_keeps_on_one_device(num_towers):
    """Of 500 examples: the gradients of some losses underflow in float16, on one device, too."""
    x = tf.constant(np.random.default_rng(4).normal(size=(500, 6)), tf.float16)
    scales = tf.constant(10.0 ** np.random.default_rng(5).uniform(-6, 3, size=(500, 1)), tf.float32)
    layer = keras.layers.Dense(2, dtype="mixed_float16", use_bias=False)
    layer.build((None, 6))

    def loss_fn(x, scales):
        return tf.reduce_sum(tf.cast(layer(x), tf.float32) * scales, axis=-1)

    with tf.GradientTape() as tape:
        mean = tf.reduce_mean(loss_fn(x, scales))
    towers = builder(num_towers)
    _, [found] = tf.function(lambda *batch: towers.gradients(loss_fn, [layer.kernel], *batch))(
        x, scales
    )
    np.testing.assert_allclose(found, tape.gradient(mean, layer.kernel.value), rtol=2e-3)
