"""Signals and stalls while a run waits in C++ for its input, and at moments when nobody asks."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny

pytestmark = pytest.mark.process
SOON = 15  # seconds; on a machine of one's own it is 3
ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "train --model=tests.blocking:net --dataset=tests.blocking:data --batch_size=8 --num_towers=1 "
    "--num_epochs=5 --log_every_steps=1"
).split()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a command in a folder; whatever becomes of the test, it ends."""
    monkeypatch.chdir(tmp_path)
    started = []

    def start(*argv):
        folders = f"{ROOT}{os.pathsep}{tmp_path / 'libraries'}"
        environment = os.environ | {"PYTHONPATH": folders, "TF_CPP_MIN_LOG_LEVEL": "3"}
        process = subprocess.Popen(
            [sys.executable, "-m", "towers", *argv, "--train_dir=run"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(process, pattern):
    """Return the first line with a pattern that the process prints from now on."""
    for line in iter(process.stdout.readline, ""):
        if re.search(pattern, line):
            return line
    raise AssertionError(f"no {pattern!r}: {process.communicate()}")


def blocked(process, after):
    """Let the training set block once the run has said something, and wait until the run says so.

    A slow machine may seem to stall before.
    """
    until(process, after)
    Path("train").touch()
    until(process, "^stalled .* it waits for input")


def end_of(process, *numbers):
    """Send signals; return the exit code and the line that towers printed, which comes soon."""
    begun = time.monotonic()
    for number in numbers:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("towers: ")]
    assert not numbers or time.monotonic() - begun < SOON
    return process.returncode, line, err


def newest():
    return max(tiny.saved_steps(Path("run")))


def test_a_blocked_run_saves_and_is_left_with_its_last_finished_step(start):
    """That such a run goes on as if it had not been stopped, test_train tells."""
    run = start(*FLAGS, "--num_epochs=3", "--stall_seconds=1")
    blocked(run, ": step 0 of")
    Path("test").touch()  # the evaluation after an epoch is to block
    Path("train").unlink()
    until(run, "^recovered ")
    until(run, "^stalled .* evaluation .* it waits for input")
    code, line, _ = end_of(run, signal.SIGHUP, signal.SIGINT)  # two at once are one
    assert code == 75 and "step 16 is saved" in line and newest() == 16


@pytest.mark.extended
def test_a_run_that_waits_for_a_batch_is_left_at_a_signal_or_after_a_while(start):
    run = start(*FLAGS, "--stall_seconds=1")
    blocked(run, ": step 0 of")
    code, line, _ = end_of(run, signal.SIGTERM)
    assert code == 75 and f"step {newest()} is saved" in line and 0 < (before := newest()) < 40
    Path("train").unlink()

    run = start(*FLAGS, "--stall_seconds=4", "--on_stall=stop")
    blocked(run, f": step {before} of 40")
    code, line, err = end_of(run)
    assert "blocking.py" in err  # the stack of the thread that waits
    assert code == 76 and f"--on_stall=stop: step {newest()} is saved" in line
    assert before < newest() < 40


@pytest.mark.parametrize(
    "verb, waits, code, words",
    [
        ("train", "in_c()", 75, "the same command resumes the run"),
        ("evaluate", "time.sleep(60)", 143, "interrupted by SIGTERM"),
    ],
)
def test_a_signal_while_libraries_are_imported(start, verb, waits, code, words):
    Path("libraries").mkdir()
    Path("libraries/keras.py").write_text(
        "import ctypes, time\nprint('imported', flush=True)\n"
        "def in_c():\n  ctypes.PyDLL(None).sleep(1); ctypes.CDLL(None).sleep(60)\n"
        f"{waits}\n"
    )
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/flags.cfg").write_text("--seed=1\n")
    process = start(verb)
    until(process, "imported")
    found, line, _ = end_of(process, signal.SIGTERM)
    assert found == code and words in line
