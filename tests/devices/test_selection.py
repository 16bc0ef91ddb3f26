"""Which devices towers get. The process has four CPU devices; GPUs are made up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tests import fake_gpus
from tests.fake_gpus import A100, FULL, LOST, MIB, OLD, SMALL, Card
from towers import devices as devices_module
from towers.devices.selection import Device, describe, report, tower_devices
from towers.errors import InputError, RunError

ROOT = Path(__file__).resolve().parents[2]
CPUS = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
NO_DRIVER = ", no NVIDIA driver answers here"
CPU = f"CPU, {os.cpu_count()} cores shared by all its devices"


def refusal(*args, **kwargs):
    with pytest.raises(InputError) as error:
        tower_devices(*args, **kwargs)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def install(monkeypatch):
    """Return `install(*cards)`, which lets this process have those GPUs."""
    return lambda *cards, **details: fake_gpus.install(monkeypatch, *cards, **details)


@pytest.fixture
def gpus(install):
    """Return `make(2)`, which lets TensorFlow see so many GPUs; the program hides `hidden` more."""

    def make(number, hidden=0, parts=None):
        """`parts`: {GPU: number of logical devices that it was split into}."""
        machine = install(*[A100] * (number + hidden))
        machine.hidden = range(number, number + hidden)
        for gpu, split in (parts or {}).items():
            machine.split(gpu, *[1024] * split)
        return machine

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
    remedy = "type --devices=/cpu:0, or --devices=cpu"
    assert refusal(devices="/gpu:0") == (
        f"--devices=/gpu:0: there is no /gpu:0; TensorFlow sees {seen}{NO_DRIVER}; {remedy}"
    )
    assert refusal(2, ["/cpu:0", "GPU:1"]) == (
        f"--devices=/cpu:0,GPU:1: there is no /gpu:1; TensorFlow sees {seen}{NO_DRIVER}; {remedy}"
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
    "number, found, cards, most",
    [
        (1, "1 GPU (/gpu:0)", "0 (NVIDIA A100)", 1),
        (2, "2 GPUs (/gpu:0, /gpu:1)", "0 (NVIDIA A100), 1 (NVIDIA A100)", 2),
    ],
)
def test_more_towers_than_gpus_are_refused_never_reduced(gpus, number, found, cards, most):
    gpus(number)
    assert refusal(4) == (
        f"--num_towers=4, but TensorFlow sees {found}, the driver has {cards}; "
        f"ask for at most {most}, or try it out on CPU devices with --devices=cpu --num_towers=4"
    )


def test_without_nvml_nothing_is_said_of_the_driver(install):
    install(A100, driver=False)
    assert "sees 1 GPU (/gpu:0); ask for at most 1" in refusal(2)
    assert describe() == [Device(0, "/gpu:0", "NVIDIA A100")]


def test_hidden_gpus_are_named(install, monkeypatch):
    install(A100, SMALL, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert "2 (NVIDIA A100); CUDA_VISIBLE_DEVICES=2 hides the rest; ask for at most 1" in refusal(2)


def test_a_skipped_gpu_is_named(install):
    install(A100, SMALL)
    assert tower_devices() == ["/gpu:0"]
    assert refusal(2) == (
        "--num_towers=2, but TensorFlow sees 1 GPU (/gpu:0), the driver has 0 (NVIDIA A100), "
        "1 (NVIDIA T400): it leaves out GPUs with far fewer multiprocessors than the largest; "
        "type export TF_MIN_GPU_MULTIPROCESSOR_COUNT=1, or leave them out with --visible_gpus; "
        "ask for at most 1, or try it out on CPU devices with --devices=cpu --num_towers=2"
    )


# ------------------------------------------------- The driver has GPUs, and TensorFlow sees none

NO_CUDA = fake_gpus.CUDA_BUILD | {"is_cuda_build": False}
INSTALL = "type pip install 'tensorflow[and-cuda]>=2.21,<2.22'"


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    "card, build, says",
    [
        (
            Card(listed=False),
            fake_gpus.CUDA_BUILD,
            "0 (NVIDIA A100): CUDA 12.5.1 or cuDNN 9 is not found, or the driver is too old for "
            f"it; {INSTALL}",
        ),
        (
            Card(listed=False),
            NO_CUDA,
            f"0 (NVIDIA A100): this TensorFlow was built without CUDA; {INSTALL}",
        ),
        (
            OLD,
            fake_gpus.CUDA_BUILD,
            "0 (Tesla K80): GPU 0 (Tesla K80) has compute capability 3.7, this TensorFlow needs "
            "6.0; leave it out with --visible_gpus, or use the CPU with --devices=cpu",
        ),
        (
            LOST,
            fake_gpus.CUDA_BUILD,
            "0 (unreadable): the driver cannot read GPU 0; see nvidia-smi, and restart the machine",
        ),
    ],
)
def test_a_run_never_goes_to_the_cpu_in_silence(install, card, build, says, number):
    install(card, build=build)
    asked = f"--num_towers={number}, but " if number else ""
    assert refusal(number) == (
        f"{asked}TensorFlow sees 0 GPUs, the driver has {says}, or try it out on CPU devices with "
        f"--devices=cpu --num_towers={number or 1}"
    )
    assert tower_devices(number, "cpu") == CPUS[: number or 1]
    assert f"TensorFlow sees {', '.join(CPUS)}, the driver has {says}; type" in (
        refusal(devices="/gpu:0")
    )


@pytest.mark.parametrize("value", ["", "-1", "none", '""', '"-1"'])
def test_gpus_that_are_hidden_on_purpose(install, monkeypatch, value):
    install(A100, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert tower_devices() == ["/cpu:0"]
    assert tower_devices(2) == ["/cpu:0", "/cpu:1"]


def test_gpus_that_are_hidden_by_the_flag(install):
    install(A100, SMALL)
    devices_module.configure(visible_gpus="none")
    assert tower_devices(2) == ["/cpu:0", "/cpu:1"]


@pytest.mark.parametrize("value", ["7", "0,0", "gpu:0"])
def test_gpus_that_are_hidden_by_mistake(install, monkeypatch, value):
    install(Card(listed=False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert refusal() == (
        "TensorFlow sees 0 GPUs, the driver has 0 (NVIDIA A100); "
        f"CUDA_VISIBLE_DEVICES={value} hides all of them: type unset CUDA_VISIBLE_DEVICES, "
        "or try it out on CPU devices with --devices=cpu --num_towers=1"
    )


def test_quotes_hide_nothing(install, monkeypatch):
    install(A100, A100, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", '"0,2"')
    assert tower_devices() == ["/gpu:0", "/gpu:1"]


# ---------------------------------------------------------------------------- Hidden, split


def test_hidden_gpus_do_not_count(gpus):
    gpus(1, hidden=2)
    assert tower_devices() == ["/gpu:0"]
    assert "TensorFlow sees 1 GPU (" in refusal(2)
    assert "there is no /gpu:1" in refusal(devices="/gpu:1")


def test_with_every_gpu_hidden_the_cpu_is_used(gpus, install):
    gpus(0, hidden=2)
    assert tower_devices(2) == ["/cpu:0", "/cpu:1"]
    machine = install(A100, SMALL)
    machine.hidden = [0]
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
        f"--devices=/gpu:0,/gpu:2: there is no /gpu:2; TensorFlow sees /gpu:0, /gpu:1, "
        f"{', '.join(CPUS)}, the driver has 0 (NVIDIA A100), 1 (NVIDIA A100); "
        "type --devices=/gpu:0, or --devices=cpu"
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


def test_one_named_device_is_not_two_towers(gpus):
    gpus(3)
    assert "--num_towers=2 and --devices=/gpu:2 disagree: 1 device is named;" in (
        refusal(2, "/gpu:2")
    )


def test_the_number_is_not_negative():
    assert refusal(-1) == "--num_towers=-1: 0 or more is needed"


# ---------------------------------------------------------------------------- What is reported


def test_each_towers_device_is_described(install, monkeypatch):
    install(A100, FULL, Card("NVIDIA L4", (8, 9), total_mib=23034, free_mib=20000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert describe() == [
        Device(
            tower=0,
            device="/gpu:0",
            name="NVIDIA L4",
            pci_bus_id=fake_gpus.bus_id(2),
            driver_index=2,
            total_bytes=23034 * MIB,
            free_bytes=20000 * MIB,
        ),
        Device(
            tower=1,
            device="/gpu:1",
            name="NVIDIA A100",
            pci_bus_id=fake_gpus.bus_id(0),
            driver_index=0,
            total_bytes=40960 * MIB,
            free_bytes=40536 * MIB,
        ),
    ]
    [cpu, gpu] = describe(["/cpu:1", "/gpu:1"])
    assert cpu == Device(0, "/cpu:1", CPU)
    assert (gpu.tower, gpu.driver_index) == (1, 0)


def test_devices_in_words(install):
    install(A100)
    [gpu] = describe()
    assert str(gpu) == "/gpu:0 -> NVIDIA A100, GPU 0 of the driver, PCI bus id 00000000:15:00.0"
    assert str(Device(0, "/gpu:1", None)) == "/gpu:1 -> unknown"
    assert str(Device(0, "/cpu:0", CPU)) == f"/cpu:0 -> {CPU}"


def test_without_gpus_the_cpu_is_described():
    assert describe() == [Device(0, "/cpu:0", CPU)]


def test_the_table(install):
    machine = install(SMALL, A100, Card(silent=frozenset(["nvmlDeviceGetMemoryInfo"])))
    machine.split(0, 1000, 2000)
    assert report(["/cpu:0", *tower_devices()]) == [
        "devices",
        "  tower  device  PCI bus id        driver  total MiB  free MiB  name",
        f"  0      /cpu:0  -                 -       -          -         {CPU}",
        "  1      /gpu:0  00000000:25:00.0  1       40960      40536     NVIDIA A100",
        "  2      /gpu:1  00000000:25:00.0  1       40960      40536     NVIDIA A100",
        "  3      /gpu:2  00000000:35:00.0  2       -          -         NVIDIA A100",
        "memory      /gpu:0 1000 MiB, growth off",
        "memory      /gpu:1 2000 MiB, growth off",
        "memory      /gpu:2 40036 MiB, growth off",
    ]


def test_a_gpu_that_the_program_hides_is_not_described_for_another(install):
    machine = install(A100, A100)
    machine.hidden = [0]
    assert [(gpu.device, gpu.driver_index) for gpu in describe()] == [("/gpu:0", 1)]


def test_a_report_of_what_was_not_kept_is_an_error(install):
    machine = install(A100)
    devices_module.configure(gpu_memory_limit_mib=512)
    machine.memory = {"/gpu:0": 511 * MIB}
    with pytest.raises(RunError, match="may take 511 MiB, 512 were asked for"):
        report(["/gpu:0"])


def test_a_whole_program_on_two_of_four_gpus(install):
    machine = install(A100, FULL, A100, SMALL)
    devices_module.configure(visible_gpus="0,2", per_process_gpu_memory_fraction=0.25)
    assert machine.started_at is None
    assert tower_devices(2) == ["/gpu:0", "/gpu:1"]
    lines = report(tower_devices(2))
    assert [line.split()[3] for line in lines[2:4]] == ["0", "2"]
    assert lines[4:] == [
        "memory      /gpu:0 10240 MiB, growth off",
        "memory      /gpu:1 10240 MiB, growth off",
    ]
