"""The process of one run of a sweep."""

import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from towers.commands.sweep.combinations import PlannedRun

# Linux sends a run SIGTERM when the sweep ends, also when that is killed; without it a run goes on.
_LEASH = ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()


class Child(subprocess.Popen):
    """The process of a run on the GPUs of a place, whose output is added to its log."""

    def __init__(self, run: PlannedRun, place: list[int], command: Sequence[str], log: Path):
        """Start it, in a session of its own: Ctrl-C reaches the sweep alone."""
        self.run, self.place, self.started = run, place, time.monotonic()
        self._log = log
        with open(log, "ab") as output:
            self._begin = output.tell()
            super().__init__(
                [*_LEASH, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def how_it_ended(self) -> str:
        """Return "exit code 1: ..." with our own error, else with the last line of its output."""
        how = f"exit code {self.returncode}"
        if self.returncode < 0:
            how = f"killed by {signal.Signals(-self.returncode).name}"
        said = self._log.read_bytes()[self._begin :].decode(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        ours = [line.removeprefix("towers: ") for line in lines if line.startswith("towers: ")]
        return f"{how}: {(ours or lines or ['it said nothing'])[-1][:500]}"
