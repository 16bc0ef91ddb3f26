"""The page "When things go wrong": its exit codes, and what schedulers are given."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from towers import cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "towers/training/README.md").read_text(encoding="utf-8")
(JOB,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
(MANIFEST,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
CODES = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
TOWERS = """#!/bin/bash
trap 'exit 75' TERM
touch started
[ -n "$END" ] && exit "$END"
while true; do sleep 0.05; done
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return what runs the script for Slurm with stand-ins: (exit code, what scontrol was told)."""
    for name, text in {"towers": TOWERS, "scontrol": '#!/bin/bash\necho "$@" > told\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def run(end=""):
        environment = os.environ | {"END": str(end)}
        process = subprocess.Popen(["bash", "-c", JOB], cwd=tmp_path, env=environment)
        if not end:
            while not (tmp_path / "started").exists():
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
        told = tmp_path / "told"
        return process.wait(20), told.read_text() if told.exists() else None

    return run


def test_slurm_gets_a_stopped_run_into_the_queue_again(job):
    assert job() == (0, "requeue 7\n")


@pytest.mark.parametrize("code", [1, 2, 137])
def test_slurm_is_told_how_a_run_failed(job, code):
    assert job(end=code) == (code, None)


@pytest.mark.parametrize("code", [75, 76])
def test_slurm_goes_on_with_what_was_saved(job, code):
    assert job(end=code) == (0, "requeue 7\n")


def test_kubernetes_starts_again_what_was_stopped():
    """A policy for exit codes is refused with any other restartPolicy."""
    assert "restartPolicy: Never" in MANIFEST and "containerName: train" in MANIFEST
    rules = re.findall(r"action: (\w+)\n\s+onExitCodes:.*?values: \[(.*?)\]", MANIFEST, re.DOTALL)
    codes = {action: [int(code) for code in values.split(",")] for action, values in rules}
    assert codes == {"Ignore": [75], "FailJob": [1, 2]}


def test_kubernetes_reads_keys_that_are_indented_by_two():
    depth = 0
    for line in MANIFEST.splitlines():
        spaces, item, value = re.fullmatch(r"( *)(- )?[\w./]+:( [^#\t]+)?", line).groups()
        assert len(spaces) % 2 == 0 and len(spaces) <= depth, line
        depth = len(spaces) + (2 if item else 0) + (2 if value is None else 0)


def test_both_call_a_command_that_is_understood():
    (command,) = re.findall(r"command: \[(.*)\]", MANIFEST)
    (line,) = re.findall(r"^towers .*(?= &$)", JOB, re.MULTILINE)
    for words in (command.split(", "), shlex.split(line)):
        assert words[:2] == ["towers", "train"]
        cli.parse("train", words[2:])


def test_the_table_has_the_exit_codes_of_the_command_line():
    named = {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    assert {0, 75, 76} <= CODES and {code for code in named if code < 128} <= CODES
