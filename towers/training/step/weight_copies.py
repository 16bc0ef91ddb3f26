"""Gives towers on other GPUs the weights of a model that Keras' or the user's own step updates.

The weights and optimizers that Keras knows are on the first tower's GPU. The other towers get the
values in one of two ways:

* `send`: every pass starts with a broadcast, whatever has changed the weights.
* `KeptCopies`: each GPU keeps a copy of weights and optimizer, and makes the same update from the
  same summed gradients, so that only gradients move. `fit` does so with Keras' own `train_step`.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import gather
from towers.builder.passes import CopiesError, TowerGradients
from towers.builder.replica_context import WeightCopies
from towers.training.step import fused_update, train_state
from towers.training.step.train_state import overrides

_BATCH_HOOKS = (
    "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end",
)  # fmt: skip


def send(weights: Sequence[keras.Variable], devices: Sequence[str]) -> WeightCopies:
    """Return the values of weights on each device, sent from the first one in the traced step.

    Args:
        weights: floats.
        devices: of the towers.
    """
    with tf.device(devices[0]):
        values = [tf.stop_gradient(tf.convert_to_tensor(weight)) for weight in weights]
        masters = [weight.value for weight in weights]
    columns = []
    for device, received in zip(devices, gather.broadcast(values, devices), strict=True):
        with tf.device(device):  # the gradient of a gradient is that of the weights, too
            sent = tf_internals.record_as_one_op("Sent", received, masters, lambda *dy: list(dy))
        columns.append(sent)
    return list(zip(weights, zip(*columns, strict=True), strict=True))


class KeptCopies:
    """Copies of weights and of their optimizer on the towers' GPUs, which a traced step updates."""

    def __init__(self, devices: Sequence[str], model: keras.Model):
        """Make no copies yet.

        Args:
            devices: of the towers; the weights are on the first.
            model: `can_keep` its optimizer.
        """
        self._first, *self._devices = devices
        self._optimizer = model.optimizer
        self._adds_penalties = not overrides(model, "compute_loss", "losses")
        self._twins: dict[int, tuple[keras.Variable, list[keras.Variable]]] = {}
        self._optimizers: list[keras.optimizers.Optimizer] = []

    def of(self, weights: Sequence[keras.Variable]) -> WeightCopies:
        """Return what each tower reads in place of the weights; make the copies if need be."""
        new = [weight for weight in weights if id(weight) not in self._twins]
        if new:
            copies = _untraced(lambda: [train_state.copy(new, name) for name in self._devices])
            for weight, *twins in zip(new, *copies, strict=True):
                self._twins[id(weight)] = weight, twins
        for weight, twins in self._twins.values():
            for twin in twins:
                twin.regularizer, twin.constraint = weight.regularizer, weight.constraint
        return [(w, [w.value, *(t.value for t in self._twins[id(w)][1])]) for w in weights]

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
        weights: Sequence[keras.Variable],
        summed: TowerGradients | None,
    ) -> None:
        """Update the copies as an optimizer has just updated the weights.

        Args:
            optimizer: of the model.
            gradients: with which it was called.
            weights: with which it was called.
            summed: of the towers, if there are any. If `gradients` are not their sums, the updated
                weights are sent to the copies.
        """
        # A batch of one example is on the first tower alone.
        of_first = summed.gathered[0] if summed and len(summed.gathered) > 1 else []
        pairs = zip(gradients, weights, strict=True)
        places = [self._place_of(g, weight, of_first) for g, weight in pairs if g is not None]
        follow = places and None not in places and all(map(fused_update.can_follow, weights))
        if optimizer is not self._optimizer or not follow:
            self._receive([w for w in weights if id(w) in self._twins])
            return
        used = [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
        self._make_optimizers()
        for i, (name, copy) in enumerate(zip(self._devices, self._optimizers, strict=True)):
            own, twins = [], [self._twins[id(w)][1][i] for w, _ in used]
            with tf.device(name):
                for (_, gradient), twin, place in zip(used, twins, places, strict=True):
                    total = summed.gathered[i + 1][place]
                    if gradient is not of_first[place]:
                        total = tf.add_n([total, _gradient_of_penalty(twin, copy)])
                    own.append(total)
                parts = fused_update.flatten_updates(own, twins, copy)
                fused_update.apply(copy, *parts)

    def _place_of(self, gradient: Any, weight: keras.Variable, sums: Sequence[Any]) -> int | None:
        """Return the index of the sum that a gradient is, perhaps with that of a regularizer."""
        for i, each in enumerate(sums):
            if each is gradient:
                return i
        op = gradient.op if isinstance(gradient, tf.Tensor) else None
        if not (self._adds_penalties and weight.regularizer and op and op.type == "AddN"):
            return None
        added = {x.name for x in op.inputs}  # a tape adds a gradient for each use
        found = [i for i, s in enumerate(sums) if isinstance(s, tf.Tensor) and s.name in added]
        return found[0] if len(added) == 2 and len(found) == 1 else None

    def set(self) -> None:
        """Assign the current values of weights and optimizer to the copies."""
        pairs = [(twin, w) for w, twins in self._twins.values() for twin in twins]
        for optimizer in self._optimizers:
            _share_settings(self._optimizer, optimizer)
            pairs += zip(optimizer.variables, self._optimizer.variables, strict=True)
        for copy, variable in pairs:
            copy.value.assign(variable.value)

    def check(self, assigned: Sequence[tf.Variable]) -> None:
        """Raise CopiesError if a step assigns variables of which there are copies.

        Args:
            assigned: neither by towers nor by an optimizer, but in a loss for example.
        """
        ids = set(map(id, assigned))
        if any(id(weight.value) in ids for weight, _ in self._twins.values()):
            raise CopiesError("the step assigns a weight or a seed of which towers have copies")

    def _receive(self, weights: Sequence[keras.Variable]) -> None:
        for weight, (_, *values) in send(weights, [self._first, *self._devices]) if weights else ():
            for twin, value in zip(self._twins[id(weight)][1], values, strict=True):
                twin.value.assign(value)

    def _make_optimizers(self) -> None:
        if self._optimizers:
            return
        weights = tf_internals.weights_of(self._optimizer)
        self.of(weights)

        def make() -> None:
            for i, name in enumerate(self._devices):
                twins = [self._twins[id(w)][1][i] for w in weights]
                with tf.device(name):
                    self._optimizers.append(like(self._optimizer, weights, twins))
            self.set()

        _untraced(make)


def _gradient_of_penalty(weight: keras.Variable, optimizer: Any) -> tf.Tensor:
    """Return the gradient of a weight's regularizer in Keras' loss, times the loss scale."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(weight.value)
        penalty = optimizer.scale_loss(weight.regularizer(weight))
    return tape.gradient(penalty, weight.value)


def _untraced(make: Callable) -> Any:
    """Call a function that makes variables, which a step may not do when it is traced again."""
    with ThreadPoolExecutor(1) as thread:  # in which nothing is traced
        return thread.submit(make).result()


def like(
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[keras.Variable],
    twins: Sequence[keras.Variable],
) -> keras.optimizers.Optimizer:
    """Return an optimizer that updates copies of weights as another one updates the weights.

    Args:
        optimizer: made again from its config.
        weights: that it updates.
        twins: their copies, in the same order.
    """
    twin = type(optimizer).from_config(optimizer.get_config())
    inner, own = (getattr(each, "inner_optimizer", each) for each in (optimizer, twin))
    if inner.weight_decay is not None:
        pairs = zip(twins, weights, strict=True)
        own.exclude_from_weight_decay(
            var_list=[copy for copy, weight in pairs if not tf_internals.decays(inner, weight)]
        )
    train_state.build(twin, twins)
    _share_settings(optimizer, twin)
    return twin


def _share_settings(
    optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer
) -> None:
    """Give an optimizer the constants and the learning-rate schedule of another.

    A schedule of the user's may have attributes that its config does not tell.

    Args:
        optimizer: built.
        other: of the same class, also built.
    """
    inner, own = (getattr(each, "inner_optimizer", each) for each in (optimizer, other))
    for source, target in (optimizer, other), (inner, own):
        constants = bool | int | float | str | None
        vars(target).update({k: v for k, v in vars(source).items() if isinstance(v, constants)})
    if (schedule := tf_internals.schedule_of(inner)) is not None:
        own.learning_rate = schedule


def can_keep(optimizer: Any) -> bool:
    """Return whether a copy of an optimizer makes the same updates: one of Keras' own classes."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return False
    parts = [optimizer, getattr(optimizer, "inner_optimizer", optimizer)]
    if not all(type(part).__module__.startswith("keras.") for part in parts):
        return False
    with contextlib.suppress(Exception):  # a learning-rate schedule of the user's without config
        type(optimizer).from_config(optimizer.get_config())
        return True
    return False


def is_linear(optimizer: Any) -> bool:
    """Return whether rows of a sparse gradient may be added before the optimizer gets them.

    Other optimizers of Keras, and clipping, square each row of an `IndexedSlices` on its own.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    clips = (getattr(inner, name, None) for name in ("clipnorm", "clipvalue", "global_clipnorm"))
    return type(inner) is keras.optimizers.SGD and not any(clips)


def acts_on_batches(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback runs code of the user's between two steps of `fit`."""
    hooks = [getattr(callback, name) for name in _BATCH_HOOKS if hasattr(callback, name)]
    modules = [getattr(getattr(h, "__func__", h), "__module__", None) for h in hooks]
    return any(not (name and name.startswith("keras.")) for name in modules)
