"""Event files as they are written: a point is one event, and they stay below a size.

writer = EventWriter(train_dir, max_mib=200)
writer.scalars("train", 1000, {"loss/total": 0.5})

What cannot be written is told in a line, and is no reason not to train.
"""

import contextlib
import itertools
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from towers import files
from towers.errors import RunError
from towers.monitoring import events
from towers.text import reason

HEAVY, POINT = "pictures and histograms", "curves"
_SHARE = {HEAVY: 0.5, POINT: 1.0}  # of the size, at which none of a kind is left
_OVERHEAD_BYTES = 64  # of an event
PARTS = "train", "eval"
_NUMBERS = itertools.count()  # of the files of a process


class EventWriter:
    """Appends to the event files in the parts of a run; what is written can be seen at once."""

    def __init__(
        self,
        train_dir: Path,
        max_mib: float,
        say: Callable[[str], None] = print,
        check: Callable[[], None] = lambda: None,
    ):
        """Write nothing yet; each part gets a new file with its first event.

        `say` gets a line when the first event is left out, or cannot be written; `check` is called
        before each and raises RunError or OSError where the folder is not that of the run.
        """
        folders = {part: train_dir / part for part in PARTS}
        found = [path for folder in (train_dir, *folders.values()) for path in events.paths(folder)]
        self._used_bytes = sum(path.stat().st_size for path in found)
        self._max_mib, self._say, self._check, self._told = max_mib, say, check, set()
        self._offered: Counter[tuple[str, str]] = Counter()
        self._files = {part: _File(folder) for part, folder in folders.items()}

    def scalars(self, part: str, x: int, values: Mapping[str, float]) -> None:
        """Write the scalars of a point, which are {tag: value}, at `x` in one event."""
        summary = Summary()
        for tag, value in values.items():
            summary.value.extend(scalar_pb(tag, value).value)
        self._write(part, x, summary, POINT)

    def heavy(self, part: str, x: int, summary: Summary, *, last: bool = False) -> None:
        """Write a picture or the like at `x` if there is room; the last may use that of curves."""
        self._write(part, x, summary, POINT if last else HEAVY)

    def close(self) -> None:
        """End the files."""
        for file in self._files.values():
            file.close()

    def _write(self, part: str, x: int, summary: Summary, kind: str) -> None:
        """Write an event if there is room.

        All is written up to three quarters of what the kind may fill. From there on every second
        one of a tag is, up to half of what is left every fourth, and so on: the end is never
        reached.
        """
        if not summary.value:
            return
        data, tag = summary.SerializeToString(), summary.value[0].tag
        limit, num_bytes = _SHARE[kind] * self._max_mib * 2**20, len(data) + _OVERHEAD_BYTES
        left = (limit - self._used_bytes - num_bytes) / limit
        number = self._offered[kind, tag]
        self._offered[kind, tag] += 1
        if left >= 0.25 or (left > 0 and number % 2 ** math.ceil(-math.log2(4 * left)) == 0):
            event = Event(step=x, wall_time=time.time())
            event.summary.MergeFromString(data)
            try:
                self._check()
                self._files[part].write(event)
                self._used_bytes += num_bytes
                self._told.discard(part)
            except (OSError, RunError, tf.errors.OpError) as error:
                if part not in self._told:
                    self._say(f"warning     curves of {part} cannot be written: {reason(error)}")
                self._told.add(part)
        elif kind not in self._told:
            self._told.add(kind)
            self._say(
                f"thinned     {kind} in TensorBoard from here on: --max_event_mib="
                f"{self._max_mib:g} is nearly reached"
            )


class _File:
    """An event file; a new one where it is gone, or its last event may not be whole."""

    def __init__(self, folder: Path):
        self._folder, self._path, self._place, self._writer = folder, None, None, None

    def write(self, event: Event) -> None:
        """Write an event so that it can be seen at once."""
        try:
            if self._writer is None or files.place_of(self._path) != self._place:
                self._open()
            self._writer.write(event.SerializeToString())
            self._writer.flush()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(tf.errors.OpError):
                writer.close()

    def _open(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"{int(now)}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}.v2"
        self._path = self._folder / f"events.out.tfevents.{name}"
        self._writer = tf.io.TFRecordWriter(str(self._path))
        self._writer.write(Event(file_version="brain.Event:2", wall_time=now).SerializeToString())
        self._writer.flush()
        self._place = files.place_of(self._path)
