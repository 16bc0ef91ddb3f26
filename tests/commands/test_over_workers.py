"""Verbs over workers, which are real processes of this machine."""

import json
import time

import pytest

from tests import programs
from tests.runs import command
from tests.worker_processes import started
from towers.devices import remote
from towers.monitoring.event_writer import read_scalars

pytestmark = pytest.mark.process

SMALL = "--model=tests.zoo.draws:dropouts --dataset=tests.tiny:images --augment=none --batch_size=8"


@pytest.fixture(scope="module")
def addresses(two_addresses):
    return ",".join(two_addresses)


def python(*arguments, code=0):
    """Run Python in a process of its own; return what it writes to standard output and error."""
    none = {"CUDA_VISIBLE_DEVICES": ""}
    done = programs.python(*arguments, variables=none, capture_output=True, timeout=200)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout, done.stderr


def towers(line, code=0):
    return python("-m", "towers", *line.split(), code=code)


def test_verify_compares_towers_of_workers_with_one_device_here(addresses, capsys):
    line = f"{SMALL} --model=tests.tiny:cnn --steps=2 --num_towers=3 --workers={addresses} --json"
    code, out, err = command(capsys, "verify", *line.split())
    if connected := remote.current_cluster():
        connected.close()
    assert code == 0, err
    found = json.loads(out)
    assert found["passed"] and set(found["max_relative_difference"]) == {"3"}


@pytest.mark.extended
def test_a_run_is_evaluated_on_its_workers(addresses, tmp_path):
    line = f"--train_dir={tmp_path}/run --workers={addresses}"
    steps = "--max_steps=6 --log_every_steps=2 --placement=strict"
    printed, _ = towers(f"train {SMALL} {steps} {line}")
    assert "-> /job:worker/task:1/cpu:0" in printed  # what crosses
    for tower in 0, 1:
        assert read_scalars(tmp_path / "run/train" / f"tower_{tower}")[5]["tower/memory_mib"] > 50
    there = json.loads(towers(f"evaluate {line} --json")[0])
    here = json.loads(towers(f"evaluate --train_dir={tmp_path}/run --workers= --json")[0])
    assert there["num_towers"] == 2 and here["num_towers"] == 1
    assert there["accuracy"] == here["accuracy"]


FIT = """
import sys
import keras, numpy as np
import towers

addresses = sys.argv[1].split(",")
keras.config.set_floatx("float64")
def build():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input([8]), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model
def refused(*given, **workers):
    try:
        towers.parallelize(*given, **workers)
    except towers.InputError as error:
        print(error)
refused(build(), workers=addresses)
x, y = np.random.default_rng(0).random((2, 30, 8))
one, many = build(), towers.parallelize(build(), workers=addresses)
losses = [model.fit(x, y[:, :1], batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
          for model in (one, many)]
np.testing.assert_allclose(*losses, rtol=1e-9)
for weights in zip(one.get_weights(), many.get_weights(), strict=True):
    np.testing.assert_allclose(*weights, rtol=1e-9, atol=1e-12)
refused(many, 2, workers=addresses)
"""


@pytest.mark.extended
def test_fit_over_workers_has_the_numbers_of_one_device(addresses):
    too_old, both = python("-c", FIT, addresses)[0].splitlines()
    assert "before the model is made" in too_old
    assert both.startswith("num_towers=2") and both.endswith("leave one of them out")


HANGS = """
import os, signal, sys
import towers
from towers.workers.cluster import Cluster, connect

look = Cluster._mismatch

def hangs(cluster, worker):
    os.killpg(int(sys.argv[2]), signal.SIGSTOP)
    return look(cluster, worker)

Cluster._mismatch = hangs
try:
    connect(sys.argv[1], timeout_seconds=2)
except towers.InputError as error:
    print(error)
"""


@pytest.mark.extended
def test_a_worker_that_hangs_while_it_is_looked_at_is_named():
    with started(1) as (worker,):
        start = time.monotonic()
        said, _ = python("-c", HANGS, worker.address, str(worker.process.pid))
        assert worker.address in said and "does not answer" in said
        assert time.monotonic() - start < 40


@pytest.mark.extended
@pytest.mark.parametrize(
    "flags, why",
    [
        ("--min_workers=3", "--min_workers=2"),
        ("--workers={0},localhost:{1}", "are the same worker"),
        ("--workers=nobody.invalid --worker_timeout_seconds=3", "(nobody.invalid:2222) does not"),
    ],
)
def test_what_cannot_be_had_of_workers_is_one_line(addresses, tmp_path, flags, why):
    first = addresses.split(",")[0]
    flags = flags.format(first, first.rpartition(":")[2])
    line = f"train --train_dir={tmp_path}/run {SMALL} --workers={addresses} {flags}"
    _, err = towers(line, code=2)
    assert why in err.splitlines()[-1] and "Traceback" not in err
    assert not (tmp_path / "run").exists()
