"""What the check finds on the user's rows, and what becomes of it."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import InputError, RunError, TowerBuilder
from towers.builder import check

pytestmark = [pytest.mark.run, pytest.mark.checked]
X = np.random.default_rng(0).normal(size=(8, 4))
MARKED = np.where(np.arange(8)[:, None] % 3 == 0, -1.0, X)
LABELS = (np.arange(8) % 4 + 5).astype("int32")
ops = keras.ops


class State(keras.layers.Layer):
    """Calls a function with a weight, a number, a count and a vector."""

    def __init__(self, fn):
        super().__init__(name="suspect")
        self.fn = fn
        self.weight = self.add_weight(shape=(4, 4), name="weight")
        self.number = self.add_weight(shape=(), name="number", initializer="zeros", trainable=False)
        self.steps = self.add_weight(
            shape=(), name="steps", dtype="int32", initializer="zeros", trainable=False
        )
        self.state = self.add_weight(shape=(4,), name="state", trainable=False)
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        return self.fn(self, ops.matmul(x, self.weight))


def centered_if(condition):
    return lambda layer, x: ops.where(condition(layer), x - ops.mean(x, 0), x)


def backward(change):
    return tf.custom_gradient(lambda x: (tf.identity(x), change))


def assigned_every_third_step(layer, x):
    layer.steps.assign(layer.steps + 1)
    layer.state.assign(ops.where(ops.equal(layer.steps % 3, 0), ops.median(x, 0), layer.state))
    return x


FAULTS = {
    "stage 1": centered_if(lambda layer: ops.equal(layer.steps, 1)),
    "below 0": lambda layer, x: x + ops.relu(-layer.number - 0.3) * ops.mean(x, 0),
    "assigned every third step": assigned_every_third_step,
    "random numbers of a backward pass": lambda _, x: backward(
        lambda upstream: upstream + tf.random.normal(tf.shape(upstream), dtype=upstream.dtype)
    )(x),
    "small gradients": lambda layer, x: ops.matmul(
        x,
        backward(lambda upstream: upstream * tf.cast(tf.abs(upstream) > 2e-3, upstream.dtype))(
            layer.weight.value
        ),
    ),
    "a number of examples": lambda _, x: x * 2 if x.shape[0] == 8 else x,
    "many examples": lambda _, x: tf.cond(tf.shape(x)[0] > 7, lambda: x * 2, lambda: x),
    "text": lambda _, x: (x, tf.strings.as_string(tf.argsort(x[:, 0]))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_finds(name, float64):
    builder = TowerBuilder(["/cpu:0", "/cpu:1"])
    assert builder.check(State(FAULTS[name]), (), tf.constant(X))


@pytest.mark.parametrize("how, is_told", [("", False), ("squared", True), ("by example", False)])
def test_an_added_loss_may_only_be_added(how, is_told, float64):
    def add(layer, x):
        layer.add_loss(tf.reduce_mean(x**2, axis=1) if how == "by example" else tf.reduce_mean(x))
        return x

    def loss_fn(x):
        losses, added = tf.reduce_sum(layer(x), axis=1), 3 * layer.losses[0]
        return losses + (added**2 if how == "squared" else added)

    layer, told = State(add), []
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)
    loss, _ = builder.gradients(loss_fn, layer.trainable_variables, tf.constant(X))
    assert ["inexact: layer suspect adds a loss" in line for line in told] == [True] * is_told
    assert np.isclose(loss, np.mean(loss_fn(tf.constant(X))), rtol=1e-12) != is_told


def test_a_state_that_a_backward_pass_assigns_is_refused(float64):
    layer = State(lambda me, x: backward(lambda u: (me.number.assign(1.0), u)[1])(x[:, 0]))
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
    assert builder.check(State(lambda _, x: x), (), tf.constant(X)) == []
    monkeypatch.setattr(check, "_SECONDS", 1.0)
    (line,) = builder.check(State(lambda _, x: x), (), tf.constant(X))
    assert line.startswith("not checked: it takes more than")


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
    told, layer = [], State(lambda _, x: x)
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)
    step_of(builder, loss_of_labels(layer, mixes), layer)(tf.constant(X), tf.constant(LABELS))
    assert [line.startswith("inexact: ") for line in told] == [True] * mixes


@pytest.mark.parametrize("on_inexact", ["stop", "one_device"])
def test_nothing_is_trained_if_real_rows_show_it(on_inexact, float64):
    layer = State(lambda _, x: x)
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_inexact=on_inexact, on_warning=lambda _: None)
    before = layer.weight.numpy()
    step = step_of(builder, loss_of_labels(layer, True), layer)
    with pytest.raises(tf.errors.OpError, match="inexact: .* made for towers"):
        step(tf.constant(X), tf.constant(LABELS))
    assert np.array_equal(layer.weight.numpy(), before)


def test_a_step_of_the_users_stops_with_a_run_error(float64):
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_inexact="stop")

    @tf.function
    def step(x):
        return builder.concat(centered, x)

    with pytest.raises(RunError, match="inexact"):
        step(tf.constant(X))


def test_a_state_that_only_real_rows_explain_is_told(float64):
    """Towers are made before, and take a mean."""

    def largest(layer, x):
        layer.state.assign(ops.maximum(layer.state, ops.max(x, 0)))
        return x

    told, layer = [], State(largest)
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
