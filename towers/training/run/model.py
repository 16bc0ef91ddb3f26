"""Builds the user's Keras model from its name, and records what is needed to build it again."""

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.data import Data, augment
from towers.errors import InputError
from towers.formatting import first_of
from towers.options.augmentation import parse
from towers.options.functions import load_function
from towers.options.run import Options
from towers.tf_internals import floatx_set, force_float64

_OF_A_STEP = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics",
              "make_train_function", "make_test_function", "make_predict_function")  # fmt: skip


def build_for(
    options: Options,
    *,
    num_classes: int,
    x: Any,
    image_shape: Sequence[int] | None = None,
    exact: bool = False,
    no_classes: str = "",
) -> keras.Model:
    """Build the model of a run, its variables on the CPU.

    Args:
        options: of the run, with `augment` resolved.
        num_classes: argument of the model function, if it takes it; 0: targets are no classes.
        x: specs of one example as it is stored, without batch axis.
        image_shape: (height, width, channels) of a stored image; the function is given that of
            the model's inputs, if it takes it.
        exact: whether, with float64, layers of another floating type compute in float64, too.
        no_classes: why integer targets are no classes, if so; see `Data`.

    Returns:
        A Keras model, built unless it has no `call`.

    Raises:
        InputError: no such function, an argument that it does not take, or what it returns is no
            model or cannot take x.
    """
    name, dtype = options.model, options.dtype
    function = load_function("model", name)
    if isinstance(function, keras.Model):  # which can be called, too
        raise InputError(
            f"--model={name} is a model, and not the function that returns it: write "
            f"`def build(): return ...` around it, and type --model={name.partition(':')[0]}:build"
        )
    x = _input_specs(options, x, image_shape)
    from_data: dict[str, Any] = {"num_classes": num_classes} if num_classes else {}
    if image_shape is not None:
        from_data["image_shape"] = tuple(x.shape)
    arguments = _arguments(function, name, from_data, options.model_keywords(), no_classes)
    keras.utils.set_random_seed(options.seed)
    with contextlib.ExitStack() as stack:
        stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
        keras.config.set_dtype_policy(dtype)
        stack.enter_context(floatx_of(dtype))
        if exact and dtype == "float64":
            stack.enter_context(force_float64())
        stack.enter_context(tf.device("/cpu:0"))
        model = _call(function, name, arguments)
        if not isinstance(model, keras.Model):
            raise InputError(
                f"--model={name} returned {type(model).__name__}; a keras.Model is needed"
            )
        if overrides(model, "call"):  # a model of several parts, as a GAN, may have none
            _call_on(model, name, x)  # builds it, too
    return model


def _input_specs(options: Options, x: Any, image_shape: Sequence[int] | None) -> Any:
    """Return the specs of the model's inputs for one example; see `build_for`."""
    if image_shape is None:
        return x
    shape = augment.output_shape(tuple(image_shape), options.augment)
    return tf.TensorSpec(shape, options.input_dtype)


def check_classifier(model: keras.Model, options: Options, data: Data) -> None:
    """Raise InputError unless an uncompiled model returns logits of the data's classes.

    Args:
        model: built.
        options: of the run, with `augment` resolved.
        data: of the run.
    """
    name, num_classes = options.model, data.num_classes
    if overrides(model, "train_step"):
        raise InputError(
            f"--model={name} has a train_step of its own, and is not compiled: call its compile in "
            f"{name.rpartition(':')[2]}"
        )
    if not num_classes:
        reason = data.no_classes
        reason = reason or "the targets are not classes, one whole number for each example"
        raise InputError(
            f"--model={name} is not compiled, so it is a classifier, and {reason}: type "
            "--loss=mean_squared_error, or return the model compiled"
        )
    outputs = _call_on(model, name, _input_specs(options, data.spec[0], data.image_shape))
    shape = getattr(outputs, "shape", None)
    if shape is None or tuple(shape[1:]) != (num_classes,):
        actual = type(outputs).__name__ if shape is None else f"shape {tuple(shape)}"
        raise InputError(
            f"--model={name} gives outputs of {actual}; logits of shape "
            f"(batch, {num_classes}) are needed: take num_classes={num_classes} as an argument"
        )
    if "float" not in str(outputs.dtype):
        raise InputError(f"--model={name} gives outputs of type {outputs.dtype}; logits are floats")


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


def task_of(data: Data, options: Options) -> dict[str, Any]:
    """Return what a manifest records of the data, to build the model without them.

    Args:
        data: of the run.
        options: of the run, with `augment` resolved.
    """
    return {
        "num_classes": data.num_classes,
        "class_names": list(data.class_names),
        "image_shape": data.image_shape and list(data.image_shape),
        "augment": parse(options.augment).base,  # which is all that evaluation uses
        "spec": tf.nest.map_structure(lambda s: f"{s.dtype.name}{s.shape.as_list()}", data.spec),
    }


def spec_of(recorded: Any) -> Any:
    """Return the structure of `tf.TensorSpec`s that a task's `spec` records."""
    if isinstance(recorded, str):
        dtype, shape = re.fullmatch(r"(\w+)\[(.*)\]", recorded).groups()
        sizes = [None if size == "None" else int(size) for size in shape.split(", ") if size]
        return tf.TensorSpec(sizes, dtype)
    if isinstance(recorded, dict):
        return {name: spec_of(part) for name, part in recorded.items()}
    return [spec_of(part) for part in recorded]


def is_task(task: Mapping[str, Any]) -> bool:
    """Return whether a manifest's task can be one; raise an error of some kind or return False."""
    kinds = {"num_classes": int | None, "class_names": list, "augment": str, "spec": list}
    sizes = task["image_shape"]
    known = [isinstance(task[name], kind) for name, kind in kinds.items()]
    known += [isinstance(size, int) for size in ([] if sizes is None else list(sizes))]
    return all(known) and bool(spec_of(task["spec"]))


def check_data(
    data: Data,
    options: Options,
    task: Mapping[str, Any],
    number: bool = False,
    trains: bool = False,
) -> None:
    """Check that data have the classes, and to train on the image shape, of a run.

    Args:
        data: the data.
        options: of the run.
        task: of the run's manifest.
        number: whether the number of classes has to be the same, too.
        trains: whether the run is to be resumed.

    Raises:
        InputError: they have others; these are named.
    """
    dataset, now = options.dataset, list(data.class_names)
    then, remedy = task.get("class_names", now), f"--init_from={options.train_dir}"
    if now[: len(then)] != then[: len(now)] or (number and len(now) != len(then)):
        named = {"new": sorted({*now} - {*then}), "missing": sorted({*then} - {*now})}
        changes = [f"{word}: {first_of(names)}" for word, names in named.items() if names]
        raise InputError(
            f"--dataset={dataset} has other classes than the run was trained on "
            f"({'; '.join(changes) or 'in another order'}): give data of the same classes, or "
            f"train in another --train_dir with {remedy}, which loads the weights that fit"
        )
    shapes = data.image_shape, task.get("image_shape")
    if trains and all(shapes) and list(shapes[0]) != shapes[1]:
        here, there = ("x".join(map(str, shape)) for shape in shapes)
        raise InputError(
            f"--dataset={dataset} has images of {here}, and the run was trained on {there}: type "
            f"--image_size={there.rpartition('x')[0]}, or train in another --train_dir with "
            f"{remedy}"
        )


def _arguments(
    function: Callable, name: str, from_data: dict, keywords: dict, no_classes: str
) -> dict[str, Any]:
    """Return the arguments in `from_data` that `function` takes, and all `keywords`."""
    signature = inspect.signature(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    taken = {k: v for k, v in from_data.items() if k in signature.parameters or takes_all}
    arguments = taken | keywords
    if "image_shape" in from_data and "image_shape" in keywords:
        raise InputError("--model_args: image_shape is that of the data; leave it out")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        if "'num_classes'" in str(error):
            reason = no_classes or (
                "the targets are not classes, whole numbers from 0: convert them by "
                "y.astype('int32'), or one-hot rows by y.argmax(-1)"
            )
            raise InputError(
                f"{name} takes num_classes, and {reason}; or remove num_classes from the function "
                "and type --loss=mean_squared_error"
            ) from None
        if "'image_shape'" in str(error) and "image_shape" not in from_data:
            raise InputError(
                f"{name} takes image_shape, but x of these data are no images [B, H, W, C]: give "
                "grey ones their channel, by x[..., None]; else give the model by --model"
            ) from None
        raise InputError(
            f"--model_args: {name} takes {signature}: {error}; from these data it can have "
            f"{', '.join(from_data) or 'none'}, any other by --model_args=NAME=VALUE"
        ) from None
    return arguments


def _call(function: Callable, name: str, arguments: dict[str, Any]) -> Any:
    """Call a model function; raise a ValueError of its own, or any error of Keras', in a line."""
    try:
        return function(**arguments)
    except Exception as error:
        file = None
        with contextlib.suppress(TypeError):  # it is not written in Python
            file = inspect.getsourcefile(inspect.unwrap(function))
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        own = isinstance(error, ValueError) and raised_in == file
        if not own and not name.startswith(("keras", "tensorflow")):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"--model={name}: {reason}") from None


def _call_on(model: keras.Model, name: str, x: Any) -> Any:
    """Call a model on a symbolic batch of `x`; raise Keras' errors about it as InputError."""
    try:
        inputs = getattr(model, "inputs", None) or []  # absent before a model is built
        if len(inputs) == 1 and isinstance(x, tf.TensorSpec):  # Keras accepts some others
            shape = tuple(inputs[0].shape[1:])
            if not tf.TensorShape(shape).is_compatible_with(x.shape):
                raise ValueError(f"it takes inputs of shape {shape}")
        batch = tf.nest.map_structure(lambda s: keras.Input(s.shape, dtype=s.dtype.name), x)
        takes = "training" in inspect.signature(model.call).parameters
        return model(batch, training=False) if takes else model(batch)
    except (ValueError, TypeError, NotImplementedError, tf.errors.OpError) as error:
        example = tf.nest.map_structure(lambda s: f"{s.dtype.name} {s.shape}", x)
        if isinstance(x, tf.TensorSpec) and x.shape.rank == 3:
            example += " (its function may take image_shape as an argument)"
        # Keep the one sentence of Keras' message that names the reason.
        message = re.sub(r"\x1b\[\d*m", "", str(error)).split("\n\nArguments received")[0]
        parts = [part for part in message.split("\n\n") if part.strip()]
        inner = [p for p in parts if not p.startswith(("Exception encountered", "Could not auto"))]
        reason = " ".join((inner or parts or ["it raised an error"])[0].split())[:200]
        raise InputError(f"--model={name} cannot take {example}: {reason}") from None
