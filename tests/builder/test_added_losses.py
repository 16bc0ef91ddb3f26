"""Losses that layers add are those of one device: in own loops, and under `fit`."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import fits
from tests.runs import rare
from towers import TowerBuilder

X = np.random.default_rng(0).normal(size=(7, 3))
THREE = ["/cpu:0", "/cpu:1", "/cpu:2"]
layers, ops = keras.layers, keras.ops
pytestmark = pytest.mark.run


def dense(units, **keywords):
    return layers.Dense(units, dtype="float64", **keywords)


class Adds(layers.Layer):
    """Adds what functions make of its inputs."""

    def __init__(self, *losses):
        super().__init__(dtype="float64")
        self.of_inputs = losses

    def call(self, x):
        self.add_loss([loss(x) for loss in self.of_inputs])
        return x


class Twice(keras.Model):
    """Calls a part that adds losses two times."""

    def __init__(self):
        super().__init__(dtype="float64")
        self.part = network(Adds(mean, total))

    def call(self, x):
        return self.part(x) - 0.5 * self.part(2 * x)


def network(*middle, **keywords):
    last = dense(2, **keywords)
    return keras.Sequential([keras.Input((3,), dtype="float64"), dense(3), *middle, last])


def mean(x):
    return 0.3 * ops.mean(ops.sin(x))


def total(x):
    return 0.1 * ops.sum(x**2)


def shares(x):
    return x[:, :1] ** 2 / ops.cast(ops.shape(x)[0], x.dtype)


def alignments(x):
    """Return the losses of examples of six frames and two labels each, [b, 1] (CTC)."""
    num = tf.shape(x)[0]
    frames = tf.cast(tf.stack([x * i for i in range(6)], axis=1), tf.float32)
    labels, lengths = tf.tile([[1, 2]], [num, 1]), tf.fill([num], 1)
    loss = tf.nn.ctc_loss(labels, frames, 2 * lengths, 6 * lengths, False, blank_index=0)
    return tf.cast(loss, x.dtype)[:, None]


def checked(x):
    return tf.reduce_sum(tf.debugging.check_numerics(x**2, "not finite"))


SUM_AND_MEAN = "a sum beside a mean"


def weights_too():
    model = network(
        dense(3, activity_regularizer="l2", kernel_regularizer="l1"), bias_regularizer="l2"
    )
    model.layers[0].trainable = False
    return model


MODELS = {
    SUM_AND_MEAN: lambda: network(Adds(total, mean)),
    "activity, weights, a frozen layer": weights_too,
    "a nested model, called twice": Twice,
    "a vector, of the columns": lambda: network(Adds(lambda x: ops.mean(x**3, axis=0))),
    "half a norm": lambda: network(Adds(tf.nn.l2_loss, lambda x: ops.max(x) * 0 + 0.5)),
    "one for each example": lambda: network(Adds(lambda x: ops.sum(x**2, axis=1), mean)),
    "shares of a mean": lambda: network(Adds(shares)),
    "alignments": lambda: network(Adds(alignments, mean)),
    "what is checked": lambda: network(Adds(checked)),
}
RARE = (
    "half a norm", "a vector, of the columns", "shares of a mean", "what is checked", "alignments",
)  # fmt: skip
RARE_BY_EXAMPLE = *RARE, "a nested model, called twice", "activity, weights, a frozen layer"


def made(name):
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    model(X)
    return model


def added(model):
    return sum(ops.sum(loss) for loss in model.losses)


def step_of(way, name, number=0, **options):
    """Return a step of a new model: its losses are "joined", or made in the towers."""
    model = made(name)
    weights, call = model.trainable_variables, functools.partial(model, training=True)
    builder = TowerBuilder([f"/cpu:{i}" for i in range(number)], **options) if number else None

    def losses(x):
        return tf.reduce_mean(tf.sin(call(x)), axis=1) + added(model)

    @tf.function(autograph=False)
    def step(x):
        if builder and way == "by example":
            return *builder.gradients(losses, weights, x), []
        with tf.GradientTape() as tape:
            if way == "joined":
                outputs = builder.concat(call, x) if builder else call(x)
                loss = tf.reduce_mean(tf.sin(outputs)) + added(model)
            else:
                loss = tf.reduce_mean(losses(x))
        gradients = tape.gradient(loss, weights)
        return loss, gradients, list(model.losses) if way == "joined" else []

    return step


def assert_same(found, expected, rtol=1e-10):
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 100), found, expected
    )


IN_PARTS = "a sum beside a mean-joined", "one for each example-by example"
CASES = [
    pytest.param(way, name, number, id=f"{name}-{way}-{number}", marks=[pytest.mark.extended] * (
        name in rare or (f"{name}-{way}" in IN_PARTS) != (number == 3)
    ))
    for name in MODELS
    for way, rare in {"joined": RARE, "by example": RARE_BY_EXAMPLE}.items()
    for number in ((2,) if name == "alignments" else (2, 3))  # which are traced for long
]  # fmt: skip


@functools.cache
def of_one_device(way, name):
    return step_of(way, name)(X)


@pytest.mark.parametrize(("way", "name", "number"), CASES)
def test_own_loops_have_the_losses_of_one_device(way, name, number):
    found = step_of(way, name, number, accumulate_steps=number - 1)(X)
    tolerance = 1e-4 if name == "alignments" else 1e-10  # TensorFlow has them in float32
    assert_same(found, of_one_device(way, name), tolerance)


def test_joined_losses_without_a_tape_and_of_an_unknown_batch_size():
    model, builder = made(SUM_AND_MEAN), TowerBuilder(THREE)
    expected = [float(loss) for loss in model.losses]
    builder.concat(model, X)
    assert_same([float(loss) for loss in model.losses], expected)
    step, plain = (step_of("joined", SUM_AND_MEAN, number).python_function for number in (4, 0))
    step = tf.function(step, [tf.TensorSpec([None, 3], tf.float64)], autograph=False)
    for size in (7, 2):
        assert_same(step(X[:size]), plain(tf.constant(X[:size])))


def test_losses_are_added_to_those_of_their_examples_and_returned_by_stateless_calls():
    model, other = made("one for each example"), made(SUM_AND_MEAN)
    variables = other.trainable_variables, other.non_trainable_variables

    def of_examples(x):
        y = model(x)
        return tf.reduce_mean(y**2, axis=1) + model.losses[0]

    def stateless(x):
        y, _, found = other.stateless_call(*variables, x, return_losses=True)
        return tf.reduce_mean(y**2, axis=1) + sum(found)

    for losses in of_examples, stateless:
        found, _ = TowerBuilder(THREE).gradients(losses, [], X)
        assert_same(found.numpy(), np.mean(losses(X)))


def test_what_cannot_be_told_is_said_and_nothing_else():
    def printed(x):
        tf.print("", end="")
        return tf.reduce_sum(x)

    def told(fn):
        found = []
        TowerBuilder(THREE[:2], on_warning=found.append).concat(Adds(fn), tf.constant(X))
        return "".join(found)

    assert not told(lambda x: tf.reduce_sum(x**2)) and not told(lambda x: tf.reduce_mean(x**3))
    assert "neither a mean nor a sum" in told(lambda x: tf.math.reduce_std(x))
    assert "could not be tried" in told(tf.function(printed))
    for value in np.inf, np.nan:
        assert "could not be tried (it is not finite" in told(
            lambda x, value=value: tf.reduce_mean(x) + value
        )


class PartsOfTheLoss(keras.Model):
    """Weighs the losses of its parts, each read where it was added."""

    def __init__(self):
        super().__init__(dtype="float64")
        self.encoder, self.decoder = network(Adds(total)), dense(1, activity_regularizer="l1")

    def call(self, x):
        return self.decoder(self.encoder(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        of_parts = 2 * sum(self.encoder.losses) + 3 * sum(self.decoder.losses)
        return tf.reduce_mean((y_pred - y) ** 2) + of_parts + sum(self.encoder.layers[1].losses)


class LossAfterTheUpdate(PartsOfTheLoss):
    """Reports losses that it reads when the gradients are there."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "encoder": sum(self.encoder.losses)}


@pytest.mark.parametrize(
    "make, num_towers, options",
    [rare(PartsOfTheLoss, 2, {}), (LossAfterTheUpdate, 3, {"accumulate_steps": 2})],
)
def test_fit_has_the_losses_of_each_part(make, num_towers, options):
    def build():
        model = make()
        model.compile("sgd", "mse")
        return model

    given = {"x": X, "y": X[:, :1], "batch_size": 4, "shuffle": False}
    found = fits.fit(build, given, num_towers, epochs=1, **options)
    assert not fits.differences(found, fits.fit(build, given, epochs=1))
