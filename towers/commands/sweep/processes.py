"""The processes of a sweep: a run each, which ends, saved, when the sweep ends in whatever way."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from towers.errors import InputError, RunError

POLL_SECONDS = 0.1
SAVE_SECONDS = 120.0  # for a checkpoint of a large model

# A process that starts another asks Linux to send that one SIGTERM at its own end, also at one by
# SIGKILL, and then becomes the program. It is a program of its own, since Python code between fork
# and exec can hang in a process that has threads.
_LEASH = """
import contextlib, ctypes, os, signal, sys
with contextlib.suppress(Exception):
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
_TOTAL = re.compile(rb"^(?:new run .*?, (\d+) steps|continuing .* at step (\d+) of (\d+))\s*$")
_STEP = re.compile(rb"\bstep (\d+), examples ")


class Child:
    """The process of a run. What it prints is added to its log, which it locks while it lives."""

    def __init__(self, command: Sequence[str], log: Path, clock: Callable[[], float]):
        """Start it, in a session of its own: Ctrl-C reaches the sweep alone.

        Raises:
            RunError: the log cannot be written.
        """
        try:
            output = open(log, "ab")  # noqa: SIM115
            self._log = open(log, "rb")  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{log} cannot be written: {error.strerror}") from None
        self._start = self._log.seek(0, os.SEEK_END)
        self._clock, self._started = clock, clock()
        self._total, self.fraction, self._signals = 0, 0.0, 0
        self._begun = b""  # a line whose end is not written yet
        leash = [sys.executable, "-S", "-c", _LEASH, str(os.getpid())]
        with output:
            _try_lock(output)  # held as long as the child has its standard output
            self._process = subprocess.Popen(
                [*leash, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it lives."""
        return self._process.poll()

    def seconds(self) -> float:
        """Return how long ago it was started."""
        return self._clock() - self._started

    def follow(self) -> float:
        """Read what it has printed since; return which part of its steps is done."""
        *lines, self._begun = (self._begun + self._log.read()).split(b"\n")
        for line in lines:
            if match := _TOTAL.match(line):
                self._total = int(match[1] or match[3])
                self.fraction = int(match[2] or 0) / max(self._total, 1)
            elif (match := _STEP.search(line)) and self._total:
                self.fraction = min((int(match[1]) + 1) / self._total, 1.0)
        return self.fraction

    def stop(self, times: int) -> None:
        """Send SIGTERM, unless it was sent so many times: at the first it saves, then it ends."""
        if self._signals < times and self.poll() is None:
            self._signals += 1
            self._process.terminate()

    def last_line(self) -> str:
        """Return the line that says best how it ended: our own error, else the last one."""
        self._log.seek(self._start)
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - 20_000, self._start))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        ours = [line.removeprefix("towers: ") for line in lines if line.startswith("towers: ")]
        return (ours or lines or ["it said nothing"])[-1][:500]

    def close(self) -> None:
        """Wait for its end, and end it if that takes too long; forget its log."""
        try:
            self._process.wait(SAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def how_it_ended(code: int) -> str:
    """Return "exit code 1" or "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


class StopRequest:
    """Counts Ctrl-C and SIGTERM."""

    def __enter__(self) -> "StopRequest":
        """Take over the two signals."""
        self.times = 0
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._count) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.times += 1


@contextlib.contextmanager
def lock(path: Path, flag: str) -> Iterator[None]:
    """Hold a file that no other sweep can hold meanwhile; the system frees it at the latest.

    Raises:
        InputError: another sweep holds it, or it cannot be written.
    """
    try:
        file = open(path, "ab")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be written: {error.strerror}") from None
    with file:
        if not _try_lock(file):
            raise InputError(
                f"{flag}: another sweep is at work there: wait for its end, or stop it"
            )
        yield


def wait_for_orphans(
    logs: Sequence[Path], say: Callable[[str], None], stopped: Callable[[], bool]
) -> None:
    """Wait for runs that still save, since the sweep that started them was killed.

    Raises:
        RunError: they do not end.
    """
    deadline, told = time.monotonic() + SAVE_SECONDS, False
    while (busy := [log for log in logs if _busy(log)]) and not stopped():
        if not told:
            names = ", ".join(log.stem for log in busy)
            say(f"waiting     for runs of a killed sweep to save: {names}")
            told = True
        if time.monotonic() > deadline:
            raise RunError(f"a run of a sweep that was killed still writes {busy[0]}: end it first")
        time.sleep(POLL_SECONDS)


def _busy(log: Path) -> bool:
    """Tell whether a process holds the log of its run."""
    try:
        with open(log, "rb") as file:
            return not _try_lock(file)
    except OSError:
        return False


def _try_lock(file: BinaryIO) -> bool:
    """Lock an open file; False if it is locked. A file system without locks has them all free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
