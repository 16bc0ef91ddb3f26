"""Event files as they are read, and cut back; no TensorFlow is needed.

for x, scalars in read(train_dir / "train", {"loss/data"}).items(): ...     # {tag: value}
cut(train_dir / "train", x=1000)        # a run that goes on at step 1000 writes that anew

The sums of all records are checked. What is damaged is left out, with a line; what is whole counts,
also behind a damaged place: curves are never a reason not to train.
"""

import functools
import math
import os
import struct
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.util.tensor_util import make_ndarray

from towers import files
from towers.monitoring import crc32c

_HEADER = struct.Struct("<QI")  # length of a record, and its checksum
_SUM = struct.Struct("<I")  # of the record itself, which stands between
_SEARCHED_BYTES = 2**20  # at once, for the next header

Say = Callable[[str], object]
Span = tuple[int, int]  # where a record begins and ends in its file


def note(line: str) -> None:
    """Print a line that is no part of what was asked for."""
    print(f"warning     {line}", file=sys.stderr, flush=True)


def paths(folder: Path) -> list[Path]:
    """Return the folder's event files, the oldest first.

    They are ordered by the second in their names, which outlives copying.
    """
    found = [path for path in folder.glob("events.out.tfevents.*") if path.is_file()]
    return sorted(found, key=lambda path: (path.name.split(".")[3], path.stat().st_mtime))


def runs(folder: Path) -> list[Path]:
    """Return a folder and those in it: TensorBoard takes each that has event files for a run."""
    return [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]


def framed(events: Iterable[Event]) -> list[bytes]:
    """Return events as records of a file, as TensorFlow's own writer frames them."""
    texts = [event.SerializeToString() for event in events]
    lengths = [struct.pack("<Q", len(text)) for text in texts]
    sums = crc32c.masked([*lengths, *texts]).tolist()
    parts = zip(texts, lengths, sums, sums[len(texts) :], strict=False)
    return [length + _SUM.pack(a) + text + _SUM.pack(b) for text, length, a, b in parts]


class Records:
    """The whole records of a file: `for event, begin, end in Records(path)`, in bytes.

    `lost` is the number of places with something else; not the end of a file that is being written,
    or was when its process died.
    """

    def __init__(self, path: Path):
        """Read a file; an OSError says that it cannot be read."""
        self._path, self.data = path, path.read_bytes()
        self.spans, self.lost = _find(self.data)

    def __iter__(self) -> Iterator[tuple[Event, int, int]]:
        """Yield each record."""
        for begin, end in self.spans:
            try:
                event = Event.FromString(_body(self.data, begin, end))
            except Exception:  # protobuf's DecodeError, of no class that Python knows: no event
                self.lost += 1
                continue
            yield event, begin, end

    def tell(self, say: Say) -> None:
        """Say what was lost, if anything was."""
        if self.lost:
            say(
                f"{self._path} is damaged: {self.lost} of {self.lost + len(self.spans)} records, "
                "points or pictures, are lost; the others are taken"
            )


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
            records = Records(path)
        except OSError as error:
            say(f"{path} cannot be read: {error.strerror}")
            continue
        for event, *_ in records:
            for value in event.summary.value:
                if (tags is not None and value.tag not in tags) or event.step < 0:
                    continue
                if (number := _number(value)) is not None:
                    fresh.setdefault(event.step, {})[value.tag] = number
        records.tell(say)
        first = min(fresh, default=math.inf)
        points = {x: found for x, found in points.items() if x < first} | fresh
    return dict(sorted(points.items()))


def cut(folder: Path, x: int, scalars_x: int | None = None, say: Say = note) -> None:
    """Drop what stands at `x` or later, also in the folders within: it is written anew.

    Scalars are dropped from `scalars_x` on, if that is earlier.

    After a crash a file may hold points that came after the last checkpoint, and a record that is
    not whole. SessionLog.START would hide such points in TensorBoard, but from nobody else. What is
    damaged is dropped, too: TensorBoard reads no further than to there. `say` is given a line for
    each file that is damaged, or cannot be cut.
    """
    scalars_x = x if scalars_x is None else scalars_x
    for path in (path for run in runs(folder) for path in paths(run)):
        try:
            records, kept = Records(path), []
            for event, begin, end in records:
                values = event.summary.value
                if values and event.step >= (scalars_x if _is_scalar(values[0]) else x):
                    break
                kept.append((begin, end))
            records.tell(say)
            _keep(path, records.data, kept)
        except OSError as error:
            say(f"{path} cannot be cut back to step {x}: {error.strerror}")


def _is_scalar(value: Summary.Value) -> bool:
    return value.metadata.plugin_data.plugin_name == "scalars"


def _keep(path: Path, data: bytes, kept: list[Span]) -> None:
    """Let a file, which holds `data`, hold these of its records alone."""
    num_bytes = sum(end - begin for begin, end in kept)
    if len(kept) < 2:
        path.unlink()  # nothing but its header is left
    elif kept[-1][1] > num_bytes:  # there is something between them
        with files.replacing(path) as temporary:
            temporary.write_bytes(b"".join(data[begin:end] for begin, end in kept))
    elif num_bytes < len(data):
        os.truncate(path, num_bytes)


def _find(data: bytes) -> tuple[list[Span], int]:
    """Return where the whole records are, and how many places hold something else."""
    spans, lost, place = [], 0, 0
    while place + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, place)
        is_header = masked_crc32c(data[place : place + 8]) == checksum
        end = place + _HEADER.size + length + _SUM.size
        if is_header and end <= len(data):
            spans.append((place, end))
            place = end
            continue
        if spans and not _is_whole(data, *spans[-1]):  # it has not all of its bytes
            place = spans.pop()[0]
        following = _next(data, place + 1)
        lost += following is not None or not is_header  # else it is only not yet whole
        place = len(data) if following is None else following
    whole = _are_whole(data, spans)
    found = [spans[i] for i in np.flatnonzero(whole)]
    return found, lost + len(spans) - len(found)


def _next(data: bytes, place: int) -> int | None:
    """Return where the next whole record begins, None if there is none."""
    for begin in range(place, len(data) - _HEADER.size, _SEARCHED_BYTES):
        some = np.frombuffer(data[begin : begin + _SEARCHED_BYTES + _HEADER.size - 1], np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(some, _HEADER.size)
        low, high = (
            functools.reduce(np.bitwise_or, (some[n : n + len(windows)] for n in half))
            for half in (range(4), range(4, 8))
        )
        possible = np.flatnonzero((low != 0) & (high == 0))  # none is empty, or of 4 GiB
        headers = windows[possible]
        sums = np.ascontiguousarray(headers[:, 8:]).view("<u4")[:, 0]
        for offset in possible[crc32c.mask(crc32c.of_rows(headers[:, :8])) == sums].tolist():
            length, _ = _HEADER.unpack_from(data, begin + offset)
            end = begin + offset + _HEADER.size + length + _SUM.size
            if end <= len(data) and _is_whole(data, begin + offset, end):
                return begin + offset
    return None


def _are_whole(data: bytes, spans: list[Span]) -> np.ndarray:
    """Tell of each record whether it is what its sum says, [N]."""
    there = [_SUM.unpack_from(data, end - _SUM.size)[0] for _, end in spans]
    return crc32c.masked(_body(data, *span) for span in spans) == np.array(there, np.uint32)


def _is_whole(data: bytes, begin: int, end: int) -> bool:
    return bool(_are_whole(data, [(begin, end)])[0])


def _body(data: bytes, begin: int, end: int) -> bytes:
    return data[begin + _HEADER.size : end - _SUM.size]


def _number(value: Summary.Value) -> float | None:
    """Return a finite scalar, None for anything else."""
    tensor = value.tensor
    if not value.HasField("tensor") or tensor.tensor_shape.dim or tensor.string_val:
        return None
    if len(tensor.float_val) == 1:  # as towers write them; the way of all takes ten times as long
        number = tensor.float_val[0]
    else:
        try:
            number = float(make_ndarray(tensor))
        except Exception:  # of many kinds: no number, or of a type that there is not
            return None
    return number if math.isfinite(number) else None
