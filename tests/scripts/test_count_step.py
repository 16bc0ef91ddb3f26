"""scripts/count_step.py: small graphs whose counts are known, and the steps of four models."""

import itertools

import pytest
import tensorflow as tf

from scripts import count_step
from scripts.count_step import HOST
from tests.runs import rare
from towers import devices

pytestmark = pytest.mark.graph

GPU, OTHER = "/cpu:1", "/cpu:2"  # in place of /gpu:0 and /gpu:1


@pytest.fixture(autouse=True, scope="module")
def cpus():
    devices.tower_devices(3, "cpu")


def step_of(step, *values, device="/cpu:0"):
    """Return what a loop on a device does whose body maps values on the host to values there."""

    @tf.function(autograph=False)
    def loop(num_steps, values):
        with tf.device(device):
            body = lambda i, values: (i + 1, step(*values))  # noqa: E731
            return tf.while_loop(lambda i, _: i < num_steps, body, (0, values))[1]

    return count_step.read(loop, tf.constant(0), tuple(map(tf.constant, values)))


def test_an_op_without_a_kernel_goes_by_the_host_and_one_without_a_device_is_told():
    def step(images, rows):
        with tf.device(GPU):
            cropped = tf.gather(tf.bitwise.invert(images), rows)
            cropped = tf.bitwise.invert(cropped)
        return tf.bitwise.bitwise_xor(cropped, images, name="anywhere"), rows

    found = step_of(step, tf.ones([2, 5], tf.uint8), [0, 1], device=None)
    (missing,) = found.without_kernel
    assert missing.startswith("GatherV2 of uint8, ") and missing.endswith("GatherV2")
    assert any(name.endswith("anywhere") for name in found.undirected)
    ways = [(copy.source, copy.target, copy.type) for copy in found.copies]
    assert ("/gpu:0", HOST, "Invert") in ways and (HOST, "/gpu:0", "GatherV2") in ways


SMALL = "lstm", 2, "mixed_bfloat16"  # of convolutions and BatchNorm: the test of `fit`
MODELS = [SMALL] + [
    rare(*case)
    for case in itertools.product(count_step.MODELS, [1, 2], ["float32", "mixed_bfloat16"])
    if case != SMALL
]
MOST_COPIES, MOST_LAUNCHES = 4, 56  # from the host; of the update


@pytest.mark.run
@pytest.mark.parametrize(("model", "num_towers", "dtype"), MODELS)
def test_gpus_run_each_op_and_read_the_host_for_their_input_alone(model, num_towers, dtype):
    step = count_step.step_of(model, num_towers, "train", "replicated", dtype)
    assert step.without_kernel == step.undirected == []
    # What Keras' own loops copy in each iteration is apart: where it can, it calls cuDNN there.
    once = [copy for copy in step.copies if not copy.repeated]
    assert [copy for copy in once if copy.target == HOST] == []
    assert len([copy for copy in once if HOST in copy]) <= MOST_COPIES * num_towers
    assert step.launches(of_towers=False) <= MOST_LAUNCHES < step.launches(of_towers=True)
    cells = dict(zip(count_step.HEADER[3:], count_step.row(step), strict=True))
    assert cells["from host"] <= f"{MOST_COPIES}" and cells["to host"].split(" ")[0] == "0"
    if num_towers == 2 and model in ("cnn", "resnet20"):  # no weight is sent, nor rows of gradients
        assert 1 <= float(cells["bytes / least"]) < 1.1
        assert cells["all-reduces + gathers"][0] in "12"


@pytest.mark.run
@pytest.mark.parametrize(
    ("model", "num_towers"), [("cnn", 2), ("transformer", 2), rare("resnet20", 2), rare("cnn", 3)]
)
def test_fit_sends_gradients_alone_between_gpus(model, num_towers):
    step = count_step.step_of(model, num_towers, "fit", "default", "float32")
    cells = dict(zip(count_step.HEADER[3:], count_step.row(step), strict=True))
    assert cells["from host"] == "2" and cells["to host"] == "0"
    assert cells["all between GPUs"] <= 2 * (num_towers - 1)
    assert cells["all-reduces + gathers"][0] in "12" and 1 <= float(cells["bytes / least"]) <= 1.1
