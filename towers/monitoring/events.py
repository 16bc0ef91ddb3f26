"""Reads event files, appends to them and cuts them back; no TensorFlow is needed.

    for x, scalars in read(train_dir / "train", {"loss/data"}).items(): ...     # {tag: value}
    cut(train_dir / "train", x=1000)        # before a run continues from step 1000

Damaged events are skipped with a warning: curves must never stop training.
"""

import math
import struct
import sys
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_ndarray

from towers import files

_HEADER = struct.Struct("<QI")  # length of an event and its checksum; the event follows
_SUM = struct.Struct("<I")  # checksum of the event
_CHECKED_BYTES = 2**16  # larger events, pictures, are not checked: that takes 0.1 s a megabyte

Say = Callable[[str], object]


def note(line: str) -> None:
    """Print a warning."""
    print(f"warning     {line}", file=sys.stderr, flush=True)


def paths(folder: Path) -> list[Path]:
    """Return a folder's event files, oldest first by the time in their names."""
    event_files = [path for path in folder.glob("events.out.tfevents.*") if path.is_file()]
    return sorted(event_files, key=lambda path: (path.name.split(".")[3], path.stat().st_mtime))


def runs(folder: Path) -> list[Path]:
    """Return a folder and its subfolders; TensorBoard takes each with event files for a run."""
    return [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]


def append(path: Path, *events: Event) -> None:
    """Append events to a file.

    Args:
        path: the file, which is created if necessary.
        *events: the events.
    """
    with open(path, "ab") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())


class Record(NamedTuple):
    """An event, and its bytes in the file."""

    event: Event
    data: bytes


def load(path: Path, say: Say = note) -> list[Record]:
    """Return the undamaged events of a file.

    The last event may be incomplete: it may just be written, or its process was killed.

    Args:
        path: the event file.
        say: called with a line if others are damaged.
    """
    data, place, damaged, records = path.read_bytes(), 0, False, []
    while place + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, place)
        if masked_crc32c(data[place : place + 8]) != checksum:
            damaged = True  # the start of the next event is unknown
            break
        begin, end = place + _HEADER.size, place + _HEADER.size + length
        if end + _SUM.size > len(data):
            break
        (checksum,) = _SUM.unpack_from(data, end)
        try:
            if length <= _CHECKED_BYTES and masked_crc32c(data[begin:end]) != checksum:
                raise ValueError("the checksum is another one")
            event = Event.FromString(data[begin:end])
            records.append(Record(event, data[place : end + _SUM.size]))
        except Exception:  # also protobuf's DecodeError
            damaged = True
        place = end + _SUM.size
    if damaged:
        say(f"{path} is damaged: some of its points or pictures are lost")
    return records


def read(
    folder: Path, tags: Container[str] | None = None, say: Say = note
) -> dict[int, dict[str, float]]:
    """Return {x: {tag: value}} of a folder's finite scalars, in increasing order of x.

    If a file begins before the end of the previous one, the run was continued from an older
    checkpoint: points of the previous file from there on are dropped.

    Args:
        folder: folder of event files.
        tags: tags to read; None: all.
        say: called with a line for each file that is damaged or cannot be read.
    """
    points: dict[int, dict[str, float]] = {}
    for path in paths(folder):
        fresh: dict[int, dict[str, float]] = {}
        try:
            records = load(path, say)
        except OSError as error:
            say(f"{path} cannot be read: {error.strerror}")
            continue
        for event, _ in records:
            for value in event.summary.value if event.step >= 0 else ():
                wanted = tags is None or value.tag in tags
                if wanted and math.isfinite(number := _number(value)):
                    fresh.setdefault(event.step, {})[value.tag] = number
        first = min(fresh, default=math.inf)
        points = {x: scalars for x, scalars in points.items() if x < first} | fresh
    return dict(sorted(points.items()))


def cut(folder: Path, x: int, scalars_x: int | None = None, say: Say = note) -> None:
    """Drop all points at `x` or later, also in subfolders, since they are written again.

    After a crash a file may hold points beyond the last checkpoint, which only TensorBoard knows to
    hide after SessionLog.START. Damaged events are dropped, too: TensorBoard stops reading there.

    Args:
        folder: folder of event files, and of folders of such.
        x: x of the first point to drop.
        scalars_x: the same for scalars, if that is earlier.
        say: called with a line for each file that is damaged or cannot be cut.
    """
    scalars_x = x if scalars_x is None else scalars_x
    for path in (path for run in runs(folder) for path in paths(run)):
        try:
            remaining = []
            for event, data in load(path, say):
                values = event.summary.value
                scalar = values and values[0].metadata.plugin_data.plugin_name == "scalars"
                if values and event.step >= (scalars_x if scalar else x):
                    break
                remaining.append(data)
            if len(remaining) < 2:
                path.unlink()  # only its header is left
            elif sum(map(len, remaining)) < path.stat().st_size:
                with files.replacing(path) as temporary:
                    temporary.write_bytes(b"".join(remaining))
        except OSError as error:
            say(f"{path} cannot be cut back to step {x}: {error.strerror}")


def _number(value: Summary.Value) -> float:
    """Return a scalar's value, NaN for anything else."""
    try:
        return float(make_ndarray(value.tensor)) if value.HasField("tensor") else math.nan
    except Exception:  # several numbers, a text, an unknown type
        return math.nan
