"""Runs over workers, which are processes of this machine: the numbers, and what is lost of them."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import programs, tiny
from tests.runs import command
from tests.worker_processes import ROOT, Worker, environment, started
from towers import cli

pytestmark = pytest.mark.process
extended = pytest.mark.extended
STEPS, SECONDS = 400, 150
FLAGS = [
    "--model=tests.tiny:cnn", "--dataset=tests.tiny:images", "--dtype=float64", "--batch_size=14",
    f"--max_steps={STEPS}", "--optimizer=adam", "--learning_rate=0.003", "--ema_decay=0.9",
    "--log_every_steps=50", "--evaluate_every_epochs=40", "--checkpoint_every_steps=100",
    "--worker_timeout_seconds=4",
]  # fmt: skip
TWO_EACH = "--towers_per_worker=2"


class Run:
    """`towers train` over workers in a process of its own."""

    def __init__(self, folder, workers, *flags):
        addresses = f"--workers={','.join(worker.address for worker in workers)}"
        self.log = folder.with_suffix(".log")
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "towers", "train", f"--train_dir={folder.name}", *FLAGS,
                 addresses, *flags],
                cwd=folder.parent, env=environment() | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
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


@pytest.fixture(scope="module")
def pair():
    with started(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """Return the weights of the same run on four towers of this machine."""
    folder = tmp_path_factory.mktemp("near") / "run"
    assert cli.main(["train", f"--train_dir={folder}", *FLAGS, "--num_towers=4"]) == 0
    return tiny.saved(folder, STEPS)


def assert_same(folder, weights):
    tiny.assert_close(tiny.saved(folder, STEPS), weights, 1e-9)


@pytest.mark.parametrize("variables", ["default", pytest.param("cpu", marks=extended)])
def test_two_workers_of_two_towers_compute_what_four_towers_do(pair, near, tmp_path, variables):
    with Run(tmp_path / "run", pair, TWO_EACH, f"--variables={variables}") as run:
        printed = run.end()
    assert all(worker.address in printed for worker in pair)
    assert "/job:worker/task:1/cpu:1" in printed
    assert_same(tmp_path / "run", near)
    for worker in pair:
        assert "released" in worker.read_until("over")
        worker.read_until("free")
        assert worker.errors() == ""


def test_a_killed_worker_costs_a_call_and_no_number(pair, near, tmp_path):
    """The command is run again in the same process, and moves the run aside only once."""
    folder = tmp_path / "run"
    assert cli.main(["train", f"--train_dir={folder}", *FLAGS, "--max_steps=1"]) == 0
    with started(1) as (second,):
        flags = TWO_EACH, "--overwrite", "--trust", "--variables=cpu"
        (tmp_path / "run.cfg").write_text("--overwrite\n")
        with Run(folder, [pair[0], second], *flags, "--flagfile=run.cfg") as run:
            run.until("step 0 of 400")
            time.sleep(random.uniform(0, 1.5))
            second.kill()
            run.until("^continuing")
            command = Path(f"/proc/{run.process.pid}/cmdline").read_text().split("\0")
            printed = run.end()
    assert command.count("train") == 1 and command[-2] == "--overwrite=false"
    assert f"lost        worker {second.address}" in printed
    (step,) = re.findall(r"restarting  from step (\d+): 1 worker of 2 left", printed)
    assert f"continuing  run at step {step} of 400" in printed
    assert printed.count("moved aside") == 1
    assert_same(folder, near)


def test_a_run_that_waits_for_a_worker_that_hangs_ends_with_75_if_too_few_are_left(pair, tmp_path):
    folder, flags = tmp_path / "run", (TWO_EACH, "--min_workers=2", "--variables=cpu")
    with started(1) as (second,):
        with Run(folder, [pair[0], second], *flags) as run:
            run.until("step 50 of")
            second.signal_all(signal.SIGSTOP)
            printed = run.end(75)
        assert f"lost        worker {second.address}" in printed
        assert re.search(r"stopped: 1 worker of 2 left; step \d+ is saved; the same", printed)


@extended
def test_a_run_that_waits_for_a_worker_that_hangs_is_run_again(pair, near, tmp_path):
    folder, flags = tmp_path / "run", (TWO_EACH, "--variables=cpu")
    with started(1) as (second,), Run(folder, [second, pair[0]], *flags) as run:
        run.until("step 50 of")
        second.signal_all(signal.SIGSTOP)
        assert "restarting  from step" in run.end()
    assert_same(folder, near)


@extended
def test_weights_that_a_lost_worker_had_are_those_of_the_last_checkpoint(pair, near, tmp_path):
    folder = tmp_path / "run"
    with started(1) as (second,), Run(folder, [pair[0], second], TWO_EACH) as run:
        run.until("step 150 of")
        second.kill()
        printed = run.end()
    assert "restarting  from the last checkpoint" in printed
    assert_same(folder, near)


def test_a_program_has_a_worker_alone_and_a_fresh_one_replaces_it(pair, tmp_path):
    endless = "--max_steps=100000"
    with Run(tmp_path / "first", pair, endless) as run:
        run.until("step 0 of")
        with Run(tmp_path / "second", pair) as second:
            said = second.end(2)
        assert f"(pid {run.process.pid}) uses it" in said and pair[0].address in said
        assert not (tmp_path / "second").exists()
        for worker in pair:
            while f"(pid {run.process.pid})" not in worker.read_until("taken"):
                pass
        children = f"/proc/{pair[0].process.pid}/task/{pair[0].process.pid}/children"
        (child,) = Path(children).read_text().split()
        run.process.kill()
        assert "no heartbeat" in pair[0].read_until("over")
        pair[0].read_until("free")
        assert Path(children).read_text().split() not in ([child], [])


PROGRAM = """
import os, signal, sys, threading
import keras, numpy as np
import towers

folder, addresses, victim = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
keras.config.set_floatx("float64")
def build():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input([8]), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model
workers = towers.devices.connect(addresses, timeout_seconds=4)
x, y = np.random.default_rng(0).random((2, 30, 8))
one, many = build(), towers.parallelize(build(), devices=workers.devices)
losses = [model.fit(x, y[:, :1], batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
          for model in (one, many)]
np.testing.assert_allclose(*losses, rtol=1e-9)
for weights in zip(one.get_weights(), many.get_weights(), strict=True):
    np.testing.assert_allclose(*weights, rtol=1e-9, atol=1e-12)
data = ((x, y[:, :1]), (x, y[:, :1]))
def train():
    return towers.train(model=build, dataset=data, train_dir=folder, max_steps=100000, batch_size=8,
                        workers=sys.argv[2], worker_timeout_seconds=4)
threading.Timer(12, os.killpg, [victim, signal.SIGKILL]).start()
assert train() is None
try:
    train()
except towers.InputError as error:
    print(error)
os._exit(0)
"""


@extended
def test_fit_over_workers_is_that_of_one_device_and_a_program_is_not_run_again(pair, tmp_path):
    with started(1) as (second,):
        addresses = f"{pair[0].address},{second.address}"
        done = programs.python(
            "-c", PROGRAM, tmp_path / "run", addresses, str(second.process.pid),
            variables={"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, timeout=SECONDS,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 worker of 2 left" in done.stderr and "start another process" in done.stdout


@extended
def test_verify_compares_towers_of_workers_with_one_device_here(pair):
    flags = "--model=tests.tiny:cnn --dataset=tests.tiny:images --steps=2 --num_towers=2,3 --json"
    where = f"--workers={','.join(worker.address for worker in pair)}"
    none = {"CUDA_VISIBLE_DEVICES": ""}
    line = "-m", "towers", "verify", *flags.split(), where
    done = programs.python(*line, variables=none, capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and set(found["max_relative_difference"]) == {"2", "3"}


@pytest.mark.parametrize(
    "verb, flags, remedy",
    [
        ("worker", "", "needs --address=HOST:PORT"),
        ("worker", "--address=a:b:c", "type HOST:PORT"),
        ("worker", "--address=127.0.0.1 --batch_size=3", "takes no --batch_size"),
        ("worker", "--address=127.0.0.1:1", "give another port"),
        ("train", "--workers=a --min_workers=2", "--min_workers=1"),
        ("train", "--workers=a --num_towers=2", "--towers_per_worker=N"),
        ("train", "--workers=a --devices=cpu", "--towers_per_worker=N"),
        ("benchmark", "--workers=a", "takes no --workers"),
    ],
)
def test_what_cannot_be_had_is_one_line(capsys, tmp_path, monkeypatch, verb, flags, remedy):
    monkeypatch.setattr("towers.workers.server._port_problem", lambda port: "it is taken")
    monkeypatch.chdir(tmp_path)
    code, _, err = command(capsys, verb, *flags.split())
    assert code == 2 and remedy in err.splitlines()[-1] and "Traceback" not in err
    assert os.listdir(tmp_path) == []


def test_a_signal_ends_a_worker_at_once():
    with contextlib.closing(Worker()) as worker:
        worker.ready()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(10) == 0
        assert worker.errors() == "towers: ended by SIGTERM\n"
