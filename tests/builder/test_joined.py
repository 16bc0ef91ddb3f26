"""The loss of the outputs: a tape around `concat` leads back to the towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.builder.tower import TowerBuilder
from towers.errors import InputError

pytestmark = pytest.mark.usefixtures("float64")
X = np.random.default_rng(1).normal(size=(13, 6))
KNOWN, UNKNOWN = tf.TensorSpec([13, 6], tf.float64), tf.TensorSpec([None, 6], tf.float64)


def network(norm=True):
    """Return a model with dropout, and with BatchNorm, in which examples meet."""
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(8, activation="relu"),
        *([keras.layers.BatchNormalization()] if norm else []),
        keras.layers.Dropout(0.3), keras.layers.Dense(3),
    ])  # fmt: skip


def contrast(outputs):
    """Return a loss in which the examples of a batch see each other."""
    return tf.reduce_logsumexp(tf.matmul(outputs, outputs, transpose_b=True))


def builder(num_towers, **options):
    return TowerBuilder([f"/cpu:{i}" for i in range(num_towers)], batch_norm="sync", **options)


def outcome(towers, spec=KNOWN, norm=True):
    """Return loss, gradients by weights and by inputs, and all variables after a step."""
    model = network(norm)

    def call(x):
        return model(x, training=True)

    @tf.function(input_signature=[spec])
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = contrast(towers.concat(call, x) if towers else call(x))
        return loss, tape.gradient(loss, [*model.trainable_variables, x])

    loss, gradients = step(X)
    return [loss.numpy(), *(g.numpy() for g in gradients), *(v.numpy() for v in model.variables)]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spec", [KNOWN, UNKNOWN])
@pytest.mark.parametrize("num_towers", [2, 4])
def test_a_loss_of_all_outputs_has_the_gradients_of_one_device(num_towers, spec):
    assert_same(outcome(builder(num_towers), spec), outcome(None, spec))


def test_a_batch_in_parts_has_the_gradients_of_the_whole():
    towers = builder(2, accumulate_steps=3)
    assert_same(outcome(towers, norm=False), outcome(None, norm=False))


def test_compiled_towers_have_the_gradients_of_one_device():
    towers = builder(2, jit_compile=True)
    assert_same(outcome(towers, norm=False), outcome(None, norm=False))


def test_ops_of_the_backward_pass_are_on_the_towers_device():
    model, towers = network(), builder(2)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = contrast(towers.concat(model, x))
        return tape.gradient(loss, model.trainable_variables)

    ops = step.get_concrete_function(KNOWN).graph.get_operations()
    backward = [op for op in ops if "tower_1" in op.name and op.type in ("ReluGrad", "MatMul")]
    assert len(backward) > 4  # two products forward, and at least two backward
    assert {op.device for op in backward} == {"/device:CPU:1"}


def test_outputs_may_be_of_any_structure_and_type():
    weight = tf.Variable([[2.0], [3.0]], dtype=tf.float64)

    def fn(rows):
        lengths = tf.range(tf.shape(rows)[0])
        ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(rows[:, :1], lengths, axis=0), lengths)
        return {"dense": rows @ weight, "whole": lengths, "ragged": ragged * weight[0]}

    rows = tf.constant(X[:5, :2])
    with tf.GradientTape() as tape:
        found = builder(2).concat(fn, rows)
        loss = tf.reduce_sum(found["dense"] ** 2) + tf.reduce_sum(found["ragged"].flat_values)
    assert found["whole"].numpy().tolist() == [0, 1, 2, 0, 1]
    assert found["ragged"].row_lengths().numpy().tolist() == [0, 1, 2, 0, 1]
    counts = np.array([0, 1, 2, 0, 1])
    expected = 2 * X[:5, :2].T @ X[:5, :2] @ [[2.0], [3.0]] + [[counts @ X[:5, 0]], [0.0]]
    np.testing.assert_allclose(tape.gradient(loss, weight), expected)


def test_masks_of_outputs_are_joined():
    layer = keras.layers.Embedding(9, 2, mask_zero=True)
    tokens = tf.constant([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
    layer.build()
    found = builder(2).concat(layer, tokens)
    assert found._keras_mask.numpy().tolist() == (tokens.numpy() != 0).tolist()
    with tf.GradientTape() as tape:
        found = builder(2).concat(layer, tokens)
    assert found._keras_mask.numpy().tolist() == (tokens.numpy() != 0).tolist()
    gradient = tape.gradient(found, layer.trainable_variables[0])
    assert isinstance(gradient, tf.IndexedSlices)
    counts = [[5, 5], *([[1, 1]] * 6), [0, 0], [0, 0]]
    counts[0] = [3, 3]
    assert tf.convert_to_tensor(gradient).numpy().tolist() == counts


def test_a_tensor_that_is_no_argument_and_has_a_gradient_is_refused():
    scale = tf.Variable(2.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            captured = scale * 2
            loss = tf.reduce_sum(builder(2).concat(lambda x: x * captured, x))
        return tape.gradient(loss, scale)

    with pytest.raises(InputError, match="argument"):
        step(tf.ones([4, 1]))


def test_functions_may_return_outputs_beside_their_losses():
    weight = tf.Variable([[2.0]], dtype=tf.float64)

    def loss_fn(x):
        outputs = x @ weight
        return tf.reduce_sum(outputs**2, axis=1), {"outputs": outputs}

    x = tf.constant(X[:5, :1])
    for towers in (builder(2), builder(2, accumulate_steps=2)):
        loss, (gradient,), outputs = towers.gradients(loss_fn, [weight], x)
        np.testing.assert_allclose(loss, np.mean(4 * X[:5, 0] ** 2))
        np.testing.assert_allclose(gradient[0, 0], np.mean(4 * X[:5, 0] ** 2))
        np.testing.assert_allclose(outputs["outputs"], 2 * X[:5, :1])


def test_a_device_that_does_not_exist_is_an_error():
    for towers in (TowerBuilder(["/gpu:0", "/cpu:1"]), TowerBuilder(["/cpu:0"], "/cpu:9")):
        with pytest.raises(InputError, match="/gpu:0|/cpu:9"):
            towers.sum(lambda: tf.constant(1.0))


def test_what_is_recomputed_backward_draws_again_what_it_drew():
    layer = keras.layers.Dropout(0.5, seed=1)
    weight = tf.Variable(tf.ones([6], tf.float64))

    def outcome(towers):
        layer.seed_generator.state.assign([1, 0])

        @tf.function
        def step(x):
            def drop(x):
                return tf.tanh(layer(x * weight, training=True))

            with tf.GradientTape() as tape:
                loss = contrast(towers.concat(tf.recompute_grad(drop), x) if towers else drop(x))
            return loss, tape.gradient(loss, weight)

        return [value.numpy() for value in step(tf.constant(X))]

    assert_same(outcome(builder(2)), outcome(None))


def test_outputs_whose_axes_depend_on_the_slice_are_refused():
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0], [5.0]], dtype=tf.float64)

    def step(rows):
        with tf.GradientTape():
            return builder(2).concat(lambda x: x.to_tensor(), rows)

    for run in (step, tf.function(step)):
        with pytest.raises((InputError, tf.errors.InvalidArgumentError), match="fixed size"):
            run(rows)


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


def test_rows_that_examples_do_not_choose_come_once_as_on_one_device():
    table = keras.layers.Embedding(4, 2)
    table.build()
    tokens = tf.constant([[0, 3], [1, 1], [3, 2], [0, 0], [2, 1]])

    def positions(tokens):
        return tf.range(2)[tf.newaxis]

    for x in (lambda tokens: tokens, positions):

        def fn(tokens, x=x):
            found = tf.reduce_sum(table(x(tokens)) ** 2, axis=[-1, -2])
            return found * tf.ones([tf.shape(tokens)[0]], tf.float64)

        one, *others = (builder(n).gradients(fn, table.weights, tokens)[1][0] for n in (1, 2, 3))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(builder(2).concat(fn, tokens))
        for other in (*others, tape.gradient(loss, table.weights[0])):
            assert other.indices.numpy().tolist() == one.indices.numpy().tolist()
            np.testing.assert_allclose(other.values, one.values)


@pytest.mark.parametrize("shape", [(4, 5, 2), (3,)])
@pytest.mark.parametrize("size", [7, 2])  # the second leaves towers without an example
def test_fused_kernels_normalise_batches_of_unknown_size(shape, size):
    layer = keras.layers.BatchNormalization(dtype="float32", momentum=0.5)
    layer.build((None, *shape))
    x = tf.constant(np.random.default_rng(0).normal(2, 3, (size, *shape)), tf.float32)
    weights = tf.constant(np.random.default_rng(1).normal(size=(size, *shape)), tf.float32)

    def outcome(towers):
        layer.moving_mean.assign(tf.zeros(shape[-1]))
        layer.moving_variance.assign(tf.ones(shape[-1]))

        def call(x):
            return layer(x, training=True)

        @tf.function(input_signature=[tf.TensorSpec([None, *shape], tf.float32)])
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = towers.concat(call, x)
                loss = tf.reduce_sum(found * weights)
            return found, tape.gradient(loss, [x, *layer.trainable_variables])

        found, gradients = step(x)
        ops = {op.type for op in step.get_concrete_function().graph.get_operations()}
        return ops, [found, *gradients, *(v.numpy() for v in layer.non_trainable_variables)]

    expected, found = outcome(builder(1))[1], outcome(builder(3))
    assert "FusedBatchNormV3" in found[0]
    for a, b in zip(found[1], expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)
