"""Lanes: processes that train in turn, a window at a time, and talk in lines of JSON.

    with contextlib.closing(Lane("jax", [python, "scripts/peers/jax_loop.py", config])) as lane:
        lane.wait_ready()                      # {"ready": true, ...} or {"skipped": "why"}
        lane.ask("2.0")                        # {"steps": 120, "seconds": 2.01, "loss": 2.3}
        lane.finish()                          # {"peak_memory_mib": 812.5}

A lane that is not at its turn sleeps on its standard input, so that a slow minute of the machine
slows all of them alike. No TensorFlow is needed here.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

START_SECONDS = 900.0  # for importing, loading data, building and warming up
ANSWER_SECONDS = 300.0  # beyond the window's own length: a step of a huge model
END_SECONDS = 30.0


class LaneError(RuntimeError):
    """A lane that crashed, hangs or gives no sense: one line that says how."""


class Lane:
    """One such process, in a session of its own: whatever it starts can be ended with it."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ):
        """Start the process in the current folder.

        Args:
            name: for messages.
            command: the program and its arguments.
            environment: variables beside those of this process.
        """
        self.name = name
        self._errors = tempfile.TemporaryFile()
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends all lanes
        )
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def wait_ready(self) -> dict[str, Any]:
        """Return the lane's first line: {"ready": true, ...}, {"skipped": ...} or {"refused": ...}.

        Raises:
            LaneError: it ended, or says nothing for START_SECONDS.
        """
        return self._answer({"ready", "skipped", "refused"}, START_SECONDS, "to be ready")

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Let the lane train as `line` says, for about `seconds`; return what it answers.

        Raises:
            LaneError: it ended, says nothing, or made no step.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended: the missing answer says so
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        answer = self._answer({"steps", "seconds"}, seconds + ANSWER_SECONDS, "for a window")
        good = all(isinstance(answer.get(key), int | float) for key in ("steps", "seconds"))
        if not good or not (answer["steps"] > 0 and answer["seconds"] > 0):
            raise LaneError(f"answered {json.dumps(answer)}: steps and seconds above 0 are needed")
        return answer

    def finish(self) -> dict[str, Any]:
        """Let the lane end; return its last line: {"peak_memory_mib": ...}.

        Raises:
            LaneError: it does not end, or ends with an error.
        """
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        answer = self._answer({"peak_memory_mib"}, END_SECONDS, "to end")
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has said all: close() ends it
            self._process.wait(END_SECONDS)
        return answer

    def close(self) -> None:
        """End the process and all that it has started, however they are."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._errors.close()

    def _listen(self, stdout: Any) -> None:
        """Pass on the lines of standard output; None stands for its end."""
        with stdout:
            for line in stdout:
                self._answers.put(line)
        self._answers.put(None)

    def _answer(self, keys: set[str], timeout_seconds: float, what: str) -> dict[str, Any]:
        """Return the next line of JSON that has one of the keys; a library may print others."""
        while True:
            try:
                line = self._answers.get(timeout=timeout_seconds)
            except queue.Empty:
                raise LaneError(f"waited {timeout_seconds:g} s for it {what}") from None
            if line is None:
                raise LaneError(self._how_it_ended())
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, dict) and keys & answer.keys():
                    return answer

    def _how_it_ended(self) -> str:
        """Return the exit code or signal, and the last line of standard error."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its standard output"
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(self._errors.tell() - 10_000, 0))
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        return f"{how}: {last[:300]}"
