"""Variables whose gradient is their new value, as the scales of float8, are those of one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import fits
from tests.runs import rare
from towers import TowerBuilder

pytestmark = pytest.mark.run
X = np.random.default_rng(0).normal(size=(7, 4))
Y = X[:, :1] ** 2
layers = keras.layers


class Follows(layers.Layer):
    """Divides by the largest numbers, or the means, that it has seen the step before."""

    def __init__(self, aggregation="none"):
        super().__init__()
        self.how, self.policy = aggregation, tf.reduce_max if aggregation == "none" else None

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(shape[-1],), initializer="ones", overwrite_with_gradient=True, name="seen",
            aggregation=self.how,
        )  # fmt: skip

    def call(self, x):
        @tf.custom_gradient
        def divided(x, seen):
            found = tf.reduce_max(tf.abs(x), 0) if self.policy else tf.reduce_mean(x**2, 0)
            return x / seen, lambda upstream: (upstream / seen, found)

        return divided(x, tf.convert_to_tensor(self.seen.value))


def quantized(model):
    for layer in model._flatten_layers():
        if isinstance(layer, layers.Dense | layers.EinsumDense):
            layer.quantize("float8")
    return model


def float8(*first):
    return quantized(keras.Sequential([keras.Input((4,)), *first, layers.Dense(1)]))


def two_of_float8():
    return float8(layers.Dense(6, "tanh"))


def own(aggregation="none"):
    return keras.Sequential([keras.Input((4,)), Follows(aggregation), layers.Dense(1)])


own_mean = functools.partial(own, "mean")


@functools.cache
def trained(make, way="", number=0, **options):
    """Return losses and weights of three steps of an own loop."""
    with fits.in_float64():
        keras.utils.set_random_seed(1)
        model, optimizer = make(), keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        builder = TowerBuilder([f"/cpu:{i}" for i in range(number)], **options) if number else None
        weights = model.trainable_variables

        def losses(x, y):
            return tf.reduce_mean((model(x, training=True) - y) ** 2, axis=1)

        @tf.function(jit_compile=bool(options) and not number, autograph=False)
        def step(x, y):
            if way == "gradients":
                loss, gradients = builder.gradients(losses, weights, x, y)
            else:
                with tf.GradientTape() as tape:
                    of_each = builder.concat(losses, x, y) if way else losses(x, y)
                    loss = tf.reduce_mean(of_each)
                gradients = tape.gradient(loss, weights)
            optimizer.apply(gradients, weights)
            return loss

        found = [step(X, Y).numpy() for _ in range(3)]
        return found + [w.numpy() for w in weights]


WHOLE, IN_PARTS = (2, {}), (3, {"accumulate_steps": 2})


@pytest.mark.parametrize(
    "make, way, number, options",
    [
        (two_of_float8, "gradients", *IN_PARTS), (own, "concat", *WHOLE),
        *(
            rare(make, way, *how)
            for make in (two_of_float8, own, own_mean)
            for way in ("gradients", "concat") for how in (WHOLE, IN_PARTS)
        ),
    ],
)  # fmt: skip
def test_own_loops(make, way, number, options):
    found = trained(make, way, number, **options)
    for own, value in zip(found, trained(make), strict=True):
        np.testing.assert_allclose(own, value, rtol=1e-6, atol=1e-9)


def test_losses_by_example_that_xla_compiles():
    expected = trained(float8, jit_compile=True)  # XLA rounds to float8 otherwise than kernels
    found = trained(float8, "gradients", 2, jit_compile=True, batch_norm="local")
    for own, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, value, rtol=1e-6, atol=1e-9)


def test_joined_outputs_of_float8_are_not_left_to_xla_in_silence():
    model, told = float8(), []
    options = dict(jit_compile=True, batch_norm="local", on_warning=told.append)
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], **options)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(builder.concat(lambda x: model(x, training=True), x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    step.get_concrete_function(X.astype("float32"))
    assert len(told) == 1 and "leave jit_compile out" in told[0]


@functools.cache
def fitted(make, number=0, **options):
    def build():
        model = make()
        model.compile("sgd", "mse")  # of gradients that are rounding alone Adam makes steps
        return model

    given = {"x": X, "y": Y, "batch_size": 5, "shuffle": False}
    return fits.fit(build, given, number, **options)


def test_fit_does_not_leave_float8_to_xla():
    with pytest.warns(UserWarning, match="runs on one device: jit_compile: XLA leaves out"):
        found = fitted(float8, 2, jit_compile=True, batch_norm="local")
    assert not fits.differences(fitted(float8), found)


def test_a_bias_that_is_rounded_to_16_bits_is_no_fault():
    """In float32 Keras rounds what it adds to a product of float8, and so the sum of gradients."""
    model, told = float8(layers.Dense(6, "tanh"), layers.Dense(6, "tanh")), []
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=told.append)
    step = tf.function(lambda x: builder.gradients(
        lambda x: tf.reduce_sum(model(x, training=True) ** 2, 1), model.trainable_variables, x
    ))  # fmt: skip
    step(X.astype("float32"))
    assert not told


@pytest.mark.parametrize(
    "make, number, options",
    [
        (float8, *WHOLE), (own_mean, *IN_PARTS), rare(float8, *IN_PARTS), rare(own_mean, *WHOLE),
        rare(own, *WHOLE), rare(own, *IN_PARTS),
    ],
)  # fmt: skip
def test_fit(make, number, options):
    assert not fits.differences(fitted(make, number, **options), fitted(make), 1e-6)
