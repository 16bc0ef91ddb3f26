"""Shows a run: lines on the terminal, curves and histograms in TensorBoard.

The x of a training point is the number of updates before it was measured: the loss of the first
batch is at step 0, as in the tutorial.
"""

import dataclasses
import datetime
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb

from towers.formatting import figure, print_line
from towers.monitoring import tower_metrics
from towers.monitoring.event_writer import EventWriter
from towers.monitoring.speed import RATE, Speed, by_tower
from towers.options.triggers import Timetable

_PHASES = (*tower_metrics.PHASES, "update_seconds")
_CALLS = 100  # calls of the train loop whose times are kept before they are summed


@dataclasses.dataclass
class Monitor:
    """Writes the points of a run to event files and the terminal, and measures its speed."""

    train_dir: Path  # of the run; event files are in train, train/tower_N and eval
    timetable: Timetable  # when the run logs and ends
    devices: Sequence[str]  # of each tower
    out: TextIO | None = dataclasses.field(default_factory=lambda: sys.stdout)  # None: no lines
    clock: Callable[[], float] = time.perf_counter  # returns seconds
    start: float = 0.0  # time by the clock when the command started

    seconds_to_first_step: float | None = None

    def __post_init__(self) -> None:
        """Replace the points from the step at which the run continues; they are written again."""
        timetable = self.timetable
        self._speed = Speed(self.clock)
        self.pause = self._speed.pause
        self._evaluated: set[int] = set()
        self._rates: list[float] = []
        self._writer = EventWriter(self.train_dir, timetable.first_step, self.say)
        self._warm: tuple[float, int] | None = None  # time and step of the first point
        self._calls: list[Mapping[str, tf.Tensor]] = []

    def say(self, line: str = "") -> None:
        """Print a line."""
        print_line(line, self.out)

    def after_step(
        self, step: int, values: Mapping[str, tf.Tensor], num_skipped: Callable[[], int | None]
    ) -> None:
        """Keep the train loop's seconds for the next point, and write that if it is due.

        Args:
            step: number of steps made.
            values: what the train loop returned.
            num_skipped: returns the number of skipped steps.
        """
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = self.clock() - self.start
        self._calls.append({name: values[name] for name in (*_PHASES, "tower_seconds")})
        if len(self._calls) == _CALLS:  # the next point may be far away
            self._calls = [_sum(self._calls)]
        if self.timetable.logs(step):
            metrics = {name: value.numpy().tolist() for name, value in values.items()}
            self._train_point(step, metrics | {"skipped": num_skipped()})

    def _train_point(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the point of the last of `step` steps, and print its line.

        The first point of a continued run is only printed, unless it was due anyway.
        """
        examples = self.timetable.examples(step)
        speed = self._speed.at(step, examples)
        phases, own_seconds, rate = {}, [], ""
        if speed:
            self._rates.append(speed[RATE])
            seconds = speed["speed/seconds_per_step"]
            rate = f"{speed[RATE]:.1f} examples/s; {seconds:.3f} s/step; "
            num_steps = self._speed.num_steps
            total = {name: value.numpy() / num_steps for name, value in _sum(self._calls).items()}
            if not math.isnan(total["update_seconds"]):  # see `tower_metrics.time_after`
                phases = {f"speed/{name}": total[name] for name in _PHASES}
                own_seconds = total["tower_seconds"].tolist()
        self._calls = []
        of_towers = {
            "loss": metrics["tower_loss"],
            "gradient_norm": metrics["tower_gradient_norm"],
            "step_seconds": own_seconds,
        }
        plots = self.timetable.plots(step) or step != self.timetable.first_step + 1
        scalars = {
            "loss/data": metrics["loss"],
            "loss/regularization": metrics["penalty"],
            "loss/total": metrics["loss"] + metrics["penalty"],
            "learning_rate": metrics["learning_rate"],
            "gradient_norm": metrics["gradient_norm"],
            "progress/examples": examples,
            "progress/epoch": self.timetable.epochs(step),
            **{name: value for name, value in metrics.items() if name.startswith("batch/")},
            **by_tower(self.devices, of_towers, metrics["tower_examples"]),
            **speed,
            **phases,
        }
        if metrics.get("skipped") is not None:
            scalars["skipped_steps"] = metrics["skipped"]
        if plots:
            self._writer.write_scalars("train", step - 1, scalars)
        self._warm = self._warm or (self.clock(), step)
        self.say(
            f"{_now()}: step {step - 1} of {self.timetable.last_step}, examples {examples}, "
            f"loss = {figure(metrics['loss'])}, "
            f"learning rate {figure(metrics['learning_rate'], 5)} ({rate}ETA {self._eta(step)})"
        )

    def eval_point(
        self, step: int, scalars: Mapping[str, float | None], part: str = "test"
    ) -> None:
        """Write the figures of an evaluation unless this process has, and print them.

        Args:
            step: number of updates before it.
            scalars: {name: value}; None is skipped.
            part: part of the data set, "test" or "validation", with which tags begin.
        """
        if step not in self._evaluated:
            of_part = {f"{part}/{n}": value for n, value in scalars.items() if value is not None}
            self._writer.write_scalars("eval", step, of_part)
        self._evaluated.add(step)
        self.say_figures(part, step, scalars)

    def say_figures(self, part: str, step: int, figures: Mapping[str, float | None]) -> None:
        """Print the figures of an evaluation, see `eval_point`."""
        known = [(name, value) for name, value in figures.items() if value is not None]
        shown = ", ".join(f"{name} {figure(value)}" for name, value in known)
        self.say(
            f"{_now()}: after {step} of {self.timetable.last_step} steps, epoch "
            f"{self.timetable.epochs(step):.2f}, {part}: {shown}"
        )

    def histograms(self, step: int, model: keras.Model) -> None:
        """Write histograms of the finite weights of a model.

        Args:
            step: number of updates so far.
            model: whose trainable weights are shown.
        """
        summary = Summary()
        with self.pause():
            for variable in model.trainable_variables:
                values = variable.numpy()
                if len(values := values[np.isfinite(values)]):
                    summary.MergeFrom(histogram_pb(f"weights/{variable.path}", values))
            self._writer.write_summary("train", step, summary)

    def examples_per_second(self) -> float | None:
        """Return the median speed over points, without the first unless it is the only one."""
        rates = self._rates[1:] or self._rates
        return statistics.median(rates) if rates else None

    def _eta(self, step: int) -> str:
        """Return the remaining time, "0:12:30", at the speed since the first point."""
        remaining = self.timetable.last_step - step
        start, first = self._warm or (0.0, step)
        if remaining and step == first:
            return "?"
        seconds = (self.clock() - start) / max(step - first, 1) * remaining
        return str(datetime.timedelta(seconds=round(seconds)))


def _sum(calls: Sequence[Mapping[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
    return {name: tf.add_n([call[name] for call in calls]) for name in calls[0]}


def _now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


def tensorboard_command(train_dir: str) -> str:
    """Return the command that shows a run in TensorBoard."""
    command = "tensorboard"
    if not shutil.which(command):  # the virtual environment is not active
        command = os.path.relpath(Path(sys.executable).with_name(command))
    return shlex.join([command, f"--logdir={train_dir}"])
