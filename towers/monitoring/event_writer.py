"""Event files as they are written: a point is one event, and they stay below a size.

writer = EventWriter(train_dir, max_mib=200)
writer.scalars("train", 1000, {"loss/total": 0.5})
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from towers.monitoring import events

HEAVY, POINT = "pictures and histograms", "curves"
_SHARE = {HEAVY: 0.5, POINT: 1.0}  # of the size, at which none of a kind is left
_OVERHEAD_BYTES = 64  # of an event
PARTS = "train", "eval"


class EventWriter:
    """Appends to the event files in the parts of a run; what is written can be seen at once."""

    def __init__(self, train_dir: Path, max_mib: float, say: Callable[[str], None] = print):
        """Open a new file in each part; `say` gets a line when the first event is left out."""
        folders = {part: train_dir / part for part in PARTS}
        found = [path for folder in (train_dir, *folders.values()) for path in events.paths(folder)]
        self._used_bytes = sum(path.stat().st_size for path in found)
        self._max_mib, self._say, self._told = max_mib, say, set()
        self._offered: Counter[tuple[str, str]] = Counter()
        self._writers = {
            part: tf.summary.create_file_writer(str(folder)) for part, folder in folders.items()
        }

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
        for writer in self._writers.values():
            writer.close()

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
            self._used_bytes += num_bytes
            with self._writers[part].as_default(step=x):  # which flushes at its end
                tf.summary.experimental.write_raw_pb(data)
        elif kind not in self._told:
            self._told.add(kind)
            self._say(
                f"thinned     {kind} in TensorBoard from here on: --max_event_mib="
                f"{self._max_mib:g} is nearly reached"
            )
