"""Shows a run: lines and a bar on the terminal, curves and pictures in TensorBoard.

A point of training stands at the number of updates that the weights had had when it was measured:
the loss of the first batch stands at step 0, as in the tutorial. With --tensorboard_x=examples it
is the number of examples.
"""

import datetime
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tqdm import tqdm

from towers.devices import remote
from towers.formatting import printable
from towers.monitoring import events, tower_metrics
from towers.monitoring.event_writer import PARTS, EventWriter
from towers.monitoring.gradient_noise import NoiseScale, Stragglers, estimate
from towers.monitoring.speed import RATE, Speed, by_tower
from towers.options.triggers import Timetable

_PHASES = (*tower_metrics.PHASES, "update_seconds")
_CALLS = 100  # whose times are kept one by one
_NOISE_TAGS = "noise_scale/trace", "noise_scale/squared_norm"


class Monitor:
    """Writes the points of a run to its event files and to the terminal, and keeps its speed."""

    def __init__(
        self,
        train_dir: Path,
        timetable: Timetable,
        devices: Sequence[str],
        *,
        health: Callable[[], Mapping[str, float]] = dict,
        check: Callable[[], None] = lambda: None,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Write to event files in train_dir/train, a folder for each tower, and train_dir/eval.

        Points at the step where a run goes on, or later, as after a crash, are dropped: they are
        written again.

        Args:
            train_dir: the folder of the run.
            timetable: of the run.
            devices: one for each tower.
            health: returns {tag: value} of the GPUs since its last call.
            check: see `EventWriter`.
            out: for lines; None: standard output.
            clock: returns seconds.
        """
        self._timetable, self._devices, self._health = timetable, list(devices), health
        self._out, self._clock, self._speed = out or sys.stdout, clock, Speed(clock)
        self.pause = self._speed.pause
        of_train, of_eval = (train_dir / part for part in PARTS)
        self._evaluated = _cut(of_train, of_eval, timetable)
        before = events.read(of_train, {"loss/data", RATE, *_NOISE_TAGS}).values()
        self.last_loss: float | None = None  # of the data at the last point, of whatever process
        self._noise, self._rates = NoiseScale(), []
        for point in before:  # a continued run's curve goes on
            self.last_loss = point.get("loss/data", self.last_loss)
            if all(tag in point for tag in _NOISE_TAGS):
                self._noise.add(*(point[tag] for tag in _NOISE_TAGS))
            if RATE in point and timetable.first_step == timetable.last_step:
                self._rates.append(point[RATE])  # this process makes no steps of its own
        self._writer = EventWriter(train_dir, timetable.options.max_event_mib, self.say, check)
        self._bar = tqdm(
            total=timetable.last_step,
            initial=timetable.first_step,
            unit="step",
            # In a notebook the lines' own stream: between those of two it would be drawn anew.
            file=self._out if in_notebook() else sys.stderr,
            mininterval=1.0 if in_notebook() else 0.1,
            disable=not (sys.stderr.isatty() or in_notebook()),
        )
        self._stragglers, self._machines = Stragglers(devices), remote.MachineCurves(devices)
        self._warm: tuple[float, int] | None = None  # when the first point was made, and its step
        self._calls: list[Mapping[str, tf.Tensor]] = []

    def say(self, line: str = "") -> None:
        """Print a line, above the bar if there is one."""
        tqdm.write(printable(line), file=self._out)
        self._out.flush()

    def progress(self, step: int, values: Mapping[str, tf.Tensor]) -> None:
        """Move the bar to `step`, and keep the train loop's seconds for the next point."""
        self._calls.append({name: values[name] for name in (*_PHASES, "tower_seconds")})
        if len(self._calls) == _CALLS:  # a point may be far away
            self._calls = [_sum(self._calls)]
        self._bar.update(step - self._bar.n)

    def train_point(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the train loop's metrics, numbers and lists, after `step` steps.

        The point stands at `step` - 1, the updates before the measured step. The first of a run
        that goes on is a line alone, unless it was due anyway.
        """
        self.last_loss, examples = metrics["loss"], self._timetable.examples(step)
        speed = self._speed.at(step, examples)
        phases, own_seconds, rate = {}, [], ""
        if speed:
            self._rates.append(speed[RATE])
            seconds = speed["speed/seconds_per_step"]
            rate = f"{speed[RATE]:.1f} examples/s; {seconds:.3f} s/step; "
            num_steps = self._speed.num_steps
            total = {name: value.numpy() / num_steps for name, value in _sum(self._calls).items()}
            if not math.isnan(total["update_seconds"]):  # see `tower_stats.time_after`
                phases = {f"speed/{name}": total[name] for name in _PHASES}
                own_seconds = total["tower_seconds"].tolist()
        self._calls = []
        of_towers = {
            "loss": metrics["tower_loss"],
            "gradient_norm": metrics["tower_gradient_norm"],
            "cosine_to_mean": metrics["tower_cosine"],
            "step_seconds": own_seconds,
        }
        plots = self._timetable.plots(step) or step != self._timetable.first_step + 1
        scalars = {
            "loss/data": metrics["loss"],
            "loss/regularisation": metrics["penalty"],
            "loss/total": metrics["loss"] + metrics["penalty"],
            "learning_rate": metrics["learning_rate"],
            "gradient_norm": metrics["gradient_norm"],
            "progress/examples": examples,
            "progress/epoch": self._timetable.epochs(step),
            **{name: value for name, value in metrics.items() if name.startswith("batch/")},
            **by_tower(self._devices, of_towers, metrics["tower_examples"]),
            **speed,
            **phases,
            **(self._noise_scalars(metrics) if plots else {}),
            **self._health(),
            **self._machines.point(step, own_seconds),
        }
        if self._timetable.options.on_nan == "skip":
            scalars["skipped_steps"] = metrics["skipped"]
        if plots:
            self._writer.scalars("train", self._timetable.x(step - 1), scalars)
        self._warm = self._warm or (self._clock(), step)
        self.say(
            f"{_now()}: step {step - 1} of {self._timetable.last_step}, examples {examples}, "
            f"loss = {metrics['loss']:.4f}, learning rate {metrics['learning_rate']:.5f} "
            f"({rate}ETA {self._eta(step)})"
        )
        if own_seconds and (line := self._stragglers.line(own_seconds)):
            self.say(line)

    def eval_point(
        self, step: int, scalars: Mapping[str, float | None], what: str = "test"
    ) -> None:
        """Write the figures of an evaluation after `step` updates; None is left out.

        Tags begin with `what`, the part of the data set, "test" or "validation".
        """
        if not self.evaluated(step):
            known = {name: value for name, value in scalars.items() if value is not None}
            of_part = {f"{what}/{name}": value for name, value in known.items()}
            self._writer.scalars("eval", self._timetable.x(step), of_part)
        self._evaluated.add(self._timetable.x(step))
        self.say_figures(what, step, scalars)

    def say_figures(self, what: str, step: int, figures: Mapping[str, float | None]) -> None:
        """Print the figures of an evaluation of a part of the data set."""
        known = [(name, value) for name, value in figures.items() if value is not None]
        shown = ", ".join(f"{name} {value:.4f}" for name, value in known)
        self.say(
            f"{_now()}: step {step} of {self._timetable.last_step}, epoch "
            f"{self._timetable.epochs(step):.2f}, {what}: {shown} (ETA {self._eta(step)})"
        )

    def evaluated(self, step: int) -> bool:
        """Return whether the curves have an evaluation after `step` updates."""
        return self._timetable.x(step) in self._evaluated

    def show(self, step: int, summaries: Iterable[Summary], part: str = "train") -> None:
        """Write pictures or histograms, of "train" or "eval", after `step` updates."""
        last = step == self._timetable.last_step
        for summary in summaries:
            self._writer.heavy(part, self._timetable.x(step), summary, last=last)

    def examples_per_second(self) -> float | None:
        """Return the median over windows; the first is a warm-up unless it is the only one."""
        rates = self._rates[1:] or self._rates
        return statistics.median(rates) if rates else None

    def noise_scale(self) -> float | None:
        """Return the gradient noise scale in examples, None where it is not well known."""
        return self._noise.known_examples()

    def advice(self) -> str | None:
        """Return one sentence on batch size and towers, None where the scale is not well known."""
        return self._noise.advice(self._timetable.options.batch_size)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()

    def _noise_scalars(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        found = estimate(
            metrics["tower_gradient_norm"], metrics["tower_examples"], metrics["data_gradient_norm"]
        )
        # As event files keep them, and a run that goes on reads them.
        found = np.float32(found or math.nan).tolist()
        if not np.isfinite(found).all():
            return {}
        self._noise.add(*found)
        scalars = dict(zip(_NOISE_TAGS, found, strict=True))
        scale = self._noise.examples()
        return scalars if scale is None else scalars | {"noise_scale/examples": scale}

    def _eta(self, step: int) -> str:
        """Return the time that is left, "0:12:30", at the speed since the first point."""
        remaining = self._timetable.last_step - step
        start, first = self._warm or (0.0, step)
        if remaining and step == first:
            return "?"
        seconds = (self._clock() - start) / max(step - first, 1) * remaining
        return str(datetime.timedelta(seconds=round(seconds)))


def _cut(of_train: Path, of_eval: Path, timetable: Timetable) -> set[int]:
    """Drop the points that are written again from the start on; return where evaluations stand.

    A point of training there is of the next step. An evaluation there is of the weights that the
    run goes on with, and is kept if it is whole: its figures come last. The point of the step
    before is dropped if it is only there because the run was to end.
    """
    first = timetable.first_step
    start = timetable.x(first)
    events.cut(of_train, start, start if timetable.plots(first) else timetable.x(first - 1))
    events.cut(of_eval, start + 1)
    evaluated = set(events.read(of_eval))
    if start not in evaluated:
        events.cut(of_eval, start)
    return evaluated


def _sum(calls: Sequence[Mapping[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
    return {name: tf.add_n([call[name] for call in calls]) for name in calls[0]}


def in_notebook() -> bool:
    """Return whether this program is a notebook's kernel."""
    return "ipykernel" in sys.modules


def _now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


def tensorboard_command(train_dir: str) -> str:
    """Return a command that shows a run in TensorBoard."""
    command = "towers"
    if not shutil.which(command):  # a virtual environment that is not active
        command = os.path.relpath(Path(sys.executable).with_name(command))
    return shlex.join([command, "tensorboard", f"--train_dir={train_dir}"])
