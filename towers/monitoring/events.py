"""Event files: a point is one event, none stands twice, and they stay below a size.

In use:

    budget = Budget([train_dir / "train", train_dir / "eval"], max_bytes=200 * 2**20)
    cut(train_dir / "train", x=1000)            # a run that goes on at step 1000 writes that anew
    writer = Writer(train_dir / "train", budget)
    writer.scalars(1000, {"loss/total": 0.5})
"""

import contextlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.util.tensor_util import make_ndarray

from towers.errors import RunError

HEAVY, POINT = "pictures and histograms", "curves"
_SHARE = {HEAVY: 0.5, POINT: 1.0}  # of the budget, at which none of a kind is left


class Budget:
    """What a run's event files may still grow by."""

    def __init__(
        self,
        folders: Sequence[Path],
        max_bytes: float,
        say: Callable[[str], None] = print,
    ):
        """Set the limit.

        Args:
            folders: of the event files that count.
            max_bytes: of all of them.
            say: gets a line when the first of a kind is left out.
        """
        self._folders, self._max_bytes, self._say = list(folders), max_bytes, say
        self._offered: Counter[tuple[str, str]] = Counter()
        self._told: set[str] = set()

    def takes(self, kind: str, tag: str, num_bytes: int) -> bool:
        """Tell whether something may be written.

        All is written up to three quarters of what the kind may fill. From there on every second
        one is, up to half of what is left every fourth, and so on: the end is never reached.

        Args:
            kind: HEAVY or POINT.
            tag: what it shows; every second is one of the same tag.
            num_bytes: its size.
        """
        limit = _SHARE[kind] * self._max_bytes
        left = (limit - self._used_bytes() - num_bytes) / limit
        number = self._offered[kind, tag]
        self._offered[kind, tag] += 1
        if left >= 0.25 or (left > 0 and number % 2 ** math.ceil(-math.log2(4 * left)) == 0):
            return True
        if kind not in self._told:
            self._told.add(kind)
            self._say(
                f"thinned     {kind} in TensorBoard from here on: --max_event_mib="
                f"{self._max_bytes / 2**20:g} is nearly reached"
            )
        return False

    def _used_bytes(self) -> int:
        total = 0
        for folder in self._folders:
            for path in paths(folder):
                with contextlib.suppress(FileNotFoundError):  # somebody tidies up
                    total += path.stat().st_size
        return total


class Writer:
    """Appends to the event files of a folder; what is written can be seen at once."""

    def __init__(self, folder: Path, budget: Budget):
        """Open a new event file in the folder."""
        self._writer = tf.summary.create_file_writer(str(folder))
        self._budget = budget

    def scalars(self, x: int, values: Mapping[str, float]) -> None:
        """Write the scalars of a point, which are {tag: value}, at `x` in one event."""
        summary = Summary()
        for tag, value in values.items():
            summary.value.extend(scalar_pb(tag, value).value)
        self._write(summary, x, POINT)

    def heavy(self, summary: Summary, x: int, *, last: bool = False) -> bool:
        """Write a picture or the like at `x` if the budget lets it; tell whether.

        The last ones of a run may have what is left for curves.
        """
        return self._write(summary, x, POINT if last else HEAVY)

    def close(self) -> None:
        """End the file."""
        self._writer.close()

    def _write(self, summary: Summary, x: int, kind: str) -> bool:
        data = summary.SerializeToString()
        if not summary.value or not self._budget.takes(kind, summary.value[0].tag, len(data)):
            return False
        with self._writer.as_default(step=x):  # which flushes at its end
            tf.summary.experimental.write_raw_pb(data)
        return True


def cut(folder: Path, x: int) -> None:
    """Drop what stands at `x` or later: a run that goes on from there writes it anew.

    After a crash a file may hold points that came after the last checkpoint, and a record that is
    not whole.

    Raises:
        RunError: a file cannot be written.
    """
    for path in paths(folder):
        try:
            _cut_file(path, x)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from None


def _cut_file(path: Path, x: int) -> None:
    """Drop the end of a file, from the first point that stands at `x` or later."""
    kept = empty = 0
    for start, event, end in _records(path):
        if event.HasField("summary") and event.step >= x:
            break
        kept, empty = end, empty or (end if start == 0 else 0)
    if kept == empty:
        path.unlink()  # nothing but its header is left
    elif kept < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(kept)


def read(
    folder: Path, tags: Container[str] | None = None
) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield (x, wall time in seconds, {tag: scalar}) of a folder's points, as they were written.

    Args:
        folder: of the event files.
        tags: which are wanted; None: all.
    """
    for path in paths(folder):
        for _, event, _ in _records(path):
            scalars = {
                value.tag: float(make_ndarray(value.tensor))
                for value in event.summary.value
                if (tags is None or value.tag in tags)
                and value.metadata.plugin_data.plugin_name == "scalars"
            }
            if scalars:
                yield event.step, event.wall_time, scalars


def _records(path: Path) -> Iterator[tuple[int, Event, int]]:
    """Yield (start, event, end) of a file's whole records: TensorFlow's TFRecord format."""
    with path.open("rb") as file:
        start = 0
        while len(header := file.read(12)) == 12:
            length, checksum = struct.unpack("<QI", header)
            body = file.read(length + 4) if masked_crc32c(header[:8]) == checksum else b""
            if len(body) < length + 4:
                return
            try:
                event = Event.FromString(body[:length])
            except Exception:  # protobuf's DecodeError, of no class that Python knows: no event
                return
            end = start + 16 + length
            yield start, event, end
            start = end


def paths(folder: Path) -> list[Path]:
    """Return the folder's event files, the oldest first: their names begin with the time."""
    return sorted(folder.glob("events.out.tfevents.*"))
