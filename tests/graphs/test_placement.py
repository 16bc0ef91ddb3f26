"""Where ops really ran, on logical CPU devices; what a run says of it, and how strict it is."""

import csv
import itertools
import re

import keras
import pytest
import tensorflow as tf

import towers
from tests import tiny
from tests.programs import TENSORFLOWS_LINES, python
from tests.runs import rare
from towers import cli
from towers.builder import device_names
from towers.graphs import placement_report
from towers.graphs.placement import Op, Placement, Transfer, read_placement

pytestmark = pytest.mark.graph

DEVICES = ["/cpu:0", "/cpu:1"]


def ops_of(placement, kind):
    return sorted((op.requested, op.device) for op in placement.ops if op.type == kind)


def test_the_ops_of_two_towers_and_their_sum():
    builder = towers.TowerBuilder(DEVICES)
    product = tf.function(lambda a, b: builder.sum(lambda: tf.matmul(a, b)))
    placement = read_placement(product, tf.ones([2, 3]), tf.ones([3, 2]))
    matmuls = [op for op in placement.ops if "MatMul" in op.type]
    assert [(op.tower, op.requested, op.device) for op in matmuls] == [
        (i, f"/cpu:{i}", f"/cpu:{i}") for i in (0, 1)
    ]
    assert ops_of(placement, "AddN") == [("/cpu:0", "/cpu:0")]
    assert placement.misplaced(DEVICES) == []
    # two operands to the second tower, its product back
    assert placement.crossing_bytes() == {
        ("/cpu:0", "/cpu:1"): 2 * 6 * 4,
        ("/cpu:1", "/cpu:0"): 4 * 4,
    }
    with pytest.raises(ValueError, match="read its placement at its first call"):
        read_placement(product, tf.ones([2, 3]), tf.ones([3, 2]))


@pytest.mark.run
def test_a_train_loop_of_no_steps_is_placed_and_its_bytes_are_weights_slice_and_gradients():
    loop = tiny.Loop(tiny.options("unused", num_towers=2, batch_size=8))
    before, run = loop.state(), loop.run
    placement = read_placement(loop.loop, loop.batches, tf.constant(0))
    tiny.assert_identical(loop.state(), before)
    assert placement.misplaced(DEVICES) == []
    assert {op.tower for op in placement.ops} == {None, 0, 1}
    variables = run.train_state.model.trainable_variables
    weights = sum(4 * v.value.shape.num_elements() for v in variables)
    images, labels, _ = tiny.flat(next(iter(run.data.train.train_batches(8, seed=0))))
    a_slice = images[4:].shape.num_elements() * images.dtype.size + 4 * labels.dtype.size
    condition, loss = 1, 8  # of the loop; a scalar, and again when the gradients are done
    measured, squares = 1, 3 * 4  # whether there are norms; of both towers and of the gathered
    assert placement.crossing_bytes() == {
        ("/cpu:0", "/cpu:1"): weights + a_slice + condition + measured,
        ("/cpu:1", "/cpu:0"): weights + loss + squares,
    }


@pytest.mark.process
def test_the_demonstration():
    done = python("scripts/matmul_towers.py")
    assert done.returncode == 0 and not TENSORFLOWS_LINES.search(done.stderr), done.stderr
    out = done.stdout
    assert out.startswith("[[ 44.  56.]\n [ 98. 128.]]\n")
    lines = [line.split() for line in out.splitlines()]
    assert {(name, device) for name, *_, device in lines if "MatMul" in name} == {
        ("tower_0/MatMul", "/cpu:0"),
        ("tower_1/MatMul", "/cpu:1"),
    }
    assert ["gather/AddN", "AddN", "/cpu:0"] in lines


# ---------------------------------------------------------------------------- Runs


class Pinned(keras.layers.Layer):
    """A layer that insists on a device of its own."""

    def __init__(self, device, **keywords):
        super().__init__(**keywords)
        self.device = device

    def call(self, inputs):
        with tf.device(self.device):
            return tf.tanh(inputs) * 2.0


def pinned(num_classes, image_shape, device="/cpu:1"):
    own = [keras.layers.Flatten(), Pinned(device, name="stubborn")]
    block = keras.Sequential(own, name="block")
    dense = [keras.layers.Dense(4), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), block, *dense])


def pinned_weights(num_classes, image_shape):
    """A functional model: Keras keeps nothing of tf.device but the place of the weights."""
    inputs = keras.Input(image_shape)
    x = keras.layers.Flatten()(inputs)
    with tf.device("/cpu:1"):
        x = keras.layers.Dense(4, name="hidden")(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


SHORT = "--dataset=tests.tiny:images --augment=none --max_steps=5 --batch_size=8 --num_towers=2"
HARD = "--allow_soft_placement=false"


@pytest.fixture
def command(tmp_path, capsys):
    """Return `command(model, *flags)`, a short run's exit code, output and error."""

    def command(model, *flags):
        argv = ["train", *SHORT.split(), f"--train_dir={tmp_path}/run", f"--model={model}", *flags]
        return cli.main(argv), *capsys.readouterr()

    yield command
    tf.config.set_soft_device_placement(True)  # runs set it for the whole process


@pytest.mark.run
@pytest.mark.parametrize(
    "model, flags",
    [
        rare("models.cnn:cnn", f"--num_towers=3 {HARD}"),
        ("tests.tiny:cnn", "--devices=/cpu:1,/cpu:2 --variables=replicated"),  # as of GPUs
    ],
)
def test_a_model_that_chooses_no_device_passes_strict(tmp_path, command, monkeypatch, model, flags):
    """Also with BatchNorm over GPUs: what collectives count their calls by is of no tower."""
    if "replicated" in flags:
        monkeypatch.setenv(device_names.SWITCH, "1")
    code, out, err = command(model, "--placement=strict", *flags.split())
    assert (code, err) == (0, "")
    assert tiny.saved_steps(tmp_path / "run")[-1] == 5
    assert "ops in towers, each on its tower's device" in out


def assert_logged(out, tsv):
    """Compare what --log_device_placement prints with its file."""
    lines = out.splitlines()
    mapping = lines.index("  device mapping:")
    assert re.fullmatch(r"  /cpu:1 -> CPU, \d+ cores shared by all its devices", lines[mapping + 2])
    (header,) = [i for i, x in enumerate(lines) if x.split() == ["op", "type", "/cpu:0", "/cpu:1"]]
    rows_of_table = itertools.takewhile(lambda x: x.startswith("  "), lines[header + 1 :])
    table = {line.split()[0]: line.split()[1:] for line in rows_of_table}
    with open(tsv, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert list(rows[0]) == ["name", "type", "tower", "layer", "requested", "device"]
    ran = [row for row in rows if row["device"] != "-"]
    assert len(ran) == sum(map(int, table["all"]))
    products = [row for row in ran if "MatMul" in row["type"] and row["tower"]]
    assert {(row["tower"], row["requested"], row["device"]) for row in products} == {
        (f"{i}", f"/cpu:{i}", f"/cpu:{i}") for i in (0, 1)
    }


@pytest.mark.run
def test_a_pinned_layer_is_listed_and_strict_stops_the_run(tmp_path, command):
    model = f"{__name__}:pinned", "--model_args=device=/cpu:1"
    code, out, err = command(*model, "--placement=strict")
    assert code == 1
    line = "tower 0 on /cpu:0, layer sequential/block/stubborn: Tanh, Mul on /cpu:1, placed "
    assert line in err and err.startswith("towers: --placement=strict: ")
    assert len(err.splitlines()) == 1
    assert "step 0" not in out
    assert not list(tmp_path.iterdir())

    code, out, err = command(*model, "--log_device_placement")
    assert (code, err) == (0, "")
    assert f"  {line}" in out and tiny.saved_steps(tmp_path / "run")[-1] == 5
    assert_logged(out, tmp_path / "run/placement.tsv")
    before = tiny.files(tmp_path)
    assert command(*model, "--placement=strict", "--max_steps=9")[0] == 1
    assert tiny.files(tmp_path) == before  # strict leaves an old run as it was


@pytest.mark.run
@pytest.mark.parametrize(
    "model, flags, code, says",
    [
        ("pinned", f"--model_args=device=/gpu:7 {HARD}", 2,
         ["--allow_soft_placement=false (leave it out", "stubborn_1/Tanh: was explicitly"]),
        ("pinned_weights", "--placement=strict", 1,
         ["variable model/hidden/kernel on /cpu:1, not /cpu:0"]),
    ],
)  # fmt: skip
def test_what_cannot_run_is_one_line_without_a_run(tmp_path, command, model, flags, code, says):
    found, _, err = command(f"{__name__}:{model}", *flags.split())
    assert found == code and len(err.splitlines()) == 1
    assert all(words in err for words in says)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------- Lines


@pytest.mark.unit
def test_why_an_op_is_elsewhere_and_what_crosses_is_told():
    elsewhere = [
        ("while/tower_0/net_1/block_1/Tanh", "Tanh", "/gpu:7", "/cpu:0"),
        ("while/tower_0/net_1/text_1/StringLower", "StringLower", "/gpu:0", "/cpu:0"),
        ("while/tower_0/net_1/text_1/Substr", "Substr", "", "/cpu:0"),
        ("while/tower_0/net_1/dense_1/MatMul", "MatMul", "/gpu:0", "/gpu:0"),
        ("while/gather/AddN", "AddN", "/cpu:0", "/cpu:0"),
    ]
    more = [(f"while/tower_0/x{i}x/Tanh", "Tanh", "/cpu:1", "/cpu:1") for i in range(27)]
    routes = [("/cpu:0", "/gpu:0", 4_370_000), ("/cpu:0", "/gpu:0", None), ("/gpu:0", "/cpu:0", 12)]
    transfers = tuple(Transfer("x", *route) for route in routes)
    placement = Placement(tuple(Op(*cell) for cell in elsewhere + more), (), transfers)
    stray = placement_report.strays(placement, ["/gpu:0"], {}, "/cpu:0")
    assert stray[:3] == [
        "tower 0 on /gpu:0, layer net/block: Tanh on /cpu:0, by soft placement: it asks for /gpu:7",
        "tower 0 on /gpu:0, layer net/text: Substr on /cpu:0",
        "tower 0 on /gpu:0, layer net/text: StringLower on /cpu:0, by soft placement: /gpu:0 "
        "cannot run it",
    ]
    lines = placement_report.report(placement, stray)
    assert len(lines) == 11
    assert lines[-2:] == [
        "  and 22 more: see --log_device_placement",
        "  copied per step: 4.37 MB /cpu:0 -> /gpu:0, 0.01 kB /gpu:0 -> /cpu:0, and 1 of unknown "
        "size",
    ]
