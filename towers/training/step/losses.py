"""The losses of a compiled model: what they are computed of, and one for each example."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.errors import InputError
from towers.training.step.train_state import overrides


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
        self.model = model
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

    def check_test_step(self) -> None:
        """Raise InputError for Keras' own test_step without a loss, after a training step."""
        model, has_own = self.model, overrides(self.model, "test_step", "compute_loss")
        if not has_own and model.loss is None and not model.losses:
            raise InputError(
                f"model {model.name} has its own train_step, but no test_step and no compiled "
                "loss, so it cannot be evaluated; give it a test_step that returns a dict such "
                'as {"loss": loss}'
            )

    def _record(self, loss: Any, target: int | None, y: Any, outputs: Any) -> bool:
        """Record a loss if its shapes are known; return whether it is Keras' own and unmasked."""
        if not (y.shape.rank and outputs.shape.rank):  # unknown, or without a batch axis
            return False
        shapes = tuple(y.shape), tuple(outputs.shape)
        masked = tf_internals.mask_of(outputs) is not None
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
