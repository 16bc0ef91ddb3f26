"""The pages on ends and on many machines: exit codes, and what schedulers are given."""

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from towers import cli

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
PAGE, RUNNING = (
    (ROOT / f"towers/training/{name}.md").read_text(encoding="utf-8")
    for name in ("CLUSTERS", "RUNNING")
)
JOB, JOB_OF_MANY = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
MANIFESTS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
CODES = {int(code) for code in re.findall(r"^\| (\d+) \|", RUNNING, re.MULTILINE)}
STAND_INS = {
    "towers": """#!/bin/bash
if [ "$1" = worker ]; then
    echo "$@" > worker
    exec python3 -c "$LISTEN" "$2"
fi
trap 'exit 75' TERM
touch started
[ -n "$END" ] && exit "$END"
while true; do sleep 0.05; done
""",
    "scontrol": """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" > told; fi
""",
    "srun": '#!/bin/bash\nSLURMD_NODENAME=127.0.0.1 exec "$@"\n',
}
LISTEN = """
import pathlib, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("worker_ended").touch(), sys.exit()))
time.sleep(0.5)
with socket.create_server(("127.0.0.1", int(sys.argv[1].rpartition(":")[2]))):
    time.sleep(60)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return what runs a script for Slurm with stand-ins: (exit code, what scontrol was told)."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def run(end="", script=JOB):
        for name in ("started", "told", "worker_ended"):
            (tmp_path / name).unlink(missing_ok=True)
        environment = os.environ | {"END": str(end), "LISTEN": LISTEN}
        with socket.create_server(("127.0.0.1", 0)) as free:
            script = script.replace("2222", str(free.getsockname()[1]))
        process = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=environment)
        if not end:
            wait_for(tmp_path / "started")
            process.send_signal(signal.SIGTERM)
        told = tmp_path / "told"
        return process.wait(60), told.read_text() if told.exists() else None

    return run


def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.process
def test_slurm_gets_a_stopped_run_into_the_queue_again_and_is_told_how_others_failed(job):
    """And goes on with what was saved: exit codes 75 and 76."""
    for code in (1, 2, 137):
        assert job(end=code) == (code, None)
    for code in ("", 75, 76):
        assert job(end=code) == (0, "requeue 7\n")


@pytest.mark.process
def test_slurm_starts_a_worker_on_each_node_then_the_program_and_ends_them(job, tmp_path):
    assert job(script=JOB_OF_MANY) == (0, "requeue 7\n")
    assert re.fullmatch(r"worker --address=127.0.0.1:\d+\n", (tmp_path / "worker").read_text())
    wait_for(tmp_path / "worker_ended")
    assert job(end=1, script=JOB_OF_MANY) == (1, None)


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_kubernetes_starts_again_what_was_stopped(manifest):
    """A policy for exit codes is refused with any other restartPolicy."""
    assert "restartPolicy: Never" in manifest and "containerName: train" in manifest
    rules = re.findall(r"action: (\w+)\n\s+onExitCodes:.*?values: \[(.*?)\]", manifest, re.DOTALL)
    codes = {action: [int(code) for code in values.split(",")] for action, values in rules}
    assert codes == {"Ignore": [75], "FailJob": [1, 2]}


def test_all_call_commands_that_are_understood():
    (command,) = re.findall(r"command: \[(towers.*)\]", MANIFESTS[0])
    lines = [command.replace(", ", " "), *re.findall(r"^towers .*(?= &$)", PAGE, re.MULTILINE)]
    lines += re.findall(r"exec (towers [^'\n]*)", PAGE)
    assert len(lines) == 4
    for verb, *flags in (shlex.split(line)[1:] for line in lines):
        cli.parse(verb, [flag.replace("$", "") for flag in flags])


def test_the_table_has_the_exit_codes_of_the_command_line():
    named = {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    assert {0, 75, 76} <= CODES and {code for code in named if code < 128} <= CODES
