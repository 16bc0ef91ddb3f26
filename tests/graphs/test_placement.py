"""Where ops really ran: read from executed graphs on logical CPU devices."""

import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import towers
from tests import tiny
from towers.graphs.placement import Op, read_placement, short

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


def test_a_request_is_not_the_device():
    """Soft placement moves what asks for a GPU that is not there, and says nothing."""

    @tf.function
    def inner(x):
        with tf.device("/cpu:1"):
            kept = tf.tanh(x)
        with tf.device("/gpu:0"):
            return kept + tf.matmul(x, x)

    builder = towers.TowerBuilder(["/cpu:0"])
    placement = read_placement(tf.function(lambda x: builder.sum(inner, x)), tf.ones([4, 4]))
    assert ops_of(placement, "Tanh") == [("/cpu:1", "/cpu:1")]
    (product,) = [op for op in placement.ops if "MatMul" in op.type]
    assert (product.requested, product.device) == ("/gpu:0", "/cpu:0")
    assert [op.type for op in placement.misplaced(["/cpu:0"])] == ["Tanh"]


def test_a_train_loop_of_no_steps_is_placed_and_its_bytes_are_weights_slice_and_gradients():
    loop = tiny.Loop(tiny.options("unused", num_towers=2, batch_size=8))
    before, run = loop.state(), loop.run
    placement = read_placement(loop.loop, loop.batches, tf.constant(0))
    tiny.assert_identical(loop.state(), before)
    assert placement.misplaced(DEVICES) == []
    assert {op.tower for op in placement.ops} == {None, 0, 1}
    weights = sum(4 * v.value.shape.num_elements() for v in run.masters.model.trainable_variables)
    images, labels, _ = tiny.flat(next(iter(run.data.train.train_batches(8, seed=0))))
    a_slice = images[4:].shape.num_elements() * images.dtype.size + 4 * labels.dtype.size
    condition, loss = 1, 8  # of the loop; a scalar, and again when the gradients are done
    assert placement.crossing_bytes() == {
        ("/cpu:0", "/cpu:1"): weights + a_slice + condition,
        ("/cpu:1", "/cpu:0"): weights + loss,
    }


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
    assert short("/job:worker/replica:0/task:1/device:CPU:2") == "/job:worker/task:1/cpu:2"
    assert short("/job:localhost/cpu:0") == "/cpu:0"
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
    assert all(word in done.stdout for word in ("one device", "two towers", "ratio", "difference"))
