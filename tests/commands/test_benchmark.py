"""`towers benchmark`: what is measured, in which order, and that nothing is left behind."""

import json
import os
import signal
import time
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from tests import leftovers, tiny
from tests.runs import command as command_line
from tests.runs import rare
from towers import cli
from towers.commands.benchmark import command, own_run, results, runner
from towers.errors import RunError
from towers.options.run import Options
from towers.training.run.setup import prepare

pytestmark = pytest.mark.unit

# A program that speaks the protocol and computes nothing; {} is what it does when it starts.
PEER = """
import json, os, subprocess, sys, time
config = json.loads(sys.argv[1])
def note(word):
    with open("log", "a") as log:
        print(word, file=log)
note("start" if "TOWERS_TESTS" in os.environ else "not marked")
def say(**answer):
    print(json.dumps(answer), flush=True)
{}
print("a word of the library's own")
say(ready=True, versions={{"peer": "1.0"}}, config=config)
for line in sys.stdin:
    note(line.strip())
    say(steps=4, seconds=2.0, loss=1.0)
say(peak_memory_mib=12.5)
"""
CRASH = "sys.stderr.write('first\\nno memory is left\\n'); sys.exit(3)"
CHILD = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
note("child")
"""
KEEP_IMAGES = """
images = __import__('numpy').load(config['data'])
config['images'] = [
    images['images'].shape, str(images['images'].dtype), int(images['labels'].sum())
]
json.dump(config, open('config', 'w'))
"""


@pytest.fixture
def folder(folder, monkeypatch):
    """Stand in a folder that has scripts/peers."""
    (folder / "scripts/peers").mkdir(parents=True)
    monkeypatch.setattr(command, "PEER_FOLDER", folder / "scripts/peers")
    return folder


def write_peer(folder, program, start=""):
    (folder / f"scripts/peers/{program}.py").write_text(PEER.format(start))


def log_of_the_last(folder):
    """Wait a little for what was killed to be gone; return the words that peers have noted."""
    end = time.monotonic() + 10
    while leftovers.marked(os.environ[leftovers.VARIABLE]):
        assert time.monotonic() < end
        time.sleep(0.05)
    return (folder / "log").read_text().split()


@pytest.mark.extended
@pytest.mark.process
def test_the_command_line_with_peers(folder, capsys):
    write_peer(folder, "mirrored", KEEP_IMAGES)
    write_peer(folder, "fit", "say(skipped='fit is not installed: pip install fit'); sys.exit()")
    write_peer(folder, "torch_ddp", CRASH)
    argv = (
        "benchmark --model=tests.tiny:dense --num_towers=1,2 --windows=2 --seconds=0.02 --json "
        "--batch_size=8 --model_args=width=3 --against=mirrored,fit,torch_ddp,mirrored_own_layers "
        "--dataset=tests.tiny:images --augment=none --optimizer=adamw"
    )
    code, out, err = command_line(capsys, *argv.split())
    assert code == 1  # a peer has failed
    result = json.loads(out)
    found = [(r["scaling"], r["num_towers"], r["batch_size"]) for r in result["results"]]
    assert found == [("strong", 1, 8), ("strong", 2, 8), ("weak", 2, 16)]
    strong = result["results"][1]
    theirs = 8 * 4 / 2.0  # examples/s of a window
    for name in ("mirrored", "mirrored_own_layers"):
        assert result["peers"][name] == {
            "examples_per_second": {"median": theirs, "min": theirs, "max": theirs},
            "peak_memory_mib": 12.5,
            "versions": {"peer": "1.0"},
        }
        expected = {k: v / theirs for k, v in strong["examples_per_second"].items()}
        assert result["ratio_ranges"][name] == pytest.approx(expected)
        assert result["ratios"][name] == pytest.approx(expected["median"])
    assert result["skipped"] == {"fit": "fit is not installed: pip install fit"}
    assert result["failed"] == {"torch_ddp": "exit code 3: no memory is left"}
    assert result["versions"]["tensorflow"] == tf.__version__
    assert "| strong | 2 | 8 |" in err and "failed      torch_ddp: exit code 3" in err
    assert log_of_the_last(folder).count("0.02") == 4  # turns of peers
    # No train_dir; peers train what we train, on the same images.
    assert {p.name for p in folder.iterdir()} == {"scripts", "log", "config"}
    config = json.loads((folder / "config").read_text())
    images, labels = tiny.arrays(tiny.TRAIN_SIZE)
    assert config.pop("images") == [list(images.shape), "uint8", int(labels.sum())]
    assert Path(config.pop("data")).name == "train.npz"
    assert config == {
        "model": "tests.tiny:dense", "model_args": {"width": 3}, "image_shape": [8, 8, 3],
        "num_classes": 3, "batch_size": 8, "num_devices": 2, "gpus": False, "dtype": "float32",
        "optimizer": "adamw", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.0,
        "ema_decay": 0.0, "augment": "none", "steps_per_loop": 10, "seed": 0, "own_layers": True,
    }  # fmt: skip
    for row in result["results"]:
        rates, number = row["examples_per_second"], row["num_towers"]
        assert 0 < rates["min"] <= rates["median"] <= rates["max"]
        assert row["control"]["min"] > 0 < row["efficiency"]
        assert 10 < row["peak_memory_mib"] < 100_000
        assert row["devices"] == [f"/cpu:{i}" for i in range(number)]
        assert row["shared"] == (number > 1)


class FakeRunner(runner.Runner):
    """Writes down when it was asked for what; fails from its `last` turn on."""

    def __init__(self, name, asked, last=99, scaling="", **ready):
        self.name, self.asked, self.last, self.scaling, self.failed = name, asked, last, scaling, ""
        self.ready, self.windows = {"ready": True} | ready, {"": [], "control": []}

    def train(self, seconds, part):
        if self.last == 0:
            self.failed = "crashed"
            return
        self.last -= 1
        self.asked.append((self.name, seconds, part))


def test_runners_take_turns_window_by_window_and_every_other_backwards():
    asked, lines = [], []
    given = [FakeRunner("own", asked, scaling="weak"), FakeRunner("a", asked)]
    given += [FakeRunner("b", asked, last=1), FakeRunner("c", asked)]
    given[3].ready = {"skipped": "no"}
    runner.take_turns(given, 3, 2.0, lines.append)
    forwards = [("own", 1.0, "control"), ("own", 2.0, ""), ("a", 2.0, "")]
    assert asked == [*forwards, ("b", 2.0, ""), *forwards[::-1], *forwards]
    assert lines[0] == "measuring   3 rounds of 7 s at least, a window each in turn"


@pytest.mark.process
@pytest.mark.parametrize(
    "start, message",
    [
        (CHILD + "time.sleep(1000)", "no answer within 1 s"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL: it said nothing"),
    ],
)
def test_a_runner_that_hangs_or_ends_is_ended_with_all_that_it_started(
    folder, monkeypatch, start, message
):
    write_peer(folder, "peer", start)
    monkeypatch.setattr(runner, "WAIT_SECONDS", 1.0)
    for scaling in "", "strong":
        started = runner.Runner("peer", ["scripts/peers/peer.py"], {}, scaling)
        if scaling:
            with pytest.raises(RunError, match=f"^the benchmark's own run failed: {message}$"):
                started.wait_ready()
        else:
            started.wait_ready()
        started.close()
        assert started.failed == message and not started.ready
    assert log_of_the_last(folder)[0] == "start"


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all(folder, number, monkeypatch, capsys):
    """The signal comes while a peer starts, which has a child; our own process is left out."""
    stop = f"os.kill(os.getppid(), {int(number)}); time.sleep(1000)"
    write_peer(folder, "mirrored", CHILD + stop)
    ours = {"image_shape": [8, 8, 3], "num_classes": 3, "num_towers": 1, "devices": ["/cpu:0"]}
    own = FakeRunner("own", [], augment="off", batch_size=8, **ours)
    monkeypatch.setattr(command, "start_own", lambda *_: [own])
    assert cli.main(["benchmark", "--against=mirrored", "--num_towers=1"]) == 128 + number
    assert number.name in capsys.readouterr().err.splitlines()[-1]
    assert log_of_the_last(folder) == ["start", "child"]


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
@pytest.mark.parametrize("variables", [rare("cpu"), "replicated"])
def test_the_control_computes_each_gradient_in_each_step_and_changes_nothing(variables):
    given = tiny.options("unused", model=f"{__name__}:counting", num_towers=2, variables=variables)
    run = prepare(given)
    loop = own_run.make_control(run)

    def state():
        return {name: v.numpy() for name, v in run.train_state.variables().items()}

    loop(tf.constant(0))  # the model is tried while it is traced
    COUNTS.clear()
    before = state()
    loop(tf.constant(3))
    assert len(COUNTS) == 3 * 2
    tiny.assert_identical(state(), before)


@pytest.mark.run
def test_a_run_trains_as_long_as_it_was_asked_to(monkeypatch):
    monkeypatch.setattr(own_run, "WARM_UP_SECONDS", 0.01)
    given = tiny.options("unused", dataset="synthetic", augment="tutorial", batch_size=5)
    own = own_run.OwnRun(given)
    before = int(own.run.train_state.step)
    answer = own.train(0.05)
    assert answer["seconds"] >= 0.05 and answer["steps"] % given.steps_per_loop == 0
    assert int(own.run.train_state.step) - before == answer["steps"]
    assert own.ready["image_shape"] == (24, 24, 3)
    one, two = (next(own.batches)[0][0].numpy() for _ in range(2))
    assert one.shape == (5, 24, 24, 3) and one.dtype == "float32" and one.std() > 0.9
    assert own.run.options.augment == "off" and (one == two).all()


def test_a_result_is_made_of_the_windows():
    ready = dict(shared=False, num_towers=2, devices=[], batch_size=100, peak_memory_mib=0)
    own = FakeRunner("own", [], scaling="strong", **ready)
    own.windows = {"": [1.0, 2.0, 4.0], "control": [0.5, 1.0, 3.0]}
    result = results.result_of(own)
    assert result["examples_per_second"] == {"median": 50.0, "min": 25.0, "max": 100.0}
    assert result["control"]["median"] == 100.0
    assert result["efficiency"] == 0.5  # of 0.5, 0.5 and 0.75


@pytest.mark.parametrize(
    "given, words",
    [
        ("--against=fit,tensorpack", "'tensorpack' is unknown; allowed are mirrored"),
        ("--num_towers=2,1", "greater than the one before"),
        ("--windows=0", "at least 1"),
        ("--against=session", "it comes with a checkout of towers"),
        ("--model=tests.tiny:nothing --num_towers=1", "nothing"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, given, words):
    code, out, err = command_line(capsys, "benchmark", *given.split())
    line = err.splitlines()[-1]
    assert code == 2 and line.startswith(f"towers: {given.split('=')[0]}=") and words in line
    assert "measuring" not in out


@pytest.mark.run
@pytest.mark.parametrize("task", ["two", pytest.param("masks", marks=pytest.mark.extended)])
def test_a_compiled_model_is_measured(monkeypatch, task):
    monkeypatch.setattr(own_run, "WARM_UP_SECONDS", 0.01)
    names = {"model": f"tests.tasks:{task}", "dataset": f"tests.tasks:{task}_data"}
    own = own_run.OwnRun(Options(**names, batch_size=8, num_towers=2))
    assert (own.ready["image_shape"] is None) == (task == "two")
    assert own.train(0.01)["steps"] > 0 < own.train(0.01, "control")["steps"]


@pytest.mark.graph
def test_data_that_are_no_images_with_classes_are_given_to_nobody(tmp_path):
    for task in "table", "masks", "two":
        data, _ = own_run.load(Options(dataset=f"tests.tasks:{task}_data"))
        own_run.export(data.train, str(tmp_path / "train.npz"))
        assert not (tmp_path / "train.npz").exists()
