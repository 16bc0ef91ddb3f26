"""Workers as processes of this machine, for tests: started, and ended whatever happens."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests import programs
from tests.programs import ROOT

_START_SECONDS = 120.0  # on a machine that tests share


def environment() -> dict[str, str]:
    """Return that of a user, without GPUs."""
    return programs.environment(CUDA_VISIBLE_DEVICES="")


class Worker:
    """A `towers worker` in a process of its own; `address` is "127.0.0.1:PORT"."""

    def __init__(self, *flags: str):
        """Start it; `ready` waits for it."""
        self._log = tempfile.NamedTemporaryFile("w+", prefix="worker-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "towers", "worker", "--address=127.0.0.1:0", *flags],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # so that all of it can be ended
        )
        self.lines: list[str] = []
        self.address = ""

    def read_until(self, word: str, seconds: float = _START_SECONDS) -> str:
        """Return the next line that begins with a word; AssertionError if none comes in time."""
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                if line.startswith(word):
                    return self.lines[-1]
        finally:
            timer.cancel()
        raise AssertionError(f"the worker ended without {word}: {self.lines} {self.errors()}")

    def ready(self) -> "Worker":
        """Wait until it is free."""
        self.address = self.read_until("free").rpartition("=")[2]
        return self

    def errors(self) -> str:
        """Return what it wrote to standard error."""
        return Path(self._log.name).read_text()

    def signal_all(self, number: int) -> None:
        """Send a signal to supervisor and server: SIGSTOP makes a machine that hangs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End it as a machine that is switched off."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Leave nothing behind."""
        self.signal_all(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.kill()
        self.process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def started(number: int, *flags: str) -> Iterator[list[Worker]]:
    """Start as many workers, and end them after the block."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(number):
            found.append(Worker(*flags))
            stack.callback(found[-1].close)
        yield [worker.ready() for worker in found]
