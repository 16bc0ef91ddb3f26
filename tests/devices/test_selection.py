"""Which devices towers get. The process has four CPU devices; GPUs are made up."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tests import fake_gpus
from tests.fake_gpus import A100, FULL, LOST, MIB, OLD, SMALL, SPLIT, Card
from towers.builder import kinds
from towers.devices.selection import Device, describe, report, tower_devices
from towers.errors import InputError

CPUS = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
CPU = f"CPU, {os.cpu_count()} cores shared by all its devices"
NO_CUDA = fake_gpus.CUDA_BUILD | {"is_cuda_build": False}


def refusal(*args, **kwargs):
    with pytest.raises(InputError) as error:
        tower_devices(*args, **kwargs)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


# ---------------------------------------------------------------------------- Without GPUs


def test_without_gpus():
    assert tower_devices() == ["/cpu:0"]
    for number in (1, 2, 3, 4):
        assert tower_devices(number) == tower_devices(number, "cpu") == CPUS[:number]
    assert tower_devices(devices="cpu") == ["/cpu:0"]
    assert tower_devices(devices="/cpu:2,/cpu:0") == ["/cpu:2", "/cpu:0"]
    assert describe() == [Device(0, "/cpu:0", CPU)]


def test_cpus_that_stand_in_for_gpus_are_others_than_the_host():
    with kinds.cpus_for_gpus():
        assert tower_devices() == ["/cpu:1"]
        assert tower_devices(3) == tower_devices(3, "cpu") == CPUS[1:]


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("num_towers", "said", "found"),
    [(1, "", 0), (2, "", -(-CORES // 2)), (CORES + 1, "", 1), (CORES + 1, "env", 0), (2, "5", 5)],
)
def test_towers_on_cpus_have_their_share_of_the_cores_unless_threads_are_said(
    num_towers, said, found
):
    program = f"""if 1:
        import tensorflow as tf
        from towers.options.run import Options
        from towers.training.run import tower_devices
        if "{said}".isdigit():
            tf.config.threading.set_intra_op_parallelism_threads(int("{said}"))
        tower_devices(Options(num_towers={num_towers}, devices="cpu"))
        tf.constant(0)
        print(tf.config.threading.get_intra_op_parallelism_threads())
    """
    environment = os.environ | ({"TF_NUM_INTRAOP_THREADS": "7"} if said == "env" else {})
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split()[-1] == str(found)


@pytest.mark.parametrize("args", [(5,), (5, "cpu"), (0, "/cpu:0,/cpu:4")])
def test_too_late_for_more_cpus(args):
    tf.constant(0)
    message = refusal(*args)
    assert message.startswith("5 CPU devices are needed, but TensorFlow has started with 4")
    assert "call towers.devices.tower_devices(5) before" in message


@pytest.mark.parametrize(
    "args, given, missing",
    [((0, "/gpu:0"), "/gpu:0", 0), ((2, ["/cpu:0", "GPU:1"]), "/cpu:0,GPU:1", 1)],
)
def test_a_gpu_that_is_not_there(args, given, missing):
    assert refusal(*args) == (
        f"--devices={given}: there is no /gpu:{missing}; TensorFlow sees {', '.join(CPUS)}, no "
        "NVIDIA driver answers here; type --devices=/cpu:0, or --devices=cpu"
    )


# ---------------------------------------------------------------------------- With GPUs


def test_all_gpus_or_the_first(install):
    install(A100, A100, A100)
    assert tower_devices() == ["/gpu:0", "/gpu:1", "/gpu:2"]
    assert tower_devices(1) == ["/gpu:0"]
    assert tower_devices(2, "") == ["/gpu:0", "/gpu:1"]
    assert tower_devices(3, []) == ["/gpu:0", "/gpu:1", "/gpu:2"]


@pytest.mark.parametrize(
    "number, found, cards",
    [
        (1, "1 GPU (/gpu:0)", "0 (NVIDIA A100)"),
        (2, "2 GPUs (/gpu:0, /gpu:1)", "0 (NVIDIA A100), 1 (NVIDIA A100)"),
    ],
)
def test_more_towers_than_gpus_are_refused_never_reduced(install, number, found, cards):
    install(*[A100] * number)
    assert refusal(4) == (
        f"--num_towers=4, but TensorFlow sees {found}, the driver has {cards}; ask for at most "
        f"{number}, or try it out on CPU devices with --devices=cpu --num_towers=4"
    )


def test_without_nvml_nothing_is_said_of_the_driver(install):
    install(A100, driver=False)
    assert "sees 1 GPU (/gpu:0); ask for at most 1" in refusal(2)
    assert describe() == [Device(0, "/gpu:0", "NVIDIA A100")]


def test_hidden_and_skipped_gpus_are_named(install, monkeypatch):
    install(A100, SMALL)
    assert tower_devices() == ["/gpu:0"]
    assert "TF_MIN_GPU_MULTIPROCESSOR_COUNT=1" in refusal(2)
    install(A100, SMALL, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert "2 (NVIDIA A100); CUDA_VISIBLE_DEVICES=2 hides the rest; ask for at most 1" in refusal(2)


# ------------------------------------------------- The driver has GPUs, and TensorFlow sees none


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    "card, build, says",
    [
        (Card(listed=False), fake_gpus.CUDA_BUILD, "0 (NVIDIA A100): CUDA 12.5.1 or cuDNN 9 is no"),
        (Card(listed=False), NO_CUDA, "0 (NVIDIA A100): this TensorFlow was built without CUDA; "),
        (OLD, fake_gpus.CUDA_BUILD, "0 (Tesla K80): GPU 0 (Tesla K80) has compute capability 3.7"),
        (LOST, fake_gpus.CUDA_BUILD, "0 (unreadable): the driver cannot read GPU 0; see nvidia-"),
    ],
)
def test_a_run_never_goes_to_the_cpu_in_silence(install, card, build, says, number):
    install(card, build=build)
    asked, message = f"--num_towers={number}, but " if number else "", refusal(number)
    assert message.startswith(f"{asked}TensorFlow sees 0 GPUs, the driver has {says}")
    assert message.endswith(
        f", or try it out on CPU devices with --devices=cpu --num_towers={number or 1}"
    )
    assert tower_devices(number, "cpu") == CPUS[: number or 1]
    assert f"{', '.join(CPUS)}, the driver has {says}" in refusal(devices="/gpu:0")


@pytest.mark.parametrize("value", ["", "-1", "none", '""', '"-1"'])
def test_gpus_that_are_hidden_on_purpose(install, monkeypatch, value):
    install(A100, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert tower_devices() == ["/cpu:0"]
    assert tower_devices(2) == ["/cpu:0", "/cpu:1"]


@pytest.mark.parametrize("value", ["7", "0,0", "gpu:0"])
def test_gpus_that_are_hidden_by_mistake(install, monkeypatch, value):
    install(Card(listed=False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert f"CUDA_VISIBLE_DEVICES={value} hides all of them: type unset CUDA_VIS" in refusal()


# ---------------------------------------------------------------------------- Hidden, split


def test_gpus_that_the_program_hides_do_not_count(install):
    machine = install(A100, A100, A100)
    machine.hidden = [0, 1]
    assert tower_devices() == ["/gpu:0"]
    assert [gpu.driver_index for gpu in describe()] == [2]
    assert "TensorFlow sees 1 GPU (" in refusal(2)
    assert "there is no /gpu:1" in refusal(devices="/gpu:1")
    machine.hidden = [0, 1, 2]
    assert tower_devices(2) == ["/cpu:0", "/cpu:1"]


def test_the_parts_of_a_split_gpu_count_each(install):
    install(A100, A100).split(0, 1024, 1024, 1024)
    assert tower_devices() == ["/gpu:0", "/gpu:1", "/gpu:2", "/gpu:3"]
    assert tower_devices(devices="/gpu:3") == ["/gpu:3"]
    assert "TensorFlow sees 4 GPUs" in refusal(5)


@pytest.mark.parametrize(
    "devices",
    ["/gpu:0,/gpu:2", "gpu:0,gpu:2", "/GPU:0,/device:GPU:2", "device:gpu:00, Gpu:2 "]
    + [["/gpu:0", "/gpu:2"], ("GPU:0", "/device:GPU:2")],
)
@pytest.mark.parametrize("num_towers", [0, 2])
def test_named_gpus_in_every_spelling(install, devices, num_towers):
    install(A100, A100, A100)
    assert tower_devices(num_towers, devices) == ["/gpu:0", "/gpu:2"]


def test_names_in_any_order_and_mixed(install):
    install(A100, A100)
    assert tower_devices(devices="/gpu:1,/gpu:0") == ["/gpu:1", "/gpu:0"]
    assert tower_devices(devices="/gpu:0,/cpu:1") == ["/gpu:0", "/cpu:1"]
    assert f"there is no /gpu:2; TensorFlow sees /gpu:0, /gpu:1, {', '.join(CPUS)}" in (
        refusal(devices="/gpu:0,/gpu:2")
    )


@pytest.mark.parametrize("name", ["cpu", "CPU", " cpu ", ["cpu"]])
def test_cpus_in_place_of_gpus(install, name):
    install(A100, A100)
    assert tower_devices(3, name) == CPUS[:3]
    assert tower_devices(devices=name) == ["/cpu:0"]


def test_a_process_sees_one_part_of_a_gpu_that_mig_splits(install):
    install(SPLIT, A100)
    assert tower_devices() == ["/gpu:0"]
    assert [(d.driver_index, d.name, d.total_bytes) for d in describe()] == [
        (0, "NVIDIA A100 MIG 1g.5gb", 4864 * MIB)
    ]
    assert "CUDA shows a process one part of a GPU that MIG splits, and nothing" in refusal(2)


# ---------------------------------------------------------------------------- What is malformed


@pytest.mark.parametrize(
    "devices, name",
    [
        ("/gpu:0,,/gpu:1", ""),
        ("/gpu:x", "/gpu:x"),
        ("/tpu:0", "/tpu:0"),
        ("0,1", "0"),
        ("cpu,/gpu:0", "cpu"),
        ("/cpu:10000000000", "/cpu:10000000000"),
    ],
)
def test_what_is_no_device(install, devices, name):
    install(A100, A100)
    message = refusal(devices=devices)
    assert message.startswith(f"--devices={devices}: {name!r} is not a device; name them as /gpu:0")


@pytest.mark.parametrize(
    "args, says",
    [
        ((0, "/gpu:0,/gpu:1,/device:GPU:0"), ": /gpu:0 is named twice"),
        ((1, "/gpu:0,/gpu:2"), "--num_towers=1 and --devices=/gpu:0,/gpu:2 disagree"),
        ((2, "/gpu:2"), "--num_towers=2 and --devices=/gpu:2 disagree, which names 1"),
        ((-1,), "--num_towers=-1: 0 or more is needed"),
    ],
)
def test_the_number_and_the_names_agree(install, args, says):
    install(A100, A100, A100)
    assert says in refusal(*args)


# ---------------------------------------------------------------------------- What is reported


def test_each_towers_device_is_described(install, monkeypatch):
    install(A100, FULL, Card("NVIDIA L4", (8, 9), total_mib=23034, free_mib=20000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    first, second = describe()
    where = fake_gpus.bus_id(2), 2, 23034 * MIB, 20000 * MIB
    assert first == Device(0, "/gpu:0", "NVIDIA L4", *where)
    assert str(first) == f"/gpu:0 -> NVIDIA L4, GPU 2 of the driver, PCI bus id {where[0]}"
    where = fake_gpus.bus_id(0), 0, 40960 * MIB, 40536 * MIB
    assert second == Device(1, "/gpu:1", "NVIDIA A100", *where)
    cpu, gpu = describe(["/cpu:1", "/gpu:1"])
    assert cpu == Device(0, "/cpu:1", CPU) and str(cpu) == f"/cpu:1 -> {CPU}"
    assert (gpu.tower, gpu.driver_index) == (1, 0)
    assert str(Device(0, "/gpu:1", None)) == "/gpu:1 -> unknown"


def test_the_table(install):
    machine = install(SMALL, A100, Card(silent=frozenset(["nvmlDeviceGetMemoryInfo"])))
    machine.split(0, 1000, 2000)
    lines = report(["/cpu:0", *tower_devices()])
    assert lines[0] == "devices" and [line.split() for line in lines[2:6]] == [
        ["0", "/cpu:0", "-", "-", "-", "-", *CPU.split()],
        ["1", "/gpu:0", "00000000:25:00.0", "1", "40960", "40536", "NVIDIA", "A100"],
        ["2", "/gpu:1", "00000000:25:00.0", "1", "40960", "40536", "NVIDIA", "A100"],
        ["3", "/gpu:2", "00000000:35:00.0", "2", "-", "-", "NVIDIA", "A100"],
    ]
    assert lines[6:9] == [
        "memory      /gpu:0 1000 MiB, growth off",
        "memory      /gpu:1 2000 MiB, growth off",
        "memory      /gpu:2 40036 MiB, growth off",
    ]
