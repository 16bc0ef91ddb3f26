"""Building the user's Keras model from its name."""

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.errors import InputError
from towers.options.functions import load_function
from towers.tf_private import all_in_float64, floatx_set


def build(
    name: str,
    keywords: Mapping[str, Any] | None = None,
    *,
    num_classes: int,
    image_shape: Sequence[int],
    dtype: str = "float32",
    seed: int = 0,
    exact: bool = False,
) -> keras.Model:
    """Build the model that `module:function` names, its variables on the CPU.

    Args:
        name: "models.cnn:cnn".
        keywords: further keyword arguments of the function (`--model_args`).
        num_classes: handed to the function if it takes it.
        image_shape: (height, width, channels) after augmentation; handed over if it is taken.
        dtype: Keras dtype policy of the layers.
        seed: of the initial weights.
        exact: with float64, layers that ask for another floating type get float64, too.

    Returns:
        A built Keras model that maps `[B, H, W, C]` to logits `[B, num_classes]`.

    Raises:
        InputError: no such function, an argument that it does not take, or what it returns is not
            such a model.
    """
    function = load_function("model", name)
    given = {"num_classes": num_classes, "image_shape": tuple(image_shape)}
    arguments = _accepted(function, name, given, dict(keywords or {}))
    keras.utils.set_random_seed(seed)
    with contextlib.ExitStack() as stack:
        stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
        keras.config.set_dtype_policy(dtype)
        stack.enter_context(floatx_of(dtype))
        if exact and dtype == "float64":
            stack.enter_context(all_in_float64())
        stack.enter_context(tf.device("/cpu:0"))
        model = _call(function, name, arguments)
        if not isinstance(model, keras.Model):
            raise InputError(
                f"--model={name} returned {type(model).__name__}; a keras.Model is needed"
            )
        outputs = _call_on_images(model, name, tuple(image_shape))  # builds it, too
    shape = getattr(outputs, "shape", None)
    if shape is None or tuple(shape[1:]) != (num_classes,):
        found = type(outputs).__name__ if shape is None else f"shape {tuple(shape)}"
        raise InputError(
            f"--model={name} gives outputs of {found}; logits of shape "
            f"(batch, {num_classes}) are needed: take num_classes={num_classes} as an argument"
        )
    if "float" not in str(outputs.dtype):
        raise InputError(f"--model={name} gives outputs of type {outputs.dtype}; logits are floats")
    return model


@contextlib.contextmanager
def floatx_of(dtype: str) -> Iterator[None]:
    """Let what names no type, such as `keras.random.uniform(shape)`, be float64 in a float64 run.

    To be used wherever a model's layers are built or called: `dtype` is the run's.
    """
    keras.config.dtype_policy()  # if none is set, Keras takes it from floatx and keeps it
    with floatx_set(dtype) if dtype == "float64" else contextlib.nullcontext():
        yield


def _accepted(function: Callable, name: str, given: dict, keywords: dict) -> dict[str, Any]:
    """Return those of `given` that `function` takes and all of `keywords`, which it must take."""
    signature = inspect.signature(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = {k: v for k, v in given.items() if k in signature.parameters or takes_all}
    try:
        signature.bind(**given | keywords)
    except TypeError as error:
        raise InputError(f"--model_args: {name} takes {signature}: {error}") from None
    return given | keywords


def _call(function: Callable, name: str, arguments: dict[str, Any]) -> Any:
    """Call a model function; a ValueError that its own file raises is about its arguments.

    Any other exception comes from deeper down and keeps its traceback.
    """
    try:
        return function(**arguments)
    except ValueError as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if raised_in != inspect.getsourcefile(inspect.unwrap(function)):
            raise
        raise InputError(f"--model={name}: {' '.join(str(error).split())}") from None


def _call_on_images(model: keras.Model, name: str, image_shape: tuple[int, ...]) -> Any:
    """Call a model on what stands for a batch of images; Keras' refusal becomes one line.

    Any other exception is a mistake in the model's own code and keeps its traceback.
    """
    try:
        inputs = getattr(model, "inputs", None) or []  # absent before a model is built
        own = tuple(inputs[0].shape[1:]) if len(inputs) == 1 else image_shape
        if not tf.TensorShape(own).is_compatible_with(image_shape):  # Keras lets some pass
            raise ValueError(f"it takes images of shape {own}")
        return model(keras.Input(image_shape), training=False)
    except (ValueError, TypeError, NotImplementedError, tf.errors.OpError) as error:
        raise InputError(
            f"--model={name} cannot take images of shape {image_shape} alone (its function may "
            f"take image_shape as an argument): {_reason(str(error))}"
        ) from None


def _reason(message: str) -> str:
    """Return the sentence that says what is wrong, without what Keras puts around it."""
    message = re.sub(r"\x1b\[\d*m", "", message).split("\n\nArguments received")[0]
    parts = [part for part in message.split("\n\n") if part.strip()]
    inner = [p for p in parts if not p.startswith(("Exception encountered", "Could not auto"))]
    return " ".join((inner or parts or ["it raised an error"])[0].split())[:200]
