"""Which devices towers get. The process has four CPU devices; GPUs are made up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from towers.devices import tower_devices
from towers.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
CPUS = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
WHY = "; its log (TF_CPP_MIN_LOG_LEVEL=0) may say why"


def refusal(*args, **kwargs):
    with pytest.raises(InputError) as error:
        tower_devices(*args, **kwargs)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def gpus(monkeypatch):
    """Return `make(2)`, which lets TensorFlow see so many GPUs; `hidden` ones more are not seen."""

    def make(number, hidden=0, parts=None):
        """`parts`: {GPU: number of logical devices that it was split into}."""
        everything = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU")
            for i in range(number + hidden)
        ]
        lists = {"list_physical_devices": everything, "get_visible_devices": everything[:number]}
        for name, devices in lists.items():
            real = getattr(tf.config, name)
            monkeypatch.setattr(
                tf.config,
                name,
                lambda kind=None, real=real, found=devices: found if kind == "GPU" else real(kind),
            )
        real_setting = tf.config.get_logical_device_configuration

        def setting(device):
            if device.device_type != "GPU":
                return real_setting(device)
            split = (parts or {}).get(everything.index(device))
            return split and [tf.config.LogicalDeviceConfiguration()] * split

        monkeypatch.setattr(tf.config, "get_logical_device_configuration", setting)

    return make


def in_process(code):
    """Run code in a process where TensorFlow has not started."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


# ---------------------------------------------------------------------------- Without GPUs


def test_without_gpus():
    assert tower_devices() == ["/cpu:0"]
    for number in (1, 2, 3, 4):
        assert tower_devices(number) == CPUS[:number]
        assert tower_devices(number, "cpu") == CPUS[:number]
    assert tower_devices(devices="cpu") == ["/cpu:0"]
    assert tower_devices(devices="/cpu:2,/cpu:0") == ["/cpu:2", "/cpu:0"]


def test_as_many_logical_cpus_are_made_as_are_asked_for():
    in_process("""
import tensorflow as tf, towers
from towers import TowerBuilder, cli, model, train
from towers.devices import tower_devices
assert tower_devices(3) == ["/cpu:0", "/cpu:1", "/cpu:2"]  # nothing above started TensorFlow
assert len(tf.config.list_logical_devices("CPU")) == 3
""")


def test_logical_cpus_are_made_although_there_are_gpus():
    in_process("""
import tensorflow as tf
found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
real, setting = tf.config.get_visible_devices, tf.config.get_logical_device_configuration
tf.config.get_visible_devices = lambda kind=None: found if kind == "GPU" else real(kind)
tf.config.get_logical_device_configuration = lambda d: None if d in found else setting(d)
from towers.devices import tower_devices
assert tower_devices(3, "cpu") == ["/cpu:0", "/cpu:1", "/cpu:2"]
assert len(tf.config.list_logical_devices("CPU")) == 3
assert tower_devices(devices="/gpu:1,/cpu:2") == ["/gpu:1", "/cpu:2"]
""")


@pytest.mark.parametrize("args", [(5,), (5, "cpu"), (0, "/cpu:0,/cpu:4")])
def test_too_late_for_more_cpus(args):
    tf.constant(0)
    assert refusal(*args) == (
        "5 CPU devices are needed, but TensorFlow has started with 4: "
        "call towers.devices.tower_devices() before anything creates a tensor"
    )


def test_a_gpu_that_is_not_there():
    seen = ", ".join(CPUS)
    assert refusal(devices="/gpu:0") == (
        f"--devices=/gpu:0: there is no /gpu:0; TensorFlow sees {seen}{WHY}"
    )
    assert refusal(2, ["/cpu:0", "GPU:1"]) == (
        f"--devices=/cpu:0,GPU:1: there is no /gpu:1; TensorFlow sees {seen}{WHY}"
    )


# ---------------------------------------------------------------------------- With GPUs


def test_all_gpus_or_the_first(gpus):
    gpus(3)
    assert tower_devices() == ["/gpu:0", "/gpu:1", "/gpu:2"]
    assert tower_devices(1) == ["/gpu:0"]
    assert tower_devices(2, "") == ["/gpu:0", "/gpu:1"]
    assert tower_devices(3, []) == ["/gpu:0", "/gpu:1", "/gpu:2"]


def test_one_gpu(gpus):
    gpus(1)
    assert tower_devices() == ["/gpu:0"]


@pytest.mark.parametrize(
    "number, found",
    [(1, "1 GPU (/gpu:0): ask for at most 1"), (2, "2 GPUs (/gpu:0, /gpu:1): ask for at most 2")],
)
def test_more_towers_than_gpus_are_refused_never_reduced(gpus, number, found):
    gpus(number)
    assert refusal(4) == (
        f"--num_towers=4, but TensorFlow sees {found}, see nvidia-smi and CUDA_VISIBLE_DEVICES for "
        "the others, or try it out on CPU devices with --devices=cpu --num_towers=4"
    )


def test_hidden_gpus_do_not_count(gpus):
    gpus(1, hidden=2)
    assert tower_devices() == ["/gpu:0"]
    assert "TensorFlow sees 1 GPU (" in refusal(2)
    assert "there is no /gpu:1" in refusal(devices="/gpu:1")


def test_with_every_gpu_hidden_the_cpu_is_used(gpus):
    gpus(0, hidden=2)
    assert tower_devices(2) == ["/cpu:0", "/cpu:1"]


def test_the_parts_of_a_split_gpu_count_each(gpus):
    gpus(2, parts={0: 3})
    assert tower_devices() == ["/gpu:0", "/gpu:1", "/gpu:2", "/gpu:3"]
    assert tower_devices(devices="/gpu:3") == ["/gpu:3"]
    assert "TensorFlow sees 4 GPUs" in refusal(5)


@pytest.mark.parametrize(
    "devices",
    ["/gpu:0,/gpu:2", "gpu:0,gpu:2", "/GPU:0,/GPU:2", "/device:GPU:0,/device:GPU:2"]
    + ["device:gpu:00, Gpu:2 ", ["/gpu:0", "/gpu:2"], ("GPU:0", "/device:GPU:2")],
)
@pytest.mark.parametrize("num_towers", [0, 2])
def test_named_gpus_in_every_spelling(gpus, devices, num_towers):
    gpus(3)
    assert tower_devices(num_towers, devices) == ["/gpu:0", "/gpu:2"]


def test_the_order_is_that_of_the_names(gpus):
    gpus(3)
    assert tower_devices(devices="/gpu:2,/gpu:0") == ["/gpu:2", "/gpu:0"]


def test_a_named_gpu_that_is_not_there(gpus):
    gpus(2)
    assert refusal(devices="/gpu:0,/gpu:2") == (
        "--devices=/gpu:0,/gpu:2: there is no /gpu:2; "
        f"TensorFlow sees /gpu:0, /gpu:1, {', '.join(CPUS)}{WHY}"
    )


@pytest.mark.parametrize("name", ["cpu", "CPU", " cpu ", ["cpu"]])
def test_cpus_in_place_of_gpus(gpus, name):
    gpus(2)
    assert tower_devices(3, name) == CPUS[:3]
    assert tower_devices(devices=name) == ["/cpu:0"]


def test_gpus_and_cpus_mixed(gpus):
    gpus(1)
    assert tower_devices(devices="/gpu:0,/cpu:1") == ["/gpu:0", "/cpu:1"]


# ---------------------------------------------------------------------------- What is malformed


@pytest.mark.parametrize(
    "devices, name",
    [
        ("/gpu:0,,/gpu:1", ""),
        ("/gpu:0,", ""),
        (" ", " "),
        ("/gpu:x", "/gpu:x"),
        ("/gpu:-1", "/gpu:-1"),
        ("/gpu", "/gpu"),
        ("/tpu:0", "/tpu:0"),
        ("0,1", "0"),
        ("//gpu:0", "//gpu:0"),
        ("/gpu:0/gpu:1", "/gpu:0/gpu:1"),
        ("cpu,/gpu:0", "cpu"),
        ("/cpu:10000000000", "/cpu:10000000000"),
    ],
)
def test_what_is_no_device(gpus, devices, name):
    gpus(2)
    assert refusal(devices=devices) == (
        f"--devices={devices}: {name!r} is not a device; "
        "name them as /gpu:0,/gpu:2 or /cpu:0, or give --devices=cpu"
    )


@pytest.mark.parametrize("devices", ["/gpu:0,/gpu:0", "/gpu:0,/gpu:1,/device:GPU:0"])
def test_no_device_is_named_twice(gpus, devices):
    gpus(2)
    assert refusal(devices=devices) == (
        f"--devices={devices}: /gpu:0 is named twice; each device takes one tower"
    )


@pytest.mark.parametrize("num_towers", [1, 3])
def test_the_number_and_the_names_agree(gpus, num_towers):
    gpus(3)
    assert refusal(num_towers, "/gpu:0,/gpu:2") == (
        f"--num_towers={num_towers} and --devices=/gpu:0,/gpu:2 disagree: 2 devices are named; "
        "leave out --num_towers, or take the first ones with --devices="
    )


def test_the_number_is_not_negative():
    assert refusal(-1) == "--num_towers=-1: 0 or more is needed"
