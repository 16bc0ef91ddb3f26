"""What a user's Keras model overrides of a step, and how it is called: in which type, mirrored."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from towers.errors import InputError
from towers.tf_internals import floatx_set

_OF_A_STEP = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics",
              "make_train_function", "make_test_function", "make_predict_function")  # fmt: skip


def overrides(model: keras.Model, *names: str) -> bool:
    """Return whether a model or its class overrides a method of `keras.Model`.

    Args:
        model: any Keras model; methods that towers replace do not count.
        *names: names of methods; one that is overridden is enough.
    """
    of_class = (getattr(type(model), name) is not getattr(keras.Model, name) for name in names)
    return any(of_class) or not methods_set_on(model).keys().isdisjoint(names)


def methods_set_on(model: keras.Model) -> dict[str, Callable]:
    """Return {name: method} of a step that were set on the model itself, not by towers."""
    methods, steps = vars(model), vars(model).get("_tower_steps")
    if steps:
        methods = {n: x for n, x in methods.items() if n not in steps.REPLACED} | steps.of_instance
    return {name: methods[name] for name in _OF_A_STEP if name in methods}


@contextlib.contextmanager
def floatx_of(dtype: str) -> Iterator[None]:
    """Make float64 Keras' default type, if `dtype` is float64, where layers are built or called."""
    keras.config.dtype_policy()  # if none is set, Keras takes it from floatx and keeps it
    with floatx_set(dtype) if dtype == "float64" else contextlib.nullcontext():
        yield


def check_rows(output: Any) -> None:
    """Raise InputError for an output, symbolic or not, that has no single row for each image."""
    if tf.TensorShape(output.shape).rank != 2:
        raise InputError(
            "--test_time_flip needs one row of numbers for each image, and the model's outputs "
            f"have shape {output.shape}: leave it out"
        )


def mirrored(call: Callable, images: tf.Tensor) -> Any:
    """Return the mean outputs for images and their mirror images, float32 at least.

    Args:
        call: a model: from images to an output `[b, n]`, or a structure of such.
        images: `[b, H, W, C]`.

    Raises:
        InputError: an output has another rank.
    """

    def mean(output: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        check_rows(output)
        dtype = tf.float32 if output.dtype.size < 4 else output.dtype
        return (tf.cast(output, dtype) + tf.cast(other, dtype)) / 2

    return tf.nest.map_structure(mean, call(images), call(tf.reverse(images, [2])))
