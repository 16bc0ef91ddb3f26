"""Writes event files, one event for each point, and keeps them below a size.

writer = EventWriter(train_dir, max_mib=200)
writer.write_scalars("train", 1000, {"loss/total": 0.5, "tower_0/loss": 0.25})

TensorBoard gives each run, that is each folder, a colour and a name. So every tower, machine and
GPU is a run, and one chart shows them all: tower_0/loss is tower/loss of the run train/tower_0.
A failure to write is printed and does not stop training.
"""

import dataclasses
import itertools
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from towers.errors import RunError
from towers.formatting import reason
from towers.monitoring import events

HEAVY, POINT = "pictures and histograms", "curves"
_SHARE = {HEAVY: 0.5, POINT: 1.0}  # share of the size that a kind may fill
_OVERHEAD_BYTES = 64  # of an event
STAGES = "train", "eval"
_OWN = re.compile(r"((tower|gpu)_\d+)/(.+)")  # tags with a run of their own
_NUMBERS = itertools.count()  # of the files of a process


@dataclasses.dataclass
class EventWriter:
    """Appends events to the files of a run and flushes them at once."""

    train_dir: Path  # folder of the run
    max_mib: float  # size of all event files, in MiB
    say: Callable[[str], None] = print  # when the first event is dropped or cannot be written
    # Called before each event; raises RunError or OSError if the folder is lost.
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        """Open no file yet: a run's file is created with its first event."""
        parts = (self.train_dir / part for part in STAGES)
        folders = [self.train_dir, *(run for part in parts for run in events.runs(part))]
        event_files = [path for folder in folders for path in events.paths(folder)]
        self._used_bytes = sum(path.stat().st_size for path in event_files)
        self._files: dict[str, Path] = {}  # {run: path}
        self._told: set[str] = set()
        self._offered: Counter[tuple[str, ...]] = Counter()

    def write_scalars(self, part: str, x: int, values: Mapping[str, float]) -> None:
        """Write a point, as one event of each run.

        Args:
            part: "train" or "eval".
            x: steps, or examples, at which the point is drawn.
            values: {tag: value}; "tower_0/loss" is written to a run of its own.
        """
        summaries: dict[str, Summary] = {}
        for tag, value in values.items():
            run = part
            if match := _OWN.fullmatch(tag):
                run, tag = f"{part}/{match[1]}", f"{match[2]}/{match[3]}"
            summaries.setdefault(run, Summary()).value.extend(scalar_pb(tag, value).value)
        self._write(part, x, summaries, POINT)

    def write_summary(self, part: str, x: int, summary: Summary, *, last: bool = False) -> None:
        """Write a picture or histogram if there is room.

        Args:
            part: see `write_scalars`.
            x: see `write_scalars`.
            summary: the picture or histogram.
            last: whether it is of the last step, and may take the room of curves.
        """
        self._write(part, x, {part: summary}, POINT if last else HEAVY)

    def _write(self, part: str, x: int, summaries: Mapping[str, Summary], kind: str) -> None:
        """Write an event of each run if there is room for all.

        All events are written up to three quarters of the kind's share; then every second event of
        a tag up to half of the rest, every fourth up to half of that rest, and so on.
        """
        filled = {run: summary for run, summary in summaries.items() if summary.value}
        if not filled:
            return
        tag = next(iter(filled.values())).value[0].tag
        num_bytes = sum(summary.ByteSize() + _OVERHEAD_BYTES for summary in filled.values())
        limit = _SHARE[kind] * self.max_mib * 2**20
        left = (limit - self._used_bytes - num_bytes) / limit
        number = self._offered[kind, tag]
        self._offered[kind, tag] += 1
        if left >= 0.25 or (left > 0 and number % 2 ** math.ceil(-math.log2(4 * left)) == 0):
            now = time.time()
            try:
                self.check()
                for run, summary in filled.items():
                    self._append(run, Event(step=x, wall_time=now, summary=summary))
                self._used_bytes += num_bytes
                self._told.discard(part)
            except (OSError, RunError) as error:
                if part not in self._told:
                    self.say(f"warning     curves of {part} cannot be written: {reason(error)}")
                self._told.add(part)
        elif kind not in self._told:
            self._told.add(kind)
            self.say(
                f"thinned     {kind} in TensorBoard from here on: --max_event_mib="
                f"{self.max_mib:g} is nearly reached"
            )

    def _append(self, run: str, event: Event) -> None:
        # Keep no file open: a thousand towers are a thousand files. After an error, or if the file
        # is gone, a new one is begun.
        path = self._files.pop(run, None)
        if path is None or not path.exists():
            now, folder = int(time.time()), self.train_dir / run
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{now}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}.v2"
            path = folder / f"events.out.tfevents.{name}"
            events.append(path, Event(file_version="brain.Event:2", wall_time=now))
        events.append(path, event)
        self._files[run] = path
