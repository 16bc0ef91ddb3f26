"""Event files as they are read, and cut back; no TensorFlow is needed.

for x, scalars in read(train_dir / "train", {"loss/data"}).items(): ...     # {tag: value}
cut(train_dir / "train", x=1000)        # a run that goes on at step 1000 writes that anew
"""

import math
import os
import struct
from collections.abc import Container, Iterator
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.util.tensor_util import make_ndarray

from towers.errors import RunError

_HEADER = struct.Struct("<QI")  # length of a record, and its checksum; another one comes after it


def paths(folder: Path) -> list[Path]:
    """Return the folder's event files, the oldest first.

    They are ordered by the second in their names, which outlives copying.
    """
    found = folder.glob("events.out.tfevents.*")
    return sorted(found, key=lambda path: (path.name.split(".")[3], path.stat().st_mtime))


def records(path: Path) -> Iterator[tuple[Event, int]]:
    """Yield (event, place of its end) of a file up to its end, or to where a crash cut it off.

    TensorBoard's own reader checks each record in Python, which takes longer than all the rest.
    """
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            if masked_crc32c(header[:8]) != checksum:
                return
            body = file.read(length + 4)
            try:
                event = Event.FromString(body[:length])
            except Exception:  # protobuf's DecodeError, of no class that Python knows: no event
                return
            if len(body) < length + 4:
                return
            yield event, file.tell()


def read(folder: Path, tags: Container[str] | None = None) -> dict[int, dict[str, float]]:
    """Return {x: {tag: value}} of a folder's finite scalars, in rising order of x.

    None stands for all tags.

    A file that begins before the end of the one before is that of a run which went on from an older
    checkpoint: what was beyond its beginning is computed again, and dropped.
    """
    points: dict[int, dict[str, float]] = {}
    for path in paths(folder):
        fresh: dict[int, dict[str, float]] = {}
        for event, _ in records(path):
            for value in event.summary.value:
                if tags is not None and value.tag not in tags:
                    continue
                if (number := _number(value)) is not None:
                    fresh.setdefault(event.step, {})[value.tag] = number
        first = min(fresh, default=math.inf)
        points = {x: found for x, found in points.items() if x < first} | fresh
    return dict(sorted(points.items()))


def cut(folder: Path, x: int) -> None:
    """Drop what stands at `x` or later: a run that goes on from there writes it anew.

    After a crash a file may hold points that came after the last checkpoint, and a record that is
    not whole. SessionLog.START would hide such points in TensorBoard, but from nobody else.

    Raises:
        RunError: a file cannot be written.
    """
    for path in paths(folder):
        ends = [0]
        for event, end in records(path):
            if event.HasField("summary") and event.step >= x:
                break
            ends.append(end)
        try:
            if len(ends) < 3:
                path.unlink()  # nothing but its header is left
            elif ends[-1] < path.stat().st_size:
                os.truncate(path, ends[-1])
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from None


def _number(value: Summary.Value) -> float | None:
    """Return a finite scalar, None for anything else."""
    tensor = value.tensor
    if not value.HasField("tensor") or tensor.tensor_shape.dim or tensor.string_val:
        return None
    number = float(make_ndarray(tensor))
    return number if math.isfinite(number) else None
