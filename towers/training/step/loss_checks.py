"""Checks before the first step that data, model and loss match.

Certain mistakes raise InputError with a remedy, likely ones give a warning. Losses, metrics and
training steps of the user's own are not checked.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.errors import InputError
from towers.training.run.model import overrides
from towers.training.step.output_activation import OutputActivation, ending_of, final_activation
from towers.training.step.output_checks import LossInput, OutputCheck, doubtful_metrics, shape_of
from towers.training.step.task import Task


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
            _check_outputs(task, recorder, example)
        subject = f"the metric {raised}" if raised else "its loss"
        given = [
            f"targets {shape_of(inputs.y)} with outputs {shape_of(inputs.outputs)}"
            for inputs in recorder.inputs
        ]
        outputs = _outputs(task.model)
        if isinstance(outputs, dict) or not given:
            given = [f"targets {_shapes_of(example[1:2]) or 'none'}"]
            given += [f"outputs {', '.join(outputs)}"] if isinstance(outputs, dict) else []
        given += [f"sample weights {_shapes_of(part)}" for part in example[2:]]
        text = " ".join(str(error).partition(" for '{{node")[0].split()).removesuffix(".")[:200]
        raise InputError(
            f"{_flag_of(task)}: {subject} cannot be computed of this data set "
            f"({', '.join(given)}): {text or type(error).__name__}"
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
    for inputs, (name, ending) in zip(recorder.inputs, _output_endings(recorder), strict=True):
        values = None if inputs.target is None else leaves[inputs.target].numpy()
        if values is not None and not (values.size and values.dtype.kind in "iufb"):
            values = None
        weighted = len(example) > 2 or inputs.masked
        one = OutputCheck(_flag_of(task), name, inputs, ending, values, weighted, *classes)
        lines += one.check()
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


def _outputs(model: keras.Model) -> Any:
    """Return the symbolic outputs, by name if they have one; None for a subclassed model."""
    return model.output if getattr(model, "outputs", None) else None


def _flag_of(task: Task) -> str:
    options = task.options
    return f"--loss={options.loss}" if options.loss else f"--model={options.model}"


def _shapes_of(structure: Any) -> Any:
    return tf.nest.map_structure(lambda t: shape_of(tuple(t.shape)), structure)
