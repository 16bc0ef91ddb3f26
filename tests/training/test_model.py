"""Building a model from its name: what the function is given, and what it must return."""

import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.runs import refusal
from towers.options.functions import load_function
from towers.options.run import Options
from towers.training.run import model

SHAPE = (8, 8, 3)

# Keras says it at length, too.
pytestmark = [pytest.mark.graph, pytest.mark.filterwarnings("ignore::UserWarning")]
calls = []


def both(num_classes, image_shape):
    calls.append((num_classes, image_shape))
    return keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), layers.Dense(num_classes, name="logits")]
    )


def neither():
    return keras.Sequential([layers.Flatten(), layers.Dense(10)])  # without Input


def options(num_classes, *, width=4, activation="relu", bias=True):
    calls.append((width, activation, bias))
    dense = layers.Dense(width, activation=activation, use_bias=bias)
    return keras.Sequential([layers.Flatten(), dense, layers.Dense(num_classes)])


def functional(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = layers.Conv2D(4, 3)(images)
    x = layers.BatchNormalization()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(num_classes)(layers.Dropout(0.5)(x)))


class Subclassed(keras.Model):
    def __init__(self, num_classes):
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(num_classes)

    def call(self, images):
        return self.dense(self.flatten(images))


def two_inputs(num_classes, image_shape):
    images, sizes = keras.Input(image_shape, name="image"), keras.Input((2,), name="size")
    flat = layers.Concatenate()([layers.Flatten()(images), sizes])
    return keras.Model({"image": images, "size": sizes}, layers.Dense(num_classes)(flat))


def of_other_images(num_classes):
    images = keras.Input((32, 32, 3))
    return keras.Model(images, layers.Dense(num_classes)(layers.Flatten()(images)))


def fails():
    raise ZeroDivisionError("theirs")


def build(function, keywords=None, image_shape=SHAPE, **given):
    arguments = [f"{name}={value}" for name, value in (keywords or {}).items()]
    of_run = Options(model=function, model_args=arguments, augment="none", **given)
    x = tf.TensorSpec(image_shape, of_run.input_dtype)
    built = model.build_for(
        of_run, load_function("model", of_run.model), num_classes=10, x=x, image_shape=image_shape
    )
    about = {"num_classes": 10, "spec": (x,), "image_shape": image_shape}
    model.check_classifier(built, of_run, types.SimpleNamespace(**about))
    return built


# ---------------------------------------------------------------------------- What it is given


def test_the_function_is_given_what_it_takes_and_model_args():
    calls.clear()
    build(both)
    build(options)
    build(options, {"width": 7, "bias": False, "activation": "tanh"})
    assert calls == [(10, SHAPE), (4, "relu", True), (7, "tanh", False)]
    assert build(neither).output_shape == (None, 10)
    with pytest.raises(ZeroDivisionError, match="theirs"):  # what it raises comes through
        build(fails)


# ---------------------------------------------------------------------------- What it returns


@pytest.mark.parametrize("function", [neither, functional, Subclassed])
def test_every_kind_of_model_is_built(function):
    built = build(function)
    assert built.built and built.trainable_variables
    assert built(np.zeros([5, *SHAPE], np.float32), training=False).shape == (5, 10)


BUILT = keras.Sequential([keras.Input([3]), layers.Dense(2)])
REFUSED = [
    (options, {"depth": 20}, "--model_args: .*:options takes .num_classes, .*'depth'"),
    (
        lambda num_classes, depth, width: neither(), {"width": 3},
        "--model_args: .*missing .*'depth'; .* num_classes, image_shape; ",
    ),
    (f"{__name__}:BUILT", {}, "--model=.*:BUILT is a model; name the function"),
    (lambda: layers.Dense(10), {}, "returned Dense; a keras.Model is needed"),
    (two_inputs, {}, r"cannot take float32 \(8, 8, 3\) .*expects 2 .*input"),
    (both, {"num_classes": 3}, r"of shape \(None, 3\); .* num_classes, which is 10 here"),
    (of_other_images, {}, r"take image_shape as an argument\): its inputs have shape \(32"),
]  # fmt: skip


@pytest.mark.parametrize("function, keywords, words", REFUSED)
def test_what_does_not_map_images_to_logits_is_refused_in_one_line(function, keywords, words):
    assert re.search(words, refusal(build, function, keywords))


# ---------------------------------------------------------------------------- Weights


@pytest.mark.parametrize("function", [functional, neither])  # at once, or by the first call
def test_the_seed_makes_the_weights(function):
    first = build(function, seed=3).get_weights()
    keras.utils.set_random_seed(99)
    np.random.normal(), tf.random.normal([])
    for one, other in zip(first, build(function, seed=3).get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    other = build(function, seed=4).get_weights()
    assert any((a != b).any() for a, b in zip(first, other, strict=True))
