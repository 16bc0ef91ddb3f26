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

from tests.programs import script
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


@pytest.mark.parametrize("name, code, said", [rare("SIGTERM", 75, ""), ("SIGKILL", -9, "7")])
def test_towers_divide_the_cores_and_no_worker_outlives_a_signal(monkeypatch, name, code, said):
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    if said:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", said)
    share = said or str(-(-len(os.sched_getaffinity(0)) // 4))
    flags = ("--workers=2", "--towers_per_worker=2")
    with cluster(*flags, then=["wait"]) as (process, (_, workers, _)):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = [Path(f"/proc/{child}/environ").read_text().split("\0") for child in children]
        assert sum(f"TF_NUM_INTRAOP_THREADS={share}" in each for each in found) == 2 + bool(said)
        assert len(listening(workers)) == 2
        process.send_signal(signal.Signals[name])
        assert process.wait(SECONDS) == code
        end = time.monotonic() + SECONDS
        while listening(workers):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_what_is_no_command_is_one_line(monkeypatch, capfd):
    local_cluster = script("local_cluster")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which it sets for good
    monkeypatch.setattr(local_cluster, "end_with_parent", None)
    assert local_cluster.run(["no-such-command"], environment()) == 2
    line = "local_cluster: no-such-command: No such file or directory\n"
    assert capfd.readouterr() == ("", line)


@pytest.mark.extended
def test_the_catalogue_is_tried_on_workers():
    line = [*SCRIPT, "--workers=2", "--towers_per_worker=2", "--", ROOT / "scripts/catalogue"]
    line.append("layouts:heads_first")
    done = subprocess.run(line, env=environment(), timeout=SECONDS, **PIPES)
    assert done.returncode == 0, done.stderr
    row, last = done.stdout.splitlines()[-2:]
    assert row.split()[:2] == ["layouts:heads_first", "same"] and row.endswith(" same")
    assert last == "1 models, 1 as expected, 0 not"
