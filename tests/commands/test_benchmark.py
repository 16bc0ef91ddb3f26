"""`towers benchmark`: what is measured, in which order, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from towers.commands.benchmark.options import BenchmarkOptions

from models.cnn import cnn
from tests import tiny
from towers import cli
from towers.commands.benchmark import (
    command as benchmark,
)
from towers.commands.benchmark import (
    lanes,
)
from towers.commands.benchmark import (
    own_lane as benchmark_lane,
)
from towers.commands.benchmark import (
    report as benchmark_report,
)
from towers.commands.benchmark import (
    start as benchmark_start,
)
from towers.commands.benchmark.parts import make_parts
from towers.errors import InputError
from towers.graphs.flops import flop_per_example
from towers.options.run import Options
from towers.training.run import prepare

ROOT = Path(__file__).resolve().parents[2]
STEPS_OF_OURS = {"": 10, "gather": 10, "control": 10, "constant": 10, "matmul": 2}

# A program that speaks the protocol and computes nothing; {} is what it does when it starts.
PEER = """
import json, os, subprocess, sys, time
config = json.loads(sys.argv[1])
with open("log", "a") as log:
    print("start", os.path.basename(__file__), os.getpid(), file=log)
def say(**answer):
    print(json.dumps(answer), flush=True)
{}
print("a word of the library's own")
say(ready=True, versions={{"peer": "1.0"}}, config=config)
for line in sys.stdin:
    with open("log", "a") as log:
        print("turn", os.path.basename(__file__), line.strip(), file=log)
    say(steps=4, seconds=2.0, loss=1.0)
say(peak_memory_mib=12.5)
"""
CRASH = "sys.stderr.write('first\\nno memory is left\\n'); sys.exit(3)"
CHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
with open("log", "a") as log:
    print("start", "child", child.pid, file=log)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stand in a folder that has scripts/peers, with small matrices."""
    (tmp_path / "scripts" / "peers").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(benchmark_start, "MATMUL_SIZE", 64)
    return tmp_path


def write_peer(folder, program, start=""):
    (folder / "scripts" / "peers" / f"{program}.py").write_text(PEER.format(start))


def log(folder):
    """Return the lines that peers have written, as lists of words."""
    path = folder / "log"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def is_alive(pid):
    """Tell whether a process runs; one that has ended and was not asked for is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def nobody_is_left(folder):
    """Wait a little for what was killed to be gone; tell whether all processes of the log are."""
    pids = [int(words[2]) for words in log(folder) if words[0] == "start"]
    end = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < end:
        os.sched_yield()
    return bool(pids) and not any(map(is_alive, pids))


def options(**changes):
    given = dict(model="tests.tiny:dense", num_towers="1", windows=1, seconds=0.01, batch_size=8)
    return BenchmarkOptions(**(given | changes))


# ---------------------------------------------------------------------------- From end to end


def test_the_command_line_with_peers(folder, capsys):
    write_peer(folder, "mirrored")
    write_peer(folder, "fit", "say(skipped='fit is not installed: pip install fit'); sys.exit()")
    write_peer(folder, "jax_loop", CRASH)
    argv = (
        "benchmark --model=tests.tiny:dense --num_gpus=1,2 --windows=2 --seconds=0.02 --json "
        "--batch_size=8 --model_args=width=3 --against=mirrored,fit,jax,mirrored_own_layers "
        "--plot=a.png"
    )
    assert cli.main(argv.split()) == cli.EXIT_FAILED  # a peer has failed
    out, err = capsys.readouterr()
    result = json.loads(out)
    check_own(result["results"])
    strong = next(r for r in result["results"] if (r["num_towers"], r["scaling"]) == (2, "strong"))
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
    assert result["failed"] == {"jax": "exit code 3: no memory is left"}
    assert result["versions"]["tensorflow"] == tf.__version__
    assert "2 towers at batch size 8" in result["limit"] and result["limit"] in err
    assert "| strong | 2 | 8 |" in err and "failed      jax: exit code 3" in err
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    turns = [words[2] for words in log(folder) if words[0] == "turn"]
    assert turns == ["0.02"] * 4  # two peers, two windows each
    assert nobody_is_left(folder)
    assert {p.name for p in folder.iterdir()} == {"scripts", "log", "a.png"}  # no train_dir


def check_own(results):
    """Look at the entries of 1 and 2 towers, batch size 8."""
    found = [(r["scaling"], r["num_towers"], r["batch_size"]) for r in results]
    assert found == [("strong", 1, 8), ("strong", 2, 8), ("weak", 2, 16)]
    for row in results:
        rates, control = row["examples_per_second"], row["control"]
        assert 0 < rates["min"] <= rates["median"] <= rates["max"]
        assert control["min"] > 0 and row["efficiency"] > 0
        assert set(row["split"]) == {"input", "compute", "gather", "update"}
        assert sum(part["percent"] for part in row["split"].values()) == pytest.approx(100)
        assert row["split"]["input"]["seconds"] == 0  # nothing is read
        assert 10 < row["peak_memory_mib"] < 100_000
        assert row["graph_seconds"] > 0 and row["first_step_seconds"] > 0
        assert row["gflops"] == pytest.approx(
            row["flop_per_example"] * rates["median"] / 1e9, rel=1e-6
        )
        assert row["speedup"] == pytest.approx(
            rates["median"] / results[0]["examples_per_second"]["median"]
        )
        assert row["devices"] == [f"/cpu:{i}" for i in range(row["num_towers"])]
        assert (row["shared"], row["scaling_efficiency"] is None) == ((row["num_towers"] > 1,) * 2)


def test_peers_train_what_we_train_on_the_same_images(folder):
    write_peer(folder, "mirrored", "images = __import__('numpy').load(config['data'])\n"
               "config['shapes'] = [images['images'].shape, str(images['images'].dtype), "
               "int(images['labels'].sum())]\njson.dump(config, open('config', 'w'))")  # fmt: skip
    benchmark.benchmark(
        options(dataset="tests.tiny:images", against="mirrored", augment="none", dtype="float64",
                optimizer="adamw", model_args="width=3"),
        lambda line: None,
    )  # fmt: skip
    config = json.loads((folder / "config").read_text())
    images, labels = tiny.arrays(tiny.TRAIN_SIZE)
    assert config.pop("shapes") == [list(images.shape), "uint8", int(labels.sum())]
    assert Path(config.pop("data")).name == "train.npz"
    assert config == {
        "model": "tests.tiny:dense", "model_args": {"width": 3}, "image_shape": [8, 8, 3],
        "num_classes": 3, "batch_size": 8, "num_devices": 1, "gpus": False, "dtype": "float64",
        "optimizer": "adamw", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.0,
        "ema_decay": 0.0, "augment": "none", "steps_per_loop": 10, "seed": 0,
    }  # fmt: skip


# ---------------------------------------------------------------------------- Turns


class FakeLane:
    """Writes down when it was asked for what; fails from its `last` turn on."""

    def __init__(self, name, asked, last=99):
        self.name, self.asked, self.last = name, asked, last

    def ask(self, line, seconds):
        if self.last == 0:
            raise lanes.LaneError("crashed")
        self.last -= 1
        self.asked.append((self.name, line))
        return {"steps": 4, "seconds": 2.0}

    def close(self):
        self.asked.append((self.name, "closed"))


def turns_of(asked, names, **last):
    return {
        n: (benchmark_start.Turn(FakeLane(n, asked, last.get(n, 99)), "", 1.0), {}) for n in names
    }


def test_lanes_take_turns_window_by_window_and_every_other_backwards():
    asked, failed = [], {}
    lane = FakeLane("", asked)
    turns = {part: benchmark_start.Turn(lane, part, 2.0) for part in ("control", "")}
    own = benchmark_start.Own(2, "strong", 8, lane, {}, turns)
    others = turns_of(asked, ["a", "b"], b=1)
    benchmark.take_turns([own], others, failed, 3, lambda line: None)
    forwards = [("", "2.0 control"), ("", "2.0"), ("a", "1.0")]
    assert asked == [*forwards, ("b", "1.0"), ("b", "closed"), *forwards[::-1], *forwards]
    assert failed == {"b": "crashed"}
    assert turns[""].found == [0.5] * 3 and others["b"][0].found == [0.5]


# ---------------------------------------------------------------------------- Lanes that go wrong


def start(folder, program, extra=""):
    write_peer(folder, program, extra)
    return lanes.Lane(program, [sys.executable, f"scripts/peers/{program}.py", "{}"])


def test_a_lane_that_hangs_is_ended_with_all_that_it_started(folder, monkeypatch):
    lane = start(folder, "hangs", CHILD + "time.sleep(1000)")
    monkeypatch.setattr(lanes, "START_SECONDS", 3.0)
    with pytest.raises(lanes.LaneError, match="waited 3 s for it to be ready"):
        lane.wait_ready()
    lane.close()
    assert len(log(folder)) == 2 and nobody_is_left(folder)


def test_a_lane_that_ends_between_two_windows(folder):
    lane = start(folder, "ends", "say(ready=True); sys.stdin.close(); os.kill(os.getpid(), 9)")
    assert lane.wait_ready() == {"ready": True}
    with pytest.raises(lanes.LaneError, match="killed by signal 9: it said nothing"):
        lane.ask("1", 1)
    lane.close()


def test_a_lane_that_made_no_step(folder):
    lane = start(folder, "idle", "say(ready=True); say(steps=0, seconds=1)")
    lane.wait_ready()
    with pytest.raises(lanes.LaneError, match="steps and seconds above 0 are needed"):
        lane.ask("1", 1)
    lane.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all(folder, number):
    stop = f"os.kill(int(open('parent').read()), {int(number)}); time.sleep(1000)"
    write_peer(folder, "mirrored", CHILD + stop)
    argv = "benchmark --model=tests.tiny:dense --num_towers=1 --against=mirrored".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "towers", *argv],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    (folder / "parent").write_text(str(process.pid))
    _, err = process.communicate(timeout=100)
    assert process.returncode == cli.EXIT_INTERRUPTED
    assert err.splitlines()[-1] == "towers: interrupted"
    assert len(log(folder)) == 2 and nobody_is_left(folder)


# ---------------------------------------------------------------------------- The parts of a step


def count_in_gradient(counts):
    """Return an identity that counts how often its gradient is computed, if anybody needs it."""

    def add(x):
        counts.append(1)
        return x

    @tf.custom_gradient
    def count(x):
        def gradient(upstream):
            value = tf.numpy_function(add, [upstream], upstream.dtype, stateful=False)
            return tf.ensure_shape(value, upstream.shape)

        return tf.identity(x), gradient

    return count


COUNTS = []


class Counts(keras.layers.Layer):
    def call(self, x):
        return count_in_gradient(COUNTS)(x)


def counting(num_classes, image_shape):
    dense = keras.layers.Dense
    layers = [keras.layers.Flatten(), dense(4), Counts(), dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


@pytest.mark.parametrize("variables", ["cpu", "sharded", "replicated"])
def test_no_part_of_a_step_is_left_out_or_moved_out_of_the_loop(variables):
    model = "tests.test_benchmark:counting"
    given = tiny.options("unused", model=model, num_towers=2, variables=variables)
    run = prepare(given)
    from tests.commands.test_benchmark import (
        COUNTS as counts,
    )  # the model was imported by this name

    for part, loop in make_parts(run, given, 8).items():
        counts.clear()
        loop(tf.constant(3))
        assert len(counts) == (0 if part == "matmul" else 3 * 2), part


def test_the_control_changes_nothing_and_the_constant_step_trains():
    given = tiny.options("unused", model="tests.tiny:cnn", num_towers=2)
    run = prepare(given)
    parts = make_parts(run, given, 8)

    def state():
        return {name: v.numpy() for name, v in run.masters.variables().items()}

    before = state()
    parts["control"](tf.constant(2))
    tiny.assert_identical(state(), before)
    parts["constant"](tf.constant(2))
    assert int(run.masters.step) == 2


def test_a_lane_trains_as_long_as_it_was_asked_to():
    given = tiny.options("unused", dataset="synthetic", augment="none", model="tests.tiny:dense")
    lane = benchmark_lane.OwnLane(given, 8)
    before = int(lane.run.masters.step)
    answer = lane.train(0.05)
    assert answer["seconds"] >= 0.05 and answer["steps"] % given.steps_per_loop == 0
    assert int(lane.run.masters.step) - before == answer["steps"]
    assert np.isfinite(answer["loss"])
    said = benchmark_lane.describe(lane, 8)
    assert said["parts"] == ["gather", "control", "matmul"]
    assert said["image_shape"] == (32, 32, 3) and said["flop_per_example"] > 0
    lane = benchmark_lane.OwnLane(tiny.options("unused"), 8)
    assert lane.parts() == ["constant", "gather", "control", "matmul"]  # data is read


@pytest.mark.parametrize("kind, side", [("tutorial", 24), ("resnet", 32)])
def test_synthetic_images_are_as_the_model_sees_them(kind, side):
    dataset, given = benchmark_lane.load(Options(dataset="synthetic", augment=kind, batch_size=5))
    batches = dataset.train.train_batches(5, seed=0)
    one, two = (batch[0].numpy() for batch in batches.take(2))
    assert one.shape == (5, side, side, 3) and one.dtype == np.float32
    assert given.augment == "off" and np.array_equal(one, two) and one.std() > 0.9


# ---------------------------------------------------------------------------- Arithmetic


def test_the_arithmetic_of_the_tutorials_network():
    model = cnn(lrn=False)

    def loss_fn(images, labels, draws):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))

    first = 24 * 24 * 64 * (5 * 5 * 3)  # no gradient of the images is needed
    rest = 12 * 12 * 64 * (5 * 5 * 64) + 2304 * 384 + 384 * 192 + 192 * 10
    expected = 2 * (2 * first + 3 * rest)
    assert flop_per_example(model, loss_fn, (24, 24, 3), tf.float32) == expected


def test_the_arithmetic_of_a_depthwise_convolution():
    inputs = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(4, 1)(inputs)
    x = keras.layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(x)
    x = keras.layers.Activation("tanh")(x)  # else no gradient would need its value
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))

    def loss_fn(images, labels, draws):
        return tf.reduce_sum(model(images), axis=1)

    expected = 2 * (2 * 64 * 4 * 4 + 3 * 64 * 8 * 9)
    assert flop_per_example(model, loss_fn, (8, 8, 4), tf.float32) == expected


# ---------------------------------------------------------------------------- What the numbers say


def measured(shared=True, **seconds):
    """Return a lane's windows, in seconds of a step; a part that is not given is not measured."""
    names = {"full": ""}
    windows = {names.get(part, part): values for part, values in seconds.items()}
    ready = dict.fromkeys(
        "devices graph_seconds first_step_seconds peak_memory_mib precision variables".split()
    ) | {"shared": shared, "flop_per_example": 5_000_000, "matmul_flop": 10_000_000}
    return benchmark_report.Measured(2, "strong", 100, ready, {"matmul": [0.01], **windows})


def test_a_result_is_made_of_the_windows():
    lane = measured(full=[1.0, 2.0, 4.0], constant=[1.0, 1.8, 4.0], gather=[1.6] * 3,
                    control=[0.5, 1.0, 3.0], shared=False)  # fmt: skip
    result = benchmark_report.result_of(lane, one_tower=40.0)
    assert result["examples_per_second"] == {"median": 50.0, "min": 25.0, "max": 100.0}
    assert result["control"]["median"] == 100.0
    assert result["efficiency"] == 0.5  # of 0.5, 0.5 and 0.75
    assert (result["speedup"], result["scaling_efficiency"]) == (1.25, 0.625)
    percents = {name: part["percent"] for name, part in result["split"].items()}
    assert percents == pytest.approx({"input": 10, "compute": 50, "gather": 30, "update": 10})
    assert result["gflops"] == 0.25 and result["matmul_gflops"] == pytest.approx(1.0)
    assert result["arithmetic_rate"] == pytest.approx(0.25)
    assert result["clipped"] == []


def test_devices_that_share_hardware_have_no_scaling_efficiency():
    lane = measured(full=[1.0], gather=[1.0], control=[1.0])
    assert benchmark_report.result_of(lane, 50.0)["scaling_efficiency"] is None
    assert benchmark_report.result_of(lane, None)["speedup"] is None


def test_noise_below_zero_counts_as_nothing_and_is_said():
    split, clipped = benchmark_report.split_of({"": [1.0], "gather": [0.8], "control": [0.9]})
    assert clipped == ["gather"]
    assert split["gather"] == {"seconds": 0.0, "percent": 0.0}
    assert sum(part["percent"] for part in split.values()) == pytest.approx(100)
    # The gather alone cannot take longer than the whole step: what is beyond is noise, too.
    split, clipped = benchmark_report.split_of({"": [1.0], "gather": [1.2], "control": [0.98]})
    assert clipped == ["update"] and split["gather"]["percent"] == pytest.approx(2)
    clipped = ["gather"]
    result = {"num_towers": 2, "scaling": "weak", "clipped": clipped}
    assert "2 towers, weak: gather came out below 0" in benchmark.notes(options(), [result])[1]


@pytest.mark.parametrize(
    "shared, seconds, sentence",
    [
        (True, dict(full=[1.0], constant=[0.7], gather=[0.7], control=[0.6]),
         "the wait for input limits 2 towers at batch size 100: 30 % of a step; try INPUT"),
        (True, dict(full=[1.0], constant=[1.0], gather=[0.9], control=[0.6]),
         "the gather limits 2 towers at batch size 100: 30 % of a step; try GATHER"),
        (False, dict(full=[1.0], gather=[0.8], control=[0.8]),
         "the update limits 2 towers at batch size 100: 20 % of a step; try UPDATE"),
        (True, dict(full=[1.0], gather=[0.99], control=[0.97]),
         "the hardware that the devices share limits 2 towers at batch size 100: within 3 % of "
         "the control, so more towers cannot help; try COMPUTE"),
        (False, dict(full=[1.0], gather=[0.99], control=[0.98]),
         "nothing but computing limits 2 towers at batch size 100: within 2 % of the control; try "
         "COMPUTE, or more devices"),
    ],
)  # fmt: skip
def test_what_limits(shared, seconds, sentence):
    hints = {name: name.upper() for name in ("input", "gather", "update", "compute")}
    result = benchmark_report.result_of(measured(shared=shared, **seconds), None)
    assert benchmark_report.limit(result, hints) == sentence


def test_the_flags_to_try():
    ready = {"variables": "cpu", "batch_norm": True}
    own = benchmark_start.Own(2, "strong", 8, None, ready, {})
    found = benchmark.hints(options(optimizer="adamw"), own)
    assert "--batch_size=16" in found["gather"] and "--batch_norm=local" in found["gather"]
    assert "--optimizer=momentum" in found["update"]
    assert found["compute"] == "--dtype=mixed_bfloat16"
    found = benchmark.hints(options(batch_norm="local", dtype="mixed_bfloat16"), own)
    assert "--batch_norm" not in found["gather"] and found["compute"] == "--batch_size=16"


# ---------------------------------------------------------------------------- Bad input

MESSAGES = {
    "--against=jax,tensorpack": "--against=jax,tensorpack: 'tensorpack' is unknown; allowed are "
    "mirrored, mirrored_own_layers, mirrored_fit, fit, torch_ddp, jax, session",
    "--against=jax,jax": "--against=jax,jax: each name once",
    "--num_towers=2,1": "--num_towers=2,1: each number must be greater than the one before",
    "--num_towers=0,1": "--num_towers=0,1: whole numbers of at least 1 are needed, as 1,2,4",
    "--num_towers=two": "--num_towers=two: numbers with commas are needed, as 80,120",
    "--windows=0": "--windows=0: a whole number of at least 1 is needed",
    "--seconds=0": "--seconds=0.0: a number from 0.01 to 3600 is needed",
    "--plot=a.pdf": "--plot=a.pdf: a name that ends in .png is needed",
    "--against=session": "--against=session: there is no scripts/peers/session.py in this folder; "
    "run it in a checkout of towers",
    "--plot=none/a.png": "--plot=none/a.png: there is no folder none to write to",
    "--num_towers=1,2 --devices=/gpu:0,/gpu:1": "--devices=/gpu:0,/gpu:1: there is no /gpu:0; "
    "TensorFlow sees /cpu:0, no NVIDIA driver answers here; type --devices=/cpu:0, or "
    "--devices=cpu",
    "--model=tests.tiny:nothing --num_towers=1": "--model=tests.tiny:nothing: ",
}


@pytest.mark.parametrize("given", MESSAGES)
def test_bad_input_is_one_line(folder, capsys, given):
    assert cli.main(["benchmark", *given.split()]) == cli.EXIT_USAGE
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert line.startswith(f"towers: {MESSAGES[given]}")
    assert line == f"towers: {MESSAGES[given]}" or MESSAGES[given].endswith(": ")
    assert not list(folder.rglob("*.png")) and "measuring" not in out


def test_a_plot_needs_matplotlib(folder, monkeypatch):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="--plot needs matplotlib: pip install matplotlib"):
        benchmark.benchmark(options(plot="a.png"), pytest.fail)


def test_without_gpus_the_default_is_one_two_and_four_towers():
    assert benchmark.default_numbers(options(num_towers="")) == [1, 2, 4]
    assert benchmark.default_numbers(options(num_towers="", devices="cpu")) == [1, 2, 4]
    named = options(num_towers="", devices="/cpu:0,/cpu:1,/cpu:2")
    assert benchmark.default_numbers(named) == [1, 3]
