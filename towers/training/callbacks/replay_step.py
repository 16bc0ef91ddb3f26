"""Replays one step on one device, with the range of every tensor in it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import HOST
from towers.data import Data
from towers.formatting import first_line
from towers.options.run import Options
from towers.training.run.setup import assemble
from towers.training.step.train_state import restore_after

_PARTS = ("inputs", "targets", "sample weights")
_MOST_TRIALS = 40  # steps of the bisection


@dataclasses.dataclass(frozen=True)
class TensorRange:
    """The range of the numbers in a tensor."""

    kind: str  # "data", "variable", "layer", "loss" or "gradient"
    name: str
    dtype: str
    low: float | None  # of its finite numbers, None if there are none
    high: float | None
    not_finite: int  # number of infinite or NaN elements
    size: int  # number of all elements
    # Examples with such elements, if axis 0 of the tensor is the batch.
    rows: list[int] = dataclasses.field(default_factory=list)

    @property
    def of_data(self) -> bool:
        """Whether the tensor is part of the batch."""
        return self.kind == "data"


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """A replayed step; `reason` says why it could not be replayed, if so."""

    ranges: list[TensorRange]
    is_finite: bool
    loss: float
    fault: TensorRange | None  # the first one that is not finite
    reason: str = ""

    @property
    def what(self) -> str:
        """What is not finite, for a message."""
        if self.reason:
            return "the step is not finite"
        finite = np.isfinite(self.loss)
        return "a gradient is not finite" if finite else f"the loss is {self.loss:g}"


def num_examples(batch: Any) -> int:
    """Return the number of examples in a batch, (example, draws)."""
    return len(tf.nest.flatten(batch[1])[0])


def replay_step(
    options: Options, dataset: Data, device: str, state: Mapping[str, np.ndarray], batch: Any
) -> ReplayResult:
    """Replay a step on one device, with one tower and without XLA.

    Args:
        options: of the run.
        dataset: of the run.
        device: of the step; the host, if that has too little memory.
        state: {name: master variable} before the step.
        batch: (example, draws).

    Returns:
        The result. An error in the step is its `reason`: the caller reports one already.
    """
    for place in dict.fromkeys([device, HOST]):  # a GPU may be too small for all the batch
        try:
            return _Step(options, dataset, place, state).make(batch)
        except Exception as error:  # of many kinds: the user's code, memory
            reason = first_line(error)
    return ReplayResult([], False, float("nan"), None, reason)


class _Step:
    """One step of a run on one device, whose tensors are recorded."""

    def __init__(self, options: Options, dataset: Data, device: str, state: Mapping):
        changed = dict(variables="cpu", accumulate_steps=1, jit_compile=False, on_nan="stop")
        options = dataclasses.replace(options, num_towers=1, devices="", **changed)
        self.run = run = assemble(options, [device], dataset)
        for name, variable in run.train_state.variables().items():
            variable.assign(state[name])
        self.state = state
        self._trace = tf.function(self._ranges, autograph=False)

    def make(self, batch: Any) -> ReplayResult:
        """Replay the step with this batch."""
        size = num_examples(batch)
        tensors = {name: tf.constant(value) for name, value in self.state.items()}
        ranges = [
            TensorRange("variable", name, tensor.dtype.name, *_numbers(_statistics(tensor)))
            for name, tensor in tensors.items()
            if tensor.dtype.is_floating
        ]
        stuck, loss, measured = self._call(batch)
        ranges += [
            TensorRange(kind, name, dtype, *_numbers(values), _rows(values["rows"], size))
            for (kind, name, dtype), values in measured
        ]
        ranges.sort(key=lambda r: ("data", "layer", "loss", "gradient", "variable").index(r.kind))
        fault = self._fault(ranges) if stuck else None
        if fault and not fault.rows and fault.kind in ("loss", "gradient"):
            fault = dataclasses.replace(fault, rows=self._rows_at_fault(batch))
        return ReplayResult(ranges, not stuck, loss, fault)

    def _fault(self, ranges: Sequence[TensorRange]) -> TensorRange | None:
        """Return the first tensor that is not finite, in the order of computation."""
        bad = [tensor for tensor in ranges if tensor.not_finite]
        layers = [tensor for tensor in bad if tensor.kind in ("layer", "loss")]
        first = [
            *(tensor for tensor in bad if tensor.kind == "variable"),
            # In half precision large inputs overflow, which matters if a layer then does.
            *(f for f in bad if f.kind == "data" and (layers or f.dtype != "float16")),
            *layers,
            # Going backward, the last variable comes first.
            *[tensor for tensor in bad if tensor.kind == "gradient"][::-1],
        ]
        return first[0] if first else None

    def _call(self, batch: Any) -> tuple[bool, float, list[tuple[tuple, Any]]]:
        """Make a step, restore the state; return whether it is non-finite, its loss and ranges."""
        train_state = self.run.train_state
        with restore_after([*train_state.variables().values(), *train_state.in_a_row]):
            loss, values = self._trace(*batch)
            named = list(zip(self._names, values, strict=True))
            return bool(train_state.stuck()), float(loss), named

    def _rows_at_fault(self, batch: Any) -> list[int]:
        """Return, by bisection, the examples that alone make a step non-finite."""
        trials = 0

        def find(rows: range) -> list[int]:
            nonlocal trials
            trials += 1
            some = tf.nest.map_structure(lambda t: t[rows.start : rows.stop], batch)
            if trials > _MOST_TRIALS or not self._call(some)[0]:
                return []
            if len(rows) == 1:
                return [rows.start]
            half = len(rows) // 2
            return find(rows[:half]) + find(rows[half:])

        try:
            self._trace = tf.function(self._ranges, autograph=False, reduce_retracing=True)
            return find(range(num_examples(batch)))
        except Exception:  # a model may need all of the batch
            return []

    def _ranges(self, example: Any, draws: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        task, graph, seen = self.run.task, tf.compat.v1.get_default_graph(), []
        for name, part in zip(_PARTS, example, strict=False):
            leaves = [leaf for leaf in tf.nest.flatten(part) if leaf.dtype != tf.string]
            floats = [t if t.dtype.is_floating else tf.cast(t, tf.float64) for t in leaves]
            seen += [("data", name, leaf) for leaf in floats]
        if self.run.options.dtype == "mixed_float16":
            with tf.device(HOST):
                leaves = tf.nest.flatten(task.inputs(example[0], draws))
            floats = [leaf for leaf in leaves if leaf.dtype.is_floating]
            seen += [("data", "inputs", tf.cast(leaf, tf.float16)) for leaf in floats]

        def make(call: Callable) -> Callable:
            def watched(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
                outputs = call(layer, *args, **kwargs)
                if tf.compat.v1.get_default_graph() is graph:
                    name = getattr(layer, "path", None) or layer.name
                    seen.extend(("layer", name, leaf) for leaf in tf.nest.flatten(outputs))
                return outputs

            return watched

        def on_update(gradients: Sequence[Any], weights: Sequence[Any]) -> None:
            if tf.compat.v1.get_default_graph() is graph:
                pairs = zip(gradients, weights, strict=True)
                seen.extend(("gradient", weight.path, gradient) for gradient, weight in pairs)

        task.on_update = on_update
        with tf_internals.replaced((keras.Layer, "__call__", make)):
            values, _ = task.make_train_step(self.run.learning_rate)(example, draws)
        seen.append(("loss", "loss", values["loss"]))
        seen = [(k, n, t.values if isinstance(t, tf.IndexedSlices) else t) for k, n, t in seen]
        seen = [s for s in seen if isinstance(s[2], tf.Tensor) and s[2].dtype.is_floating]
        self._names = [(kind, name, tensor.dtype.name) for kind, name, tensor in seen]
        return values["loss"], [_statistics(tensor) for _, _, tensor in seen]


def _statistics(tensor: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return a tensor's finite range, how many numbers are not finite, its size, the bad rows."""
    finite = tf.math.is_finite(tensor)
    flat = tf.reshape(finite, [tf.shape(tensor)[0] if tensor.shape.rank else 1, -1])
    return {
        "low": tf.reduce_min(tf.where(finite, tensor, tensor.dtype.max)),
        "high": tf.reduce_max(tf.where(finite, tensor, tensor.dtype.min)),
        "not_finite": tf.math.count_nonzero(~finite),
        "size": tf.size(tensor, tf.int64),
        "rows": tf.reduce_any(~flat, axis=1),
    }


def _numbers(values: Mapping[str, tf.Tensor]) -> tuple[float | None, float | None, int, int]:
    not_finite, size = int(values["not_finite"]), int(values["size"])
    none = not_finite == size
    low, high = (None if none else float(values[name]) for name in ("low", "high"))
    return low, high, not_finite, size


def _rows(bad: tf.Tensor, size: int) -> list[int]:
    """Return the bad rows of a batch; [] for a tensor without a row for each example."""
    return np.flatnonzero(bad.numpy()).tolist() if len(bad) == size else []
