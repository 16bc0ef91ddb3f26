"""Lanes: processes that train in turn, a window at a time, and talk in lines of JSON.

    lane = Lane("jax", [python, "scripts/peers/jax_loop.py", config], os.environ)
    lane.wait_ready()                 # it says {"ready": true, ...} or {"skipped": "why"}
    lane.train(2.0)                   # it reads "2.0" and says {"steps": 120, "seconds": 2.01}
    lane.finish()                     # it says {"peak_memory_mib": 812.5}
    lane.close()

A lane that is not at its turn sleeps on its standard input, so that a slow minute of the machine
slows all of them alike. No TensorFlow is needed here.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

START_SECONDS = 900.0  # for importing, loading data, building and warming up
ANSWER_SECONDS = 300.0  # beyond the window's own length: a step of a huge model
END_SECONDS = 30.0


class LaneError(RuntimeError):
    """A lane that crashed or hangs: one line that says how."""


class Lane:
    """One such process, in a session of its own: whatever it starts can be ended with it.

    `ready` is what it said first, `windows` {part of a step: seconds of a step, one for each
    window}; "" is the whole step. Each method may raise a LaneError.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        """Start the process in the current folder."""
        self.name = name
        self.ready: dict[str, Any] = {}
        self.windows: dict[str, list[float]] = {}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends all lanes
        )

    def wait_ready(self) -> None:
        """Keep the first line: {"ready": true, ...}, {"skipped": why} or {"refused": why}."""
        self.ready = self._answer({"ready", "skipped", "refused"}, START_SECONDS, "to be ready")

    def train(self, seconds: float, part: str = "") -> None:
        """Let the lane train for about `seconds`, or run a part of a step; keep what that took."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: the missing answer says so
            print(seconds, part, file=self._process.stdin, flush=True)
        answer = self._answer({"steps"}, seconds + ANSWER_SECONDS, "for a window")
        self.windows.setdefault(part, []).append(answer["seconds"] / answer["steps"])

    def finish(self) -> float | None:
        """Let the lane end; return its peak memory in MiB, None if it does not tell any more."""
        with contextlib.suppress(BrokenPipeError, LaneError):
            self._process.stdin.close()
            return self._answer({"peak_memory_mib"}, END_SECONDS, "to end")["peak_memory_mib"]
        return None

    def close(self) -> None:
        """End the process and all that it has started, however they are."""
        with contextlib.suppress(BrokenPipeError), self._errors, self._process:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, keys: set[str], timeout_seconds: float, what: str) -> dict[str, Any]:
        """Return the next line of JSON that has one of the keys; a library may print others."""
        start = time.monotonic()
        timer = threading.Timer(timeout_seconds, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict) and keys & answer.keys():
                        return answer
            code = self._process.wait()
        finally:
            timer.cancel()
        if time.monotonic() - start >= timeout_seconds:
            raise LaneError(f"waited {timeout_seconds:g} s for it {what}")
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()] or ["it said nothing"]
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        raise LaneError(f"{how}: {lines[-1][:300]}")
