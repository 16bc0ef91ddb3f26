"""Runs whose towers stand on workers, which are processes of this machine: lost, back, the same."""

import contextlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from tests import tiny
from tests.worker_processes import ROOT, Worker, environment, started
from towers import cli

pytestmark = pytest.mark.process
extended = pytest.mark.extended
STEPS = 400
FLAGS = [
    "--model=tests.tiny:cnn", "--dataset=tests.tiny:images", "--dtype=float64", "--batch_size=14",
    f"--max_steps={STEPS}", "--optimizer=adam", "--learning_rate=0.003", "--ema_decay=0.9",
    "--log_every_steps=50", "--evaluate_every_epochs=40", "--checkpoint_every_steps=100",
    "--worker_timeout_seconds=4",
]  # fmt: skip
SECONDS = 150


class Run:
    """`towers train` over workers in a process of its own."""

    def __init__(self, folder, workers, *flags):
        addresses = f"--workers={','.join(worker.address for worker in workers)}"
        self.log = folder.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "towers", "train", f"--train_dir={folder}", *FLAGS,
                 addresses, *flags],
                cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def until(self, pattern, seconds=SECONDS):
        """Return the first line with a pattern; it must come in time."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            for line in self.log.read_text().splitlines():
                if re.search(pattern, line):
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in {seconds} s: {self.log.read_text()}")

    def end(self, code=0):
        """Wait for the end, which is to have this exit code; return all that was printed."""
        assert self.process.wait(SECONDS) == code, self.log.read_text()
        return self.log.read_text()


def near(folder, *flags):
    """Return the folder of the same run on this machine."""
    assert cli.main(["train", f"--train_dir={folder}", *FLAGS, *flags]) == 0
    return folder


@contextlib.contextmanager
def again(worker):
    """Start a worker again that was killed."""
    with contextlib.closing(Worker(address=worker.address)) as new:
        yield new.ready()


def assert_same(folder, other, bound=0.0):
    """Compare all master variables of two runs' last checkpoints."""
    tiny.assert_close(tiny.saved(folder, STEPS), tiny.saved(other, STEPS), bound)


@pytest.fixture(scope="module")
def pair():
    with started(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def undisturbed(pair, tmp_path_factory):
    """Return the folder of a run over two workers that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with Run(folder, pair) as run:
        run.end()
    return folder


def lose(run, worker, number=signal.SIGKILL):
    """Let a worker be lost at some time, and wait until the run knows."""
    run.until("step 0 of")
    time.sleep(random.uniform(0, 0.5))
    worker.signal_all(number)
    assert worker.address in run.until("^lost ", seconds=30)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=extended)])
def test_a_run_goes_on_without_a_worker_and_with_it_again(tmp_path, number):
    with started(2) as (one, other), Run(tmp_path / "run", [one, other]) as run:
        lose(run, other, number)
        assert "1 worker: 1 tower" in run.until("^going on", seconds=30)
        other.signal_all(signal.SIGCONT)
        with again(other) if number == signal.SIGKILL else contextlib.nullcontext():
            run.end()
    assert_same(tmp_path / "run", near(tmp_path / "near", "--num_towers=2"), 1e-9)


@extended
def test_with_as_many_workers_as_before_not_a_bit_differs(pair, undisturbed, tmp_path):
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other], "--min_workers=2") as run:
        lose(run, other)
        with again(other):
            run.until("^back", seconds=30)
            run.end()
    assert_same(tmp_path / "run", undisturbed)


@extended
def test_two_towers_on_each_worker_compute_what_four_here_do(pair, tmp_path):
    with Run(tmp_path / "far", pair, "--variables=sharded", "--towers_per_worker=2") as run:
        printed = run.end()
    assert all(worker.address in printed for worker in pair)
    assert "/job:worker/task:1/cpu:1" in printed
    here = near(tmp_path / "near", "--variables=sharded", "--num_towers=4")
    assert_same(tmp_path / "far", here, 1e-9)


@extended
def test_train_state_that_a_lost_worker_had_are_those_of_the_last_checkpoint(pair, tmp_path):
    flags = ["--variables=sharded", "--min_workers=2"]
    with Run(tmp_path / "quiet", pair, *flags) as run:
        run.end()
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other], *flags) as run:
        run.until("step 150 of")
        other.kill()
        with again(other):
            assert "last checkpoint" in run.until("^going on")
            run.end()
    assert_same(tmp_path / "run", tmp_path / "quiet")


@extended
def test_a_run_stops_if_that_is_asked_for_and_goes_on_with_whom_there_is(
    pair, undisturbed, tmp_path
):
    stops = "--on_worker_loss=stop"
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other], stops) as run:
        run.until("step 50 of")
        other.kill()
        assert stops in run.end(75)
    with Run(tmp_path / "run", [pair[0], other]) as run:
        printed = run.end()
    assert f"without worker 1 ({other.address})" in printed
    assert_same(tmp_path / "run", undisturbed, 1e-9)


@extended
def test_a_worker_that_another_program_has_meanwhile_is_left_to_it(pair, undisturbed, tmp_path):
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other]) as run:
        run.until("step 0 of")
        other.signal_all(signal.SIGSTOP)
        run.until("^going on", seconds=30)
        other.signal_all(signal.SIGCONT)
        with Run(tmp_path / "second", [other], "--max_steps=100000") as second:
            printed = run.end()
            second.process.kill()
    assert printed.count("going on") <= 3
    assert_same(tmp_path / "run", undisturbed, 1e-9)


@extended
def test_workers_are_free_again_when_the_program_ends(pair, undisturbed, tmp_path):
    numbers = {50: signal.SIGINT, 150: signal.SIGTERM, 250: signal.SIGKILL}
    for step, number in numbers.items():
        with Run(tmp_path / "run", pair) as run:
            run.until(f"step {step} of")
            run.process.send_signal(number)
            run.end(-number if number == signal.SIGKILL else 75)
        for worker in pair:
            while f"(pid {run.process.pid})" not in worker.read_until("taken"):
                pass
            worker.read_until("free", seconds=20)
    with Run(tmp_path / "run", pair) as run:
        run.end()
    assert_same(tmp_path / "run", undisturbed)


@extended
def test_a_worker_that_is_busy_or_missing_is_named(pair, tmp_path):
    with Run(tmp_path / "run", pair, "--max_steps=100000") as run:
        run.until("step 0 of")
        with Run(tmp_path / "second", pair) as second:
            said = second.end(2)
        assert f"(pid {run.process.pid})" in said and pair[0].address in said
        run.process.send_signal(signal.SIGINT)
        run.end(75)
    with Run(tmp_path / "second", pair, "--max_steps=10") as second:  # free again just now
        second.end()
    nobody = "127.0.0.1:9"
    with Run(tmp_path / "third", pair, f"--workers={pair[0].address},{nobody}") as third:
        start = time.monotonic()
        said = third.end(2)
    assert f"towers worker --address={nobody}" in said
    assert time.monotonic() - start < 40
    assert not (tmp_path / "third").exists()
