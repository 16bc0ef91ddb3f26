"""The classic guides on GPUs, line by line: each thing that they do works here by one option.

Their programs run as they stand, with sessions; only the `ConfigProto` is ours. CPU devices stand
in for GPUs, so "/gpu:2" is a device that is missing. Choosing GPUs and their memory is tried on a
made-up driver; test_readme.py has what is done without a session.
"""

import pytest
import tensorflow.compat.v1 as tf
from google.protobuf.json_format import MessageToDict

from tests import fake_gpus
from towers import devices

A = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
B = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
PRODUCT = [[22.0, 28.0], [49.0, 64.0]]


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default():
        yield


def constants():
    return tf.constant(A, name="a"), tf.constant(B, name="b")


def placeholders():
    return tf.placeholder(tf.float32, [2, 3], "a"), tf.placeholder(tf.float32, [3, 2], "b")


def run_and_find(fetch, feed, *types, **options):
    """Run; return the result, and {op: device} of the graphs that really ran."""
    metadata = tf.RunMetadata()
    with tf.Session(config=devices.config_proto(**options)) as session:
        trace = tf.RunOptions(output_partition_graphs=True)
        result = session.run(fetch, feed, options=trace, run_metadata=metadata)
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    return result.tolist(), {n.name: n.device[-5:] for n in nodes if n.op.endswith(types)}


# ---------------------------------------------------------------------------- Placing ops


def test_logging_device_placement(capfd):
    c = tf.matmul(*constants(), name="c")
    with tf.Session(config=devices.config_proto(log_device_placement=True)) as session:
        assert session.run(c).tolist() == PRODUCT
    output = "".join(capfd.readouterr())
    for op in "c: (MatMul)", "a: (Const)", "b: (Const)":
        assert f"{op}: /job:localhost/replica:0/task:0/device:CPU:0" in output


def test_operands_on_the_cpu_and_the_product_elsewhere(capfd):
    with tf.device("/cpu:0"):
        a, b = placeholders()
        a2, b2 = tf.abs(a, "a2"), tf.abs(b, "b2")
    with tf.device("/cpu:1"):  # one of many devices
        c = tf.matmul(a2, b2, name="c")
    result, places = run_and_find(c, {a: A, b: B}, "Abs", "MatMul", num_cpus=2)
    assert result == PRODUCT
    assert places == {"a2": "CPU:0", "b2": "CPU:0", "c": "CPU:1"}
    assert "(MatMul)" not in "".join(capfd.readouterr())  # which only logging prints


def test_a_device_that_does_not_exist_is_an_error_that_names_it_or_another_is_taken():
    with tf.device("/gpu:2"):
        c = tf.matmul(*constants(), name="c")
    with tf.Session(config=devices.config_proto(allow_soft_placement=False)) as session:
        with pytest.raises(tf.errors.InvalidArgumentError, match="operation c") as error:
            session.run(c)
    assert "was explicitly assigned to /device:GPU:2" in str(error.value)
    with tf.Session(config=devices.config_proto(allow_soft_placement=True)) as session:
        assert session.run(c).tolist() == PRODUCT


def test_two_towers_and_add_n():
    c = []
    a, b = placeholders()
    for d in ["/cpu:2", "/cpu:3"]:
        with tf.device(d):
            c.append(tf.matmul(a, b, name="product"))
    with tf.device("/cpu:0"):
        total = tf.add_n(c, name="total")
    options = dict(num_cpus=4, allow_soft_placement=False)
    result, places = run_and_find(total, {a: A, b: B}, "MatMul", "AddN", **options)
    assert result == [[44.0, 56.0], [98.0, 128.0]]
    assert places == {"product": "CPU:2", "product_1": "CPU:3", "total": "CPU:0"}


# ---------------------------------------------------------------------------- GPUs and memory


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(per_process_gpu_memory_fraction=0.4), {"per_process_gpu_memory_fraction": 0.4}),
        (dict(allow_growth=True), {"allow_growth": True}),
        (dict(visible_gpus="0,2"), {"visible_device_list": "0,2"}),
        (
            dict(visible_gpus="2", gpu_memory_limit_mib=512),
            {
                "visible_device_list": "2",
                "experimental": {"virtual_devices": [{"memory_limit_mb": [512.0]}]},
            },
        ),
    ],
)
def test_memory_and_visible_devices_of_a_session(monkeypatch, options, expected):
    """The `ConfigProto` says it, and a session takes it: TensorFlow refuses what it cannot read."""
    fake_gpus.install_driver(monkeypatch, *[fake_gpus.A100] * 3)
    config = devices.config_proto(**options)
    with tf.Session(config=config) as session:
        assert session.run(tf.constant(42)) == 42
    assert MessageToDict(config.gpu_options, preserving_proto_field_name=True) == expected
