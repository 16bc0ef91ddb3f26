"""`scripts/local_cluster`: workers for one command, and none after it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import rare
from tests.worker_processes import ROOT, environment

pytestmark = pytest.mark.process
SCRIPT = [sys.executable, ROOT / "scripts/local_cluster"]
SECONDS = 120
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
# Tells its arguments; ends with 7 at once, or, if it is to wait, with 75 at SIGTERM.
COMMAND = """
trap 'exit 75' TERM
echo "$@"
[ "$1" = wait ] || exit 7
while true; do sleep 0.05; done
"""


@contextlib.contextmanager
def cluster(*flags, then=()):
    """Run the command on workers; give the process, and the flags that the command was given."""
    command = [*SCRIPT, *flags, "--", "sh", "-c", COMMAND, "sh", *then]
    with subprocess.Popen(command, env=environment(), **PIPES) as process:
        try:
            yield process, process.stdout.readline().split()
        finally:
            process.terminate()


def listening(flag):
    """Return which workers of a flag still listen."""
    found = []
    for address in flag.removeprefix("--workers=").split(","):
        host, _, port = address.partition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1).close()
            found.append(address)
    return found


def test_a_command_gets_workers_and_hands_on_its_exit_code():
    with cluster("--workers=1", "--towers_per_worker=3") as (process, (workers, towers)):
        assert process.wait(SECONDS) == 7
        assert towers == "--towers_per_worker=3"
        assert not listening(workers)


@pytest.mark.parametrize("name, code", [rare("SIGTERM", 75), rare("SIGKILL", -9)])
def test_towers_divide_the_cores_and_no_worker_outlives_a_signal(monkeypatch, name, code):
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    share = -(-len(os.sched_getaffinity(0)) // 4)
    flags = ("--workers=2", "--towers_per_worker=2")
    with cluster(*flags, then=["wait"]) as (process, (_, workers, _)):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = [Path(f"/proc/{child}/environ").read_text().split("\0") for child in children]
        assert sum(f"TF_NUM_INTRAOP_THREADS={share}" in each for each in found) == 2
        assert len(listening(workers)) == 2
        process.send_signal(signal.Signals[name])
        assert process.wait(SECONDS) == code
        end = time.monotonic() + SECONDS
        while listening(workers):
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.extended
def test_the_catalogue_is_tried_on_workers():
    line = [*SCRIPT, "--workers=2", "--towers_per_worker=2", "--", ROOT / "scripts/catalogue"]
    line.append("layouts:heads_first")
    done = subprocess.run(line, env=environment(), timeout=SECONDS, **PIPES)
    assert done.returncode == 0, done.stderr
    row, last = done.stdout.splitlines()[-2:]
    assert row.split()[:2] == ["layouts:heads_first", "same"] and row.endswith(" same")
    assert last == "1 models, 1 as expected, 0 not"
