"""Building a model from its name: what the function is given, and what it must return."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.runs import refusal
from towers.errors import InputError
from towers.options.parts import DTYPES
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


def keywords(**kwargs):
    calls.append(kwargs)
    return both(kwargs["num_classes"], kwargs["image_shape"])


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


def any_size(num_classes):
    images = keras.Input((None, None, 3))
    return keras.Model(images, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(images)))


def two_inputs(num_classes, image_shape):
    images, sizes = keras.Input(image_shape, name="image"), keras.Input((2,), name="size")
    flat = layers.Concatenate()([layers.Flatten()(images), sizes])
    return keras.Model({"image": images, "size": sizes}, layers.Dense(num_classes)(flat))


class TakesLabels(Subclassed):
    def call(self, images, labels, training):
        return super().call(images)


class Mistaken(Subclassed):
    def call(self, images):
        return super().call(imagse)  # noqa: F821


class ReturnsNothing(Subclassed):
    def call(self, images):
        super().call(images)


def particular(depth=20):
    if depth % 6 != 2:
        raise ValueError(f"depth={depth} must be 6n + 2")


def flat(shape, num_classes, num_outputs=1):
    images = keras.Input(shape)
    outputs = [layers.Dense(num_classes)(layers.Flatten()(images)) for _ in range(num_outputs)]
    return keras.Model(images, outputs if num_outputs > 1 else outputs[0])


class Signs(layers.Layer):
    def call(self, x):
        return keras.ops.cast(x > 0, "int32")


def fails():
    raise ZeroDivisionError("theirs")


def build(function, keywords=None, image_shape=SHAPE, **given):
    arguments = [f"{name}={value}" for name, value in (keywords or {}).items()]
    of_run = Options(model=function, model_args=arguments, augment="off", **given)
    x = tf.TensorSpec(image_shape, of_run.input_dtype)
    built = model.build_for(of_run, num_classes=10, x=x, image_shape=image_shape)
    model.check_classifier(built, of_run.model, 10, x)
    return built


# ---------------------------------------------------------------------------- What it is given


def test_the_function_is_given_what_it_takes_and_model_args():
    calls.clear()
    build(both)
    build(keywords, {"extra": 1}, image_shape=[8, 8, 3])
    given = {"num_classes": 10, "image_shape": SHAPE}
    assert calls == [(10, SHAPE), given | {"extra": 1}, (10, SHAPE)]
    build(options)
    build(options, {"width": 7, "bias": False, "activation": "tanh"})
    assert calls[3:] == [(4, "relu", True), (7, "tanh", False)]
    assert build(neither).output_shape == (None, 10)


@pytest.mark.parametrize("name", ["keras:Model", "keras:Sequential", "keras.layers:Dense"])
def test_what_is_kerass_own_and_cannot_be_called_so_is_said_in_a_line(name):
    assert name in refusal(build, name)


def test_the_shape_of_images_is_no_argument_of_the_users():
    with pytest.raises(InputError, match="--model_args: image_shape is that of the data"):
        build(both, {"image_shape": 3})


def test_what_the_function_raises_comes_through():
    with pytest.raises(ZeroDivisionError, match="theirs"):
        build(fails)
    with pytest.raises(NameError, match="imagse"):
        build(Mistaken)
    with pytest.raises(ValueError, match="units") as error:
        build(lambda: layers.Dense(-1))  # from further down than the function itself
    assert not isinstance(error.value, InputError)


# ---------------------------------------------------------------------------- What it returns


@pytest.mark.parametrize("function", [both, neither, functional, Subclassed, any_size, options])
def test_every_kind_of_model_is_built(function):
    built = build(function)
    assert built.built and built.trainable_variables
    assert built(np.zeros([5, *SHAPE], np.float32), training=False).shape == (5, 10)


BUILT = keras.Sequential([keras.Input([3]), layers.Dense(2)])
REFUSED = [
    (options, {"depth": 20}, "--model_args: .*:options takes .num_classes, .*'depth'"),
    (
        lambda num_classes, depth, width: neither(), {"width": 3},
        "--model_args: .*missing .*'depth'; .* num_classes, image_shape, ",
    ),
    (particular, {"depth": 21}, "--model=.*:particular: depth=21 must be 6n . 2"),
    (f"{__name__}:BUILT", {}, "--model=.*:BUILT is a model, and not the function that returns it"),
    (lambda: None, {}, "--model=.*:.* returned NoneType; a keras.Model is needed"),
    (lambda: layers.Dense(10), {}, "returned Dense; a keras.Model is needed"),
    (two_inputs, {}, r"cannot take float32 \(8, 8, 3\) .*expects 2 .*input"),
    (TakesLabels, {}, r"cannot take float32 \(8, 8, 3\) .*labels"),
    (ReturnsNothing, {}, r"outputs of NoneType; logits of shape \(batch, 10\) are needed"),
    (
        lambda: keras.Sequential([layers.Flatten(), layers.Dense(10), Signs()]), {},
        "gives outputs of type int32; logits are floats",
    ),
    (both, {"num_classes": 3}, r"of shape \(None, 3\); .* take num_classes=10 as an argument"),
    (
        lambda: keras.Sequential([layers.Dense(10)]), {},
        r"gives outputs of shape \(None, 8, 8, 10\); logits of shape \(batch, 10\)",
    ),
    (lambda: flat(SHAPE, 10, 2), {}, "gives outputs of list; logits of shape"),
    (
        lambda: flat((32, 32, 3), 10), {},
        r"take image_shape as an argument\): it takes inputs of shape \(32, 32, 3\)",
    ),
    (lambda: flat((192,), 10), {}, r"it takes inputs of shape \(192,\)"),
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_and_place(dtype):
    before = keras.config.dtype_policy()
    with tf.device("/cpu:2"):
        built = build(functional, dtype=dtype)
    assert keras.config.dtype_policy() == before
    assert {v.value.device.rpartition("/")[2] for v in built.variables} == {"device:CPU:0"}
    compute = dtype.removeprefix("mixed_")
    assert built(np.zeros([1, *SHAPE], np.float32)).dtype == compute
    master = "float64" if dtype == "float64" else "float32"
    assert {v.dtype for v in built.trainable_variables} == {master}


def test_policy_and_floatx_of_the_program_come_back(float64):
    with model.floatx_of("float64"), model.floatx_of("mixed_bfloat16"):
        assert keras.config.floatx() == "float64"
    assert {v.dtype for v in build(functional).trainable_variables} == {"float32"}
    for dtype in ("float32", "float64"):
        with pytest.raises(ZeroDivisionError):
            build(fails, dtype=dtype)
        assert keras.config.floatx() == "float32"
        assert keras.config.dtype_policy().name == "float64"
