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

SOON = 15  # seconds; on a machine of one's own it is 3
ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--model=tests.blocking:net --dataset=tests.blocking:data --batch_size=8 --num_towers=2 "
    "--num_epochs=3 --train_dir=run"
).split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(folder):
    """Start a command in the folder; whatever becomes of the test, it ends."""
    started = []

    def start(*argv):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        process = subprocess.Popen(
            [sys.executable, "-m", "towers", *argv],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path, process):
    """Wait until a file is there."""
    while not Path(path).exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def blocked(process, part, after="new run "):
    """Let the source block once the run has said something, and wait until the run says that."""
    lines = iter(process.stdout)  # a slow machine may seem to stall before
    assert any(after in line for line in lines), process.communicate()
    Path(part).touch()
    assert any(line.startswith("stalled") for line in lines), process.communicate()


def end_of(process, number=None):
    """Send a signal; return exit code, lines of towers on standard error, and the seconds."""
    begun = time.monotonic()
    if number:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("towers: ")]
    return process.returncode, lines, out, time.monotonic() - begun


@pytest.mark.parametrize(
    "part, after, number",
    [
        ("train", ": step 0, ", signal.SIGTERM),
        ("train", ": step 0, ", signal.SIGHUP),
        ("test", "new run ", signal.SIGINT),  # the evaluation after an epoch
    ],
)
def test_a_blocked_input_is_left_with_the_last_finished_step(start, part, after, number):
    assert end_of(start("train", *FLAGS[:-1], "--train_dir=whole"))[0] == 0
    run = start("train", *FLAGS, "--stall_seconds=1")
    blocked(run, part, after)
    code, lines, _, seconds = end_of(run, number)
    assert (code, len(lines)) == (75, 1) and seconds < SOON, (lines, seconds)
    step = max(tiny.saved_steps(Path("run")))
    assert f"step {step} is saved" in lines[0]
    assert step == 8 if part == "test" else 1 <= step < 24
    Path(part).unlink()
    assert end_of(start("train", *FLAGS))[0] == 0
    tiny.assert_identical(tiny.saved(Path("run")), tiny.saved(Path("whole")))


def test_usr1_saves_now_also_where_the_input_is_blocked(start):
    run = start("train", *FLAGS, "--stall_seconds=1")
    blocked(run, "train", ": step 0, ")
    run.send_signal(signal.SIGUSR1)
    while not any(tiny.saved_steps(Path("run"))):
        assert run.poll() is None
        time.sleep(0.05)
    Path("train").unlink()
    code, lines, out, _ = end_of(run)
    assert (code, lines) == (0, [])
    assert re.search(r"saving +step \d+, .*SIGUSR1", out) and "goes on " in out


def test_a_stall_says_what_is_waited_for_and_may_end_the_run(start):
    run = start("train", *FLAGS, "--stall_seconds=4", "--on_stall=stop")
    blocked(run, "train", ": step 0, ")
    _, err = run.communicate(timeout=60)
    assert run.returncode == 76
    assert "blocking.py" in err  # the stack of the thread that waits
    assert re.search(r"towers: .*--on_stall=stop: step \d+ is saved", err)
    assert max(tiny.saved_steps(Path("run"))) > 0


def test_a_first_batch_that_does_not_come_has_lost_nothing(start):
    Path("train").touch()
    run = start("train", *FLAGS, "--stall_seconds=1")
    assert any(line.startswith("stalled") for line in run.stdout)
    code, lines, _, seconds = end_of(run, signal.SIGTERM)
    assert (code, len(lines)) == (75, 1) and "nothing is lost" in lines[0] and seconds < SOON
    assert not Path("run").exists()


IMPORTS = {
    "train": (75, "the same command goes on"),
    "evaluate": (143, "interrupted by SIGTERM"),
}


@pytest.mark.parametrize("verb", IMPORTS)
@pytest.mark.parametrize("waits", ["time.sleep(60)", "threading.Event().wait(60)", "in_c()"])
def test_a_signal_while_libraries_are_imported(folder, start, verb, waits):
    (folder / "keras.py").write_text(
        "import ctypes, threading, time\nfrom pathlib import Path\nPath('imported').touch()\n"
        "def in_c():\n  ctypes.PyDLL(None).sleep(1); ctypes.CDLL(None).sleep(60)\n"
        f"{waits}\n"
    )
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "flags.cfg").write_text("--seed=1\n")
    process = start(verb, "--train_dir=run")
    wait_for("imported", process)
    expected, line = IMPORTS[verb]
    code, lines, _, seconds = end_of(process, signal.SIGTERM)
    assert (code, len(lines)) == (expected, 1) and line in lines[0]
    assert seconds < SOON


def test_two_signals_at_once_are_one(start):
    run = start("train", *FLAGS, "--stall_seconds=1")
    blocked(run, "train", ": step 0, ")
    run.send_signal(signal.SIGINT)
    code, lines, _, _ = end_of(run, signal.SIGTERM)
    assert (code, len(lines)) == (75, 1) and "is saved" in lines[0]
