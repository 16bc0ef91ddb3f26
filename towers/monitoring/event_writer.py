"""Writes event files, one event for each point.

    writer = EventWriter(train_dir, first_step=0)
    writer.write_scalars("train", 1000, {"loss/total": 0.5, "tower_0/loss": 0.25})

Every tower is a run of its own, with a color and a name: tower_0/loss is tower/loss of the run
train/tower_0. A process that continues a run begins new files with SessionLog.START and a step:
TensorBoard drops the events of older files from that step on, which are written again.
"""

import dataclasses
import errno
import itertools
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from towers.errors import reason

_OWN = re.compile(r"(tower_\d+)/(.+)")  # tags with a run of their own
_NUMBERS = itertools.count()  # of the files of a process


@dataclasses.dataclass
class EventWriter:
    """Appends events to the files of a run and flushes them at once.

    A failure to write is printed and does not stop training.
    """

    train_dir: Path  # folder of the run
    first_step: int = 0  # at which this process continues the run
    say: Callable[[str], None] = print  # prints a line

    def __post_init__(self) -> None:
        """Begin the files of a continued run; others are created with their first event."""
        self._files: dict[str, Path] = {}  # {run: path}
        self._failed: set[str] = set()  # parts whose last event could not be written
        if self.first_step:
            runs = [path for path in self.train_dir.glob("train/*_*") if path.is_dir()]
            names = ["train", *(f"train/{path.name}" for path in runs)]
            self._write("train", self.first_step, dict.fromkeys(names))

    def write_scalars(self, part: str, step: int, values: Mapping[str, float]) -> None:
        """Write a point, as one event of each run.

        Args:
            part: "train" or "eval".
            step: number of updates before the point.
            values: {tag: value}; "tower_0/loss" is written to a run of its own.
        """
        summaries: dict[str, Summary] = {}
        for tag, value in values.items():
            run = part
            if match := _OWN.fullmatch(tag):
                run, tag = f"{part}/{match[1]}", f"tower/{match[2]}"
            summaries.setdefault(run, Summary()).value.add(tag=tag, simple_value=value)
        self._write(part, step, summaries)

    def write_summary(self, part: str, step: int, summary: Summary) -> None:
        """Write a picture or a histogram, like `write_scalars`."""
        self._write(part, step, {part: summary})

    def _write(self, part: str, step: int, summaries: Mapping[str, Summary | None]) -> None:
        """Write an event of each run, or only begin its file if there is no summary."""
        try:
            if not self.train_dir.is_dir():  # a run that was moved is not begun again here
                raise FileNotFoundError(errno.ENOENT, f"{self.train_dir} is missing")
            for run, summary in summaries.items():
                # Keep no file open: a thousand towers are a thousand files. After an error, or if
                # the file is gone, a new one is begun.
                path = self._files.pop(run, None)
                if path is None or not path.exists():
                    path = _new_file(self.train_dir / run, step)
                if summary and summary.value:
                    append(path, Event(step=step, wall_time=time.time(), summary=summary))
                self._files[run] = path
            self._failed.discard(part)
        except OSError as error:
            if part not in self._failed:
                self.say(f"warning     curves of {part} cannot be written: {reason(error)}")
            self._failed.add(part)


def _new_file(folder: Path, step: int) -> Path:
    """Begin a file that replaces the events of older files from `step` on; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files of a folder in the order of their names.
    name = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
    append(path := folder / f"events.out.tfevents.{name}", *beginning(step))
    return path


def beginning(step: int) -> tuple[Event, Event]:
    """Return the events that begin a file: its version, and SessionLog.START at `step`."""
    now, start = time.time(), SessionLog(status=SessionLog.START)
    version = Event(file_version="brain.Event:2", wall_time=now)
    return version, Event(session_log=start, step=step, wall_time=now)


def append(path: Path, *events: Event) -> None:
    """Append events to a file, which is created if necessary, see `EventWriter`."""
    with open(path, "ab") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
