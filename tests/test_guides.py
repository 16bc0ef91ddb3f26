"""The classic guides on GPUs, line by line: each thing that they do works here by one option.

Their programs run as they stand, with sessions, in processes of their own; only the `ConfigProto`
is ours. CPU devices stand in for GPUs, so "/gpu:2" is a device that is missing. Choosing GPUs and
their memory is tried on a made-up driver.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import fake_gpus
from towers import devices
from towers.devices import gpus, nvml

ROOT = Path(__file__).resolve().parents[1]
HEADER = """
import json
import tensorflow.compat.v1 as tf
from towers import devices
tf.disable_eager_execution()

def run_and_find(session, fetch, feed, *types):
    "Run; return the result, and {op: device} of the graphs that really ran."
    options, metadata = tf.RunOptions(output_partition_graphs=True), tf.RunMetadata()
    result = session.run(fetch, feed, options=options, run_metadata=metadata)
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    places = {node.name: node.device[-5:] for node in nodes if node.op.endswith(types)}
    return result.tolist(), places
"""
PRODUCT = [[22.0, 28.0], [49.0, 64.0]]
CONSTANTS = """
a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3], name="a")
b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2], name="b")
"""


def start(program, **environment):
    """Run a guide's program; the last line that it prints is what it says of itself."""
    return subprocess.run(
        [sys.executable, "-c", HEADER + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        timeout=120,
    )


def result_of(program, **environment):
    done = start(program, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


# ---------------------------------------------------------------------------- Placing ops


def test_logging_device_placement():
    result, output = result_of(
        CONSTANTS
        + """
c = tf.matmul(a, b, name="c")
with tf.Session(config=devices.config_proto(log_device_placement=True)) as session:
    print(json.dumps(session.run(c).tolist()))
"""
    )
    assert result == PRODUCT
    for op in "c: (MatMul)", "a: (Const)", "b: (Const)":
        assert f"{op}: /job:localhost/replica:0/task:0/device:CPU:0" in output


def test_operands_on_the_cpu_and_the_product_elsewhere():
    (result, places), output = result_of(
        """
        with tf.device("/cpu:0"):
            a = tf.placeholder(tf.float32, [2, 3], name="a")
            b = tf.placeholder(tf.float32, [3, 2], name="b")
            a2, b2 = tf.abs(a, "a2"), tf.abs(b, "b2")
        with tf.device("/cpu:1"):  # one of many devices
            c = tf.matmul(a2, b2, name="c")
        with tf.Session(config=devices.config_proto(num_cpus=2)) as session:
            feed = {a: [[1, 2, 3], [4, 5, 6]], b: [[1, 2], [3, 4], [5, 6]]}
            print(json.dumps(run_and_find(session, c, feed, "Abs", "MatMul")))
        """
    )
    assert result == PRODUCT
    assert places == {"a2": "CPU:0", "b2": "CPU:0", "c": "CPU:1"}
    assert "(MatMul)" not in output  # which only logging prints


MISSING = (
    CONSTANTS
    + """
with tf.device("/gpu:2"):
    c = tf.matmul(a, b, name="c")
with tf.Session(config=devices.config_proto(allow_soft_placement={soft})) as session:
    print(json.dumps(session.run(c).tolist()))
"""
)


def test_a_device_that_does_not_exist_is_an_error_that_names_it():
    done = start(MISSING.format(soft=False))
    assert done.returncode == 1 and not done.stdout
    assert "InvalidArgumentError: Cannot assign a device for operation c" in done.stderr
    assert "was explicitly assigned to /device:GPU:2" in done.stderr


def test_soft_placement_takes_one_that_exists():
    assert result_of(MISSING.format(soft=True))[0] == PRODUCT


def test_two_towers_and_add_n():
    (result, places), _ = result_of(
        """
        c = []
        a, b = tf.placeholder(tf.float32, [2, 3]), tf.placeholder(tf.float32, [3, 2])
        for d in ["/cpu:2", "/cpu:3"]:
            with tf.device(d):
                c.append(tf.matmul(a, b, name="product"))
        with tf.device("/cpu:0"):
            total = tf.add_n(c, name="total")
        config = devices.config_proto(num_cpus=4, allow_soft_placement=False)
        with tf.Session(config=config) as session:
            feed = {a: [[1, 2, 3], [4, 5, 6]], b: [[1, 2], [3, 4], [5, 6]]}
            print(json.dumps(run_and_find(session, total, feed, "MatMul", "AddN")))
        """
    )
    assert result == [[44.0, 56.0], [98.0, 128.0]]
    assert places == {"product": "CPU:2", "product_1": "CPU:3", "total": "CPU:0"}


def test_two_towers_without_a_session():
    program = """
        import json
        import tensorflow as tf
        import towers
        from towers import devices
        from towers.graphs.placement import read_placement
        devices.configure(allow_soft_placement=False)
        builder = towers.TowerBuilder(devices.tower_devices(2))
        a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        total = tf.function(lambda a, b: builder.sum(lambda: tf.matmul(a, b)))
        ops = read_placement(total, a, b).ops
        where = sorted(op.device for op in ops if "MatMul" in op.type)
        print(json.dumps([total(a, b).numpy().tolist(), where]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[[44.0, 56.0], [98.0, 128.0]], ["/cpu:0", "/cpu:1"]]


# ---------------------------------------------------------------------------- GPUs and memory


def test_memory_and_visible_devices_of_a_session():
    """The `ConfigProto` says it, and a session takes it: TensorFlow refuses what it cannot read."""
    configs, _ = result_of(
        """
        import pytest
        from google.protobuf.json_format import MessageToDict
        from tests import fake_gpus

        fake_gpus.install_driver(pytest.MonkeyPatch(), *[fake_gpus.A100] * 3)
        found = []
        for options in [
            dict(per_process_gpu_memory_fraction=0.4),
            dict(allow_growth=True),
            dict(visible_gpus="0,2"),
            dict(visible_gpus="2", gpu_memory_limit_mib=512),
        ]:
            config = devices.config_proto(**options)
            with tf.Session(config=config) as session:
                assert session.run(tf.constant(42)) == 42
            found.append(MessageToDict(config.gpu_options, preserving_proto_field_name=True))
        print(json.dumps(found))
        """
    )
    assert configs == [
        {"per_process_gpu_memory_fraction": 0.4},
        {"allow_growth": True},
        {"visible_device_list": "0,2"},
        {
            "visible_device_list": "2",
            "experimental": {"virtual_devices": [{"memory_limit_mb": [512.0]}]},
        },
    ]


@pytest.mark.parametrize(
    "value, driver_indices",
    [
        ("1", [1]),
        ("0,1", [0, 1]),
        ('"0,1"', [0, 1]),
        ("0,2,3", [0, 2, 3]),
        ("", []),
        ("GPU-2a5b0c3d-0000-4000-8000-000000000000", [2]),
        (None, [0, 1, 2, 3]),
    ],
)
def test_cuda_visible_devices(monkeypatch, value, driver_indices):
    fake_gpus.install(monkeypatch, *[fake_gpus.A100] * 4)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    devices.configure()
    assert [gpu.index for gpu in gpus.visible_gpus(nvml.gpus())] == driver_indices
    if not (value or "").startswith("GPU-"):  # which the made-up TensorFlow does not read
        towers = [f"/gpu:{i}" for i in range(len(driver_indices))] or ["/cpu:0"]
        assert devices.tower_devices() == towers
        seen = [device.driver_index for device in devices.describe()]
        assert seen == (driver_indices or [None])


@pytest.mark.parametrize("value", ['"0,1"', ""])
def test_cuda_visible_devices_where_there_is_no_gpu(value):
    """The guides' command lines also run on a machine without GPUs."""
    program = """
        names = devices.tower_devices(2)
        a = tf.placeholder(tf.float32, [])
        with tf.Session(config=devices.config_proto(num_cpus=2)) as session:
            print(json.dumps([names, float(session.run(a + 1, {a: 1.0}))]))
    """
    assert result_of(program, CUDA_VISIBLE_DEVICES=value)[0] == [["/cpu:0", "/cpu:1"], 2.0]


@pytest.mark.parametrize(
    "options, memory",
    [
        (dict(per_process_gpu_memory_fraction=0.4), "16384 MiB, growth off"),
        (dict(gpu_memory_limit_mib=4096), "4096 MiB, growth off"),
        (dict(allow_growth=True), "40036 MiB, growth on"),
    ],
)
def test_memory_without_a_session(monkeypatch, options, memory):
    fake_gpus.install(monkeypatch, *[fake_gpus.A100] * 3)
    devices.configure(visible_gpus="0,2", **options)
    assert devices.read_back() == [f"memory      /gpu:{i} {memory}" for i in (0, 1)]
