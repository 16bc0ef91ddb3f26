"""Ends a run whose loss, gradient or weights are not finite, and names where that began.

Such a step makes no update (`update.py`), so the master variables hold
the state before it. The step is repeated on one device, whose layers and gradients are looked at,
and its batch is saved as train_dir/nan/step_N.npz.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import files, tf_internals
from towers.builder.device_names import HOST
from towers.builder.sharding import slices_of
from towers.devices.shown_names import shown_name
from towers.errors import RunError, first_line
from towers.formatting import count, first_of
from towers.training.run.setup import RunContext
from towers.training.step.step import floatx_of
from towers.training.step.train_state import not_finite

FOLDER = "nan"


class NotFinite(RunError):
    """Raised if a non-finite step or weight ends the run."""


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
            now: whether to wait for the devices; otherwise the values of the previous call are
                checked.
        """
        checked = values if now else self._last
        self._last = values
        if self.run.task.options.on_nan == "skip" and checked is values:
            before, self._num_skipped = self._num_skipped, self.run.task.num_skipped()
            if self._num_skipped > before:
                self.say(
                    f"skipped     {count(self._num_skipped - before, 'step')} before step {step}: "
                    f"the loss or a gradient was not finite; {self._num_skipped} since step 0"
                )
        if bool(checked.get("stuck", False)):
            raise NotFinite(_report(self.run))

    def check_weights(self, step: int) -> None:
        """Raise NotFinite as `check` does, or if a variable is not finite after `step` steps."""
        self.check(self._last, step, now=True)
        if names := not_finite(self.run.train_state.variables()):
            raise NotFinite(
                f"{names[0]} is infinite or NaN after {step} steps; {_remedy(self.run)}; "
                f"{self.run.folder}/checkpoints holds an earlier state"
            )


def _report(run: RunContext) -> str:
    """Return a line on the step that was not finite, whose state the variables still have."""
    step, examples = (int(v) for v in (run.train_state.step, run.train_state.examples))
    options = run.task.options
    position = dict(seed=options.seed, step=step, examples=examples)
    example, draws = next(iter(run.data.train.train_batches(options.batch_size, **position)))
    with tf.device(HOST):
        inputs, *targets = run.task.prepare(example, draws)
    remedy = _remedy(run) + (", or --on_nan=skip" if options.on_nan == "stop" else "")
    if broken := not_finite(run.train_state.variables()):
        found, rows = f"the variable {broken[0]} was not finite before the step", None
    elif (rows := _bad_rows((inputs, targets))) is not None:
        found, remedy = "the batch is not finite", "remove these examples or scale them"
    else:
        found, rows = _repeat(run, inputs, targets)
    where = f"step {step} (epoch {examples / run.data.train.size:.2f})"
    rows, size = [] if rows is None else rows, len(draws)
    if len(rows):
        found += f" for {_names_of(run, rows, position)}"
        where += f", {_towers_of(run, rows, size)}"
    path = run.folder / FOLDER / f"step_{step}.npz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **_arrays(example), rows=np.array(rows, np.int64))
        saved = f"the batch is in {path}"
    except (OSError, RunError) as error:
        saved = f"{path} cannot be written: {first_line(error)}"
    return f"the loss or a gradient is not finite at {where}: {found}; {remedy}; {saved}"


def _repeat(run: RunContext, inputs: Any, targets: Sequence[Any]) -> tuple[str, np.ndarray | None]:
    """Return the first value of a step that is not finite, and for which rows of the batch."""
    seen: list[tuple[str, np.ndarray]] = []

    def watched(call: Callable) -> Callable:
        def call_and_look(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            outputs = call(layer, *args, **kwargs)
            if not seen and (rows := _bad_rows(outputs)) is not None:
                seen.append((getattr(layer, "path", layer.name), rows))
            return outputs

        return call_and_look

    model, error = run.task.model, None
    for device in dict.fromkeys([run.builder.devices[0], HOST]):  # a GPU may be too small for it
        try:
            with tf.device(device), keras.StatelessScope(), floatx_of(run.task.options.dtype):
                with tf.GradientTape() as tape:
                    with tf_internals.replaced((keras.Layer, "__call__", watched)):
                        outputs = model(inputs, training=True)
                    if seen:
                        layer, rows = seen[0]
                        return f"the first non-finite output is that of layer {layer}", rows
                    if model.loss is None:
                        return "the outputs of all layers are finite on one device", None
                    loss = model.compute_loss(inputs, *[*targets[:1], outputs, *targets[1:]])
                found = tape.gradient(loss, [v.value for v in model.trainable_variables])
            if not bool(tf.math.is_finite(loss)):
                return "the outputs of all layers are finite, but the loss is not", None
            for weight, gradient in reversed([*zip(model.trainable_variables, found, strict=True)]):
                if gradient is not None and _bad_rows(gradient) is not None:
                    return f"the first non-finite gradient is that of {weight.path}", None
            return "on one device the loss and all gradients are finite", None
        except Exception as raised:  # of many kinds: the user's code, memory
            error = raised
    return f"it cannot be repeated ({first_line(error)})", None


def _towers_of(run: RunContext, rows: Sequence[int], size: int) -> str:
    """Return the towers that had these rows of a batch, as "tower 0 (/gpu:0)"."""
    names = list(map(shown_name, run.builder.devices))
    slices = slices_of(size, len(names), run.builder.accumulate_steps)
    ends = [start + number for start, number in slices]
    towers = sorted({int(np.searchsorted(ends, row, "right")) % len(names) for row in rows})
    return f"tower{'s' * (len(towers) > 1)} {first_of([f'{i} ({names[i]})' for i in towers])}"


def _arrays(example: Any) -> dict[str, np.ndarray]:
    """Return {"x": array, "y": array, ...} of an example; of a dict "x/NAME"."""
    arrays = {}
    for name, part in zip(("x", "y", "sample_weight"), example, strict=False):
        for path, leaf in keras.tree.flatten_with_path(part):
            array = leaf.numpy()  # NumPy would pickle objects
            array = array.astype(bytes) if array.dtype == object else array
            arrays["/".join([name, *map(str, path)])] = array
    return arrays


def _bad_rows(structure: Any) -> np.ndarray | None:
    """Return the indices of rows with an infinity or NaN in any tensor, None if all are finite."""
    bad: set[int] = set()
    for leaf in tf.nest.flatten(structure):
        value = getattr(leaf, "values", leaf)
        if tf.is_tensor(value) and value.dtype.is_floating and value.shape.rank:
            axes = list(range(1, value.shape.rank))
            bad |= {*np.flatnonzero(tf.reduce_any(~tf.math.is_finite(value), axes))}
    return np.array(sorted(bad)) if bad else None


def _names_of(run: RunContext, rows: Sequence[int], position: Mapping[str, int]) -> str:
    """Return the numbers of examples of a step's batch, and what these count."""
    split, size = run.data.train, run.task.options.batch_size
    if len(rows) == size:
        return f"all {size} examples"
    if hasattr(split, "train_rows"):
        of_batch, _ = next(iter(split.train_rows(size, **position)))
        numbers, counted = split.numbers(of_batch), "rows of the training set"
    else:
        numbers = position["examples"] + np.arange(size)
        counted = "examples of the run, counted over all epochs"
    return f"{first_of([str(numbers[row]) for row in rows])} ({counted})"


def _remedy(run: RunContext) -> str:
    if not run.task.rate_is_set:
        return "give the optimizer a lower learning rate or global_clipnorm=1.0"
    return "try a lower --learning_rate or --clip_global_norm=1"
