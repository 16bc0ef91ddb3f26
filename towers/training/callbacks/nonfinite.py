"""Ends a run whose loss, gradient or weights are not finite, and names where that began.

Such a step makes no update (`optimizer_step.py`, `skip_nonfinite.py`), so the master variables hold
the state before it. The step is repeated on one device with all layers watched.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import HOST, shown_name
from towers.builder.sharding import slices_of
from towers.errors import RunError
from towers.formatting import count, first_line
from towers.training.run.setup import RunContext, assemble
from towers.training.step.train_state import not_finite

_PARTS = ("x", "y", "sample_weight")
_SHOWN = 5  # rows in a line


class NotFinite(RunError):
    """Raised if a non-finite step or weight ends the run."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first tensor of a repeated step that is not finite."""

    kind: str  # "variable", "batch", "layer", "loss" or "gradient"
    name: str
    rows: Sequence[int] = ()  # of the batch, if axis 0 of the tensor is the batch


@dataclasses.dataclass
class NonFiniteMonitor:
    """Checks after each call of the train loop whether its steps were finite."""

    run: RunContext
    say: Callable[[str], None]  # prints a line

    def __post_init__(self) -> None:
        """Begin with the steps that were skipped so far."""
        self._last: Mapping[str, Any] = {}
        self._num_skipped = self.run.task.num_skipped()

    def check(self, values: Mapping[str, Any], step: int, now: bool) -> None:
        """Report skipped steps; raise NotFinite at the limit of non-finite steps in a row.

        Args:
            values: what the train loop returned.
            step: steps done.
            now: whether to wait for the devices; else the values of the previous call are checked.
        """
        checked = values if now else self._last
        self._last = values
        if self.run.options.on_nan == "skip" and checked is values:
            before, self._num_skipped = self._num_skipped, self.run.task.num_skipped()
            if self._num_skipped > before:
                self.say(
                    f"skipped     {count(self._num_skipped - before, 'step')} before step {step}: "
                    f"the loss or a gradient was not finite; {self._num_skipped} since step 0"
                )
        if bool(checked.get("stuck", False)):
            raise NotFinite(self._report())

    def check_weights(self, step: int) -> None:
        """Raise NotFinite as `check` does, or if a variable is not finite after `step` steps."""
        self.check(self._last, step, now=True)
        if names := not_finite(self.run.train_state.variables()):
            raise NotFinite(
                f"{names[0]} is infinite or NaN after {step} steps; {_remedy(self.run)}; "
                f"{self.run.folder}/checkpoints holds the state before"
            )

    def _report(self) -> str:
        """Repeat the step and return the report on it."""
        run = self.run
        step, examples = (int(v) for v in (run.train_state.step, run.train_state.examples))
        position = dict(seed=run.options.seed, step=step, examples=examples)
        batch = next(iter(run.data.train.train_batches(run.options.batch_size, **position)))
        size = len(tf.nest.flatten(batch[0])[0])
        what, fault = _repeat(run, batch)
        rows = fault.rows if fault else ()
        numbers, rows_are = _row_numbers(run, step, examples, size)
        of_rows = ""
        if rows:
            of_rows = f" for {_first([str(numbers[row]) for row in rows])} ({rows_are})"
            of_rows = f" for all {size} examples" if len(rows) == size else of_rows
        where = f"step {step} (epoch {examples / run.data.train.size:.2f})"
        if towers := _towers_of(run, rows, size):
            where += f", tower{'s' * (len(towers) > 1)} {_first(towers)}"
        return f"{what} at {where}; {_text(fault)}{of_rows}; {_remedy(run, fault)}"


def _repeat(run: RunContext, batch: Any) -> tuple[str, Fault | None]:
    """Repeat a step on one device; return what is not finite, in words, and the first tensor."""
    for device in dict.fromkeys([run.builder.devices[0], HOST]):  # a GPU may be too small for it
        try:
            loss, fault = _find_fault(run, device, batch)
        except Exception as error:  # of many kinds: the user's code, memory
            reason = first_line(error)
            continue
        return "a gradient is not finite" if np.isfinite(loss) else f"the loss is {loss:g}", fault
    return f"the loss or a gradient is not finite ({reason} when the step was repeated)", None


def _find_fault(run: RunContext, device: str, batch: Any) -> tuple[float, Fault | None]:
    """Return the loss of a repeated step, and the first tensor in it that is not finite."""
    plain = dict(variables="cpu", accumulate_steps=1, jit_compile=False, on_nan="stop")
    options = dataclasses.replace(run.options, num_towers=1, devices="", **plain)
    one, state = assemble(options, [device], run.data), run.train_state.variables()
    for name, variable in one.train_state.variables().items():
        variable.assign(state[name].numpy())
    task, seen = one.task, []  # (kind, name, tensor)

    @tf.function(autograph=False)
    def step(example: Any, draws: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        graph = tf.compat.v1.get_default_graph()

        def note(kind: str, name: str, values: Any) -> Any:
            if tf.compat.v1.get_default_graph() is graph:
                leaves = [getattr(leaf, "values", leaf) for leaf in tf.nest.flatten(values)]
                floats = [v for v in leaves if tf.is_tensor(v) and v.dtype.is_floating]
                seen.extend((kind, name, leaf) for leaf in floats)
            return values

        def watched(call: Callable) -> Callable:
            return lambda layer, *args, **kwargs: note(
                "layer", getattr(layer, "path", layer.name), call(layer, *args, **kwargs)
            )

        def on_update(gradients: Sequence[Any], weights: Sequence[Any]) -> None:
            for gradient, weight in reversed([*zip(gradients, weights, strict=True)]):
                note("gradient", weight.path, gradient)

        with tf.device(HOST):
            parts = [task.inputs(example[0], draws), *task.cast(example[1:])]
        for name, part in zip(_PARTS, parts, strict=False):
            note("batch", name, part)
        losses_of, task.on_update = task.losses_of, on_update
        task.losses_of = lambda *args: note("loss", "", losses_of(*args))
        with tf_internals.replaced((keras.Layer, "__call__", watched)):
            values, _ = task.make_train_step(one.learning_rate)(example, draws)
        note("loss", "", values["loss"])
        seen.sort(key=lambda each: ("batch", "layer", "loss", "gradient").index(each[0]))
        return values["loss"], [_bad_rows(tensor) for *_, tensor in seen]

    broken = not_finite(one.train_state.variables())
    loss, bad = step(*batch)
    if not one.train_state.stuck():
        return float(loss), None
    if broken:
        return float(loss), Fault("variable", broken[0])
    size = len(tf.nest.flatten(batch[0])[0])
    for (kind, name, _), rows in zip(seen, bad, strict=True):
        if np.any(rows):
            rows = np.flatnonzero(rows).tolist() if rows.shape == [size] else ()
            return float(loss), Fault(kind, name, rows)
    return float(loss), None


def _bad_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Return whether each row has a number that is not finite; for a scalar, whether it is one."""
    rank = tensor.shape.rank
    axes = None if rank is None else list(range(1, rank))
    return tf.reduce_any(~tf.math.is_finite(tensor), axes)


def _row_numbers(run: RunContext, step: int, examples: int, size: int) -> tuple[np.ndarray, str]:
    """Return a number that identifies each example of a step's batch, and what it counts."""
    split = run.data.train
    if hasattr(split, "train_rows"):
        position = dict(seed=run.options.seed, step=step, examples=examples)
        rows, _ = next(iter(split.train_rows(size, **position)))
        return split.numbers(rows), "rows of the training set"
    return examples + np.arange(size), "examples of the run, counted over all epochs"


def _towers_of(run: RunContext, rows: Sequence[int], size: int) -> list[str]:
    """Return the towers that had these rows of a batch, each as "0 (/gpu:0)"."""
    names = list(map(shown_name, run.builder.devices))
    slices = slices_of(size, len(names), run.builder.accumulate_steps)
    ends = [start + number for start, number in slices]
    towers = {int(np.searchsorted(ends, row, "right")) % len(names) for row in rows}
    return [f"{tower} ({names[tower]})" for tower in sorted(towers)]


def _first(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def _text(fault: Fault | None) -> str:
    if fault is None:
        return "one device gives no infinite or NaN value for this batch"
    return {
        "variable": f"the variable {fault.name} was not finite before the step",
        "batch": f"{fault.name} is not finite in the batch",
        "layer": f"the first output that is not finite is that of layer {fault.name}",
        "loss": "the outputs of all layers are finite and the loss is not",
        "gradient": f"the first gradient that is not finite is that of {fault.name}",
    }[fault.kind]


def _remedy(run: RunContext, fault: Fault | None = None) -> str:
    if fault and fault.kind == "batch":
        return "leave these examples out or scale them"
    if not run.task.rate_is_set:
        return "give the optimizer a lower learning rate or global_clipnorm=1.0"
    skip = ", or --on_nan=skip" if run.options.on_nan == "stop" and fault else ""
    return f"try a lower --learning_rate or --clip_global_norm=1{skip}"
