"""Skips non-finite updates in the training steps of compiled models."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import is_gpu
from towers.options.parts import StepOptions
from towers.training.step.optimizer_step import (
    end_step,
    finite_now,
    global_norm,
    if_finite,
    update_averages,
)
from towers.training.step.train_state import TrainState


@dataclasses.dataclass
class NonFiniteGuard:
    """Skips non-finite updates of the optimizers in one step of a compiled model.

    An update is skipped if its gradients, those of an earlier update in the step, or an earlier
    loss are not finite. A `LossScaleOptimizer` does so itself while its scale is above 1. Updates
    inside of a user's own loop or branch are not guarded.
    """

    train_state: TrainState

    def __post_init__(self) -> None:
        """Belong to the step that is being traced."""
        self.graph = tf.compat.v1.get_default_graph()
        self.gradients: Sequence[Any] = ()  # of the last update
        self.norm = tf.zeros([])  # of these
        self._losses: list[tf.Tensor] = []
        self._finite: list[tf.Tensor] = []
        self._scales: list[tf.Tensor] = []  # before the step

    @contextlib.contextmanager
    def record_losses(self, model: keras.Model) -> Iterator[None]:
        """Record each loss that a model computes in the block."""

        def make(compute: Callable) -> Callable:
            def noting(*args: Any, **kwargs: Any) -> Any:
                loss = compute(*args, **kwargs)
                if self._is_here() and tf.is_tensor(loss):
                    self._losses.append(loss)
                return loss

            return noting

        with tf_internals.replaced((model, "compute_loss", make)):
            yield

    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
        weights: Sequence[keras.Variable],
        update: Callable,
    ) -> None:
        """Make an update if it is finite; see `fused_update.updates_joined` for the arguments."""
        if not self._is_here():
            update()
            return
        self.gradients = gradients
        scale = getattr(optimizer, "dynamic_scale", None)
        if scale is not None:
            scale = tf.convert_to_tensor(scale.value)
            self._scales.append(scale)
        self.norm = global_norm([g for g in gradients if g is not None])
        finite = finite_now(self.train_state, 0, self.norm, _total(self._losses))
        self._finite.append(finite)
        finite = _all(self._finite)
        if scale is not None:  # the optimizer skips the update and halves the scale itself
            finite |= scale > 1.0
        if is_gpu(self.train_state.replicas[0].device):
            update(finite)
        else:
            if_finite(finite, update)

    def end_step(
        self,
        loss: tf.Tensor,
        before: Sequence[tuple[tf.Variable, tf.Tensor]],
        num_examples: tf.Tensor,
        rules: StepOptions,
    ) -> None:
        """Count the step and move the averages; restore `before` if the step was not finite.

        After an overflow at a loss scale above 1 the scale is lowered all the same.

        Args:
            loss: of the step.
            before: (variable, its value before the step) of what may have changed.
            num_examples: of the step.
            rules: `ema_decay` and `batch_size`.
        """
        train_state = self.train_state
        of_loss = finite_now(train_state, 0, tf.zeros([], loss.dtype), loss)
        finite = moves = _all([of_loss, *self._finite])
        tolerated: Any = False
        if self._scales:
            tolerated = tf.reduce_any(tf.stack(self._scales) > 1.0)
            moves = finite | (tolerated & of_loss)  # as in `fit` after too high a scale
        if is_gpu(train_state.replicas[0].device):
            update_averages(train_state, rules, moves)
        elif train_state.averages:
            if_finite(moves, lambda: update_averages(train_state, rules))
        end_step(train_state, [finite], before, num_examples, tolerated, moves)

    def _is_here(self) -> bool:
        return tf.compat.v1.get_default_graph() is self.graph


def _all(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return values[0] if len(values) == 1 else tf.reduce_all(tf.stack(values))


def _total(losses: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Return a scalar that is finite if all losses are, or None without losses."""
    if len(losses) < 2:
        return tf.reduce_sum(losses[0]) if losses else None
    return tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float64)) for loss in losses])
