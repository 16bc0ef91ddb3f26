"""`towers benchmark`: what is measured, in which order, and that nothing is left behind."""

import json
import os
import signal
import time

import keras
import pytest
import tensorflow as tf

from tests import leftovers, tiny
from tests.runs import command as command_line
from towers import cli
from towers.commands.benchmark import own_run
from towers.commands.benchmark.command import Runner
from towers.training.run.setup import prepare

pytestmark = pytest.mark.unit


@pytest.mark.process
def test_the_command_line(folder, capsys):
    argv = "--model=tests.tiny:dense --num_towers=1,2 --windows=2 --seconds=0.02 --batch_size=8"
    argv += " --json --dataset=tests.tiny:images --augment=standardize --model_args=width=3"
    code, out, err = command_line(capsys, "benchmark", *argv.split())
    result = json.loads(out)
    assert code == 0 and list(folder.iterdir()) == []  # no train_dir
    assert [row["num_towers"] for row in result["results"]] == [1, 2]
    assert list(result["ratios"]) == ["1", "2"] and min(result["ratios"].values()) > 0
    for row in result["results"]:
        rates, number = row["examples_per_second"], row["num_towers"]
        assert 0 < rates["min"] <= rates["median"] <= rates["max"]
        assert 10 < row["peak_memory_mib"] < 100_000
        assert row["devices"] == [f"/cpu:{i}" for i in range(number)]
    assert result["versions"]["tensorflow"] == tf.__version__ and "| 2 | " in err


CHILD = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open("child", "w").close()
"""


def wait_for_the_end():
    """Wait a little for what was killed to be gone."""
    end = time.monotonic() + 10
    while leftovers.marked(os.environ[leftovers.VARIABLE]):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.process
def test_an_interrupt_ends_all(folder, monkeypatch, capsys):
    """The signal comes while a process starts, which has a child."""
    stop = f"os.kill(os.getppid(), {int(signal.SIGINT)}); time.sleep(1000)"
    given = Runner.__init__
    monkeypatch.setattr(
        Runner, "__init__", lambda self, *_, **__: given(self, ["-c", CHILD + stop], {})
    )
    assert cli.main(["benchmark", "--num_towers=1"]) == 128 + signal.SIGINT
    assert "SIGINT" in capsys.readouterr().err.splitlines()[-1]
    assert (folder / "child").exists()
    wait_for_the_end()


COUNTS = []


@tf.custom_gradient
def counted(x):
    """Return x; count how often its gradient is computed, if anybody needs it."""

    def add(upstream):
        COUNTS.append(1)
        return upstream

    def gradient(upstream):
        value = tf.numpy_function(add, [upstream], upstream.dtype, stateful=False)
        return tf.ensure_shape(value, upstream.shape)

    return tf.identity(x), gradient


def counting(num_classes, image_shape):
    dense, count = keras.layers.Dense, keras.layers.Lambda(counted)
    layers = [keras.layers.Flatten(), dense(4), count, dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


@pytest.mark.run
def test_the_control_computes_each_gradient_in_each_step_and_changes_nothing():
    given = dict(model=f"{__name__}:counting", num_towers=2, variables="replicated")
    run = prepare(tiny.options("unused", **given))
    loop = own_run.make_control(run)

    def state():
        return {name: v.numpy() for name, v in run.train_state.variables().items()}

    loop(tf.constant(0))  # the model is tried while it is traced
    COUNTS.clear()
    before = state()
    loop(tf.constant(3))
    assert len(COUNTS) == 3 * 2
    tiny.assert_identical(state(), before)


@pytest.mark.parametrize(
    "given, remedy",
    [
        ("--num_towers=2,1", "larger than the one before"),
        ("--windows=0", "at least 1"),
        ("--model=tests.tiny:nothing --num_towers=1", "nothing"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, given, remedy):
    code, out, err = command_line(capsys, "benchmark", *given.split())
    line = err.splitlines()[-1]
    assert code == 2 and line.startswith(f"towers: {given.split('=')[0]}=") and remedy in line
    assert "measuring" not in out
