"""Runners: processes that train in turn, a window at a time, and exchange lines of JSON.

A runner first prints {"ready": true, ...} or {"skipped": reason}. For a line "2.0" it trains two
seconds and prints {"steps": 120, "seconds": 2.01}; "0.5 control" runs our control. At the end of
its input it prints {"peak_memory_mib": 812.5}.

Between its turns a runner sleeps on its standard input, so that a slow minute of the machine slows
all of them alike. TensorFlow is not needed here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from towers.errors import RunError
from towers.formatting import process_end
from towers.options import search_path

WAIT_SECONDS = 900.0  # for importing, loading data, building and warming up; for a huge step
END_SECONDS = 30.0
WINDOW_SHARES = {"control": 0.5, "": 1.0}  # of a window's seconds, for each of our loops


class Runner:
    """A process that trains on request, in its own session, so that its children end with it.

    If it crashes or hangs, methods raise RunError for a run of ours; for another program they note
    it in `failed`.

    Attributes:
        scaling: "strong" or "weak" for a run of ours, "" for another program.
        ready: its first answer.
        windows: {loop: [seconds of a step in each window]}; loops are "" (training) and "control".
        failed: how it ended, "" while it runs.
    """

    def __init__(
        self, name: str, program: Sequence[str], config: Any, scaling: str = "", grow: bool = False
    ):
        """Start the process in the current folder.

        Args:
            name: of the configuration.
            program: arguments of Python, a file or -m and a module.
            config: what to train, its last argument, as JSON.
            scaling: see the attributes.
            grow: whether GPU memory grows as needed.
        """
        self.name, self.scaling, self.failed = name, scaling, ""
        self.ready: dict[str, Any] = {}
        self.windows: dict[str, list[float]] = {part: [] for part in WINDOW_SHARES}
        environment = search_path.child_environment()
        if program[0] != "-m":
            del environment["PYTHONSAFEPATH"]  # it imports modules beside it
        if grow:
            environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, *program, json.dumps(config)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them all
        )

    def wait_ready(self) -> None:
        """Wait for the first answer and keep it as `ready`."""
        self.ready = self._answer({"ready", "skipped"}, WAIT_SECONDS)

    def train(self, seconds: float, part: str) -> None:
        """Run a window, and append its seconds per step to `windows`.

        Args:
            seconds: length of the window, at least.
            part: the loop to run: "" or "control".
        """
        with contextlib.suppress(BrokenPipeError):  # the missing answer says that it has ended
            print(seconds, part, file=self._process.stdin, flush=True)
        if answer := self._answer({"steps"}, seconds + WAIT_SECONDS):
            self.windows[part].append(answer["seconds"] / answer["steps"])

    def finish(self) -> float | None:
        """Close its input; return its peak memory in MiB, or None without an answer."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        return self._answer({"peak_memory_mib"}, END_SECONDS).get("peak_memory_mib")

    def close(self) -> None:
        """Kill the process and all that it has started."""
        with contextlib.suppress(BrokenPipeError), self._errors, self._process:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, keys: set[str], timeout_seconds: float) -> dict[str, Any]:
        """Return the next JSON object with one of the keys, {} if a program of others fails."""
        start = time.monotonic()
        timer = threading.Timer(timeout_seconds, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):  # a line that a library prints
                    answer = json.loads(line)
                    if isinstance(answer, dict) and keys & answer.keys():
                        return answer
            code = self._process.wait()
        finally:
            timer.cancel()
        self._errors.seek(0)
        self.failed = process_end(code, self._errors.read())
        if time.monotonic() - start >= timeout_seconds:
            self.failed = f"no answer within {timeout_seconds:g} s"
        if self.scaling:
            raise RunError(f"the benchmark's own run failed: {self.failed}")
        return {}


def take_turns(
    runners: Sequence[Runner], windows: int, seconds: float, say: Callable[[str], None]
) -> None:
    """Run all windows in turn; a program that is not ready, or fails, gets no further turn.

    Args:
        runners: all of them.
        windows: windows of each.
        seconds: length of a window, at least.
        say: called with each line to print.
    """
    ready = [runner for runner in runners if "ready" in runner.ready]
    turns = [(r, part) for r in ready for part in (WINDOW_SHARES if r.scaling else [""])]
    total = sum(seconds * WINDOW_SHARES[part] for _, part in turns)
    say(f"measuring   {windows} rounds of {total:.0f} s at least, a window each in turn")
    for window in range(windows):
        # Reverse every other window, so that no runner always follows the same one.
        for runner, part in turns[:: -1 if window % 2 else 1]:
            if not runner.failed:
                runner.train(seconds * WINDOW_SHARES[part], part)
        say(f"round       {window + 1}/{windows}")
