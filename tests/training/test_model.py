"""Building a model from its name: what the function is given, and what it must return."""

import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.errors import InputError
from towers.options.run import DTYPES
from towers.training import model

SHAPE = (8, 8, 3)
MODELS = """
import keras
from keras import layers

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


def needs(num_classes, depth, width):
    return neither()


def functional(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = layers.Conv2D(4, 3)(images)
    x = layers.BatchNormalization()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(num_classes)(layers.Dropout(0.5)(x)))


def particular(num_classes, depth=20):
    if depth % 6 != 2:
        raise ValueError(f"depth={depth} must be 6n + 2")
    return both(num_classes, (8, 8, 3))


def deep():
    return layers.Dense(-1)


class Subclassed(keras.Model):
    def __init__(self, num_classes):
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(num_classes)

    def call(self, images):
        return self.dense(self.flatten(images))


def any_size(num_classes):
    images = keras.Input((None, None, 3))
    return keras.Model(images, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(images)))


def fixed(num_classes, size=32, channels=3):
    images = keras.Input((size, size, channels))
    return keras.Model(images, layers.Dense(num_classes)(layers.Flatten()(images)))


def flat(num_classes, size=192):
    images = keras.Input((size,))
    return keras.Model(images, layers.Dense(num_classes)(images))


def nothing():
    pass


def layer():
    return layers.Dense(10)


def not_flat(num_classes):
    return keras.Sequential([layers.Dense(num_classes)])


def two_outputs(num_classes, image_shape):
    images = keras.Input(image_shape)
    outputs = [layers.Dense(num_classes)(layers.Flatten()(images)) for _ in range(2)]
    return keras.Model(images, outputs)


def named_outputs(num_classes, image_shape):
    images = keras.Input(image_shape)
    return keras.Model(images, {"logits": layers.Dense(num_classes)(layers.Flatten()(images))})


def two_inputs(num_classes, image_shape):
    images, sizes = keras.Input(image_shape), keras.Input((2,))
    flat = layers.Concatenate()([layers.Flatten()(images), sizes])
    return keras.Model([images, sizes], layers.Dense(num_classes)(flat))


def named_inputs(num_classes, image_shape):
    images, sizes = keras.Input(image_shape, name="image"), keras.Input((2,), name="size")
    flat = layers.Concatenate()([layers.Flatten()(images), sizes])
    return keras.Model({"image": images, "size": sizes}, layers.Dense(num_classes)(flat))


def one_named_input(num_classes, image_shape):
    images = keras.Input(image_shape, name="image")
    return keras.Model({"image": images}, layers.Dense(num_classes)(layers.Flatten()(images)))


class Unpacks(Subclassed):
    def call(self, images):
        left, right = images
        return super().call(left)


class LooksUp(Subclassed):
    def call(self, images):
        return super().call(images["image"])


class TakesLabels(Subclassed):
    def call(self, images, labels, training):
        return super().call(images)


class TakesTraining(Subclassed):
    def call(self, images, training, *rest, scale=1.0, **more):
        return super().call(images)


class HasNoCall(keras.Model):
    def __init__(self, num_classes):
        super().__init__()


def empty():
    return keras.Sequential([])


class Signs(layers.Layer):
    def call(self, x):
        return keras.ops.cast(x > 0, "int32")


def whole_numbers(num_classes):
    return keras.Sequential([layers.Flatten(), layers.Dense(num_classes), Signs()])


class Mistaken(Subclassed):
    def call(self, images):
        return super().call(imagse)


class ReturnsNothing(Subclassed):
    def call(self, images):
        super().call(images)


def fails(num_classes):
    raise ZeroDivisionError("theirs")
"""


@pytest.fixture(autouse=True)
def nets(tmp_path, monkeypatch):
    """The module `nets`."""
    (tmp_path / "nets.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    import nets

    yield nets
    del sys.modules["nets"]


def build(name, keywords=None, **options):
    options = {"num_classes": 10, "image_shape": SHAPE} | options
    return model.build(f"nets:{name}", keywords, **options)


def refusal(name, keywords=None, **options):
    with pytest.raises(InputError) as error:
        build(name, keywords, **options)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


# ---------------------------------------------------------------------------- What it is given


def test_the_function_is_given_what_it_takes(nets):
    build("both")
    build("keywords", image_shape=[8, 8, 3])
    assert nets.calls == [
        (10, SHAPE),
        {"num_classes": 10, "image_shape": SHAPE},
        (10, SHAPE),
    ]
    assert build("neither").output_shape == (None, 10)


def test_model_args(nets):
    build("options")
    build("options", {"width": 7, "bias": False, "activation": "tanh"})
    assert nets.calls == [(4, "relu", True), (7, "tanh", False)]
    build("keywords", {"extra": 1})
    assert nets.calls[2] == {"num_classes": 10, "image_shape": SHAPE, "extra": 1}


def test_model_args_come_before_what_the_data_says(nets):
    build("both", {"image_shape": SHAPE})
    assert refusal("both", {"num_classes": 3}) == (
        "--model=nets:both gives outputs of shape (None, 3); logits of shape (batch, 10) are "
        "needed: take num_classes=10 as an argument"
    )


def test_model_args_that_are_not_taken():
    assert refusal("options", {"depth": 20}) == (
        "--model_args=depth=...: nets:options takes num_classes, width, activation, bias"
    )
    assert refusal("neither", {"depth": 20}) == (
        "--model_args=depth=...: nets:neither takes no arguments"
    )


def test_model_args_that_are_missing():
    assert refusal("needs", {"width": 3}) == (
        "--model=nets:needs needs depth: give it by --model_args=depth=..."
    )
    build("needs", {"width": 3, "depth": 2})


def test_what_the_function_raises_comes_through():
    with pytest.raises(ZeroDivisionError, match="theirs"):
        build("fails")
    with pytest.raises(InputError, match="no_nets"):
        model.build("no_nets:build", num_classes=10, image_shape=SHAPE)


# ---------------------------------------------------------------------------- What it returns


@pytest.mark.parametrize(
    "name",
    [
        *("both", "neither", "functional", "Subclassed", "any_size", "options"),
        "one_named_input",
    ],
)
@pytest.mark.filterwarnings("ignore:[\\s\\S]*The structure of `inputs`:UserWarning")
def test_every_kind_of_model_is_built(name):
    built = build(name)
    assert built.built and built.trainable_variables
    assert built(np.zeros([5, *SHAPE], np.float32)).shape == (5, 10)


@pytest.mark.parametrize("name, kind", [("nothing", "NoneType"), ("layer", "Dense")])
def test_what_is_no_model(name, kind):
    assert refusal(name) == f"--model=nets:{name} returned {kind}; a keras.Model is needed"


@pytest.mark.parametrize(
    "name, words",
    [
        ("two_inputs", "takes 2 inputs, of shapes (8, 8, 3), (2,); towers train hands over one, "
         "images of shape (8, 8, 3): build a model of one input, or use towers.TowerBuilder"),
        ("named_inputs", "takes 2 inputs, of shapes (8, 8, 3), (2,); "),
        ("TakesLabels", "returned a model whose call needs labels; towers train hands over the "
         "images alone: give labels a default"),
        ("Unpacks", "cannot take images of shape (None, 8, 8, 3): Iterating over a symbolic"),
        ("LooksUp", "cannot take images of shape (None, 8, 8, 3): Only integers, slices"),
        ("HasNoCall", "cannot take images of shape (None, 8, 8, 3): Model HasNoCall does not have"),
        ("empty", "cannot take images of shape (None, 8, 8, 3): Sequential model sequential"),
        ("ReturnsNothing", "gives outputs of NoneType; logits of shape (batch, 10) are needed"),
        ("whole_numbers", "gives outputs of type int32; logits are floats"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_map_images_to_logits(name, words):
    with warnings.catch_warnings(record=True) as caught:
        assert refusal(name).startswith(f"--model=nets:{name} {words}")
    assert not [warning for warning in caught if "keras" in warning.filename]


def test_a_model_may_ask_whether_it_is_trained():
    assert build("TakesTraining").trainable_variables


def test_a_mistake_in_a_models_own_code_keeps_its_traceback():
    with pytest.raises(NameError, match="imagse"):
        build("Mistaken")


@pytest.mark.parametrize(
    "name, classes, given",
    [
        ("neither", 100, "shape (None, 10)"),
        ("not_flat", 10, "shape (None, 8, 8, 10)"),
        ("two_outputs", 10, "list"),
        ("named_outputs", 10, "dict"),
    ],
)
def test_outputs_that_are_no_logits(name, classes, given):
    assert refusal(name, num_classes=classes) == (
        f"--model=nets:{name} gives outputs of {given}; logits of shape (batch, {classes}) are "
        f"needed: take num_classes={classes} as an argument"
    )


@pytest.mark.parametrize(
    "name, keywords, shape",
    [
        ("fixed", {}, (32, 32, 3)),
        ("fixed", {"size": 8, "channels": 1}, (8, 8, 1)),
        ("any_size", {}, (None, None, 3)),
        ("flat", {}, (192,)),
        ("flat", {"size": 8}, (8,)),
    ],
)
def test_a_model_for_other_images(name, keywords, shape):
    images = (8, 8, 1) if name == "any_size" else SHAPE
    assert refusal(name, keywords, image_shape=images) == (
        f"--model=nets:{name} takes images of shape {shape}; they have shape {images} "
        "after augmentation: take image_shape as an argument"
    )


# ---------------------------------------------------------------------------- Weights


def weights(name="functional", **options):
    return build(name, **options).get_weights()


def test_the_seed_makes_the_weights():
    first = weights(seed=3)
    keras.utils.set_random_seed(99)
    np.random.normal(), tf.random.normal([])
    for one, other in zip(first, weights(seed=3), strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((a != b).any() for a, b in zip(first, weights(seed=4), strict=True))
    assert any((a != b).any() for a, b in zip(first, weights(), strict=True))


def test_the_seed_makes_the_weights_of_a_model_that_is_built_late():
    for one, other in zip(weights("neither"), weights("neither"), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["functional", "neither", "Subclassed"])
def test_variables_are_on_the_cpu(name):
    with tf.device("/cpu:2"):
        built = build(name)
    assert {v.value.device.rpartition("/")[2] for v in built.variables} == {"device:CPU:0"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["functional", "neither", "Subclassed"])
def test_precision(name, dtype):
    before = keras.config.dtype_policy()
    built = build(name, dtype=dtype)
    assert keras.config.dtype_policy() == before
    compute = dtype.removeprefix("mixed_")
    assert built(np.zeros([1, *SHAPE], np.float32)).dtype == compute
    master = "float64" if dtype == "float64" else "float32"
    assert {v.dtype for v in built.trainable_variables} == {master}


def test_the_policy_of_the_program_comes_back(float64):
    assert {v.dtype for v in build("functional").trainable_variables} == {"float32"}
    assert keras.config.dtype_policy().name == "float64"
    with pytest.raises(ZeroDivisionError):
        build("fails")
    assert keras.config.dtype_policy().name == "float64"


def test_what_the_function_says_of_its_arguments_is_one_line():
    with pytest.raises(InputError) as error:
        build("particular", {"depth": 21})
    assert str(error.value) == "--model=nets:particular: depth=21 must be 6n + 2"


def test_an_error_from_further_down_is_left_as_it_is():
    with pytest.raises(ValueError, match="units") as error:
        build("deep")
    assert not isinstance(error.value, InputError)


def test_floatx_is_float64_while_a_model_is_built_and_no_longer():
    seen = []
    with model.floatx_of("float64"):
        seen.append(keras.config.floatx())
        with model.floatx_of("mixed_bfloat16"):
            seen.append(keras.config.floatx())
    with pytest.raises(ZeroDivisionError):
        build("fails", dtype="float64")
    assert seen == ["float64"] * 2 and keras.config.floatx() == "float32"
    assert keras.config.dtype_policy().name == "float32"
