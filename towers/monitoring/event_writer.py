"""Event files as they are written: a point is one event, and they stay below a size.

budget = Budget([train_dir / "train", train_dir / "eval"], max_bytes=200 * 2**20)
writer = Writer(train_dir / "train", budget)
writer.scalars(1000, {"loss/total": 0.5})
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from towers.monitoring import events

HEAVY, POINT = "pictures and histograms", "curves"
_SHARE = {HEAVY: 0.5, POINT: 1.0}  # of the budget, at which none of a kind is left
_OVERHEAD_BYTES = 64  # of an event


class Budget:
    """What a run's event files may still grow by."""

    def __init__(
        self, folders: Iterable[Path], max_bytes: float, say: Callable[[str], None] = print
    ):
        """Set the limit of all event files there; `say` gets a line when the first is left out."""
        found = [path for folder in folders for path in events.paths(folder)]
        self._used_bytes = sum(path.stat().st_size for path in found)
        self._max_bytes, self._say = max_bytes, say
        self._offered: Counter[tuple[str, str]] = Counter()
        self._told: set[str] = set()

    def takes(self, kind: str, tag: str, num_bytes: int) -> bool:
        """Tell whether so many bytes may be written, and count them.

        All is written up to three quarters of what the kind may fill. From there on every second
        one of a tag is, up to half of what is left every fourth, and so on: the end is never
        reached.
        """
        limit = _SHARE[kind] * self._max_bytes
        num_bytes += _OVERHEAD_BYTES
        left = (limit - self._used_bytes - num_bytes) / limit
        number = self._offered[kind, tag]
        self._offered[kind, tag] += 1
        if left >= 0.25 or (left > 0 and number % 2 ** math.ceil(-math.log2(4 * left)) == 0):
            self._used_bytes += num_bytes
            return True
        if kind not in self._told:
            self._told.add(kind)
            self._say(
                f"thinned     {kind} in TensorBoard from here on: --max_event_mib="
                f"{self._max_bytes / 2**20:g} is nearly reached"
            )
        return False


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
