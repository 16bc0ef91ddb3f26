"""Nothing that a test starts outlives the tests, however they end.

Everything that is started inherits an environment variable that says which session and which of
its processes started it. A watchdog in a session of its own waits for the end of the process that
runs the tests, also by SIGKILL, and ends whatever still has the variable. What is left at a normal
end is reported, and the session fails.

    python tests/leftovers.py PID KEY    # the watchdog
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

VARIABLE = "TOWERS_TESTS"


def begin() -> str:
    """Mark all that this process starts from now on, start the watchdog, and return the mark."""
    key = f"{os.getpid()}-{time.time_ns()}"
    os.environ.pop(VARIABLE, None)  # the watchdog itself has no mark
    os.posix_spawn(
        sys.executable,
        [sys.executable, __file__, str(os.getpid()), key],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)],
        setsid=True,  # what ends the tests' process group does not end it
    )
    os.environ[VARIABLE] = key
    return key


def marked(key: str) -> dict[int, str]:
    """Return {process ID: command line} of the live processes with this mark, or one below it."""
    found, wanted = {}, f"{VARIABLE}={key}/".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            if any((entry + b"/").startswith(wanted) for entry in environment):
                if _state(folder) not in "ZX":
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
    found.pop(os.getpid(), None)
    return found


def end(key: str) -> None:
    """Kill all that is marked, and what it starts meanwhile."""
    for _ in range(50):
        found = marked(key)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _state(folder: Path) -> str:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]


def _watch(pid: int, key: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    end(key)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
