"""What a run would move, hold and launch on GPUs."""

import dataclasses
import json

import keras
import pytest
import tensorflow as tf

from tests.programs import python
from tests.runs import command as command_line
from tests.runs import released
from towers import data, devices
from towers.commands.plan import command
from towers.graphs.communication import HOST, read_step
from towers.graphs.placement import read_placement
from towers.options.run import Options
from towers.training.run import memory_estimate
from towers.training.run.setup import assemble

pytestmark = pytest.mark.unit

TOWERS = ["/cpu:1", "/cpu:2", "/cpu:3"]
# Of tests.tiny:dense: kernels and biases of 192 -> 5 -> 3, in float32.
DENSE_BYTES = 4 * (192 * 5 + 5 + 5 * 3 + 3)
A_ROW = 8 * 8 * 3 + 4  # bytes of an image and its label
CONDITION, LOSS = 1, 4  # of the loop; a scalar


@pytest.fixture(scope="module", autouse=True)
def cpus():
    devices.tower_devices(4, "cpu")


def options_of(**changes):
    given = dict(model="tests.tiny:dense", dataset="tests.tiny:images", augment="none")
    return Options(**(given | dict(batch_size=8, max_steps=3) | changes))


def place(num_towers=2, **changes):
    dataset = data.load("tests.tiny:images")
    return command.place(options_of(**changes), TOWERS[:num_towers], dataset)


@pytest.mark.run
def test_what_the_dense_model_moves_and_holds_with_its_variables_on_the_host():
    found = place(3, batch_size=7, ema_decay=0.9)
    for name, rows in zip(TOWERS, (3, 2, 2), strict=True):
        assert found.planned[HOST, name] == DENSE_BYTES + rows * A_ROW + CONDITION
        assert found.planned[name, HOST] == DENSE_BYTES + LOSS
    assert len(found.planned) == 6
    held = memory_estimate.memory_by_purpose(found.run, found.step, TOWERS[0])
    assert (held["weights"], held["optimizer"], held["average"]) == (0, 0, 0)
    assert held["weights_received"] == held["gradients"] == DENSE_BYTES
    assert held["batch"] == 3 * A_ROW
    # At the first layer's gradient live: images, and what tanh, its gradient and it need.
    activations = [found.step.activation_bytes(tower) for tower in (0, 1)]
    for rows, most in zip((3, 2), activations, strict=True):
        images, hidden = 4 * 192 * rows, 4 * 5 * rows
        assert images + hidden <= most <= 2 * images + 4 * hidden + 4 * 12 * rows + 100
    assert activations[0] == pytest.approx(1.5 * activations[1], rel=0.05)
    row = found.describe(0.5)  # GiB, less than what CUDA takes
    assert row["fits"] is False and row["largest_batch_per_tower"] == 0
    total = row["memory_bytes"]["total"]
    exact = found.describe(total / 2**30)
    assert exact["fits"] is True and exact["largest_batch_per_tower"] == 3
    assert found.describe((total - 1) / 2**30)["largest_batch_per_tower"] == 2


@pytest.mark.run
def test_what_it_moves_with_its_variables_sharded():
    found = place(2, variables="sharded")
    largest = 4 * 192 * 5  # lies on the first tower, all else on the second
    # weights one way, gradients of what the other holds back
    assert found.planned[TOWERS[0], TOWERS[1]] == DENSE_BYTES
    assert found.planned[TOWERS[1], TOWERS[0]] == DENSE_BYTES
    rate = 4  # of learning: it is read once for all three small weights
    assert found.step.received_bytes(TOWERS[1])["weights"] == largest + rate


@pytest.mark.run
def test_what_it_moves_and_holds_with_replicated_variables():
    found = place(3, variables="replicated", batch_size=9, optimizer="momentum", ema_decay=0.9)
    counts = found.describe(16)["bytes_per_step"]
    ring = round(2 * 2 / 3 * DENSE_BYTES)
    assert [counts["per_device"][name]["collective"] for name in TOWERS] == [ring] * 3
    assert not {(s, t) for s, t in found.planned if HOST not in (s, t)}  # no gradient is sent
    assert found.planned[HOST, TOWERS[1]] < 3 * A_ROW + 100
    held = memory_estimate.memory_by_purpose(found.run, found.step, TOWERS[1])
    assert held["weights"] == DENSE_BYTES <= held["optimizer"]
    assert held["average"] == 0  # it is on the first tower


@tf.function
def double(x):
    return 2.0 * tf.tanh(x)


def calling(num_classes, image_shape):
    """A layer runs a function of its own; a convolution and BatchNorm."""
    x, layers = keras.Input(image_shape), keras.layers
    y = layers.BatchNormalization()(layers.Conv2D(3, 3)(layers.Lambda(double)(x)))
    return keras.Model(x, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(y)))


GIVEN = dict(batch_size=11, augment="tutorial", ema_decay=0.9, weight_decay=0.001)
MOMENTUM = GIVEN | dict(optimizer="nesterov", clip_global_norm=5.0)
CASES = {
    "cpu, a function": MOMENTUM | dict(model=f"{__name__}:calling"),
    "sharded, local moments, parts": GIVEN | dict(
        model="tests.tiny:cnn", variables="sharded", batch_norm="local", accumulate_steps=2,
        optimizer="adamw", clip_norm=1.0,
    ),
    "replicated": MOMENTUM | dict(model="tests.tiny:cnn", variables="replicated"),
    "loss scale": dict(dtype="mixed_float16"),
}  # fmt: skip


@pytest.mark.run
@pytest.mark.parametrize("case", released(CASES, *CASES.keys() - {"replicated"}))
def test_the_traced_graph_and_the_executed_one_give_the_same_bytes(case):
    options = options_of(**CASES[case])
    run = assemble(options, TOWERS[:2], data.load(options.dataset))
    loop = run.train_loop(telemetry=False)
    batches = iter(run.data.train.train_batches(options.batch_size, seed=options.seed))
    placement = read_placement(loop, batches, tf.constant(0))
    step = read_step(loop.get_concrete_function(batches, tf.constant(0)))
    known = {op.name for op in step.known}  # constants, of which the optimizer decides
    sent = [transfer for transfer in placement.transfers if transfer.name not in known]
    executed = dataclasses.replace(placement, transfers=tuple(sent)).crossing_bytes()
    if "loss scale" in case:  # a value behind a branch has no size in the executed graph
        assert sum(transfer.bytes is None for transfer in sent) <= 1
        assert sum(step.crossing_bytes()[way] != executed[way] for way in executed) <= 1
    else:
        assert step.crossing_bytes() == executed and None not in [t.bytes for t in sent]
    assert not known & {tensor.op.name for tensor, _ in step.crossings()}


@pytest.mark.graph
def test_loops_are_not_looked_into():
    def body(i, x):
        return i + 1, tf.while_loop(lambda y: tf.norm(y) < 9.0, lambda y: [y * y], [x])[0]

    loop = tf.function(lambda x: tf.while_loop(lambda i, x: i < 0, body, (tf.constant(0), x)))
    step = read_step(loop.get_concrete_function(tf.TensorSpec([5])))
    assert [kind.removeprefix("Stateless") for kind in step.loops] == ["While"]


def wide(num_classes, image_shape):
    """Convolutions of 64 channels, whose outputs the backward pass needs."""
    layers = [keras.layers.Conv2D(64, 3, padding="same", activation="tanh") for _ in range(3)]
    end = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers, *end])


MEASURED = f"""
import tensorflow as tf
from tests import tiny
from towers.devices.memory import peak_mib
from towers.graphs.communication import read_step
from towers.training.run.setup import prepare

run = prepare(tiny.options("unused", model="{__name__}:wide", batch_size=1024))
loop, batches = run.train_loop(), iter(run.data.train.train_batches(1024, seed=0))
step = read_step(loop.get_concrete_function(batches, tf.constant(0)))
loop(batches, tf.constant(0))
before = peak_mib()
loop(batches, tf.constant(1))
print(step.activation_bytes(0), round((peak_mib() - before) * 2**20))
"""


@pytest.mark.extended
@pytest.mark.process
def test_activations_are_about_what_a_step_really_takes():
    """In a process of its own: only there is the peak that of the step."""
    done = python("-c", MEASURED)
    reckoned, grown = map(int, done.stdout.split()[-2:])
    assert grown / 3 < reckoned < 3 * grown


def plan(capsys, *argv):
    """Return the exit code, standard output and standard error of a plan of a small run."""
    given = "--model=tests.tiny:dense --dataset=tests.tiny:images --augment=none --batch_size=8"
    return command_line(capsys, "plan", *given.split(), "--max_steps=3", "--num_towers=2", *argv)


class Lookup(keras.layers.Layer):
    """Looks up bytes, for which GPUs have no kernel."""

    def call(self, inputs):
        columns = tf.gather(tf.cast(inputs, tf.uint8), [2, 1], axis=1)
        return inputs + tf.reduce_sum(tf.cast(columns, inputs.dtype))


def faulty(num_classes, image_shape):
    """GPUs cannot run one layer, and no output depends on the weight of another."""
    inputs = keras.Input(image_shape)
    flat = keras.layers.Flatten()(inputs)
    outputs = keras.layers.Dense(num_classes)(Lookup(name="lookup")(flat))
    nothing = keras.layers.Dense(num_classes, name="nothing", use_bias=False)(flat)
    zero = keras.layers.Lambda(tf.stop_gradient)(nothing)
    return keras.Model(inputs, keras.layers.Add()([outputs, zero]))


@pytest.mark.run
def test_what_is_said_of_bytes_memory_gpus_and_a_missing_gradient(capsys):
    code, out, said = plan(capsys, f"--model={__name__}:faulty", "--json", "--gpu_memory_gib=2")
    result = json.loads(out)
    assert code == 1 and result["num_towers"] == 2 and result["failed"]
    assert list(result["placements"]) == ["cpu", "sharded", "replicated"]
    for row in result["placements"].values():
        counts, held = row["bytes_per_step"], row["memory_bytes"]
        assert min(counts["planned"].values()) > 0 and counts["loops"] == []
        assert held["total"] == sum(v for k, v in held.items() if k != "total")
        assert row["fits"] and row["largest_batch_per_tower"] >= 4
    missing = {"op": "GatherV2", "dtype": "uint8", "layer": "functional/lookup"}
    for number, row in result["gpu"].items():
        assert row["without_kernel"] == [missing]
        assert row["to_host"]["count"] >= 1 <= row["from_host"]["count"]
        assert row["collectives"]["count"] == (0 if number == "1" else 1)
        assert row["launches"]["tower"] > 0 < row["launches"]["update"]
        assert row["undirected"] == []
    for words in (
        "FAILED      no gradient: nothing/kernel", "each of 2 GPUs",
        "no kernel: GatherV2 of uint8, layer functional/lookup",
        "a tower's GPU holds, in MB, of 2 GiB",
    ):  # fmt: skip
        assert words in said
    assert max(map(len, said.splitlines())) <= 160


def two_norms():
    parts = [[keras.layers.Conv2D(2, 1), keras.layers.BatchNormalization()] for _ in range(2)]
    end = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
    square = keras.layers.Reshape((2, 2, 1))
    model = keras.Sequential([keras.Input((4,)), square, *sum(parts, []), *end])
    model.compile("sgd", "mse")
    return model


@pytest.mark.run
def test_a_compiled_model_is_planned_with_what_it_can_have_and_its_batch_norm(capsys):
    flags = f"--model={__name__}:two_norms --dataset=tests.tasks:table_data --batch_size=8 --json"
    code, out, said = command_line(capsys, "plan", *flags.split(), "--num_towers=2")
    assert code == 0 and "every trainable variable has one" in said, said
    result = json.loads(out)
    assert list(result["placements"]) == ["cpu", "sharded", "replicated"]
    assert result["gradients"]["missing"] == [] and not result["failed"]
    one, two = (result["gpu"][number]["launches"]["tower"] for number in "12")
    # A layer packs its moments (2), corrects its variance, computes the moments of all (4), and
    # normalises; backward it computes a line (2), evaluates it and adds it. Its factors are common.
    assert two - one == 12 * 2 + 26


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--num_towers=9", "from 2 to --batch_size=8 towers"),
        ("--gpu_memory_gib=0", "from 0.1 to"),
        ("--dataset=nothing", "unknown"),
    ],
)
def test_bad_input_is_one_line(argument, words, capsys):
    code, _, err = plan(capsys, argument)
    last = err.strip().splitlines()[-1]
    assert code == 2 and last.startswith(f"towers: {argument}") and words in last
