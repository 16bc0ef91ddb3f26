"""Checks before the first step that data, model and loss match.

A mistake that Keras would train on raises InputError with a remedy, and a doubtful model gives a
warning. Losses, metrics and training steps of the user's own are not checked.
"""

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.errors import InputError
from towers.training.step.keras_model import overrides
from towers.training.step.output_activation import output_ending

_OF_COMPILE = "keras.src.trainers.compile_utils"  # calls losses and metrics
_FRAMEWORKS = "keras tensorflow numpy optree towers contextlib functools".split()
_SPARSE = "sparse_categorical_crossentropy"
_BINARY = ("binary_crossentropy", "binary_focal_crossentropy")
# Losses of probabilities, with the activation that makes them.
_PROBABILITIES = {
    **dict.fromkeys(_BINARY, "sigmoid"),
    "categorical_crossentropy": "softmax",
    "categorical_focal_crossentropy": "softmax",
    _SPARSE: "softmax",
}
# These broadcast silently.
_ELEMENTWISE = (
    "mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error", "huber", "log_cosh", "poisson", "dice", "tversky",
    "cosine_similarity", "kl_divergence", "hinge", "squared_hinge", "categorical_hinge",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LossInput:
    """The inputs of a loss. Shapes have a batch axis, and None for unknown sizes."""

    loss: keras.Loss
    target: int | None  # index of y among the leaves of the data's y; None: it is computed
    y: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    masked: bool

    @property
    def kind(self) -> str:
        """Name of the Keras function that the loss computes; "" for a loss of the user's."""
        function = getattr(self.loss, "fn", None)
        modules = type(self.loss).__module__, getattr(function, "__module__", None) or ""
        is_known = all(module.partition(".")[0] in ("keras", "towers") for module in modules)
        return function.__name__ if is_known else ""


class LossRecorder:
    """Records the inputs of losses while a model's step is traced."""

    def __init__(self, model: keras.Model):
        """Record nothing yet."""
        self.inputs: list[LossInput] = []
        # Whether each loss is Keras' own, and a mean or sum of separate examples' losses.
        self.of_examples = False
        # Else the training step is the user's, and is not checked.
        self.is_keras = not overrides(model, "train_step", "compute_loss")

    @contextlib.contextmanager
    def record(self, y: Any) -> Iterator[None]:
        """Record the losses computed in the block for a batch with targets y."""
        leaves = tf.nest.flatten(y)
        self.inputs.clear()
        self.of_examples = self.is_keras
        depth = 0  # a loss may call others

        def make(call: Callable) -> Callable:
            def recording(loss: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                weights = args[0] if args else kwargs.get("sample_weight")
                if not depth and isinstance(y_true, tf.Tensor) and isinstance(y_pred, tf.Tensor):
                    target = next((i for i, leaf in enumerate(leaves) if leaf is y_true), None)
                    self.of_examples &= self._record(loss, target, y_true, y_pred)
                    if self.of_examples:  # do not call a user's loss twice
                        self.of_examples = _is_per_example(call, loss, y_true, y_pred, weights)
                depth += 1
                try:
                    return call(loss, y_true, y_pred, *args, **kwargs)
                finally:
                    depth -= 1

            return recording

        with tf_internals.replaced((keras.Loss, "__call__", make)):
            yield

    def _record(self, loss: Any, target: int | None, y: Any, outputs: Any) -> bool:
        """Record a loss if its shapes are known; return whether it is Keras' own and unmasked."""
        if not (y.shape.rank and outputs.shape.rank):  # unknown, or without a batch axis
            return False
        shapes = tuple(y.shape), tuple(outputs.shape)
        masked = tf_internals.attached(outputs, "mask") is not None
        inputs = LossInput(loss, target, *shapes, masked)
        self.inputs.append(inputs)
        return bool(inputs.kind) and not inputs.masked


@contextlib.contextmanager
def per_example_losses(total: int) -> Iterator[None]:
    """Make Keras' losses return one loss per example, [b], whose mean is the loss of the batch.

    Losses with the reduction "sum" are multiplied by `total`, the examples of a batch.
    """

    def make(call: Callable) -> Callable:
        return lambda loss, *args, **kwargs: _per_example(call, loss, total, *args, **kwargs)

    with tf_internals.replaced((keras.Loss, "__call__", make)):
        yield


def _per_example(call: Callable, loss: Any, total: int, *args: Any, **kwargs: Any) -> tf.Tensor:
    reduction, loss.reduction = loss.reduction, "none"
    try:
        values = call(loss, *args, **kwargs)
    finally:
        loss.reduction = reduction
    axes = list(range(1, values.shape.rank))
    if reduction == "sum":
        return tf.reduce_sum(values, axes) * tf.cast(total, values.dtype)
    return tf.reduce_mean(values, axes)


def _is_per_example(call: Callable, loss: Any, y: Any, outputs: Any, weights: Any) -> bool:
    if loss.reduction not in ("sum_over_batch_size", "mean", "sum"):
        if loss.reduction != "mean_with_sample_weight" or weights is not None:
            return False
    masks: list[Any] = []  # as of ignore_class, which make the mean depend on the whole batch
    compute = loss.call

    def noting(*args: Any, **kwargs: Any) -> Any:
        values = compute(*args, **kwargs)
        masks.append(tf_internals.attached(values, "mask"))
        return values

    vars(loss)["call"] = noting
    try:
        values = _per_example(call, loss, 1, y, outputs, weights)
    except Exception:
        return False  # it needs the whole batch
    finally:
        del vars(loss)["call"]
    return masks == [None] and values.shape.rank == 1 and values.shape[0] == outputs.shape[0]


def check(task: Any, batch: Any) -> list[str]:
    """Check a task on its first batch; return warnings of likely mistakes.

    Args:
        task: of the run, before its first step.
        batch: (example, draws).

    Raises:
        InputError: data, model and loss do not match.
    """
    example, _ = batch
    lines = [
        f"{_flag_of(task)}: its step changes the variable {name}, which no checkpoint holds, so a "
        "run that was stopped goes on with other numbers: make it by add_weight(..., "
        "trainable=False); for draws keep a keras.random.SeedGenerator in the layer"
        for name in task.unsaved
    ]
    lines += _check_losses(task, example) if task.recorder.is_keras else []
    return [f"warning     {line}" for line in dict.fromkeys(lines)]


def check_test_step(model: keras.Model, name: str) -> None:
    """Raise InputError for Keras' own test_step without a loss, after a training step.

    Args:
        model: compiled.
        name: --model.
    """
    has_own = overrides(model, "test_step", "compute_loss")
    if not has_own and model.loss is None and not model.losses:
        raise InputError(
            f"--model={name} has a train_step of its own, no test_step, and no loss by compile, so "
            'it cannot be evaluated: give it a test_step that returns a dict such as {"loss": loss}'
        )


@contextlib.contextmanager
def translate_loss_errors(task: Any, batches: Any) -> Iterator[None]:
    """Raise errors of Keras' own losses and metrics in the block as InputError of one line.

    Args:
        task: of the compiled model, whose `recorder` is in use in the block.
        batches: (example, draws), the first of which is looked at after an error.

    Raises:
        InputError: there is no loss, or it or a metric cannot be computed of these data.
    """
    try:
        yield
    except (
        ValueError, TypeError, KeyError, AttributeError, NotImplementedError, tf.errors.OpError
    ) as error:  # fmt: skip
        if str(error).startswith("No loss to compute"):
            raise InputError(
                f"{_flag_of(task)} is compiled without a loss: give one, by compile(..., loss=...) "
                "or --loss=..."
            ) from None
        if not _raised_in_compiled(error) or isinstance(error, InputError):
            raise
        example, _ = next(iter(batches))
        if task.recorder.is_keras:
            _check_losses(task, example)
        names = getattr(task.model, "output_names", None)
        outputs = [shape_of(each.outputs) for each in task.recorder.inputs] or names or ["unknown"]
        given = [
            f"targets {_shapes_of(example[1]) if len(example) > 1 else 'none'}",
            f"outputs {', '.join(outputs)}",
        ]
        given += [f"sample weights {_shapes_of(part)}" for part in example[2:]]
        text = " ".join(str(error).partition(" for '{{node")[0].split()).removesuffix(".")[:200]
        raise InputError(
            f"{_flag_of(task)}: its loss or a metric cannot be computed of this data set "
            f"({'; '.join(given)}): {text or type(error).__name__}"
        ) from None


def _raised_in_compiled(error: BaseException) -> bool:
    """Return whether Keras raised in what `compile` was given, and not a function of the user's."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    if _OF_COMPILE not in modules:
        return False
    after = modules[modules.index(_OF_COMPILE) :]
    return all(module.partition(".")[0] in _FRAMEWORKS for module in after)


def _check_losses(task: Any, example: Any) -> list[str]:
    leaves = tf.nest.flatten(example[1]) if len(example) > 1 else []
    activation, layer = output_ending(task.model)
    lines = []
    for inputs in task.recorder.inputs:
        values = None if inputs.target is None else leaves[inputs.target].numpy()
        if values is not None and not (values.size and values.dtype.kind in "iufb"):
            values = None
        alone = len(task.recorder.inputs) == 1 and inputs.kind
        wrong = _wrong_shapes(inputs) if inputs.kind in _ELEMENTWISE else ""
        wrong = wrong or (_wrong_ending(inputs, activation, layer) if alone else "")
        if not wrong and values is not None and inputs.kind == _SPARSE:
            about = (task.data.num_classes, task.data.no_classes) if len(leaves) == 1 else (0, "")
            wrong = _wrong_classes(inputs, values, *about)
        excluded = len(example) > 2 or inputs.masked  # targets may be left out
        if not wrong and values is not None and inputs.kind in _BINARY and not excluded:
            wrong = _outside_of_0_to_1(values, inputs.kind)
        if wrong:
            raise InputError(f"{_flag_of(task)}: {wrong}")
        twice = alone and getattr(inputs.loss, "from_logits", False)
        if twice and activation in ("softmax", "sigmoid"):
            lines.append(
                f"{_flag_of(task)}: the output ends in a {activation}, and the loss has "
                "from_logits=True, so it applies one itself and learns badly: take the "
                f"{activation} off the last layer, or from_logits=True off the loss"
            )
    return lines


def _wrong_shapes(inputs: LossInput) -> str:
    """Return what is wrong if targets would be broadcast, else ""."""
    y, outputs = inputs.y, inputs.outputs
    if len(y) == len(outputs) + 1 and y[-1] == 1:  # Keras takes an axis of size 1 away
        outputs = (*outputs, 1)
    elif len(outputs) == len(y) + 1 and outputs[-1] == 1:
        y = (*y, 1)
    pairs = zip(y[1:], outputs[1:], strict=False)
    if len(y) == len(outputs) and all(None in pair or pair[0] == pair[1] for pair in pairs):
        return ""
    advice = "let the model give outputs of the targets' shape"
    if len(y) == 2 >= len(outputs) and y[1] != 1:
        advice = f"give the last layer {y[1]} units"
    elif len(y) <= 2 == len(outputs):
        advice = "give the last layer 1 unit, or a target for each of its units"
    return (
        f"targets of shape {shape_of(inputs.y)}, and the output has shape "
        f"{shape_of(inputs.outputs)}; {inputs.kind} needs both the same: {advice}"
    )


def _wrong_ending(inputs: LossInput, activation: str | None, layer: str) -> str:
    """Return what is wrong with the output's activation, else ""."""
    kind, wanted = inputs.kind, _PROBABILITIES.get(inputs.kind)
    if activation == "softmax" and inputs.outputs[1:][-1:] == (1,):
        return (
            "the output is a softmax of 1 unit, which always gives 1: take "
            'activation="sigmoid", or more units'
        )
    if not wanted or getattr(inputs.loss, "from_logits", False) or activation != "linear":
        return ""
    name = "".join(part.title() for part in kind.split("_"))
    return (
        f"the output, of layer {layer}, has no activation, and {kind} takes probabilities: "
        f'give it activation="{wanted}", or the loss from_logits=True: '
        f"keras.losses.{name}(from_logits=True)"
    )


def _wrong_classes(inputs: LossInput, values: np.ndarray, num_classes: int, no_classes: str) -> str:
    """Return what is wrong with numbers of classes, else ""; see `Data` for the last two."""
    if values.dtype.kind == "f" and np.any(broken := values != np.floor(values)):
        return (
            f"targets such as {values[broken][0]:g} are no whole numbers, and {_SPARSE} takes the "
            "number of the class: for numbers take mean_squared_error"
        )
    size, ignored = inputs.outputs[-1], getattr(inputs.loss, "ignore_class", None)
    if size is None:
        return ""
    bad = np.unique(values[(values < 0) | (values >= size)]).astype(np.int64)
    bad = bad[bad != ignored]
    if bad.size:
        advice = f"give the last layer {bad[-1] + 1} units or more"
        if bad[0] < 0 or bad[-1] == 255:
            advice = f"if {bad[0]} means no class, give the loss ignore_class={bad[0]}"
        elif bad[0] == size and values.min() == 1:
            advice = f"count them from 0, or give the last layer {size + 1} units"
        return (
            f"there are targets {', '.join(map(str, bad[:3]))}{', ...' * (bad.size > 3)}, and the "
            f"output has {size} units, for classes 0..{size - 1}: {advice}"
        )
    if num_classes > size and ignored is None:
        return (
            f"the targets are of {num_classes} classes, and the output has {size} units: give the "
            f"last layer {num_classes}"
        )
    return no_classes if ignored is None else ""


def _outside_of_0_to_1(values: np.ndarray, kind: str) -> str:
    """Return what is wrong with targets of a binary loss, else ""."""
    least, most = float(values.min()), float(values.max())
    if not np.isfinite([least, most]).all() or (least >= 0 and most <= 1):
        return ""
    advice = "bring them there, or take a loss for numbers, such as mean_squared_error"
    if least == 0 and np.array_equal(values, np.floor(values)):
        advice = f"for numbers of classes take {_SPARSE}, and {int(most) + 1} units"
    return f"targets go from {least:g} to {most:g}, and {kind} takes 0..1: {advice}"


def _flag_of(task: Any) -> str:
    options = task.options
    return f"--loss={options.loss}" if options.loss else f"--model={options.model}"


def shape_of(shape: Sequence[int | None]) -> str:
    """Return a shape as text: "(batch, 3)"."""
    return f"({', '.join(['batch', *(str(n or '?') for n in shape[1:])])})"


def _shapes_of(structure: Any) -> Any:
    return tf.nest.map_structure(lambda t: shape_of(tuple(t.shape)), structure)


def text_of_loss(loss: Any) -> str:
    """Return the name of a loss, or those of several."""
    if isinstance(loss, Mapping):
        return ", ".join(f"{name}: {text_of_loss(part)}" for name, part in loss.items())
    if isinstance(loss, list | tuple):
        return ", ".join(map(text_of_loss, loss))
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", None) or loss)
