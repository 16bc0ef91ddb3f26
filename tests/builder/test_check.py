"""What the check finds on the user's rows, and what becomes of it."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builder.test_trials import Layer, backward, of_product
from towers import InputError, TowerBuilder
from towers.builder import check

pytestmark = [pytest.mark.run, pytest.mark.checked]
X = np.random.default_rng(0).normal(size=(8, 4))
MARKED = np.where(np.arange(8)[:, None] % 3 == 0, -1.0, X)
LABELS = (np.arange(8) % 4 + 5).astype("int32")
ops = keras.ops


def suspect(fn):
    """Return a layer that calls a function with itself and a product."""
    return Layer(of_product(fn))


@pytest.mark.parametrize(
    "fn",
    [
        lambda _, x: x * 2 if x.shape[0] == 8 else x,
        lambda _, x: tf.cond(tf.shape(x)[0] > 7, lambda: x * 2, lambda: x),
    ],
)
def test_as_many_examples_as_in_the_batch_are_tried(fn, float64):
    assert TowerBuilder(["/cpu:0", "/cpu:1"]).check(suspect(fn), (), tf.constant(X))


@pytest.mark.parametrize("how, is_told", [("", False), ("squared", True), ("by example", False)])
def test_an_added_loss_may_only_be_added(how, is_told, float64):
    def add(layer, x):
        layer.add_loss(tf.reduce_mean(x**2, axis=1) if how == "by example" else tf.reduce_mean(x))
        return x

    def loss_fn(x):
        losses, added = tf.reduce_sum(layer(x), axis=1), 3 * layer.losses[0]
        return losses + (added**2 if how == "squared" else added)

    layer, told = suspect(add), []
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)
    loss, _ = builder.gradients(loss_fn, layer.trainable_variables, tf.constant(X))
    assert ["inexact: layer suspect adds a loss" in line for line in told] == [True] * is_told
    assert np.isclose(loss, np.mean(loss_fn(tf.constant(X))), rtol=1e-12) != is_told


def test_a_state_that_a_backward_pass_assigns_is_refused(float64):
    layer = suspect(lambda me, x: backward(lambda u: (me.number.assign(1.0), u)[1])(x[:, 0]))
    for devices in ["/cpu:0"], ["/cpu:0", "/cpu:1"]:
        builder = TowerBuilder(devices, on_warning=lambda _: None)
        with pytest.raises(InputError, match="a backward pass assigns suspect/number"):
            builder.gradients(layer, layer.trainable_variables, tf.constant(X))


def test_towers_that_raise_an_error_are_told_first(float64):
    def five_largest(x):
        return x * tf.cast(x >= tf.math.top_k(tf.transpose(x), 5)[0][:, -1], x.dtype)

    told = []
    with pytest.raises(tf.errors.InvalidArgumentError):
        TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append).concat(five_largest, X)
    assert len(told) == 1 and told[0].startswith("not checked: towers raise an error")
    one = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append, on_inexact="one_device")
    assert np.allclose(one.concat(five_largest, X), five_largest(tf.constant(X)))


def test_what_takes_long_is_left_out_after_the_first_trials(monkeypatch, float64):
    seconds = itertools.count(step=25.0)
    monkeypatch.setattr(check.time, "monotonic", lambda: next(seconds))
    builder = TowerBuilder(["/cpu:0", "/cpu:1"])
    assert builder.check(suspect(lambda _, x: x), (), tf.constant(X)) == []
    monkeypatch.setattr(check, "_SECONDS", 1.0)
    (line,) = builder.check(suspect(lambda _, x: x), (), tf.constant(X))
    assert line.startswith("not checked: the check takes more than")


def centered(x):
    return x - tf.reduce_mean(x, axis=0)


def mean_of_unmarked(x):
    mask = tf.cast(x[:, :1] != -1, x.dtype)
    return x * mask / tf.reduce_mean(mask)


def test_a_mark_in_real_rows_is_not_taken_for_rounding(float64):
    builder = TowerBuilder(["/cpu:0", "/cpu:1"])
    assert builder.check(mean_of_unmarked, (), tf.constant(MARKED))


def loss_of_labels(layer, mixes):
    def loss_fn(x, labels):
        with tf.control_dependencies([tf.debugging.assert_greater_equal(labels, 5)]):
            labels = labels - 5
        x = layer(x)
        x -= tf.reduce_mean(x, axis=0) if mixes else 0
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)

    return loss_fn


def step_of(builder, loss_fn, layer):
    signature = [tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None], tf.int32)]

    @tf.function(input_signature=signature)
    def step(x, labels):
        loss, gradients = builder.gradients(loss_fn, layer.trainable_variables, x, labels)
        layer.weight.assign_sub(gradients[0])
        return loss

    return step


@pytest.mark.parametrize("mixes", [False, True])
def test_real_rows_are_tried_if_made_up_ones_do_not_suit(mixes, float64):
    told, layer = [], suspect(lambda _, x: x)
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)
    step_of(builder, loss_of_labels(layer, mixes), layer)(tf.constant(X), tf.constant(LABELS))
    assert [line.startswith("inexact: ") for line in told] == [True] * mixes


@pytest.mark.parametrize("on_inexact", ["stop", "one_device"])
def test_nothing_is_trained_if_real_rows_show_it(on_inexact, float64):
    layer = suspect(lambda _, x: x)
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_inexact=on_inexact, on_warning=lambda _: None)
    before = layer.weight.numpy()
    step = step_of(builder, loss_of_labels(layer, True), layer)
    with pytest.raises(tf.errors.OpError, match="inexact: .* traced for towers"):
        step(tf.constant(X), tf.constant(LABELS))
    assert np.array_equal(layer.weight.numpy(), before)


def test_a_state_that_only_real_rows_explain_is_told(float64):
    """Towers are made before, and take a mean."""

    def largest(layer, x):
        layer.state.assign(ops.maximum(layer.state, ops.max(x, 0)))
        return x

    told, layer = [], suspect(largest)
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)
    step_of(builder, loss_of_labels(layer, False), layer)(tf.constant(X), tf.constant(LABELS))
    assert [line.startswith("inexact: the variable suspect/state") for line in told] == [True]


@pytest.mark.parametrize("shape", [(7, 4), (7, 11, 4)])
@pytest.mark.parametrize("number", [None, 8])
def test_random_numbers_of_seven_rows_need_not_be_those_of_examples(shape, number, float64):
    """The check is traced for seven examples."""
    told = []
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)

    def fn(x):
        drawn = tf.random.stateless_normal(shape, [1, 2], dtype=x.dtype)
        return x + tf.reduce_sum(tf.reshape(drawn, [-1, 4]), axis=0)

    signature = [tf.TensorSpec([number, 4], tf.float64)]
    joined = tf.function(lambda x: builder.concat(fn, x), input_signature=signature)(X)
    assert np.allclose(joined, fn(tf.constant(X)), rtol=1e-12)
    assert told == []


# Sound models.

ROWS = np.random.default_rng(0).normal(size=(16, 8))
L = keras.layers


def told(fn, *batch):
    """Return all that a user sees of a check."""
    lines = []
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=lines.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines += builder.check(fn, (), *map(tf.constant, batch))
    return lines + [str(each.message) for each in caught]


def of_layers(policy, *layers):
    """Return a built model of layers that are made under a policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(3)
    try:
        model = keras.Sequential([make() for make in layers])
        model.build((None, *ROWS.shape[1:]))
        return model
    finally:
        keras.config.set_dtype_policy(before)


def test_a_gradient_that_normalizations_make_vanish_is_rounding():
    """One far example among zeros: each BatchNorm divides what goes back by its distance."""
    blocks = [lambda: L.Dense(4), L.BatchNormalization, L.ReLU] * 3
    model = of_layers("float64", *blocks, lambda: L.Dense(4))
    assert told(lambda x: model(x, training=True), ROWS) == []


def test_a_far_example_costs_moments_digits():
    """The second of two normalizations divides what the first has left of the others."""
    norm = of_layers("float64", L.BatchNormalization)
    assert told(lambda x: norm(norm(x * 1e-2, training=True), training=True), ROWS) == []


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_sums_in_16_bits_may_be_rough(policy):
    """On a CPU the gradient of a bias in bfloat16 stops growing at 256 terms."""
    layers = [lambda: L.Reshape((8, 1)), lambda: L.UpSampling1D(32), lambda: L.Dense(4)]
    model = of_layers(policy, *layers, L.GlobalAveragePooling1D, L.UnitNormalization)
    assert told(lambda x: model(x, training=True), ROWS.astype("float32")) == []
    assert {layer.dtype_policy.name for layer in model.layers} == {policy}  # as before


class CastsItself(keras.layers.Layer):
    def call(self, x):
        return x * keras.ops.cast(keras.ops.exp(keras.ops.cast(x, "float32")), "bfloat16")


class AddsIn16Bits(keras.layers.Layer):
    def call(self, x):
        return tf.add(x, tf.ones_like(x, tf.bfloat16))  # of no other type than its own


@pytest.mark.parametrize("make", [CastsItself, AddsIn16Bits])
def test_layers_may_cast_to_16_bits_themselves(make):
    model = of_layers("mixed_bfloat16", lambda: L.Dense(4), make, lambda: L.Dense(2))
    assert told(lambda x: model(x, training=True), ROWS.astype("float32")) == []


def test_a_mixing_is_told_in_16_bits():
    mixing = lambda: L.Lambda(lambda x: x - keras.ops.mean(x, axis=0))  # noqa: E731
    model = of_layers("mixed_float16", lambda: L.Dense(4), mixing)
    (line,) = told(lambda x: model(x, training=True), ROWS.astype("float32"))
    assert line.startswith("inexact: layer ") and "lambda" in line


def test_the_message_says_why_a_layer_cannot_be_called():
    def refuse(x):
        raise ValueError("rows are too short")

    model = of_layers("float32", lambda: L.Dense(4))
    (line,) = told(lambda x: L.Lambda(refuse)(model(x)), ROWS)
    assert line.startswith("not checked: rows are too short")
