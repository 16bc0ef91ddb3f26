"""What a run would move, hold and take on GPUs: counted twice, and by closed formulas."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from towers.commands.plan.options import PlanOptions

from tests import tiny
from towers import cli, data, devices
from towers.commands.plan import command as plan
from towers.commands.plan import cost_model
from towers.commands.plan import measure as plan_measure
from towers.commands.plan.cost_model import LINKS, NETWORKS, Link, Memory, Work
from towers.commands.plan.measure import shared_core_seconds, split_seconds
from towers.graphs.traffic import HOST, read_step
from towers.options.run import Options

ROOT = Path(__file__).resolve().parents[2]
TOWERS = ["/cpu:1", "/cpu:2", "/cpu:3"]
# Of tests.tiny:dense: kernels and biases of 192 -> 5 -> 3, in float32.
DENSE_BYTES = 4 * (192 * 5 + 5 + 5 * 3 + 3)
A_ROW = 8 * 8 * 3 + 4  # bytes of an image and its label
CONDITION, LOSS = 1, 4  # of the loop; a scalar


@pytest.fixture(scope="module", autouse=True)
def cpus():
    devices.tower_devices(4, "cpu")


def options(**changes):
    given = dict(model="tests.tiny:dense", dataset="tests.tiny:images", augment="none")
    return Options(**(given | dict(batch_size=8, max_steps=3) | changes))


def place(num_towers=2, **changes):
    return plan.place(options(**changes), TOWERS[:num_towers], data.load("tests.tiny:images"))


def test_bytes_of_the_dense_model_with_its_variables_on_the_host():
    planned = place(3, batch_size=7).planned
    for name, rows in zip(TOWERS, (3, 2, 2), strict=True):
        assert planned[HOST, name] == DENSE_BYTES + rows * A_ROW + CONDITION
        assert planned[name, HOST] == DENSE_BYTES + LOSS
    assert len(planned) == 6


def test_bytes_of_the_dense_model_with_its_variables_sharded():
    placed = place(2, variables="sharded")
    largest = 4 * 192 * 5  # lies on the first tower, all else on the second
    # weights one way, gradients of what the other holds back
    assert placed.planned[TOWERS[0], TOWERS[1]] == DENSE_BYTES
    assert placed.planned[TOWERS[1], TOWERS[0]] == DENSE_BYTES
    rates = 3 * 4  # of learning: each of the three small weights reads it
    assert placed.step.received_bytes(TOWERS[1])["weights"] == largest + rates


def test_bytes_of_the_dense_model_with_replicated_variables():
    placed = place(3, variables="replicated", batch_size=9)
    ring = round(2 * 2 / 3 * DENSE_BYTES)
    assert placed.step.collective_bytes() == dict.fromkeys(TOWERS, ring)
    assert not {(s, t) for s, t in placed.planned if HOST not in (s, t)}  # no gradient is sent
    assert placed.planned[HOST, TOWERS[1]] < 3 * A_ROW + 100


@tf.function
def double(x):
    return 2.0 * tf.tanh(x)


def calling(num_classes, image_shape):
    """A layer runs a function of its own."""
    layers = [keras.layers.Lambda(double), keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


CASES = {
    "uneven batch": dict(model="tests.tiny:cnn", augment="resnet", batch_size=7),
    "parts": dict(accumulate_steps=2, optimizer="adamw", clip_norm=1.0),
    "local moments": dict(model="tests.tiny:cnn", batch_norm="local", ema_decay=0.9),
    "loss scale": dict(model="tests.tiny:cnn", dtype="mixed_float16"),
    "function": dict(model=f"{__name__}:calling"),
    "bfloat16": dict(model="tests.tiny:cnn", dtype="mixed_bfloat16", label_smoothing=0.1),
    "all in one": dict(
        model="tests.tiny:cnn",
        augment="tutorial",
        batch_size=11,
        optimizer="nesterov",
        ema_decay=0.9,
        weight_decay=0.001,
        clip_global_norm=5.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variables", ["cpu", "sharded", "replicated"])
def test_the_traced_graph_and_the_executed_one_give_the_same_bytes(case, variables):
    placed = place(3 if "batch" in case else 2, variables=variables, **CASES[case])
    if case == "loss scale":  # a value behind a branch has no size in the executed graph
        assert placed.equal and sum(placed.executed.unknown.values()) <= 1
    else:
        assert placed.planned == placed.executed.crossing and not placed.executed.unknown
    assert placed.executed.constants <= 16


def test_a_count_that_is_off_by_a_byte_does_not_agree():
    placed = place()
    placed.planned[HOST, TOWERS[0]] += 1
    assert placed.equal is False


def test_loops_in_a_step_are_not_looked_into_and_said():
    def body(i, x):
        return i + 1, tf.while_loop(lambda y: tf.norm(y) < 9.0, lambda y: [y * y], [x])[0]

    loop = tf.function(lambda x: tf.while_loop(lambda i, x: i < 0, body, (tf.constant(0), x)))
    step = read_step(loop.get_concrete_function(tf.TensorSpec([5])))
    assert [kind.removeprefix("Stateless") for kind in step.loops] == ["While"]
    placed = place()
    placed.step.loops.add("While")
    assert placed.equal is None


def test_activations_of_a_dense_net():
    """At the first layer's gradient live: images, and what tanh, its gradient and it need."""
    found = {b: place(2, batch_size=2 * b).step.activation_bytes(0) for b in (4, 8)}
    for rows, most in found.items():
        images, hidden = 4 * 192 * rows, 4 * 5 * rows
        assert images + hidden <= most <= 2 * images + 4 * hidden + 4 * 12 * rows + 100
    assert found[8] == pytest.approx(2 * found[4], rel=0.01)


def wide(num_classes, image_shape):
    """Convolutions of 64 channels, whose outputs the backward pass needs."""
    layers = [keras.layers.Conv2D(64, 3, padding="same", activation="tanh") for _ in range(6)]
    end = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers, *end])


def many():
    images, labels = tiny.arrays(4096)
    return (images, labels), (images, labels), tiny.NUM_CLASSES


MEASURED = """
import tensorflow as tf
from towers.memory import peak_mib
from towers.options import Options
from towers.plan_graph import read_step
from towers.run import prepare

run = prepare(Options(
    model="tests.test_plan:wide", dataset="tests.test_plan:many", augment="none", batch_size=4096
))
loop, batches = run.train_loop(), iter(run.data.train.train_batches(4096, seed=0))
step = read_step(loop.get_concrete_function(batches, tf.constant(0)))
loop(batches, tf.constant(0))
before = peak_mib()
loop(batches, tf.constant(1))
grown = peak_mib() - before
print(step.activation_bytes(0), round(grown * 2**20))
"""


def test_activations_are_about_what_a_step_really_takes():
    """In a process of its own: only there is the peak that of the step."""
    command = [sys.executable, "-c", MEASURED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    reckoned, grown = map(int, done.stdout.split()[-2:])
    assert grown / 3 < reckoned < 3 * grown


def test_memory_by_closed_formulas():
    given = dict(optimizer="momentum", ema_decay=0.9)
    for variables, copies in (("cpu", 0), ("replicated", 1)):
        memory = plan.memory_of(place(variables=variables, **given), TOWERS[1])
        assert memory.fixed["weights"] == copies * DENSE_BYTES
        assert memory.fixed["gradients"] == DENSE_BYTES
        assert memory.fixed["average"] == 0  # on the host, or on the first tower
        assert memory.per_example["batch"] == A_ROW
        assert memory.examples == 4
    assert memory.fixed["optimizer"] >= DENSE_BYTES
    assert plan.memory_of(place(**given), TOWERS[0]).fixed["weights_received"] == DENSE_BYTES


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 20 * 2**30))
def test_the_largest_slice_fits_and_one_more_does_not(fixed, each, examples, limit):
    memory = Memory({"weights": fixed}, {"activations": each / 3}, examples)
    most = memory.largest_slice(limit)
    assert memory.at(most) <= limit or most == 0
    assert memory.at(most + 1) > limit


# Times.

WORKS = st.builds(
    Work,
    tower_seconds=st.floats(1e-4, 1.0),
    launch_seconds=st.floats(0, 1e-2),
    slice_bytes=st.floats(0, 1e7),
    weights=st.lists(st.integers(1, 10**8), min_size=1, max_size=20),
    exchange_bytes=st.floats(0, 1e5),
    exchanges=st.integers(0, 50),
)
PLACEMENTS = st.sampled_from(["cpu", "sharded", "replicated"])
BEST = Link("a wire without length", math.inf, 1.0, 0.0)


@given(WORKS, PLACEMENTS, st.sampled_from([2, 8, 64]))
def test_what_crosses_at_no_cost_scales_perfectly(work, placement, number):
    original, cost_model.HOST_LINK = cost_model.HOST_LINK, BEST
    try:
        assert cost_model.predict(work, placement, BEST, number, BEST).efficiency == 1.0
    finally:
        cost_model.HOST_LINK = original


@given(WORKS, PLACEMENTS)
def test_one_gpu_is_the_measure(work, placement):
    found = cost_model.predict(work, placement, LINKS["PCIe 4 x16"], 1)
    assert found.efficiency == 1.0 and found.seconds == work.computing_seconds


@given(WORKS, PLACEMENTS, st.sampled_from([2, 4, 8, 16, 32]), st.floats(1.0, 10.0))
def test_slower_links_more_bytes_and_more_gpus_make_no_step_shorter(work, placement, number, more):
    link, network = LINKS["PCIe 4 x16"], NETWORKS["10 Gbit/s"]

    def seconds(work=work, link=link, network=network, number=number):
        return cost_model.predict(work, placement, link, number, network).seconds

    slow = dataclasses.replace(link, gb_per_second=link.gb_per_second / more)
    slow_network = dataclasses.replace(network, gb_per_second=network.gb_per_second / more)
    heavy = dataclasses.replace(work, weights=[math.ceil(more * w) for w in work.weights])
    assert seconds(link=slow) >= seconds()
    assert seconds(network=slow_network) >= seconds()
    assert seconds(work=heavy) >= seconds() * (1 - 1e-12)
    if placement != "sharded":  # whose largest shard gets smaller
        assert seconds(number=2 * number) >= seconds() * (1 - 1e-12)


@given(WORKS, st.integers(2, 8))
def test_a_ring_moves_twice_the_gradients_at_most(work, number):
    bare = dataclasses.replace(work, slice_bytes=0.0, exchange_bytes=0.0, exchanges=0)
    link = Link("a bare wire", 10.0, 1.0, 0.0)
    seconds = cost_model.predict(bare, "replicated", link, number).seconds
    moved = (seconds - bare.computing_seconds) * 10e9
    fixed = cost_model.HOST_LINK.latency_seconds * 10e9
    expected = 2 * (number - 1) / number * work.weights_bytes
    assert expected - 1e3 <= moved * (1 + 1e-6) + 1e3
    assert moved <= 2 * work.weights_bytes * (1 + 1e-6) + fixed + 1e3


def test_several_machines_need_a_network():
    work = Work(0.1, 0.0, 0.0, [1], 0.0)
    with pytest.raises(ValueError, match="16 towers on machines of 8 need a network"):
        cost_model.predict(work, "cpu", LINKS["NVLink"], 16)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(1, 16))
def test_the_largest_shard_holds_a_fair_part_at_least(weights, number):
    largest = cost_model.largest_shard(weights, number)
    assert max(weights) <= largest and sum(weights) <= largest * number
    assert largest <= sum(weights) / number + max(weights)


def test_a_step_is_split_into_what_its_batch_changes_and_the_rest():
    assert split_seconds(1.2, 0.7, 100, 50) == pytest.approx((0.2, 1.0))
    assert split_seconds(1.0, 1.1, 100, 50) == (1.0, 0.0)
    assert split_seconds(1.0, 1.0, 1, 1) == (0.0, 1.0)


def test_towers_on_shared_cores_launch_side_by_side_as_far_as_there_are_cores():
    assert shared_core_seconds(0.1, 1.0, 0, 1e9, 2, 2) == pytest.approx(1.1)
    assert shared_core_seconds(0.1, 1.0, 0, 1e9, 4, 2) == pytest.approx(1.2)
    assert shared_core_seconds(0.0, 1.0, 1e9, 1e9, 4, 2) == pytest.approx(2.0)


# The verb.

ARGUMENTS = (
    "--model=tests.tiny:cnn --dataset=tests.tiny:images --augment=none --batch_size=8 "
    "--max_steps=3 --num_towers=2"
).split()


def test_the_plan_of_a_run(capsys):
    assert cli.main(["plan", "--nomeasure", *ARGUMENTS]) == 0
    said = capsys.readouterr().out
    assert said.count("equal") == 3 and "every trainable variable has one" in said
    assert "PCIe 5 x16 63 x 0.8" in said and "400 Gbit/s" in said
    last = said.splitlines()[-1]
    assert last.startswith("advice      --variables=") and "limit" in last or "small" in last
    assert max(map(len, said.splitlines())) <= 160


def test_the_plan_as_json_with_its_error_on_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(plan_measure, "SECONDS", 0.05)
    quick = ["--model=tests.tiny:dense", "--step_ms=20", "--gpu_memory_gib=2"]
    assert cli.main(["plan", "--json", *ARGUMENTS, *quick]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_towers"] == 2 and not result["failed"]
    assert list(result["placements"]) == ["cpu", "sharded", "replicated"]
    for row in result["placements"].values():
        counts = row["bytes_per_step"]
        assert counts["planned"] == counts["executed"] and counts["equal"] is True
        held = row["memory_bytes"]
        assert held["total"] == sum(v for k, v in held.items() if k != "total")
        assert row["fits"] and row["largest_batch_per_tower"] >= 4
    assert set(result["model_error"]) == {"2", "4"}
    assert all(0 <= error < 20 for error in result["model_error"].values())
    alone = [r for r in result["predictions"] if r["num_towers"] == 1 and r["scaling"] == "weak"]
    assert {round(row["seconds"], 9) for row in alone} == {0.02}
    assert {r["num_towers"] for r in result["predictions"]} == set(cost_model.COUNTS)


def unused(num_classes, image_shape):
    """A weight that no output depends on."""
    inputs = keras.Input(image_shape)
    flat = keras.layers.Flatten()(inputs)
    nothing = keras.layers.Dense(num_classes, name="nothing", use_bias=False)(flat)
    logits = keras.layers.Dense(num_classes)(flat)
    zero = keras.layers.Lambda(lambda x: tf.stop_gradient(x))(nothing)
    return keras.Model(inputs, keras.layers.Add()([logits, zero]))


def test_a_weight_without_gradient_is_named(capsys):
    arguments = [*ARGUMENTS, f"--model={__name__}:unused", "--nomeasure"]
    assert cli.main(["plan", *arguments]) == 1
    said = capsys.readouterr().out
    assert "FAILED      no gradient: nothing/kernel" in said


def test_what_does_not_fit_is_said(capsys):
    arguments = [*ARGUMENTS, "--nomeasure", "--gpu_memory_gib=0.5"]
    assert cli.main(["plan", *arguments]) == 0
    said = capsys.readouterr().out
    assert "TOO LARGE" in said and "does not fit at any batch" in said.splitlines()[-1]


REFUSED = {
    "--num_towers=1": "--num_towers=1: from 2 to --batch_size=8 towers can be planned",
    "--num_towers=9": "--num_towers=9: from 2 to --batch_size=8 towers can be planned",
    "--gpu_memory_gib=0": "--gpu_memory_gib=0.0: a number from 0.1",
    "--gpu_utilisation=2": "--gpu_utilisation=2.0: a number from 0.001 to 1",
    "--step_ms=-1": "--step_ms=-1.0: a number of at least 0",
    "--dataset=nothing": "--dataset=nothing is unknown",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_bad_input_is_one_line(argument, capsys):
    assert cli.main(["plan", *ARGUMENTS, argument]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert REFUSED[argument] in shown[-1] and shown[-1].startswith("towers: ")


def test_a_plan_is_of_the_run_itself():
    given = dict(batch_size=32, variables="sharded")
    assert PlanOptions(gpu_tflops=1.0, **given).of_run() == Options(**given)


def test_known_values_are_left_out_of_both_counts():
    placed = place(2, model="tests.tiny:cnn")
    names = {op.name for op in placed.step.known}
    assert not names & {tensor.op.name for tensor, _ in placed.step.crossings()}
    assert placed.executed.constants == 8  # each tower's number of examples
