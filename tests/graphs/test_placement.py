"""Where ops really ran: read from executed graphs on logical CPU devices."""

import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import towers
from towers.graphs.placement import Op, read_placement, short
from towers.options.run import Options
from towers.training.run import prepare
from towers.training.step import make_train_loop

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ["/cpu:0", "/cpu:1"]


def ops_of(placement, kind):
    return sorted((op.requested, op.device) for op in placement.ops if op.type == kind)


def test_the_ops_of_two_towers_and_their_sum():
    builder = towers.TowerBuilder(DEVICES)
    product = tf.function(lambda a, b: builder.sum(lambda: tf.matmul(a, b)))
    placement = read_placement(product, tf.ones([2, 3]), tf.ones([3, 2]))
    matmuls = [op for op in placement.ops if "MatMul" in op.type]
    assert [(op.tower, op.requested, op.device) for op in matmuls] == [
        (0, "/cpu:0", "/cpu:0"),
        (1, "/cpu:1", "/cpu:1"),
    ]
    assert ops_of(placement, "AddN") == [("/cpu:0", "/cpu:0")]
    assert placement.misplaced(DEVICES) == []
    # two operands to the second tower, its product back
    assert placement.crossing_bytes() == {
        ("/cpu:0", "/cpu:1"): 2 * 6 * 4,
        ("/cpu:1", "/cpu:0"): 4 * 4,
    }
    assert placement.counts()["/cpu:0", "AddN"] == 1


def test_the_request_is_not_the_device():
    """Soft placement moves what asks for a GPU that is not there, and says nothing."""

    @tf.function
    def square(a):
        with tf.device("/gpu:0"):
            return tf.matmul(a, a)

    placement = read_placement(square, tf.ones([4, 4]))
    assert [o for o in placement.ops if "MatMul" in o.type][0].requested == "/gpu:0"
    assert [o for o in placement.ops if "MatMul" in o.type][0].device == "/cpu:0"


class Pinned(keras.layers.Layer):
    """A layer that insists on a device of its own."""

    def call(self, inputs):
        with tf.device("/cpu:1"):
            return tf.tanh(inputs) * 2.0


def build(num_classes, image_shape, pinned=False):
    layers = [keras.layers.Flatten(), keras.layers.Dense(num_classes, name="logits")]
    middle = [Pinned(name="pinned")] if pinned else []
    return keras.Sequential([keras.Input(image_shape), *middle, *layers])


@pytest.fixture
def train_loop(tmp_path):
    def make(**options):
        options = Options(
            model=f"{__name__}:build",
            dataset="tests.tiny:images",
            augment="none",
            num_towers=2,
            batch_size=8,
            max_steps=4,
            **options,
        )
        run = prepare(options)
        loop = make_train_loop(
            run.builder, run.masters, options, train_size=run.data.train.size, total_epochs=1.0
        )
        return run, loop, iter(run.data.train.train_batches(8, seed=0))

    return make


def test_a_train_loop_of_no_steps_is_placed_and_changes_nothing(train_loop):
    run, loop, batches = train_loop()
    before = [v.numpy() for v in run.masters.variables().values()]
    placement = read_placement(loop, batches, tf.constant(0))
    for old, variable in zip(before, run.masters.variables().values(), strict=True):
        assert (old == variable.numpy()).all()
    assert placement.misplaced(DEVICES) == []
    assert {op.tower for op in placement.ops} == {None, 0, 1}


def test_the_bytes_of_a_step_are_the_weights_the_slice_and_the_gradients(train_loop):
    run, loop, batches = train_loop()
    weights = sum(4 * v.value.shape.num_elements() for v in run.masters.model.trainable_variables)
    images, labels, _ = next(iter(run.data.train.train_batches(8, seed=0)))
    a_slice = images[4:].shape.num_elements() * images.dtype.size + 4 * labels.dtype.size
    condition, loss = 1, 8  # of the loop; a scalar, and again when the gradients are done
    assert read_placement(loop, batches, tf.constant(0)).crossing_bytes() == {
        ("/cpu:0", "/cpu:1"): weights + a_slice + condition,
        ("/cpu:1", "/cpu:0"): weights + loss,
    }


def test_a_layer_that_runs_elsewhere_is_named(train_loop):
    _, loop, batches = train_loop(model_args="pinned=true")
    misplaced = read_placement(loop, batches, tf.constant(0)).misplaced(DEVICES)
    assert {(op.tower, op.device) for op in misplaced} == {(0, "/cpu:1")}
    assert all("pinned" in op.layer for op in misplaced)


def test_the_request_of_an_op_in_an_inner_function_is_known():
    @tf.function
    def inner(x):
        with tf.device("/cpu:1"):
            return tf.tanh(x)

    builder = towers.TowerBuilder(["/cpu:0"])
    placement = read_placement(tf.function(lambda x: builder.sum(inner, x)), tf.ones([4]))
    assert ops_of(placement, "Tanh") == [("/cpu:1", "/cpu:1")]
    assert [op.type for op in placement.misplaced(["/cpu:0"])] == ["Tanh"]


def test_what_tensorflow_folds_away_is_told_apart_from_what_runs():
    @tf.function
    def product(x):
        with tf.device("/cpu:1"):
            folded = tf.matmul(tf.ones([2, 2]), tf.ones([2, 2]), name="folded")
        return x + folded

    placement = read_placement(product, tf.ones([2, 2]))
    assert not [op for op in placement.ops if "MatMul" in op.type]
    gone = [(op.type, op.requested, op.device) for op in placement.gone if op.type == "MatMul"]
    assert gone == [("MatMul", "/cpu:1", "")]


def test_a_function_that_ran_before_is_refused():
    square = tf.function(lambda a: a * a)
    square(tf.ones([2]))
    with pytest.raises(ValueError, match="read its placement at its first call"):
        read_placement(square, tf.ones([2]))


def test_names_are_read_as_tower_and_layer():
    op = Op("gradient_tape/while/tower_1_2/cnn_1/conv2_1/Relu", "ReluGrad", "", "/cpu:0")
    assert (op.tower, op.layer) == (1, "cnn/conv2")
    inner = "while/body/_1/while/tower_0/net_1/block_2_1/fn_1/PartitionedCall/Tanh"
    assert Op(inner, "Tanh", "", "").layer == "net/block_2/fn"
    loop = "while/body/_1/while/tower_0/lstm_3/while/body/_9/while/tower_0/lstm_3/while/cell_1/Tanh"
    assert Op(loop, "Tanh", "", "").layer == "lstm/cell"
    assert Op("while/tower_0/mul", "Mul", "", "").layer == "the loss function itself"
    assert Op("while/update/AddN", "AddN", "", "/cpu:0").tower is None
    assert short("/job:localhost/replica:0/task:0/device:GPU:3") == "/gpu:3"
    assert short("") == ""


def script(*words):
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_the_demonstration_of_two_towers():
    done = script("scripts/matmul_towers.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[ 44.  56.]\n [ 98. 128.]]\n")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {(name, device) for name, *_, device in lines if "MatMul" in name} == {
        ("tower_0/MatMul", "/cpu:0"),
        ("tower_1/MatMul", "/cpu:1"),
    }
    assert ["gather/AddN", "AddN", "/cpu:0"] in lines


def test_the_demonstration_of_powers():
    done = script("scripts/matpow.py", "--size=120", "--n=4")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("one device", "two towers", "ratio", "difference"):
        assert word in done.stdout
    assert script("scripts/matpow.py", "--n=0").returncode == 2
