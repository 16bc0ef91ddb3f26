"""Towers in several threads, towers in towers, and what is beside them: nobody meets a patch."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder, tf_private

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
TWO = ["/cpu:0", "/cpu:1"]


def network(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=3),
            layers.Dense(1),
        ]
    )


def losses_of(model):
    return lambda x: tf.square(model(x, training=True)[:, 0])


def step_of(model, devices):
    builder = TowerBuilder(devices, batch_norm="sync")
    step = tf.function(lambda x: builder.gradients(losses_of(model), model.trainable_variables, x))
    return lambda: step(tf.constant(X))


def in_threads(*functions):
    """Run functions at the same time; return what they return."""
    results, start = [None] * len(functions), threading.Barrier(len(functions))

    def call(place):
        start.wait()
        try:
            results[place] = functions[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=call, args=[i]) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_towers_that_are_traced_at_the_same_time():
    expected, *_ = step_of(network(), TWO[:1])()
    for loss, _ in in_threads(*(step_of(network(), TWO) for _ in range(4))):
        assert loss.numpy() == pytest.approx(expected.numpy(), rel=1e-5)


def test_a_bystander_meets_no_tower():
    """A plain model is trained in another thread while a tower is being traced."""

    def train_plainly(model):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses_of(model)(tf.constant(X)))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return [loss.numpy(), *(g.numpy() for g in gradients), model.layers[1].moving_mean.numpy()]

    expected = train_plainly(network())
    towers_model, plain_model, found = network(), network(), []

    def loss_fn(x):
        if not found:  # in the midst of the first trace
            found.extend(in_threads(lambda: train_plainly(plain_model)))
        return losses_of(towers_model)(x)

    builder = TowerBuilder(TWO, batch_norm="sync")
    step = tf.function(lambda x: builder.gradients(loss_fn, towers_model.trainable_variables, x))
    step(tf.constant(X))
    for a, b in zip(found[0], expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind_by_an_error(error):
    call = layers.BatchNormalization.call
    assign = tf.Variable(0).assign

    def loss_fn(x):
        raise error("from the user's own code")

    with pytest.raises(error):
        TowerBuilder(TWO).gradients(loss_fn, [], tf.constant(X))
    assert layers.BatchNormalization.call is call
    assert tf.Variable(0).assign.__func__ is assign.__func__
    assert not tf_private._SWITCHES


@pytest.mark.parametrize("inner_towers", [1, 2, 3])
def test_towers_in_towers_draw_by_example_and_assign_once(inner_towers):
    """Four examples for each of two towers, which split them again."""
    plain = layers.Dropout(0.5, seed=3)
    expected = plain(tf.constant(X), training=True)
    again = plain(tf.constant(X), training=True)
    dropout = layers.Dropout(0.5, seed=3)
    inner = TowerBuilder(["/cpu:0"] * inner_towers)
    outer = TowerBuilder(TWO)

    @tf.function
    def step(x):
        return outer.concat(lambda x: inner.concat(lambda x: dropout(x, training=True), x), x)

    np.testing.assert_array_equal(step(tf.constant(X)), expected)
    np.testing.assert_array_equal(step(tf.constant(X)), again)
