"""Reads event files, appends to them and cuts them back; no TensorFlow is needed.

    for x, scalars in read(train_dir / "train", {"loss/data"}).items(): ...     # {tag: value}
    cut(train_dir / "train", x=1000)        # a run that goes on at step 1000 writes that anew

A damaged event is left out, with a line: curves are never a reason not to train.
"""

import dataclasses
import math
import struct
import sys
from collections.abc import Callable, Container
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_ndarray

from towers import files

_HEADER = struct.Struct("<QI")  # length of an event and the checksum of that; then comes the event
_SUM = struct.Struct("<I")  # and its own checksum
_CHECKED_BYTES = 2**16  # of an event: sums take 0.1 s a megabyte, and pictures are not read here

Say = Callable[[str], object]


def note(line: str) -> None:
    """Print a warning."""
    print(f"warning     {line}", file=sys.stderr, flush=True)


def paths(folder: Path) -> list[Path]:
    """Return the folder's event files, the oldest first by the time in their names."""
    found = [path for path in folder.glob("events.out.tfevents.*") if path.is_file()]
    return sorted(found, key=lambda path: (path.name.split(".")[3], path.stat().st_mtime))


def runs(folder: Path) -> list[Path]:
    """Return a folder and those in it: TensorBoard takes each that has event files for a run."""
    return [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]


def append(path: Path, *found: Event) -> None:
    """Append events to a file, which is made if there is none."""
    with open(path, "ab") as file:
        writer = RecordWriter(file)
        for event in found:
            writer.write(event.SerializeToString())


@dataclasses.dataclass(frozen=True)
class Record:
    """An event, and its bytes in the file."""

    event: Event
    data: bytes


def load(path: Path, say: Say = note) -> list[Record]:
    """Return the events of a file that are not damaged; `say` is given a line if one is.

    The end of a file may be missing: it is being written, or was when its process died.
    """
    data, place, damaged, found = path.read_bytes(), 0, False, []
    while place + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, place)
        if masked_crc32c(data[place : place + 8]) != checksum:
            damaged = True  # nobody knows where the next event begins
            break
        begin, end = place + _HEADER.size, place + _HEADER.size + length
        if end + _SUM.size > len(data):
            break
        whole, content = data[place : end + _SUM.size], data[begin:end]
        place = end + _SUM.size
        (checksum,) = _SUM.unpack_from(data, end)
        try:
            if length <= _CHECKED_BYTES and masked_crc32c(content) != checksum:
                raise ValueError("the checksum is another one")
            found.append(Record(Event.FromString(content), whole))
        except Exception:  # protobuf's DecodeError, too, which TensorBoard does not export
            damaged = True
    if damaged:
        say(f"{path} is damaged: some of its points or pictures are lost")
    return found


def read(
    folder: Path, tags: Container[str] | None = None, say: Say = note
) -> dict[int, dict[str, float]]:
    """Return {x: {tag: value}} of a folder's finite scalars, in rising order of x.

    A file that begins before the end of the one before is that of a run which went on from an older
    checkpoint: what was beyond its beginning is computed again, and dropped.

    Args:
        folder: of event files.
        tags: that are wanted; None: all.
        say: is given a line for each file that is damaged or cannot be read.
    """
    points: dict[int, dict[str, float]] = {}
    for path in paths(folder):
        fresh: dict[int, dict[str, float]] = {}
        try:
            records = load(path, say)
        except OSError as error:
            say(f"{path} cannot be read: {error.strerror}")
            continue
        for event in (record.event for record in records if record.event.step >= 0):
            for value in event.summary.value:
                if tags is None or value.tag in tags:
                    number = _number(value)
                    if math.isfinite(number):
                        fresh.setdefault(event.step, {})[value.tag] = number
        first = min(fresh, default=math.inf)
        points = {x: found for x, found in points.items() if x < first} | fresh
    return dict(sorted(points.items()))


def cut(folder: Path, x: int, scalars_x: int | None = None, say: Say = note) -> None:
    """Drop all points at `x` or later, also in the folders within: they are written anew.

    After a crash a file may hold points that came after the last checkpoint. TensorBoard hides
    them after SessionLog.START, but nobody else does. What is damaged is dropped, too:
    TensorBoard reads no further than to there.

    Args:
        folder: of event files, and of folders of such.
        x: of the first point that is written anew.
        scalars_x: the same for scalars, if that is earlier.
        say: is given a line for each file that is damaged or cannot be cut.
    """
    scalars_x = x if scalars_x is None else scalars_x
    for path in (path for run in runs(folder) for path in paths(run)):
        try:
            kept = []
            for record in load(path, say):
                values = record.event.summary.value
                scalar = values and values[0].metadata.plugin_data.plugin_name == "scalars"
                if values and record.event.step >= (scalars_x if scalar else x):
                    break
                kept.append(record.data)
            if len(kept) < 2:
                path.unlink()  # nothing but its header is left
            elif sum(map(len, kept)) < path.stat().st_size:
                with files.replacing(path) as temporary:
                    temporary.write_bytes(b"".join(kept))
        except OSError as error:
            say(f"{path} cannot be cut back to step {x}: {error.strerror}")


def _number(value: Summary.Value) -> float:
    """Return a scalar, NaN for anything else."""
    try:
        return float(make_ndarray(value.tensor)) if value.HasField("tensor") else math.nan
    except Exception:  # of many kinds: several numbers, a text, or of a type that there is not
        return math.nan
