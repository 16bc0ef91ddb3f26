"""What a run says of its placement, and that strict mode stops it before the first step."""

import csv
import itertools
import re

import keras
import pytest
import tensorflow as tf

from tests import tiny
from towers import cli
from towers.errors import InputError, RunError
from towers.graphs import placement_report
from towers.graphs.placement import Op, Placement, Transfer
from towers.training.tensorflow_errors import one_line_errors
from towers.training.train import train


class Pinned(keras.layers.Layer):
    """A layer that insists on a device of its own."""

    def __init__(self, device, **keywords):
        super().__init__(**keywords)
        self.device = device

    def call(self, inputs):
        with tf.device(self.device):
            return tf.tanh(inputs) * 2.0


def pinned(num_classes, image_shape, device="/cpu:1"):
    block = keras.Sequential(
        [keras.layers.Flatten(), Pinned(device, name="stubborn")], name="block"
    )
    return keras.Sequential([keras.Input(image_shape), block, keras.layers.Dense(num_classes)])


def pinned_weights(num_classes, image_shape):
    """A functional model: Keras keeps nothing of tf.device but the place of the weights."""
    inputs = keras.Input(image_shape)
    x = keras.layers.Flatten()(inputs)
    with tf.device("/cpu:1"):
        x = keras.layers.Dense(4, name="hidden")(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


def of_model(train_dir, model, **changes):
    given = dict(num_towers=2, max_steps=5, batch_size=8, model=f"{__name__}:{model}")
    return tiny.options(train_dir, **given | changes)


def command(capsys, train_dir, *argv):
    """Return the exit code, standard output and standard error of a short run."""
    capsys.readouterr()
    short = "--dataset=tests.tiny:images --augment=none --max_steps=5 --batch_size=8"
    code = cli.main(["train", *short.split(), f"--train_dir={train_dir}", *argv])
    return code, *capsys.readouterr()


@pytest.fixture
def no_soft_placement():
    """Runs set it for the whole process."""
    yield
    tf.config.set_soft_device_placement(True)


# ---------------------------------------------------------------------------- Runs


@pytest.mark.parametrize("model, num_towers", [("tests.tiny:cnn", 3), ("models.cnn:cnn", 2)])
def test_a_model_that_chooses_no_device_passes_strict(
    tmp_path, capsys, no_soft_placement, model, num_towers
):
    flags = [f"--model={model}", f"--num_towers={num_towers}", "--placement=strict"]
    flags += ["--allow_soft_placement=false"]
    code, out, err = command(capsys, tmp_path, *flags)
    assert (code, err) == (0, "")
    assert tiny.saved_steps(tmp_path)[-1] == 5
    assert "ops in towers, each on its tower's device" in out


@pytest.mark.parametrize(
    "device, tower, where",
    [
        ("/cpu:1", 0, "/cpu:1, where a tf.device puts it"),
        ("/gpu:7", 1, "/cpu:0, by soft placement: it asks for /gpu:7"),
    ],
)
def test_a_pinned_layer_is_listed_and_strict_stops_the_run(tmp_path, capsys, device, tower, where):
    flags = ["--num_towers=2", f"--model={__name__}:pinned", f"--model_args=device={device}"]
    code, out, err = command(capsys, tmp_path, "--placement=strict", *flags)
    assert code == 1
    line = f"tower {tower} on /cpu:{tower}, layer sequential/block/stubborn: Tanh, Mul on {where}"
    assert line in err and err.startswith("towers: --placement=strict: ")
    assert len(err.splitlines()) == 1
    assert "step 0" not in out
    assert not list(tmp_path.iterdir())

    code, out, err = command(capsys, tmp_path, *flags)
    assert (code, err) == (0, "")
    assert f"  {line}" in out and tiny.saved_steps(tmp_path)[-1] == 5
    before = tiny.files(tmp_path)
    assert command(capsys, tmp_path, "--placement=strict", "--max_steps=9", *flags)[0] == 1
    assert tiny.files(tmp_path) == before  # strict leaves an old run as it was


def test_weights_that_are_elsewhere_are_named_by_their_layer(tmp_path):
    with pytest.raises(RunError) as error:
        train(of_model(tmp_path / "run", "pinned_weights", placement="strict"))
    assert "master variable model/hidden/kernel on /cpu:1, not /cpu:0" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_log_device_placement(tmp_path, capsys):
    flags = ["--model=tests.tiny:dense", "--num_towers=2"]
    code, out, _ = command(capsys, tmp_path, *flags, "--log_device_placement")
    assert code == 0
    lines = out.splitlines()
    mapping = lines.index("  device mapping:")
    assert re.fullmatch(r"  /cpu:1 -> CPU, \d+ cores shared by all its devices", lines[mapping + 2])
    header = next(
        i for i, line in enumerate(lines) if line.split() == ["op", "type", "/cpu:0", "/cpu:1"]
    )
    rows_of_table = itertools.takewhile(lambda x: x.startswith("  "), lines[header + 1 :])
    table = {line.split()[0]: line.split()[1:] for line in rows_of_table}
    with open(tmp_path / "placement.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert list(rows[0]) == ["name", "type", "tower", "layer", "requested", "device"]
    ran = [row for row in rows if row["device"] != "-"]
    assert len(ran) == sum(map(int, table["all"]))
    sums = [row["device"] for row in ran if row["type"] == "AddN"]
    assert set(sums) == {"/cpu:0"} and table["AddN"] == [str(len(sums)), "-"]
    products = [row for row in ran if "MatMul" in row["type"] and row["tower"]]
    assert {(row["tower"], row["requested"], row["device"]) for row in products} == {
        ("0", "/cpu:0", "/cpu:0"),
        ("1", "/cpu:1", "/cpu:1"),
    }
    assert {row["layer"].split("/")[-1] for row in products} >= {"dense", "dense_1"}
    assert any(row["device"] == "-" for row in rows)  # what was folded, fused or pruned


def missing_at_once(num_classes, image_shape, device):
    with tf.device(device):
        scale = tf.Variable(1.0)
    return tiny.dense(num_classes, image_shape, width=int(scale.numpy()))


@pytest.mark.parametrize(
    "model, asks",
    [
        ("pinned", "layer sequential/block/stubborn asks for /gpu:7"),
        ("missing_at_once", "the model asks for /gpu:7, which is not there"),
    ],
)
def test_without_soft_placement_the_error_lists_what_exists(
    tmp_path, capsys, no_soft_placement, model, asks
):
    flags = [f"--model={__name__}:{model}", "--model_args=device=/gpu:7", "--num_towers=2"]
    code, _, err = command(capsys, tmp_path / "run", "--allow_soft_placement=false", *flags)
    assert code == 2 and len(err.splitlines()) == 1
    assert asks in err and "TensorFlow has /cpu:0, /cpu:1, /cpu:2, /cpu:3: " in err
    assert not (tmp_path / "run").exists()


class ForGpus(keras.layers.Layer):
    """A layer that no CPU can run."""

    def call(self, inputs):
        rows, state = tf.reshape(inputs, [1, -1, 4]), tf.zeros([1, tf.size(inputs) // 4, 4])
        drawn = tf.raw_ops.CudnnRNN(input=rows, input_h=state, input_c=state, params=tf.zeros(160))
        return inputs + tf.reduce_sum(drawn[0])


def for_gpus(num_classes, image_shape):
    flat, fast = keras.layers.Flatten(), ForGpus(name="fast")
    return keras.Sequential([keras.Input(image_shape), flat, fast, keras.layers.Dense(num_classes)])


def test_an_op_that_no_device_here_can_run_is_named_with_its_layer(tmp_path, capsys):
    code, _, err = command(capsys, tmp_path / "run", f"--model={__name__}:for_gpus")
    assert code == 2 and len(err.splitlines()) == 1
    assert "CudnnRNN, of layer sequential/fast: TensorFlow has no kernel for it" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "end", ["", "\nOp: GatherV2\nNode attrs: T=DT_UINT8\nRegistered kernels:\n"]
)
def test_an_op_without_a_kernel_for_the_device_is_named_with_its_layer(end):
    said = (
        "Cannot assign a device for operation while/tower_0/net_1/crop_1/GatherV2: Could not "
        "satisfy explicit device specification '/job:localhost/replica:0/task:0/device:GPU:0' "
        f"because no supported kernel for GPU devices is available.\nColocation Debug Info:\n{end}"
    )
    with pytest.raises(InputError) as error, one_line_errors(tiny.options("unused")):
        raise tf.errors.InvalidArgumentError(None, None, said)
    (line,) = str(error.value).splitlines()
    assert "GatherV2, of layer net/crop, has no kernel for /gpu:0" in line
    assert "leave the flag out" in line and "towers plan" in line


# ---------------------------------------------------------------------------- Lines


def placement_of(*cells, transfers=()):
    return Placement(tuple(Op(*cell) for cell in cells), (), transfers)


def test_an_op_without_a_kernel_is_told_apart():
    placement = placement_of(
        ("while/tower_0/net_1/text_1/StringLower", "StringLower", "/gpu:0", "/cpu:0"),
        ("while/tower_0/net_1/text_1/Substr", "Substr", "", "/cpu:0"),
        ("while/tower_0/net_1/dense_1/MatMul", "MatMul", "/gpu:0", "/gpu:0"),
        ("while/gather/AddN", "AddN", "/cpu:0", "/cpu:0"),
    )
    assert placement_report.strays(placement, ["/gpu:0"], {}, "/cpu:0") == [
        "tower 0 on /gpu:0, layer net/text: Substr on /cpu:0",
        "tower 0 on /gpu:0, layer net/text: StringLower on /cpu:0, by soft placement: /gpu:0 "
        "cannot run it",
    ]


def test_many_strays_are_summed_up_and_sizes_that_are_not_known_are_said():
    names = [f"while/tower_0/layer{i}x/Tanh" for i in range(30)]
    routes = [("/cpu:0", "/gpu:0", 4_370_000), ("/cpu:0", "/gpu:0", None), ("/gpu:0", "/cpu:0", 12)]
    placement = placement_of(
        *((name, "Tanh", "/cpu:1", "/cpu:1") for name in names),
        transfers=tuple(Transfer("x", *route) for route in routes),
    )
    stray = placement_report.strays(placement, ["/cpu:0"], {}, "/cpu:0")
    lines = placement_report.report(placement, stray)
    assert len(lines) == 11
    assert lines[-2:] == [
        "  and 22 more: see --log_device_placement",
        "  in a step cross 4.37 MB /cpu:0 -> /gpu:0, 0.01 kB /gpu:0 -> /cpu:0, and 1 of unknown "
        "size",
    ]


def test_what_crosses_in_some_steps_is_told_apart():
    both = Transfer("x", "/cpu:0", "/gpu:0", 4_000), Transfer("y", "/cpu:0", "/gpu:0", 5_000, True)
    (_, line) = placement_report.report(placement_of(transfers=both), [])
    assert "4.00 kB /cpu:0 -> /gpu:0;" in line
    assert "5.00 kB more" in line
