"""The classic guides on GPUs: each thing that they do works here by one option.

Their programs run as they stand, with sessions; only the `ConfigProto` is ours. CPU devices stand
in for GPUs, so "/gpu:2" is a device that is missing. Choosing GPUs and their memory is tried on a
made-up driver, for each row of the devices page's table.
"""

import dataclasses
import os
import re

import pytest
import tensorflow.compat.v1 as tf

import towers
from tests import fake_gpus
from tests.programs import ROOT
from towers import devices
from towers.options import flags
from towers.options.run import Options

pytestmark = pytest.mark.graph

PAGE = (ROOT / "towers/devices/README.md").read_text(encoding="utf-8")
PRODUCT = [[22.0, 28.0], [49.0, 64.0]]
CARDS = [dataclasses.replace(fake_gpus.A100, name=f"card {i}") for i in range(4)]


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default():
        yield


def matrices():
    a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], name="a")
    return a, tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], name="b")


# Their programs.


def test_logging_device_placement(capfd):
    c = tf.matmul(*matrices(), name="c")
    with tf.Session(config=devices.config_proto(log_device_placement=True)) as session:
        assert session.run(c).tolist() == PRODUCT
    output = "".join(capfd.readouterr())
    for op in "c: (MatMul)", "a: (Const)", "b: (Const)":
        assert f"{op}: /job:localhost/replica:0/task:0/device:CPU:0" in output


def test_a_device_that_does_not_exist_is_an_error_that_names_it_or_another_is_taken():
    with tf.device("/gpu:2"):
        c = tf.matmul(*matrices(), name="c")
    with tf.Session(config=devices.config_proto(allow_soft_placement=False)) as session:
        with pytest.raises(tf.errors.InvalidArgumentError, match="operation c") as error:
            session.run(c)
    assert "was explicitly assigned to /device:GPU:2" in str(error.value)
    with tf.Session(config=devices.config_proto(allow_soft_placement=True)) as session:
        assert session.run(c).tolist() == PRODUCT


def test_two_towers_and_add_n(capfd):
    """Also: operands on the CPU, the product elsewhere."""
    c = []
    with tf.device("/cpu:0"):
        a, b = (tf.placeholder_with_default(x, x.shape) for x in matrices())
    for d in ["/cpu:2", "/cpu:3"]:
        with tf.device(d):
            c.append(tf.matmul(a, b, name="product"))
    with tf.device("/cpu:0"):
        total = tf.add_n(c, name="total")
    metadata, trace = tf.RunMetadata(), tf.RunOptions(output_partition_graphs=True)
    config = devices.config_proto(num_cpus=4, allow_soft_placement=False)
    with tf.Session(config=config) as session:
        result = session.run(total, options=trace, run_metadata=metadata)
    assert result.tolist() == [[44.0, 56.0], [98.0, 128.0]]
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    places = {n.name: n.device[-5:] for n in nodes if n.op.endswith(("MatMul", "AddN"))}
    assert places == {"product": "CPU:2", "product_1": "CPU:3", "total": "CPU:0"}
    assert "(MatMul)" not in "".join(capfd.readouterr())  # which only logging prints


# The page's table.


def rows():
    """Return {what the guides write: what is typed here}, cells as the page has them."""
    table = PAGE.partition("| in the guides you wrote")[2].partition("\n\n")[0]
    return dict(line.strip("| ").split(" | ") for line in table.splitlines()[2:])


ROWS = rows()
SETTINGS = [left for left in ROWS if left.startswith("`config.")]
VARIABLES = [left for left in ROWS if left.startswith("`CUDA_VISIBLE_DEVICES=")]
DEVICES = [left for left in ROWS if "tf.device" in left]
(ENVIRON,) = [left for left in ROWS if left.startswith("`os.environ")]
(GPU_OPTIONS,) = [left for left in ROWS if left.startswith("`tf.GPUOptions(")]
(SESSION,) = [left for left in ROWS if left.startswith("`tf.Session(")]


def typed(left):
    """Return the options that the flags of a row's right side give."""
    line = " ".join(re.findall(r"`(?:towers train )?(--[^`]*)`", ROWS[left]))
    return flags.parse(line.split())


def test_every_row_is_tried():
    assert (len(VARIABLES), len(DEVICES), len(SETTINGS)) == (2, 2, 5)
    single = [ENVIRON, GPU_OPTIONS, SESSION]
    assert sorted([*VARIABLES, *DEVICES, *SETTINGS, *single]) == sorted(ROWS)


@pytest.mark.parametrize("left", SETTINGS)
def test_a_setting_of_a_session_is_a_flag(left, monkeypatch):
    """What the flags mean to a session is what the guides' line sets; TensorFlow can read it."""
    fake_gpus.install(monkeypatch, fake_gpus.A100)
    wanted = devices.config_proto()
    exec(left.strip("`"), {"config": wanted})
    options = typed(left)
    log = options.log_device_placement
    if left.startswith("`config.allow_soft"):
        assert ROWS[left].startswith("nothing")
        assert not options.allow_soft_placement  # which is the way to forbid it
        assert devices.config_proto(allow_soft_placement=False) != wanted
        options = Options()
    given = dataclasses.asdict(options.gpu_options())
    assert devices.config_proto(log_device_placement=log, **given) == wanted
    with tf.Session(config=wanted) as session:
        assert session.run(tf.constant(42)) == 42
    devices.configure(**given)  # and the same can be set for a run
    devices.read_back()


def test_the_variable_in_a_program_still_works(monkeypatch):
    fake_gpus.install(monkeypatch, *CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    exec(ENVIRON.strip("`"), {"os": os})
    devices.configure(allow_growth=True)
    assert [row.name for row in devices.describe()] == ["card 0", "card 2"]


@pytest.mark.parametrize("left", VARIABLES)
def test_a_variable_is_a_flag_and_still_works(left, monkeypatch):
    value = re.search(r'CUDA_VISIBLE_DEVICES="?([\d,]*)"? ', left)[1]

    def seen_with(**options):
        devices.configure(**options)
        return [row.name for row in devices.describe()]

    with monkeypatch.context() as patch:
        fake_gpus.install(patch, *CARDS)
        by_flag = seen_with(visible_gpus=typed(left).visible_gpus)
    with monkeypatch.context() as patch:
        fake_gpus.install(patch, *CARDS)
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        by_variable = seen_with()
    expected = [f"card {i}" for i in value.split(",")] if value else None
    cpu = by_flag[0].startswith("CPU")
    assert by_flag == by_variable and (by_flag == expected or (cpu and expected is None))


@pytest.mark.parametrize("left", DEVICES)
def test_a_device_is_a_flag(left, monkeypatch):
    fake_gpus.install(monkeypatch, *[fake_gpus.A100] * 4)
    assert devices.tower_devices(devices=typed(left).devices) == re.findall(r"/gpu:\d", left)


def test_a_session_takes_the_config(monkeypatch):
    fake_gpus.install(monkeypatch, fake_gpus.A100)
    given = {"towers": towers}
    exec(ROWS[SESSION].strip("`"), given)
    with tf.Session(config=given["config"]) as session:
        assert session.run(tf.constant(42)) == 42
        assert session._config.gpu_options.allow_growth
