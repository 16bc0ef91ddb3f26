"""Reads the curves of a run from its event files; TensorFlow is not needed.

    curves = read_curves(Path("runs/a"))
    curves.loss.examples, curves.loss.values           # [N], [N]
    curves.seconds_at(curves.of("accuracy").examples)  # of training, up to each evaluation

Curves are over examples, the clock that all runs share.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from towers.monitoring import events

_TRAIN_TAGS = ("loss/data", "loss/total", "progress/examples", "speed/examples_per_second")
_PART = re.compile("^(test|validation)/")  # part of the data set

Points = Mapping[float, Mapping[str, float]]  # {x: {tag: value}}


class Curve(NamedTuple):
    """Values over the course of a run, each [N]; `examples` were seen before each."""

    examples: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float | None:
        """The last value, None if the curve is empty."""
        return float(self.values[-1]) if len(self.values) else None


@dataclasses.dataclass(frozen=True)
class Curves:
    """The curves of a run; any may be empty."""

    loss: Curve  # training loss without regularisation
    evaluated: Mapping[str, Curve]  # {metric: curve of its evaluations}
    examples: np.ndarray  # examples seen at training points, with 0 at the start, [N]
    seconds: np.ndarray  # of training up to there, [N]; NaN if the speed is unknown

    def of(self, metric: str) -> Curve:
        """Return a metric's curve, that of the moving average if there is one; it may be empty."""
        none = Curve(np.array([]), np.array([]))
        return self.evaluated.get(f"{metric}_ema", self.evaluated.get(metric, none))

    def seconds_at(self, examples: float) -> float | None:
        """Return the seconds of training up to `examples` examples, None if unknown."""
        known = len(self.examples) > 1 and np.isfinite(self.seconds[-1])
        return float(np.interp(examples, self.examples, self.seconds)) if known else None


def read_curves(folder: Path, batch_size: int = 1, by_examples: bool = False) -> Curves:
    """Return the curves of the run in a folder.

    Args:
        folder: folder of the run.
        batch_size: examples of a step, for points beyond the known numbers of examples.
        by_examples: whether x is examples (--tensorboard_x=examples) instead of updates.
    """
    train = events.read(folder / "train", _TRAIN_TAGS)
    evaluated = {
        x: {_PART.sub("", tag): value for tag, value in values.items()}
        for x, values in events.read(folder / "eval").items()
    }
    steps, seen = _series(train, "progress/examples")  # x is before the step, examples after it
    known_x, known_examples = np.append(0.0, steps + 1), np.append(0.0, seen)

    def curve(points: Points, tag: str) -> Curve:
        x, values = _series(points, tag)
        beyond = known_examples[-1] + (x - known_x[-1]) * batch_size
        before = np.interp(x, known_x, known_examples)
        return Curve(x if by_examples else np.where(x > known_x[-1], beyond, before), values)

    rates = np.array([train[x].get("speed/examples_per_second", np.nan) for x in steps])
    loss = curve(train, "loss/data")
    return Curves(
        loss=loss if len(loss.values) else curve(train, "loss/total"),
        evaluated={tag: curve(evaluated, tag) for tag in set().union(*evaluated.values())},
        examples=known_examples,
        seconds=training_seconds(seen, rates),
    )


def training_seconds(examples: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Return the seconds of training up to 0 and each point, [N + 1]; [] without points.

    Args:
        examples: examples seen at each point, [N].
        rates: examples/s from the previous point to each point, [N]. NaN, at the first point after
            a start, stands for the next rate; if all are NaN, so are the seconds.
    """
    if not len(examples):
        return np.array([])
    known = np.flatnonzero(rates > 0)
    if not len(known):
        return np.append(0.0, np.full(len(examples), np.nan))
    following = np.minimum(np.searchsorted(known, np.arange(len(rates))), len(known) - 1)
    return np.append(0.0, np.cumsum(np.diff(examples, prepend=0.0) / rates[known[following]]))


def _series(points: Points, tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x and values of a tag."""
    series = {x: values[tag] for x, values in points.items() if tag in values}
    return np.array(list(series), float), np.array(list(series.values()))
