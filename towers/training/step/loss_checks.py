"""Checks before the first step that data, model and loss match.

Certain mistakes raise InputError with a remedy, likely ones give a warning. Losses, metrics and
training steps of the user's own are not checked.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.replica_scope import ReplicaScope
from towers.errors import InputError
from towers.formatting import count
from towers.training.run.model import overrides
from towers.training.step.output_activation import OutputActivation, ending_of, final_activation
from towers.training.step.output_checks import LossInput, OutputCheck, doubtful_metrics, shape_of
from towers.training.step.task import Task

_ROWS = 32  # of the first loss, or a tower's slice if that is larger


class LossRecorder:
    """Records the inputs of losses while a model's step is traced."""

    def __init__(self, model: keras.Model):
        """Record nothing yet."""
        self.model, self.inputs = model, []  # of `LossInput`
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
                    self.of_examples &= self._record(loss, target, y_true, y_pred, weights)
                    if self.of_examples:  # do not call a user's loss twice
                        self.of_examples = _is_per_example(call, loss, y_true, y_pred, weights)
                depth += 1
                try:
                    return call(loss, y_true, y_pred, *args, **kwargs)
                finally:
                    depth -= 1

            return recording

        with tf_internals.patch_losses(make):
            yield

    def _record(self, loss: Any, target: int | None, y: Any, outputs: Any, weights: Any) -> bool:
        """Record a loss if its shapes are known; return whether it is Keras' own and unmasked."""
        shapes = [
            None if t is None or t.shape.rank is None else tuple(t.shape)
            for t in (y, outputs, weights if isinstance(weights, tf.Tensor) else None)
        ]
        if not all(shapes[:2]):  # unknown, or without a batch axis
            return False
        inputs = LossInput(loss, target, *shapes, tf_internals.mask_of(outputs) is not None)
        self.inputs.append(inputs)
        return bool(inputs.kind) and not inputs.masked


@contextlib.contextmanager
def per_example_losses(total: int) -> Iterator[None]:
    """Make Keras' losses return one loss per example, [b], whose mean is the loss of the batch.

    Losses with the reduction "sum" are multiplied by `total`, the examples of a batch.
    """

    def make(call: Callable) -> Callable:
        return lambda loss, *args, **kwargs: _per_example(call, loss, total, *args, **kwargs)

    with tf_internals.patch_losses(make):
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
        masks.append(tf_internals.mask_of(values))
        return values

    vars(loss)["call"] = noting
    try:
        values = _per_example(call, loss, 1, y, outputs, weights)
    except Exception:
        return False  # it needs the whole batch
    finally:
        del vars(loss)["call"]
    return masks == [None] and values.shape.rank == 1 and values.shape[0] == outputs.shape[0]


def check(task: Task, batch: Any) -> list[str]:
    """Check a task on its first batch; return warnings of likely mistakes.

    Args:
        task: of the run, before its first step.
        batch: (example, draws).

    Raises:
        InputError: data, model and loss do not match.
    """
    example, _ = batch
    recorder: LossRecorder | None = getattr(task, "recorder", None)
    if recorder is None:
        return _check_classifier(task, example)
    lines = [
        f"{_flag_of(task)}: its step changes the variable {name}, which no checkpoint holds, so a "
        "run that was stopped goes on with other numbers: make it by add_weight(..., "
        "trainable=False); for draws keep a keras.random.SeedGenerator in the layer"
        for name in task.unsaved
    ]
    if recorder.is_keras:
        lines += _check_outputs(task, recorder, example)
        _check_first_loss(task, batch, lines)
    return [f"warning     {line}" for line in dict.fromkeys(lines)]


@contextlib.contextmanager
def translate_loss_errors(task: Task, recorder: LossRecorder, batches: Any) -> Iterator[None]:
    """Raise errors of Keras' own losses and metrics in the block as InputError of one line.

    Args:
        task: of the compiled model.
        recorder: of the model's losses, in use in the block.
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
        raised = tf_internals.raised_in_compiled(error)
        if raised is None or isinstance(error, InputError):
            raise
        example, _ = next(iter(batches))
        if recorder.is_keras and not raised:
            _check_structure(task, example)
            _check_outputs(task, recorder, example)
        subject = f"the metric {raised}" if raised else "its loss"
        shapes = ", ".join(
            f"targets {shape_of(inputs.y)} with outputs {shape_of(inputs.outputs)}"
            for inputs in recorder.inputs
        )
        shapes = f" ({shapes or f'targets {_shapes_of(example[1:])}'})"
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        text = " ".join(text.partition(" for '{{node")[0].split()).removesuffix(".")[:200]
        raise InputError(
            f"{_flag_of(task)}: {subject} cannot be computed of this data set{shapes}: "
            f"{text or type(error).__name__}"
        ) from None


def _check_classifier(task: Task, example: Any) -> list[str]:
    for weights in example[2:]:
        if not isinstance(weights, tf.Tensor) or weights.shape.rank != 1:
            raise InputError(
                f"--dataset={task.options.dataset}: sample weights of shape {_shapes_of(weights)}; "
                "a classifier takes one number for each example"
            )
    final = final_activation(task.model)
    if final not in ("softmax", "sigmoid"):
        return []
    return [
        f"warning     {task.options.model} ends in a {final}, and the loss takes logits, of which "
        f"it takes the softmax itself: it will learn badly; take the {final} off the last layer"
    ]


def _check_structure(task: Task, example: Any) -> None:
    """Raise InputError for missing targets, or names that are not those of the outputs."""
    if len(example) < 2:
        raise InputError(
            f"--dataset={task.options.dataset} gives no targets, and the loss of "
            f"{task.options.model} needs them: give (x, y)"
        )
    outputs, losses = _outputs(task.model), task.model.loss
    names = list(outputs) if isinstance(outputs, dict) else None
    names = names or getattr(task.model, "output_names", None)  # a Sequential has none
    if outputs is None or not names:
        return
    losses = losses if isinstance(losses, dict) else dict.fromkeys(names, losses)
    for name in losses:
        if name not in names:
            raise InputError(
                f"--model={task.options.model}: there is a loss for {name!r}, and the outputs are "
                f"{_quoted(names)}: name one of them"
            )
    needed = {name for name in names if losses.get(name) is not None}
    for role, named in zip(("targets", "sample weights"), example[1:], strict=False):
        if isinstance(named, dict) and not needed <= set(named) <= set(names):
            raise InputError(
                f"--dataset={task.options.dataset}: the {role} are named {_quoted(named)}, and the "
                f"outputs of {task.options.model} {_quoted(names)}: give both the same names"
            )
    if (number := len(tf.nest.flatten(example[1]))) not in (len(needed), len(names)):
        raise InputError(
            f"--dataset={task.options.dataset} gives {count(number, 'tensor')} of targets, and "
            f"{task.options.model} has the outputs {_quoted(names)}: give a dict with targets for "
            "each of these"
        )


def _check_outputs(task: Task, recorder: LossRecorder, example: Any) -> list[str]:
    leaves = tf.nest.flatten(example[1]) if len(example) > 1 else []
    data = task.data
    classes = (data.num_classes, data.no_classes, data.class_names) if len(leaves) == 1 else ()
    outputs, lines = _outputs(task.model), []
    unnamed = len(example) > 1 and isinstance(example[1], tuple | list)
    if isinstance(outputs, dict) and unnamed and list(outputs) != sorted(outputs):
        lines.append(
            f"{_flag_of(task)}: the targets have no names, and Keras takes them in the order "
            f"{', '.join(sorted(outputs))}: give a dict of targets"
        )
    order = lines[:]
    for inputs, (name, ending) in zip(recorder.inputs, _output_endings(recorder), strict=True):
        values = None if inputs.target is None else leaves[inputs.target].numpy()
        if values is not None and not (values.size and values.dtype.kind in "iufb"):
            values = None
        weighted = len(example) > 2 or inputs.masked
        one = OutputCheck(_flag_of(task), name, inputs, ending, values, weighted, *classes)
        try:
            lines += one.check()
        except InputError as error:
            if not order:
                raise
            reason = str(error).removeprefix(f"{_flag_of(task)}: ")
            raise InputError(f"{order[0]}; as they are: {reason}") from None
        if len(recorder.inputs) == 1:
            groups = (getattr(metric, "metrics", ()) for metric in recorder.model.metrics)
            lines += doubtful_metrics(one, itertools.chain.from_iterable(groups))
    return lines


def _output_endings(recorder: LossRecorder) -> list[tuple[str, OutputActivation]]:
    """Return (output name, "" for a single output; its activation) for each recorded loss."""
    paths, outputs = tf_internals.loss_paths(recorder.model), _outputs(recorder.model)
    endings, waiting, single = [], list(paths), len(paths) < 2
    for inputs in recorder.inputs:
        at = next((i for i, (_, _, loss) in enumerate(waiting) if loss is inputs.loss), None)
        path, name, _ = waiting.pop(at) if at is not None else ((), "", None)
        output = outputs
        for step in path:
            within = isinstance(output, dict | list | tuple)
            output = output[step] if within else output if single else None
        if isinstance(output, keras.KerasTensor):
            ending = ending_of(output)
        else:
            ending = OutputActivation(
                final_activation(recorder.model) if single and outputs is None else None
            )
        endings.append(("" if single else name, ending))
    return endings


def _check_first_loss(task: Task, batch: Any, warnings: Sequence[str]) -> None:
    """Raise InputError for an infinite or NaN first loss; `warnings` may give the reason."""
    example, draws = batch
    rows = tf.nest.flatten(draws)[0].shape[0]  # with mixing, those of the partners, too
    rows = max(-(-rows // task.builder.num_slices), min(rows, _ROWS))
    some = tf.nest.map_structure(lambda t: t[:rows], (*example, draws))
    losses: list[Any] = []

    def compute(*batch: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        values: list[tf.Tensor] = []
        losses.clear()

        def make(call: Callable) -> Callable:
            def recording(loss: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
                value = call(loss, *args, **kwargs)
                losses.append(loss)
                values.append(value)
                return value

            return recording

        with tf.device(task.builder.devices[0]), ReplicaScope(), tf_internals.patch_losses(make):
            return task.loss(*batch), values

    try:
        total, values = tf.function(compute, autograph=False)(*some)
        total, finite = float(total), [np.isfinite(value).all() for value in values]
    except Exception:  # it may need the whole batch
        return
    if np.isfinite(total):
        return
    parts = {"inputs": example[0], "targets": example[1:2], "sample weights": example[2:]}
    for role, part in parts.items():
        leaves = [leaf for leaf in tf.nest.flatten(part) if leaf.dtype.is_floating]
        if not all(bool(tf.reduce_all(tf.math.is_finite(leaf))) for leaf in leaves):
            raise InputError(
                f"--dataset={task.options.dataset}: there are {role} that are infinite or NaN in "
                f"the first batch, and the loss is {total:g} before the first step: leave these "
                "examples out, or put numbers in their place"
            )
    names = {id(loss): name for _, name, loss in tf_internals.loss_paths(task.model)}
    bad = [names.get(id(loss)) for loss, ok in zip(losses, finite, strict=True) if not ok]
    bad = [name for name in bad if name is not None and len(names) > 1]
    fault = f"the loss{f' of output {bad[0]!r}' if bad else ''} is {total:g} before the first step"
    if warnings:
        raise InputError(f"{fault}: {warnings[0]}")
    raise InputError(
        f"{_flag_of(task)}: {fault}: scale inputs and targets to about -1..1, and look whether the "
        "outputs are what the loss takes (no logarithm, root or division of 0 or less)"
    )


def _outputs(model: keras.Model) -> Any:
    """Return the symbolic outputs, by name if they have one; None for a subclassed model."""
    return model.output if getattr(model, "outputs", None) else None


def _flag_of(task: Task) -> str:
    options = task.options
    return f"--loss={options.loss}" if options.loss else f"--model={options.model}"


def _quoted(names: Any) -> str:
    return ", ".join(map(repr, names))


def _shapes_of(structure: Any) -> Any:
    return tf.nest.map_structure(lambda t: shape_of(tuple(t.shape)), structure)
