"""The suite itself: a test keeps to its tier, leaves nothing behind, and changes no shared run."""

import os
import signal
import subprocess
import sys
import time
import types

import pytest

from tests import leftovers, tiers
from tests.programs import ROOT, environment

pytestmark = pytest.mark.process
CONFTEST = "from tests.conftest import *\n"
SESSION = """
import contextlib, os, subprocess, sys
import keras, numpy as np, pytest, tensorflow as tf
import towers
from tests.tiers import TierError

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
too_much = pytest.mark.xfail(raises=TierError, strict=True)

def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

def trace(calls):
    net = model()
    for n in range(1, calls + 1):
        tf.function(net).get_concrete_function(tf.zeros([n, 2]))

@too_much
@pytest.mark.unit
def test_graph():
    tf.function(lambda x: x + 1).get_concrete_function(tf.zeros([]))

@too_much
@pytest.mark.graph
def test_traces():
    trace(3)

@too_much
@pytest.mark.graph
def test_fit():
    net = model()
    net.compile("sgd", "mse")
    net.fit(np.ones([2, 2]), np.ones([2, 1]), verbose=0)

@too_much
@pytest.mark.graph
def test_train(tmp_path):
    given = dict(model="tests.tiny:dense", dataset="tests.tiny:images", max_steps=1)
    towers.train(**given, train_dir=str(tmp_path))

@too_much
@pytest.mark.graph
def test_verify():
    net = model()
    net.compile("sgd", "mse")
    towers.verify(net, np.ones([4, 2]), np.ones([4, 1]), steps=1)

@too_much
@pytest.mark.run
def test_process():
    subprocess.run([sys.executable, "-c", ""])

@too_much
@pytest.mark.unit
def test_caught():
    with contextlib.suppress(BaseException):
        tf.Graph()

@pytest.mark.graph
def test_in_its_tier():
    trace(2)

class TestOfModule:
    pytestmark = pytest.mark.graph

    @pytest.mark.run
    def test_nearest_mark_counts(self):
        trace(3)

@pytest.mark.process
def test_starts_a_process_with_a_session_of_its_own():
    subprocess.Popen(SLEEP, start_new_session=True).returncode = 0  # or Python would warn of it
    print("started", os.environ["TOWERS_TESTS"], flush=True)
"""
NEEDS = {
    "graph": "graph", "traces": "run", "fit": "run", "train": "run", "verify": "run",
    "process": "process", "caught": "graph",
}  # fmt: skip
ENDED = """
import subprocess, sys, time
from tests import leftovers

print(leftovers.begin(), flush=True)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep, start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return how a session of pytest ended, in which tests that do too much are to fail."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(SESSION)
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    line += [f"--config-file={ROOT}/pyproject.toml", "-s", "--xfail-tb", str(folder)]
    own = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | own
    given = dict(env=variables, cwd=ROOT, text=True, capture_output=True)
    return subprocess.run(line, **given)


def test_a_test_that_does_more_than_its_tier_fails_and_names_the_marker(done):
    assert "3 passed, 7 xfailed" in done.stdout
    for name, marker in NEEDS.items():
        (_, own) = done.stdout.split(f"_ test_{name} _")
        assert f"mark it @pytest.mark.{marker}" in own.partition("_ test_")[0]


@pytest.mark.unit
def test_a_test_needs_a_tier():
    item = types.SimpleNamespace(nodeid="test_it.py::test_it", iter_markers=lambda: [])
    with pytest.raises(pytest.UsageError, match="test_it has no tier: write @pytest.mark.unit"):
        tiers.tier_of(item)


def test_what_a_test_leaves_behind_fails_the_session_and_is_ended(done):
    assert done.returncode == 1 and " failed" not in done.stdout
    assert "left behind by a test: process " in done.stdout and "time.sleep(600)" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "started " in line]
    assert_soon_nothing_has(line.partition("started ")[2].strip())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_tests_that_are_ended(number):
    given = dict(env=environment(), cwd=ROOT, text=True, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", ENDED], stderr=subprocess.DEVNULL, **given) as run:
        key = run.stdout.readline().strip()
        run.stdout.readline()
        deadline, seen = time.monotonic() + 30, False
        while not seen and time.monotonic() < deadline:  # Linux shows what it starts a little later
            seen = any("time.sleep(600)" in line for line in leftovers.marked(key).values())
        run.send_signal(number)
    assert seen
    assert_soon_nothing_has(key)


def assert_soon_nothing_has(key):
    deadline = time.monotonic() + 30
    while (left := leftovers.marked(key)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
