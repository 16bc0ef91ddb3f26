"""Builds the user's Keras model from its name, compiled by its function or by the flags."""

import contextlib
import dataclasses
import hashlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from towers.data import Data, augment
from towers.errors import InputError, first_line, kind_of
from towers.options.functions import PREFIX, call_without_arguments, load_function
from towers.options.run import OF_COMPILED, Options
from towers.training.run.optimizers import DECAY_APART, is_decayed, make_optimizer
from towers.training.run.precision import force_float64
from towers.training.step.evaluation import check_rows
from towers.training.step.step import floatx_of
from towers.training.step.train_state import overrides

_NO_CLASSES = (
    "the targets are not classes, integers from 0 (at most 1000, or as many as examples; for more "
    "return (train, test, num_classes) from the data function)"
)


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A compiled model, and what examples go through before it."""

    network: keras.Model
    by_flags: bool  # whether flags have compiled it, and not its function
    augment: str  # that of the options, in which "auto" is resolved
    prepare: Callable  # see `augment.preparation`
    code: Mapping[str, str | None]  # see `code_of`


def build_model(options: Options, dataset: Data, exact: bool = False) -> BuiltModel:
    """Build a run's model, see `build_for`, and compile it unless its function did.

    Raises:
        InputError: the options do not fit the model.
    """
    if dataset.image_shape is None:
        for name, value in ("model", Options.model), ("test_time_flip", True):
            if getattr(options, name) == value:
                raise InputError(
                    f"--{name}={value} needs images, and --dataset={options.dataset} has none; "
                    "leave it out, or name your own model with --model=my_net:build"
                )
    # "auto" depends on whether the model is compiled; the image shape does not.
    kind = augment.resolve(options.augment, dataset, compiled=False)
    resolved = dataclasses.replace(options, augment=kind)
    function = load_function("model", options.model)
    with floatx_of(options.dtype):  # layers, the loss and the metrics compute in it
        network = build_for(
            resolved,
            function,
            num_classes=dataset.num_classes,
            x=dataset.spec[0],
            image_shape=dataset.image_shape,
            exact=exact,
        )
        if by_flags := not network.compiled:
            if not (options.loss or options.metrics):
                check_classifier(network, resolved, dataset)
            compile_from_flags(network, options)
    code = code_of(options.model, function)
    for output in (getattr(network, "outputs", None) or []) if options.test_time_flip else []:
        check_rows(output)
    if not by_flags:
        _refuse_overridden(options)
        kind = augment.resolve(options.augment, dataset, compiled=True)
    as_they_are = dataset.image_shape is None or (kind == "none" and not by_flags)
    prepare = augment.preparation(None if as_they_are else kind, options.input_dtype)
    return BuiltModel(network, by_flags, kind, prepare, code)


def code_of(name: str, function: Callable) -> dict[str, str | None]:
    """Return {"model": checksum of the file that has the model function; None if there is none}.

    Args:
        name: of the function, an option.
        function: of that name.
    """
    checksum = None
    if not name.startswith(PREFIX):
        with contextlib.suppress(OSError, TypeError):  # it is not written in Python
            path = inspect.getsourcefile(inspect.unwrap(function))
            checksum = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return {"model": checksum}


def build_for(
    options: Options,
    function: Callable,
    *,
    num_classes: int,
    x: Any,
    image_shape: Sequence[int] | None = None,
    exact: bool = False,
) -> keras.Model:
    """Build the model of a run, its variables on the CPU, where `floatx_of` its dtype is in force.

    Args:
        options: of the run, with `augment` resolved.
        function: that they name.
        num_classes: argument of the model function, if it takes it; 0: targets are no classes.
        x: specs of one example as it is stored, without batch axis.
        image_shape: (height, width, channels) of a stored image; the function is given that of
            the model's inputs, if it takes it.
        exact: whether, with float64, layers of another floating type compute in float64, too.

    Returns:
        A Keras model, built unless it has no `call`.

    Raises:
        InputError: an argument that the function does not take, or what it returns is no model or
            cannot take x.
    """
    name, dtype = options.model, options.dtype
    x = _input_specs(options, x, image_shape)
    from_data: dict[str, Any] = {"num_classes": num_classes} if num_classes else {}
    if image_shape is not None:
        from_data["image_shape"] = tuple(x.shape)
    keras.utils.set_random_seed(options.seed)
    with contextlib.ExitStack() as stack:
        stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
        keras.config.set_dtype_policy(dtype)
        if exact and dtype == "float64":
            stack.enter_context(force_float64())
        stack.enter_context(tf.device("/cpu:0"))
        model = _call(function, name, from_data, options.model_keywords())
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
    """Raise InputError unless a built model returns logits of the classes, see `build_model`."""
    name, num_classes = options.model, data.num_classes
    if overrides(model, "train_step"):
        raise InputError(
            f"--model={name} has its own train_step but is not compiled; call its compile in "
            f"{name.rpartition(':')[2]}"
        )
    if not num_classes:
        raise InputError(
            f"--model={name} is not compiled, so it is trained as a classifier, but {_NO_CLASSES}; "
            "type --loss=mean_squared_error, or return a compiled model"
        )
    outputs = _call_on(model, name, _input_specs(options, data.spec[0], data.image_shape))
    shape = getattr(outputs, "shape", None)
    if shape is None or tuple(shape[1:]) != (num_classes,):
        actual = type(outputs).__name__ if shape is None else f"shape {tuple(shape)}"
        raise InputError(
            f"--model={name} has outputs of {actual}; logits of shape (batch, {num_classes}) are "
            f"needed; give the function the argument num_classes, which is {num_classes} here"
        )


def compile_from_flags(model: keras.Model, options: Options) -> None:
    """Compile a model as --loss, --metrics and the flags of the update say.

    By default it is a classifier: cross entropy of logits, and accuracy.

    Args:
        model: built. Weight decay is added to the regularizers of its kernels.
        options: of the run.

    Raises:
        InputError: a flag names nothing that can be used, or excludes another.
    """
    names = options.metrics or ("" if options.loss else "accuracy")
    metrics = [_resolve("metrics", n, keras.metrics.get) for n in names.split(",") if n]
    loss = _resolve("loss", options.loss, keras.losses.get) if options.loss else None
    if loss and options.label_smoothing:
        raise InputError(
            f"--label_smoothing={options.label_smoothing:g} is for the default loss; leave it out, "
            "or name a --loss with smoothing as module:function"
        )
    weights = model.trainable_variables
    if options.weight_decay and options.optimizer not in DECAY_APART:
        for weight in filter(is_decayed, weights):
            weight.regularizer = _with_decay(weight.regularizer, options.weight_decay / 2)
    if not loss:
        smoothed = options.label_smoothing
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loss = SmoothedCrossEntropy(smoothed) if smoothed else cross_entropy
    own = options.makes_own_optimizer
    optimizer = _own_optimizer(options.optimizer) if own else make_optimizer(weights, options)
    model.compile(optimizer, loss, metrics=metrics)


def _own_optimizer(name: str) -> keras.optimizers.Optimizer:
    """Return the optimizer that the user's function of this name makes."""
    made = call_without_arguments("optimizer", name)
    if isinstance(made, keras.optimizers.Optimizer):
        return made
    raise InputError(
        f"--optimizer={name} returned {type(made).__name__}; a keras.optimizers.Optimizer is needed"
    )


def _call(function: Callable, name: str, from_data: dict, keywords: dict) -> keras.Model:
    """Call a model function with what it takes of `from_data`, and all `keywords`."""
    if isinstance(function, keras.Model):  # which can be called, too
        raise InputError(f"--model={name} is a model; name the function that builds it")
    signature = inspect.signature(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    taken = {k: v for k, v in from_data.items() if k in signature.parameters or takes_all}
    try:
        signature.bind(**taken | keywords)
    except TypeError as error:
        if "'num_classes'" in str(error):
            raise InputError(
                f"{name} takes num_classes, but {_NO_CLASSES}; convert them with "
                "y.astype('int32'), one-hot rows with y.argmax(-1), or remove num_classes from the "
                "function and type --loss=mean_squared_error"
            ) from None
        raise InputError(
            f"--model_args: {name} takes {signature}: {error}; the data give "
            f"{', '.join(from_data) or 'none'}; set others with --model_args=NAME=VALUE"
        ) from None
    try:
        model = function(**taken | keywords)
    except ValueError as error:  # of its own, as of a wrong depth
        file = inspect.getsourcefile(inspect.unwrap(function))
        if traceback.extract_tb(error.__traceback__)[-1].filename != file:
            raise
        raise InputError(f"--model={name}: {' '.join(str(error).split())}") from None
    if not isinstance(model, keras.Model):
        raise InputError(f"--model={name} returned {kind_of(model)}; a keras.Model is needed")
    return model


def _call_on(model: keras.Model, name: str, x: Any) -> Any:
    """Call a model on a symbolic batch of `x`; raise Keras' errors about it as InputError."""
    try:
        inputs = getattr(model, "inputs", None) or []  # absent before a model is built
        if len(inputs) == 1 and isinstance(x, tf.TensorSpec):  # Keras accepts some others
            shape = tuple(inputs[0].shape[1:])
            if not tf.TensorShape(shape).is_compatible_with(x.shape):
                raise ValueError(f"its inputs have shape {shape}")
        batch = tf.nest.map_structure(lambda s: keras.Input(s.shape, dtype=s.dtype.name), x)
        takes = "training" in inspect.signature(model.call).parameters
        return model(batch, training=False) if takes else model(batch)
    except (ValueError, TypeError, NotImplementedError, tf.errors.OpError) as error:
        example = tf.nest.map_structure(lambda s: f"{s.dtype.name} {s.shape}", x)
        if isinstance(x, tf.TensorSpec) and x.shape.rank == 3:
            example += " (its function may take image_shape as an argument)"
        raise InputError(f"--model={name} cannot take {example}: {first_line(error)}") from None


def _refuse_overridden(options: Options) -> None:
    """Raise InputError for a flag that would override a setting of a compiled model."""
    for name in OF_COMPILED:
        value, default = getattr(options, name), getattr(Options, name)
        if value != default:
            short = {"learning_rate": "lr"}.get(name, name)
            raise InputError(
                f"--{name}={value}, but {options.model} returns a compiled model, which has its "
                f"own; leave --{name} out, or write build({short}=...) and type "
                f"--model_args={short}={value} (in a sweep --vary=model_args:{short}={value},...)"
            )


def _with_decay(regularizer: Callable | None, l2: float) -> Callable:
    """Return a regularizer that also adds `l2` times the sum of squares."""
    kinds = keras.regularizers
    if regularizer is None:
        return kinds.L2(l2)
    if type(regularizer) in (kinds.L1, kinds.L2, kinds.L1L2):  # which a file of Keras can name
        config = regularizer.get_config()
        return kinds.L1L2(config.get("l1", 0.0), config.get("l2", 0.0) + l2)
    return lambda weight: regularizer(weight) + kinds.L2(l2)(weight)


def _resolve(flag: str, name: str, get: Callable) -> Any:
    """Return Keras' loss or metric of a name, or the user's own module:function.

    A class, or a function without arguments, is called.
    """
    if ":" in name:
        resolved = load_function(flag, name)
        if isinstance(resolved, type) or not inspect.signature(resolved).parameters:
            resolved = call_without_arguments(flag, name)
        return resolved
    try:
        resolved = get(name)
        return name if flag == "metrics" else resolved  # "accuracy" has many meanings, mae its name
    except ValueError:
        raise InputError(
            f"--{flag}={name}: Keras has nothing of that name; name one, such as "
            f"{'mean_squared_error' if flag == 'loss' else 'mae'}, or module:function"
        ) from None


class SmoothedCrossEntropy(keras.losses.SparseCategoricalCrossentropy):
    """Cross entropy of logits with label smoothing (Szegedy et al. 2016).

    The right class has probability 1 - `smoothing`, and the rest is spread over all classes.
    """

    def __init__(self, smoothing: float):
        """Set the smoothing, 0 to 1."""
        super().__init__(from_logits=True)
        self.smoothing = smoothing

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the loss of each example, see `keras.Loss`."""
        of_all = -tf.reduce_mean(tf.nn.log_softmax(y_pred), axis=-1)
        return (1.0 - self.smoothing) * super().call(y_true, y_pred) + self.smoothing * of_all
