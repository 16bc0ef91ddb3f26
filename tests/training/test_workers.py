"""Runs whose towers stand on workers, which are processes of this machine: lost, back, the same."""

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.workers import ROOT, Worker, environment, started
from towers.training import checkpoint

STEPS = 400
FLAGS = [
    "--model=tests.tiny:cnn", "--dataset=tests.tiny:images", "--dtype=float64", "--batch_size=14",
    f"--max_steps={STEPS}", "--optimizer=adam", "--learning_rate=0.003", "--ema_decay=0.9",
    "--log_every_steps=50", "--evaluate_every_epochs=40", "--checkpoint_every_steps=100",
    "--worker_timeout_seconds=4",
]  # fmt: skip
SECONDS = 150


class Run:
    """`towers train` in a process of its own."""

    def __init__(self, folder, workers, *flags):
        addresses = [f"--workers={','.join(worker.address for worker in workers)}"] * bool(workers)
        self.log = folder.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "towers", "train", f"--train_dir={folder}", *FLAGS,
                 *addresses, *flags],
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


@contextlib.contextmanager
def again(worker):
    """Start a worker again that was killed."""
    with contextlib.closing(Worker(address=worker.address)) as new:
        yield new.ready()


def weights(folder):
    """Return all master variables of a run's last checkpoint."""
    _, prefix = checkpoint.find(Path(folder) / "checkpoints")[-1]
    with checkpoint.open_reader(prefix) as reader:
        keys = checkpoint.keys_of(reader)
        found = {name: reader.get_tensor(key) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value.dtype != object}


def assert_same(folder, other, bound=0.0):
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys()
    assert int(ours["step"]) == STEPS
    for name, value in ours.items():
        scale = np.abs(theirs[name]).max(initial=1e-30)
        assert np.abs(value - theirs[name]).max(initial=0) <= bound * scale, name


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


@pytest.mark.parametrize("variables", ["cpu", "sharded"])
def test_workers_compute_what_one_machine_computes(pair, tmp_path, variables):
    flags = [f"--variables={variables}"]
    with Run(tmp_path / "far", pair, "--towers_per_worker=2", *flags) as far:
        printed = far.end()
    assert all(worker.address in printed for worker in pair)
    assert "/job:worker/task:1/cpu:1" in printed
    with Run(tmp_path / "near", [], "--num_towers=4", *flags) as near:
        near.end()
    assert_same(tmp_path / "far", tmp_path / "near", 1e-9)


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_run_goes_on_without_a_worker_and_with_it_again(pair, undisturbed, tmp_path, how):
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other]) as run:
        run.until("step 0,")
        time.sleep(random.uniform(0.1, 1.0))
        if how == "killed":
            other.kill()
        else:
            other.signal_all(signal.SIGSTOP)
        lost = run.until("^lost ", seconds=15)
        assert other.address in lost
        going_on = run.until("^going on", seconds=15)
        assert "1 worker: 1 tower" in going_on
        if how == "killed":
            with again(other):
                run.end()
        else:
            other.signal_all(signal.SIGCONT)
            run.end()
    assert_same(tmp_path / "run", undisturbed, 1e-9)


def test_with_as_many_workers_as_before_not_a_bit_differs(pair, undisturbed, tmp_path):
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other], "--min_workers=2") as run:
        run.until("step 0,")
        time.sleep(random.uniform(0.1, 1.0))
        other.kill()
        run.until("^lost ", seconds=15)
        with again(other):
            run.until("^back", seconds=30)
            run.end()
    assert_same(tmp_path / "run", undisturbed)


def test_masters_that_a_lost_worker_had_are_those_of_the_last_checkpoint(pair, tmp_path):
    flags = ["--variables=sharded", "--min_workers=2"]
    with Run(tmp_path / "quiet", pair, *flags) as run:
        run.end()
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other], *flags) as run:
        run.until("step 150,")
        other.kill()
        with again(other):
            assert "last checkpoint" in run.until("^going on")
            run.end()
    assert_same(tmp_path / "run", tmp_path / "quiet")


def test_a_run_stops_if_that_is_asked_for_and_goes_on_with_whom_there_is(
    pair, undisturbed, tmp_path
):
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other], "--on_worker_loss=stop"
    ) as run:  # fmt: skip
        run.until("step 50,")
        other.kill()
        assert "--on_worker_loss=stop" in run.end(75)
    with Run(tmp_path / "run", [pair[0], other]) as run:
        printed = run.end()
    assert f"without worker 1 ({other.address})" in printed
    assert_same(tmp_path / "run", undisturbed, 1e-9)


def test_a_worker_that_another_program_has_meanwhile_is_left_to_it(pair, undisturbed, tmp_path):
    with started(1) as (other,), Run(tmp_path / "run", [pair[0], other]) as run:
        run.until("step 0,")
        other.signal_all(signal.SIGSTOP)
        run.until("^going on", seconds=30)
        other.signal_all(signal.SIGCONT)
        with Run(tmp_path / "second", [other], "--max_steps=100000") as second:
            printed = run.end()
            second.process.kill()
    assert printed.count("going on") <= 3
    assert_same(tmp_path / "run", undisturbed, 1e-9)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_are_free_again_when_the_program_ends(pair, undisturbed, tmp_path, number):
    with Run(tmp_path / "run", pair) as run:
        run.until("step 50,")
        run.process.send_signal(number)
        run.end(-number if number == signal.SIGKILL else 75)
    for worker in pair:
        while f"(pid {run.process.pid})" not in worker.read_until("taken"):
            pass
        worker.read_until("free", seconds=20)
    with Run(tmp_path / "run", pair) as run:
        run.end()
    assert_same(tmp_path / "run", undisturbed)


def test_a_worker_that_is_busy_or_missing_is_named(pair, tmp_path):
    with Run(tmp_path / "run", pair, "--max_steps=100000") as run:
        run.until("step 0,")
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


def test_devices_of_this_machine_are_not_asked_for_beside(pair, tmp_path):
    for flag, remedy in ("--devices=cpu", "--towers_per_worker"), ("--num_towers=3", "=0"):
        with Run(tmp_path / "run", pair, flag) as run:
            said = run.end(2)
        assert flag in said and remedy in said
