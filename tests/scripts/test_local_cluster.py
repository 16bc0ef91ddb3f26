"""`scripts/local_cluster`: workers for one command, and none after it."""

import contextlib
import socket
import subprocess
import sys

import pytest

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
