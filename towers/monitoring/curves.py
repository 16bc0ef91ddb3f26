"""The curves of a run, read from its event files; no TensorFlow is needed.

    curves = read_curves(Path("runs/a"))
    curves.loss.examples, curves.loss.values           # [N], [N]
    curves.seconds_at(curves.accuracy.examples)        # of training, up to each evaluation

A run that was stopped and goes on writes more files; what it computes again takes the place of what
was written before. Everything is put over examples, the one clock that all runs have.
"""

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.util import tensor_util

TRAIN_TAGS = (
    "loss/data", "loss/total", "progress/examples", "progress/epoch", "speed/examples_per_second",
)  # fmt: skip
EVAL_TAGS = ("accuracy", "accuracy_ema")
_HEADER = struct.Struct("<QI")  # length of a record, and its checksum; another one comes after it

Points = dict[float, dict[str, float]]  # {x: {tag: value}}


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values over the course of a run.

    Attributes:
        x: as TensorBoard shows it: updates, or examples, before the value was measured, [N].
        examples: seen before that, [N].
        values: [N].
    """

    x: np.ndarray
    examples: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Curves:
    """The curves of a run; each may be empty.

    Attributes:
        loss: of training, on the data alone.
        accuracy: on the test set, of the moving average where there is one.
        examples: seen at points of training, with 0 at the start, [N].
        seconds: of training up to there, [N]; NaN where the speed is not known.
        epochs: up to there, [N].
    """

    loss: Curve
    accuracy: Curve
    examples: np.ndarray
    seconds: np.ndarray
    epochs: np.ndarray

    def seconds_at(self, examples: float) -> float | None:
        """Return the seconds of training after so many examples, None if they are not known."""
        return _at(examples, self.examples, self.seconds)

    def epochs_at(self, examples: float) -> float | None:
        """Return the epochs after so many examples, None if they are not known."""
        return _at(examples, self.examples, self.epochs)


def _at(examples: float, xs: np.ndarray, ys: np.ndarray) -> float | None:
    value = float(np.interp(examples, xs, ys)) if len(xs) > 1 else np.nan
    return value if np.isfinite(value) else None


def read_curves(folder: Path, batch_size: int = 1, by_examples: bool = False) -> Curves:
    """Return the curves of a run.

    Args:
        folder: of the run.
        batch_size: of the run, for points whose examples are not known otherwise.
        by_examples: whether x is examples (--tensorboard_x=examples), else it is updates.
    """
    train = read_points(folder / "train", TRAIN_TAGS)
    evaluated = read_points(folder / "eval", EVAL_TAGS)
    steps, seen = _series(train, "progress/examples")  # x is before the step, examples are after it
    if by_examples:
        known_x, known_examples = np.array([0.0]), np.array([0.0])
    else:
        known_x, known_examples = _from_zero(steps + 1, seen)

    def examples_of(x: np.ndarray) -> np.ndarray:
        if by_examples:
            return x
        last = known_x[-1], known_examples[-1]
        beyond = last[1] + (x - last[0]) * batch_size
        return np.where(x > last[0], beyond, np.interp(x, known_x, known_examples))

    def curve(points: Points, *tags: str) -> Curve:
        x, values = _series(points, *tags)
        return Curve(x, examples_of(x), values)

    examples, epochs = _from_zero(seen, _aligned(train, steps, "progress/epoch"))
    return Curves(
        loss=curve(train, "loss/data", "loss/total"),
        accuracy=curve(evaluated, "accuracy_ema", "accuracy"),
        examples=examples,
        seconds=training_seconds(seen, _aligned(train, steps, "speed/examples_per_second")),
        epochs=epochs,
    )


def training_seconds(examples: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Return the seconds of training after each number of examples, beginning with 0.

    The examples between two points went at the speed that the second one has. A point without
    speed is the first after a start: the next one's stands for it.

    Args:
        examples: seen at each point, [N].
        rates: examples/s between each point and the one before, NaN where it is not known, [N].

    Returns:
        [N + 1], or [0] for no points. NaN if no speed is known.
    """
    if not len(examples):
        return np.array([])
    known = np.flatnonzero(np.isfinite(rates) & (rates > 0))
    if not len(known):
        return np.concatenate([[0.0], np.full(len(examples), np.nan)])
    following = np.minimum(np.searchsorted(known, np.arange(len(rates))), len(known) - 1)
    seconds = np.diff(examples, prepend=0.0) / rates[known[following]]
    return np.concatenate([[0.0], np.cumsum(seconds)])


def read_points(folder: Path, tags: tuple[str, ...]) -> Points:
    """Return {x: {tag: value}} of a folder's event files, in rising order of x.

    A file that begins before the end of the one before is that of a run which went on from an older
    checkpoint: what was beyond its beginning is computed again, and dropped.
    """
    points: Points = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=_when_begun):
        fresh: Points = {}
        for event in _events(path):
            for value in event.summary.value:
                if value.tag in tags and (number := _number(value)) is not None:
                    fresh.setdefault(float(event.step), {})[value.tag] = number
        if fresh:
            first = min(fresh)
            points = {x: found for x, found in points.items() if x < first} | fresh
    return dict(sorted(points.items()))


def _when_begun(path: Path) -> tuple[str, float]:
    """Order files by the second in their names, which outlives copying."""
    return path.name.split(".")[3], path.stat().st_mtime


def _events(path: Path) -> Iterator[event_pb2.Event]:
    """Yield the events of a file up to its end, or to where a crash cut it off.

    Checksums are passed over: in Python they take longer than all the rest.
    """
    from google.protobuf.message import DecodeError  # which TensorBoard brings with it

    try:
        with open(path, "rb") as file:
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                length, _ = _HEADER.unpack(header)
                if length > 2**31:
                    return
                record = file.read(length)
                if len(record) < length or len(file.read(4)) < 4:
                    return
                yield event_pb2.Event.FromString(record)
    except (OSError, DecodeError):
        return


def _number(value: summary_pb2.Summary.Value) -> float | None:
    """Return a finite scalar, None for anything else."""
    if value.WhichOneof("value") == "simple_value":
        number = value.simple_value
    elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
        number = float(tensor_util.make_ndarray(value.tensor))
    else:
        return None
    return number if np.isfinite(number) else None


def _series(points: Points, *tags: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x and values of the first of the tags that occurs at all."""
    for tag in tags:
        found = {x: values[tag] for x, values in points.items() if tag in values}
        if found:
            return np.array(list(found)), np.array(list(found.values()))
    return np.array([]), np.array([])


def _aligned(points: Mapping[float, Mapping[str, float]], xs: np.ndarray, tag: str) -> np.ndarray:
    """Return a tag's value at each x, NaN where there is none."""
    return np.array([points[x].get(tag, np.nan) for x in xs])


def _from_zero(xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both with 0 before them: nothing is done at the start."""
    return np.concatenate([[0.0], xs]), np.concatenate([[0.0], ys])
