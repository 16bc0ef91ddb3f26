"""Checks before the first step that data, model and loss match.

A mistake that Keras would train on raises InputError with a remedy, and a doubtful model gives a
warning. Losses, metrics and training steps of the user's own are not checked.
"""

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.data import Data
from towers.errors import InputError
from towers.options.run import Options
from towers.training.step.losses import LossInput, LossRecorder

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
_LINEAR = keras.activations.linear
# These broadcast silently.
_ELEMENTWISE = (
    "mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error", "huber", "log_cosh", "poisson", "dice", "tversky",
    "cosine_similarity", "kl_divergence", "hinge", "squared_hinge", "categorical_hinge",
)  # fmt: skip


def check(task: Any, batch: Any) -> list[str]:
    """Check a task on its first batch; return warnings of likely mistakes.

    The batch is (example, draws), and no step was made yet, see `Task`.

    Raises:
        InputError: data, model and loss do not match.
    """
    (example, _), flag = batch, _flag_of(task.options)
    lines = [
        f"{flag}: its step changes the variable {name}, which checkpoints do not hold, so a "
        "resumed run gets other results; create it with add_weight(..., trainable=False), or, "
        "for random numbers, keep a keras.random.SeedGenerator in the layer"
        for name in task.unsaved
    ]
    if task.recorder.is_keras:
        lines += _check_losses(task.recorder, example, flag, task.data)
    return [f"warning     {line}" for line in dict.fromkeys(lines)]


@contextlib.contextmanager
def translate_loss_errors(recorder: LossRecorder, options: Options, data: Data) -> Iterator[None]:
    """Raise errors of Keras' own losses and metrics in the block as InputError of one line.

    Args:
        recorder: in use in the block, where the model's steps are traced.
        options: of the run.
        data: of the run, whose first batch is looked at after an error.

    Raises:
        InputError: there is no loss, or it or a metric cannot be computed of these data.
    """
    try:
        yield
    except (
        ValueError, TypeError, KeyError, AttributeError, NotImplementedError, tf.errors.OpError
    ) as error:  # fmt: skip
        flag, model = _flag_of(options), recorder.model
        if str(error).startswith("No loss to compute"):
            raise InputError(
                f"{flag} is compiled without a loss; give one with compile(..., loss=...) or "
                "--loss=..."
            ) from None
        if not _raised_in_compiled(error) or isinstance(error, InputError):
            raise
        example, _ = next(iter(data.train.train_batches(options.batch_size, seed=options.seed)))
        if recorder.is_keras:
            _check_losses(recorder, example, flag, data)
        names = getattr(model, "output_names", None)
        outputs = [shape_of(each.outputs) for each in recorder.inputs] or names or ["unknown"]
        given = [
            f"targets {_shapes_of(example[1]) if len(example) > 1 else 'none'}",
            f"outputs {', '.join(outputs)}",
        ]
        given += [f"sample weights {_shapes_of(part)}" for part in example[2:]]
        text = " ".join(str(error).partition(" for '{{node")[0].split()).removesuffix(".")[:200]
        raise InputError(
            f"{flag}: its loss or a metric cannot be computed for this data set "
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


def _check_losses(recorder: LossRecorder, example: Any, flag: str, data: Data) -> list[str]:
    leaves = tf.nest.flatten(example[1]) if len(example) > 1 else []
    activation, layer = _output_ending(recorder.model)
    lines = []
    for inputs in recorder.inputs:
        values = None if inputs.target is None else leaves[inputs.target].numpy()
        if values is not None and not (values.size and values.dtype.kind in "iufb"):
            values = None
        alone = len(recorder.inputs) == 1 and inputs.kind
        wrong = _wrong_shapes(inputs) if inputs.kind in _ELEMENTWISE else ""
        wrong = wrong or (_wrong_ending(inputs, activation, layer) if alone else "")
        if not wrong and inputs.kind == _SPARSE and len(inputs.y) == len(inputs.outputs) > 1:
            if inputs.y[-1] == inputs.outputs[-1] != 1:
                wrong = (
                    f"labels of shape {shape_of(inputs.y)} are one-hot, but {_SPARSE} takes class "
                    "numbers; use categorical_crossentropy, or y.argmax(-1)"
                )
        if not wrong and values is not None and inputs.kind == _SPARSE:
            wrong = _wrong_classes(inputs, values, data.num_classes if len(leaves) == 1 else 0)
        excluded = len(example) > 2 or inputs.masked  # targets may be left out
        if not wrong and values is not None and inputs.kind in _BINARY and not excluded:
            wrong = _outside_of_0_to_1(values, inputs.kind)
        if wrong:
            raise InputError(f"{flag}: {wrong}")
        twice = alone and getattr(inputs.loss, "from_logits", False)
        if twice and activation in ("softmax", "sigmoid"):
            lines.append(
                f"{flag}: the model ends with a {activation}, and the loss has from_logits=True, "
                f"so it is applied twice; remove the {activation} from the last layer, or "
                "from_logits=True from the loss"
            )
    return lines


def _wrong_shapes(inputs: LossInput) -> str:
    """Return what is wrong if targets would be broadcast, or ""."""
    y, outputs = inputs.y, inputs.outputs
    if len(y) == len(outputs) + 1 and y[-1] == 1:  # Keras takes an axis of size 1 away
        outputs = (*outputs, 1)
    elif len(outputs) == len(y) + 1 and outputs[-1] == 1:
        y = (*y, 1)
    pairs = zip(y[1:], outputs[1:], strict=False)
    if len(y) == len(outputs) and all(None in pair or pair[0] == pair[1] for pair in pairs):
        return ""
    advice = "change the model so that its output has the shape of the targets"
    if len(y) == 2 >= len(outputs) and y[1] != 1:
        advice = f"give the last layer {y[1]} units"
    elif len(y) <= 2 == len(outputs):
        advice = "give the last layer 1 unit, or give a target for each of its units"
    return (
        f"the targets have shape {shape_of(inputs.y)}, but the output has shape "
        f"{shape_of(inputs.outputs)}, and {inputs.kind} needs equal shapes; {advice}"
    )


def _wrong_ending(inputs: LossInput, activation: str | None, layer: str) -> str:
    """Return what is wrong with the output's activation, or ""."""
    kind, wanted = inputs.kind, _PROBABILITIES.get(inputs.kind)
    if activation == "softmax" and inputs.outputs[1:][-1:] == (1,):
        return (
            "the output is a softmax of 1 unit, which is always 1; use "
            'activation="sigmoid", or more units'
        )
    if not wanted or getattr(inputs.loss, "from_logits", False) or activation != "linear":
        return ""
    name = "".join(part.title() for part in kind.split("_"))
    return (
        f"the output layer {layer} has no activation, but {kind} takes probabilities; "
        f'give the layer activation="{wanted}", or use '
        f"keras.losses.{name}(from_logits=True)"
    )


def _wrong_classes(inputs: LossInput, values: np.ndarray, num_classes: int) -> str:
    """Return what is wrong with numbers of classes, or ""."""
    if values.dtype.kind == "f" and np.any(broken := values != np.floor(values)):
        return (
            f"the labels are not integers, such as {values[broken][0]:g}, but {_SPARSE} takes "
            "class numbers; for regression use mean_squared_error"
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
            advice = f"count labels from 0, or give the last layer {size + 1} units"
        which = f"smallest label is {bad[0]}" if bad[0] < 0 else f"largest label is {bad[-1]}"
        return f"the {which}, but the model has {size} outputs (classes 0 to {size - 1}); {advice}"
    if num_classes > size and ignored is None:
        return (
            f"there are {num_classes} classes, but the model has {size} outputs; give the last "
            f"layer {num_classes} units"
        )
    return ""


def _outside_of_0_to_1(values: np.ndarray, kind: str) -> str:
    """Return what is wrong with targets of a binary loss, or ""."""
    least, most = float(values.min()), float(values.max())
    if not np.isfinite([least, most]).all() or (least >= 0 and most <= 1):
        return ""
    advice = "scale them, or use a loss for regression, such as mean_squared_error"
    if least == 0 and np.array_equal(values, np.floor(values)):
        advice = f"for class numbers use {_SPARSE} and {int(most) + 1} units"
    return f"the targets go from {least:g} to {most:g}, but {kind} takes 0 to 1; {advice}"


def _flag_of(options: Any) -> str:
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


def _output_ending(model: keras.Model) -> tuple[str | None, str]:
    """Return the final activation of a model's single output, and the layer that has it.

    It is "softmax", "sigmoid", "linear", or None: another, or unknown, as that of a model with
    several outputs or of a subclassed model.
    """
    outputs = getattr(model, "outputs", None) or []
    if len(outputs) != 1:
        return None, ""
    tensor = outputs[0]
    while True:
        layer, place, inputs = tf_internals.maker_of(tensor)
        if getattr(layer, "outputs", None):  # a model in it
            tensor = layer.outputs[place]
        elif isinstance(layer, keras.layers.Activation) and layer.activation is _LINEAR:
            tensor = inputs[0]
        else:
            return _activation(layer), layer.name


def _activation(layer: keras.Operation) -> str | None:
    is_keras = type(layer).__module__.startswith("keras.")
    activation = getattr(layer, "activation", layer) if is_keras else layer
    if activation is _LINEAR:  # a constraint may make it one of probabilities
        return "linear" if getattr(layer, "kernel_constraint", None) is None else None
    if activation is layer and getattr(layer, "axis", -1) != -1:
        return None
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    return name if name in ("softmax", "sigmoid") else None
