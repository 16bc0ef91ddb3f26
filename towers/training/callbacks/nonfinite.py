"""Detects non-finite steps, reports where they began, and stops or rolls back the run.

Such a step makes no update (`update.py`, `skip_nonfinite.py`), so the master variables hold the
state before it. That state and the batch are written to train_dir/nan for `towers replay`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import files
from towers.builder.sharding import slices_of
from towers.errors import InputError, RunError
from towers.formatting import count, first_line
from towers.options.triggers import Timetable
from towers.training.callbacks.replay_step import (
    ReplayResult,
    TensorRange,
    num_examples,
    replay_step,
)
from towers.training.run import checkpoint
from towers.training.run.setup import RunContext
from towers.training.step.train_state import not_finite

FOLDER = "nan"
REPORT, BATCH, STATE, ROLLBACKS = "report.json", "batch.npz", "state", "rollbacks.json"
MOST_ROLLBACKS, FACTOR = 3, 0.5  # the factor is that of the learning rate
_SHOWN = 5  # rows in a line


class Rollback(Exception):
    """Raised to resume the run from an earlier checkpoint; its text is printed."""


class NotFinite(RunError):
    """Raised if a non-finite step or weight ends the run."""


@dataclasses.dataclass
class NonFiniteMonitor:
    """Checks after each call of the train loop whether its steps were finite."""

    run: RunContext
    timetable: Timetable
    say: Callable[[str], None]  # prints a line

    def __post_init__(self) -> None:
        """Begin with the steps that were skipped so far."""
        self._last: Mapping[str, Any] = {}
        self._num_skipped = self.run.task.num_skipped()

    def check(self, values: Mapping[str, Any], step: int, now: bool) -> None:
        """Report skipped steps, and raise if the limit of non-finite steps is reached.

        Args:
            values: what the train loop returned.
            step: steps done.
            now: whether to wait for GPUs; else the values of the previous call are checked.

        Raises:
            NotFinite: the run ends.
            Rollback: the run resumes from an earlier checkpoint.
        """
        checked = values if now or "batch" in values else self._last
        self._last = values
        if self.run.options.on_nan == "skip" and checked is values:
            before, self._num_skipped = self._num_skipped, self.run.task.num_skipped()
            if self._num_skipped > before:
                self.say(
                    f"skipped     {count(self._num_skipped - before, 'step')} before step {step}: "
                    f"the loss or a gradient was not finite; {self._num_skipped} since step 0"
                )
        if bool(checked.get("stuck", False)):
            self._end(values.get("batch"))

    def check_weights(self, step: int) -> None:
        """Raise as `check` does if a master variable is infinite or NaN after `step` steps."""
        self.check(self._last, step, now=True)
        if names := not_finite(self.run.train_state.variables()):
            line = f"{names[0]} is infinite or NaN after {step} steps"
            self._roll_back(step, line)
            before = f"{self.run.folder}/checkpoints holds the state before"
            raise NotFinite(f"{line}: {_remedy(self.run)}; {before}")

    def _end(self, batch: Any) -> None:
        """Replay the step, write the report, and raise NotFinite or Rollback."""
        run, train_state = self.run, self.run.train_state
        step, examples = int(train_state.step.numpy()), int(train_state.examples.numpy())
        # GPUs return no batch, and device-resident data only rows; data are a function of the step.
        if batch is None or tf.is_tensor(batch[0]):
            position = dict(seed=run.options.seed, step=step, examples=examples)
            batch = next(iter(run.data.train.train_batches(run.options.batch_size, **position)))
        state = {name: variable.numpy() for name, variable in train_state.variables().items()}
        replayed = replay_step(run.options, run.data, run.builder.devices[0], state, batch)
        report = self._report(step, examples, replayed, batch)
        line, more = report["line"], f"; `towers replay --train_dir={run.folder}` makes it again"
        try:
            _write(run.folder, train_state.variables(), batch, report)
        except (OSError, tf.errors.OpError, RunError) as error:
            more = f"; {run.folder / FOLDER} cannot be written: {first_line(error)}"
        if replayed.fault is None or not replayed.fault.of_data:
            self._roll_back(step, line)
        raise NotFinite(f"{line}: {report['remedy']}{more}")

    def _report(
        self, step: int, examples: int, replayed: ReplayResult, batch: Any
    ) -> dict[str, Any]:
        run, fault, size = self.run, replayed.fault, num_examples(batch)
        numbers, rows_are = _row_numbers(run, step, examples, size)
        rows, num_towers = fault.rows if fault else [], len(run.builder.devices)
        ends = [start + n for start, n in slices_of(size, num_towers, run.builder.accumulate_steps)]
        towers = sorted({int(np.searchsorted(ends, row, "right")) % num_towers for row in rows})
        report = {
            "step": step,
            "epoch": examples / run.data.train.size,
            "loss": f"{replayed.loss:g}",  # JSON has no NaN
            "fault": fault and fault.kind,
            "name": fault and fault.name,
            "towers": towers,
            "devices": [run.builder.devices[tower] for tower in towers],
            "places_in_batch": rows,
            "rows": [int(numbers[row]) for row in rows],
            "rows_are": rows_are,
            "inputs_at_fault": bool(fault and fault.of_data),
            "on_nan": run.options.on_nan,
        }
        where = f"step {step} (epoch {report['epoch']:.2f})"
        if towers:
            plural = "tower" if len(towers) == 1 else "towers"
            named = ", ".join(f"{t} ({run.builder.devices[t]})" for t in towers[:_SHOWN])
            where += f", {plural} {named}{', ...' if len(towers) > _SHOWN else ''}"
        rows_text = _rows_text(report["rows"], rows_are, size)
        report["line"] = f"{replayed.what} at {where}: {_fault_text(fault, rows_text)}"
        report["remedy"] = _remedy(run, fault)
        return report

    def _roll_back(self, step: int, line: str) -> None:
        """Record and raise a Rollback, if the options and the checkpoints allow one.

        Later checkpoints are moved to train_dir/nan.
        """
        if self.run.options.on_nan != "rollback":
            return
        folder = self.run.folder
        entries = rollbacks(folder)
        to = self._last_good(step, entries)
        if len(entries) >= MOST_ROLLBACKS or to is None:
            return
        (folder / FOLDER).mkdir(exist_ok=True)
        entries = [*entries, {"step": step, "to": to, "examples": self.timetable.examples(to)}]
        files.write_json(folder / FOLDER / ROLLBACKS, {"rollbacks": entries})
        checkpoints = checkpoint.find(folder / "checkpoints")
        for base in [Path(prefix) for number, prefix in checkpoints if number > to]:
            for path in sorted(base.parent.glob(f"{base.name}.*"), reverse=True):
                path.replace(folder / FOLDER / path.name)  # index first: with it, one is whole
        raise Rollback(
            f"rollback    {line}; back to step {to}, with {FACTOR:g} times the learning rate "
            f"({len(entries)} of {MOST_ROLLBACKS})"
        )

    def _last_good(self, step: int, before: list[dict[str, int]]) -> int | None:
        """Return the step of the checkpoint to go back to, or None.

        Not the state right before the bad step, nor one from which the same step failed again. If
        there are regular checkpoints, those of stops do not count: the result must not depend on
        where a run was stopped.
        """
        bound = before[-1]["to"] if before and before[-1]["step"] == step else step
        every = self.run.options.checkpoint_every_steps
        steps = [number for number, _ in checkpoint.find(self.run.folder / "checkpoints")]
        regular = [number for number in steps if number % every == 0] if every else []
        return max((number for number in regular or steps if number < bound), default=None)


def rollbacks(folder: Path) -> list[dict[str, int]]:
    """Return a run's rollbacks: {"step": bad step, "to": step, "examples": seen at `to`}."""
    return list(files.read_json(folder / FOLDER / ROLLBACKS).get("rollbacks", []))


def lower_learning_rate(run: RunContext, restored: int | None) -> RunContext:
    """Return the run with its learning rate lowered once for each rollback.

    Args:
        run: built and restored. Learning rates of the model's own optimizers are assigned.
        restored: step of the restored checkpoint; None: it is a new run.

    Raises:
        InputError: --on_nan=rollback, and the learning rate cannot be lowered.
    """
    rates = [optimizer.learning_rate for optimizer in run.train_state.optimizers]
    has_own_rate = not run.task.rate_is_set
    if has_own_rate and run.options.on_nan == "rollback":
        if not rates or not all(isinstance(rate, keras.Variable) for rate in rates):
            raise InputError(
                "--on_nan=rollback lowers the learning rate, and an optimizer of this model has a "
                "schedule of its own for it: give it a number, or type --on_nan=stop or skip"
            )
    entries = rollbacks(run.folder) if restored is not None else []
    if not entries:
        return run
    if not has_own_rate:
        return dataclasses.replace(run, lowered_at=tuple(e["examples"] for e in entries))
    for rate in rates:  # later checkpoints hold the lowered rate
        rate.assign(rate * FACTOR ** sum(entry["to"] == restored for entry in entries))
    run.train_state.set_copies()
    return run


def _write(folder: Path, variables: Mapping[str, Any], batch: Any, report: Mapping) -> None:
    """Write the state before a step, its batch and the report on it to train_dir/nan."""
    directory = folder / FOLDER
    directory.mkdir(parents=True, exist_ok=True)
    (directory / REPORT).unlink(missing_ok=True)  # written last: it marks the others as complete
    (directory / STATE).mkdir(exist_ok=True)
    values = {name: tf.identity(variable) for name, variable in variables.items()}
    checkpoint.write(directory / STATE, report["step"], values, {})
    arrays: dict[str, np.ndarray] = {}
    for i, leaf in enumerate(tf.nest.flatten(batch)):
        if leaf.dtype == tf.string:  # which NumPy would pickle
            leaf = tf.io.decode_raw(tf.io.serialize_tensor(leaf), tf.uint8)
        arrays[str(i)] = leaf.numpy()
    with files.replacing(directory / BATCH) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)
    files.write_json(directory / REPORT, report)


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report on the run's non-finite step; raise InputError if there is none."""
    report = files.read_json(folder / FOLDER / REPORT)
    if not {"step", "line", "rows"} <= report.keys():
        raise InputError(
            f"--train_dir={folder}: there is nothing to replay: no step of that run was infinite "
            f"or NaN (it would be in {folder / FOLDER})"
        )
    return report


def read(folder: Path, spec: Any) -> tuple[dict[str, np.ndarray], Any]:
    """Return the state before the non-finite step, {name: array}, and its batch.

    Args:
        folder: of the run.
        spec: the structure of the batch, (example, draws).

    Raises:
        InputError: a file is missing or damaged.
    """
    directory = folder / FOLDER
    try:
        state = checkpoint.read(str(directory / STATE / f"ckpt-{read_report(folder)['step']}"), "")
        files.check_is_file(directory / BATCH)
        with np.load(directory / BATCH) as file:
            arrays = dict(file)
    except Exception as error:  # of many kinds
        raise InputError(f"{directory} cannot be read: {first_line(error)}") from None
    leaves = [
        tf.io.parse_tensor(arrays[str(i)].tobytes(), tf.string)
        if leaf is not None and leaf.dtype == tf.string
        else tf.constant(arrays[str(i)])
        for i, leaf in enumerate(tf.nest.flatten(spec))
    ]
    return state, tf.nest.pack_sequence_as(spec, leaves)


def _row_numbers(run: RunContext, step: int, examples: int, size: int) -> tuple[np.ndarray, str]:
    """Return a number that identifies each example of a step's batch, and what it counts."""
    split = run.data.train
    if hasattr(split, "train_rows"):
        position = dict(seed=run.options.seed, step=step, examples=examples)
        rows, _ = next(iter(split.train_rows(size, **position)))
        return split.numbers(rows), "rows of the training set"
    return examples + np.arange(size), "examples of the run, counted over all epochs"


def _rows_text(rows: list[int], rows_are: str, size: int) -> str:
    if not rows:
        return ""
    if len(rows) == size:
        return f"for all {size} examples"
    shown = ", ".join(map(str, rows[:_SHOWN]))
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"for {shown}{more} ({rows_are})"


def _fault_text(fault: TensorRange | None, rows_text: str) -> str:
    if fault is None:
        return "on one device it does not come again"
    rows_text = f" {rows_text}" if rows_text else ""
    return {
        "variable": f"the variable {fault.name} is not finite, before the step",
        "data": f"{fault.name} are not finite in {fault.dtype}{rows_text}",
        "layer": f"layer {fault.name} is the first whose output is not finite{rows_text}",
        "loss": f"all layers' outputs are finite, the loss is not{rows_text}",
        "gradient": f"the loss is finite, the gradient of {fault.name} is not{rows_text}",
    }[fault.kind]


def _remedy(run: RunContext, fault: TensorRange | None = None) -> str:
    if fault and fault.of_data:
        half = ", or type --dtype=float32" if fault.dtype == "float16" else ""
        return f"leave these examples out or scale them{half}"
    if not run.task.rate_is_set:
        return "give its optimizer a lower learning rate or global_clipnorm=1.0"
    more = ", or --on_nan=rollback" if run.options.on_nan == "stop" else ""
    return f"try a lower --learning_rate or --clip_global_norm=1{more}"
