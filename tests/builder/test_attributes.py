"""What calls leave in attributes, add to the loss, or have as gradients: what is told, and `fit`.

`test_equality` has the rest.
"""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import fits, tiny
from tests.builder.test_equality import Adds, sequential
from tests.runs import rare
from towers import TowerBuilder
from towers.errors import InputError
from towers.training.run.setup import prepare

pytestmark = [pytest.mark.run, pytest.mark.checked]
RANDOM = np.random.default_rng(0)
DATA = {"x": RANDOM.normal(size=(17, 3)), "y": RANDOM.normal(size=(17, 1)), "batch_size": 7}
layers, ops = keras.layers, keras.ops
DEVICES, X = ["/cpu:0", "/cpu:1", "/cpu:2"], DATA["x"][:7]


class Leaving(keras.Model):
    """Leaves what `leave` makes of features; `use` makes a loss of it."""

    def __init__(self, leave, use):
        super().__init__()
        self.features, self.end = layers.Dense(4, "tanh"), layers.Dense(1)
        self.leave, self.use, self.kept, self.calls, self.flag = leave, use, [], 0, False
        self.build((None, 3))

    def build(self, shape):
        self.features.build(shape)
        self.end.build((None, 4))
        self.built = True

    def call(self, x):
        features = self.features(x)
        scale = self.leave(self, features)
        return self.end(features) * (1.0 if scale is None else scale)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred) ** 2) + self.use(self)


def spread(model, x):
    model.spread = ops.std(x)


def leaves(model, x):
    """Leave rows, a maximum in a layer below, a list, a counter and a flag."""
    model.z = {"of": [x, ops.sum(x, axis=1)]}
    model.features.largest = ops.max(x)
    model.kept.clear()
    model.kept.append(ops.mean(x, axis=0))
    model.calls += 1
    model.flag = not model.flag
    return model.calls * (2.0 if model.flag else 1.0)


def of_what_is_left(model):
    of_rows = ops.mean(model.z["of"][0] ** 4) + ops.max(model.z["of"][1])
    return of_rows + model.features.largest**2 + ops.sum(ops.abs(model.kept[0])) + model.calls


def fitted(leave, use, num_towers=0):
    def build():
        model = Leaving(leave, use)
        model.compile("sgd")
        return model

    return fits.fit(build, DATA, num_towers)


@pytest.mark.parametrize("num_towers", [rare(1), 3])
def test_fit_has_the_numbers_of_one_device(num_towers):
    parts = leaves, of_what_is_left
    assert not fits.differences(fitted(*parts), fitted(*parts, num_towers))


@pytest.mark.parametrize("num_towers", [rare(1), 3])
def test_what_a_function_leaves_around_it_is_that_of_one_device(num_towers, float64):
    x, net = tf.constant(X), layers.Dense(4, "tanh")
    net.build((None, 3))
    expected = net(x)

    @tf.function
    def step(call):
        a_list, a_dict, a_variable = [], {}, None
        an_object, a_module, an_argument = types.SimpleNamespace(), tf.Module(), {}
        a_module.a_list = []

        def leave(x, an_argument):
            nonlocal a_variable
            a_list.append(net(x))
            a_module.a_list.append(a_list[0])
            a_dict["of"] = {"features": [a_list[0]]}
            an_object.features = a_variable = an_argument["of"] = a_list[0]
            return tf.reduce_sum(x, axis=1)

        call(functools.partial(leave, an_argument=an_argument))
        assert len(a_list) == len(a_module.a_list) == 1
        others = a_dict["of"]["features"][0], an_object.features, a_variable, an_argument["of"]
        return [a_list[0], a_module.a_list[0], *others]

    builder = TowerBuilder(DEVICES[:num_towers])
    for call in (
        lambda leave: builder.gradients(leave, [], x),
        lambda leave: builder.map(leave, x),
        lambda leave: builder.sum(lambda x: tf.reduce_sum(leave(x)), x),
        lambda leave: builder.concat(leave, x),
    ):
        for left in step(call):
            np.testing.assert_allclose(left, expected, rtol=1e-12)


def test_what_a_function_leaves_and_cannot_be_joined_is_told():
    told, left = [], {}
    builder = TowerBuilder(DEVICES[:2], on_warning=told.append)

    def leave(x):
        left["spread"] = tf.math.reduce_std(x)
        return x[:, 0]

    tf.function(lambda x: builder.gradients(leave, [], x))(tf.constant(X))
    assert ["'left'" in line for line in told] == [True], told


class Seen:
    """Is reached through the class itself."""


def seen(model, x):
    Seen.x = x


def test_a_class_may_hold_what_a_layer_leaves():
    parts = seen, lambda model: ops.mean(Seen.x)
    assert not fits.differences(fitted(*parts), fitted(*parts, 2))


def test_a_model_that_leaves_what_cannot_be_joined_runs_on_one_device():
    parts, said = (spread, lambda model: model.spread), "attribute 'spread' of layer leaving"
    with pytest.warns(UserWarning, match=f"runs on one device: .*{said}"):
        found = fitted(*parts, 2)
    assert not fits.differences(fitted(*parts), found)


# Variables whose gradient is their new value, as in float8, run on one device.


def float8(num_classes=1, image_shape=(3,)):
    model = tiny.dense(num_classes, image_shape)
    model.layers[-1].quantize("float8")
    return model


def test_new_values_as_gradients_run_on_one_device_and_a_builder_refuses_them():
    def build():
        model = float8()
        model.compile("sgd", "mse")
        return model

    said = "runs on one device: the gradient of .* is its new value"
    with pytest.warns(UserWarning, match=said):
        fits.fit(build, DATA, 2, epochs=1)
    options = tiny.options("x", model=f"{__name__}:float8", metrics="accuracy", num_towers=2)
    (line,) = prepare(options).diagnostics
    assert "runs on one device: the gradient of" in line
    model, builder = float8(), TowerBuilder(DEVICES[:2])
    for way in builder.concat, lambda fn, x: builder.gradients(fn, model.trainable_variables, x):
        with pytest.raises(InputError, match="is its new value.*compile the model"):
            step = tf.function(way, autograph=False)
            step(lambda x: model(x)[:, 0], tf.constant(DATA["x"], tf.float32))


# Losses that layers add.


def test_a_model_has_the_losses_of_its_layers_without_a_tape(float64):
    model = sequential((3,), layers.Dense(3), Adds(tf.reduce_sum, lambda x: tf.reduce_mean(x**2)))
    model(X)
    expected = [float(loss) for loss in model.losses]
    TowerBuilder(DEVICES).concat(model, X)
    np.testing.assert_allclose([float(loss) for loss in model.losses], expected, rtol=1e-10)


def test_what_cannot_be_told_is_said_and_nothing_else():
    def printed(x):
        tf.print("", end="")
        return tf.reduce_sum(x)

    def told(fn):
        found = []
        TowerBuilder(DEVICES[:2], on_warning=found.append).concat(Adds(fn), tf.constant(X))
        return "".join(found)

    assert not told(lambda x: tf.reduce_sum(x**2)) and not told(lambda x: tf.reduce_mean(x**3))
    assert "neither a mean nor a sum" in told(lambda x: tf.math.reduce_std(x))
    assert not told(tf.function(printed))
    for value in np.inf, np.nan:
        assert "not checked: the loss that layer" in told(
            lambda x, value=value: tf.reduce_mean(x) + value
        )
