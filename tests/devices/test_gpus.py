"""Set, then read back: what a process sees and takes of GPUs, on made-up machines."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tests.fake_gpus import A100, FULL, LOST, MIB, OLD, PART, SMALL, SPLIT, Card, part_uuid
from towers.devices import gpus
from towers.errors import InputError, RunError

LIMITED = Card(total_mib=10000, free_mib=9900)
SILENT = Card(silent=frozenset(["nvmlDeviceGetMemoryInfo"]))
THREADS = "threads     TF_GPU_THREAD_MODE=gpu_private"
TF32_ON = (
    "precision   TF32 is on: float32 products are of 10 bits of their factors; "
    "--tf32=false for all 23"
)
NO_GPU = "memory      no GPU here: --{} has nothing to act on"


def refusal(**options):
    with pytest.raises(InputError) as error:
        gpus.configure(**options)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


# ---------------------------------------------------------------------------- Which are seen


def test_nothing_is_asked_for(install):
    machine = install(A100, SMALL)
    gpus.configure()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert machine.growth == [None] and machine.limits_mib == [None]
    assert not machine.started
    assert gpus.read_back() == ["memory      /gpu:0 40036 MiB, growth off", TF32_ON]


def test_visible_gpus_hides_the_others(install):
    install(A100, FULL, A100)
    gpus.configure(visible_gpus="0,2")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"
    listed = tf.config.list_physical_devices("GPU")
    assert [gpu.index for gpu in gpus.driver_gpus(listed)] == [0, 2]


def test_no_gpu_is_seen(install):
    machine = install(A100)
    gpus.configure(visible_gpus="none", allow_growth=True)
    assert machine.physical() == []
    assert gpus.read_back() == [NO_GPU.format("allow_growth=True")]


@pytest.mark.parametrize(
    "cards, asked, says",
    [
        ((A100, SMALL, A100), "1,2", "does not list GPU 1 (NVIDIA T400): it leaves out GPUs with"),
        ((A100, OLD), "1", "does not list GPU 1 (Tesla K80): GPU 1 (Tesla K80) has compute capab"),
        ((A100, LOST), "0,1", "does not list GPU 1 (unreadable): the driver cannot read GPU 1; se"),
    ],
    ids=["skipped", "too old", "lost"],
)
def test_a_gpu_that_cannot_be_had_is_refused_by_number_only(install, cards, asked, says):
    install(*cards)
    gpus.configure()
    install(*cards)
    assert refusal(visible_gpus=asked).startswith(f"--visible_gpus={asked}: TensorFlow {says}")


def test_the_missing_driver(install):
    install(driver=False)
    assert refusal(visible_gpus="0").startswith("--visible_gpus=0: there is no GPU 0; no NVIDIA")
    gpus.configure(visible_gpus="none")
    gpus.configure(per_process_gpu_memory_fraction=0.4)
    assert gpus.read_back() == [NO_GPU.format("per_process_gpu_memory_fraction=0.4")]


# ---------------------------------------------------------------------------- Memory


def test_a_fraction_is_of_each_gpus_total(install):
    machine = install(LIMITED, Card(total_mib=501, free_mib=500), A100)
    gpus.configure(per_process_gpu_memory_fraction=0.5)
    assert machine.limits_mib == [[5000], [250], [20480]]
    assert gpus.read_back() == [
        "memory      /gpu:0 5000 MiB, growth off",
        "memory      /gpu:1 250 MiB, growth off",
        "memory      /gpu:2 20480 MiB, growth off",
        THREADS,
        TF32_ON,
    ]


def test_a_fraction_is_of_what_cuda_has_where_the_driver_tells(install):
    machine = install(dataclasses.replace(A100, reserved_mib=424))
    gpus.configure(per_process_gpu_memory_fraction=1)
    assert machine.limits_mib == [[40536]]


def test_a_part_has_its_own_memory_and_name(install):
    second = part_uuid(0, 1)
    machine = install(SPLIT)
    gpus.configure(visible_gpus=second, per_process_gpu_memory_fraction=0.5)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == second
    assert machine.limits_mib == [[2400]]
    install(SPLIT)
    assert f"=0: 0 may be {part_uuid(0, 0)} (NVIDIA A100 MIG 1g.5gb), {second} (NV" in (
        refusal(visible_gpus="0")
    )
    both = f"{part_uuid(0, 0)},{second}"
    assert "one part of a GPU that MIG splits" in refusal(visible_gpus=both)
    full = dataclasses.replace(PART, free_mib=10)
    install(dataclasses.replace(SPLIT, parts=(full, PART)))
    assert refusal().endswith(f"choose others with --visible_gpus={second}")


@pytest.mark.parametrize(
    "card, options, limit",
    [
        (LIMITED, {"per_process_gpu_memory_fraction": 1}, 10000),
        (LIMITED, {"gpu_memory_limit_mib": 10000}, 10000),
        (SILENT, {"gpu_memory_limit_mib": 4096}, 4096),
    ],
)
def test_a_limit(install, card, options, limit):
    machine = install(card, A100)
    gpus.configure(**options)
    assert machine.limits_mib[0] == [limit] and machine.growth == [None, None]


@pytest.mark.parametrize(
    "card, options, says",
    [
        (LIMITED, {"gpu_memory_limit_mib": 10001}, "of 10000 MiB free, 10001 are needed: ask for"),
        (SILENT, {"per_process_gpu_memory_fraction": 0.5}, "not tell here: type --gpu_memory_limi"),
    ],
    ids=["above the total", "of an unknown total"],
)
def test_a_limit_that_cannot_be_had(install, card, options, says):
    machine = install(A100, card)
    assert says in refusal(**options)
    assert machine.limits_mib == [None, None]  # nothing is set by halves


# ---------------------------------------------------------------------------- A full GPU


def test_a_full_gpu_names_who_fills_it_and_another(install, monkeypatch):
    install(A100, FULL, A100, FULL)
    assert refusal() == (
        "GPU 1 (NVIDIA A100) has 1000 of 40960 MiB free: python (pid 17, 39000 MiB), "
        "blender (pid 18) holds the rest; choose others with --visible_gpus=0,2"
    )
    install(dataclasses.replace(FULL, holders=()))
    assert refusal().endswith(
        "MiB free: another process holds the rest; choose others with --visible_gpus=none"
    )
    install(A100, FULL, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert refusal(visible_gpus="1").endswith("choose others with --visible_gpus=2")


def test_a_full_gpu_is_no_matter_if_it_is_hidden_or_skipped_or_ones_own(install):
    install(A100, FULL)
    gpus.configure(visible_gpus="0")
    install(A100, dataclasses.replace(FULL, name="T400", listed=False))
    gpus.configure()
    machine = install(FULL)
    machine.physical()
    machine.started = True
    gpus.configure()


def test_too_little_room_for_the_limit(install):
    shared = Card(total_mib=10000, free_mib=4000, holders=((17, "python", 6000),))
    machine = install(shared, A100)
    message = refusal(per_process_gpu_memory_fraction=0.5)
    assert "4000 of 10000 MiB free, 5000 are needed: python (pid 17, 6000 MiB)" in message
    gpus.configure(gpu_memory_limit_mib=4000)
    assert machine.limits_mib == [[4000], [4000]]


# ---------------------------------------------------------------------------- In time


def test_memory_options_after_the_start(install):
    machine = install(A100)
    machine.physical()
    machine.started = True
    message = refusal(gpu_memory_limit_mib=512)
    assert message.startswith("--gpu_memory_limit_mib=512 comes too late, TensorFlow has started")
    assert "towers.devices.configure() before" in message
    assert machine.limits_mib == [None]


def test_visible_gpus_after_listing(install):
    machine = install(A100, A100)
    machine.physical()
    message = refusal(visible_gpus="1", allow_growth=True)
    assert message.startswith("--visible_gpus=1, --allow_growth=True comes too late, ")
    assert "has listed its devices" in message
    assert "comes too late" in refusal(visible_gpus="none")
    gpus.configure(allow_growth=True)  # but this is in time
    assert machine.growth == [True, True]


def test_hiding_what_is_not_there_is_never_too_late(install):
    machine = install()
    machine.physical()
    machine.started = True
    gpus.configure(visible_gpus="none")


def test_the_same_again_is_fine_at_any_time(install):
    machine = install(A100, A100)
    for _ in range(2):
        gpus.configure(visible_gpus="1", gpu_memory_limit_mib=512)
    gpus.read_back()
    assert machine.started
    gpus.configure()
    gpus.configure(visible_gpus="1")
    assert gpus.read_back() == ["memory      /gpu:0 512 MiB, growth off", TF32_ON]
    assert "comes too late" in refusal(gpu_memory_limit_mib=513)


def test_what_came_first_is_kept(install):
    machine = install(A100)
    gpus.configure(gpu_memory_limit_mib=512)
    machine.split(0, 256, 256)  # the program's own wish
    gpus.configure()
    assert machine.limits_mib == [[256, 256]]
    assert "exclude each other" in refusal(allow_growth=True)


def test_soft_placement_may_change_at_any_time(install):
    machine = install()
    machine.physical()
    machine.started = True
    gpus.configure(allow_soft_placement=False)
    assert machine.soft_placement is False
    assert gpus.read_back() == ["placement   soft placement is off"]
    gpus.configure()
    assert machine.soft_placement is True
    assert gpus.read_back() == []


@pytest.mark.parametrize("cards, mode", [([A100], None), ([A100, A100], "gpu_private")])
def test_each_of_several_gpus_has_threads_of_its_own(install, cards, mode):
    install(*cards)
    gpus.configure()
    assert os.environ.get("TF_GPU_THREAD_MODE") == mode


def test_the_users_own_thread_mode_and_one_that_would_come_too_late(install, monkeypatch):
    machine = install(A100, A100)
    machine.physical()
    machine.started = True
    gpus.configure()
    assert "TF_GPU_THREAD_MODE" not in os.environ
    install(A100, A100)
    monkeypatch.setenv("TF_GPU_THREAD_MODE", "global")
    gpus.configure()
    assert "threads     TF_GPU_THREAD_MODE=global" in gpus.read_back()


@pytest.fixture
def tf32():
    enable = tf.config.experimental.enable_tensor_float_32_execution
    yield enable
    enable(True)


def test_tf32_is_told_and_switched(install, tf32, monkeypatch):
    install(A100)
    gpus.configure(tf32=False)
    assert not tf.config.experimental.tensor_float_32_execution_enabled()
    off = "precision   TF32 is off: float32 products are of all 23 bits of their factors"
    assert gpus.precision() == [off]
    gpus.configure()
    assert gpus.precision() == [TF32_ON]
    tf32(False)  # by the program: it stays
    gpus.configure()
    assert gpus.precision() == [off]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert gpus.precision() == ["precision   TF32 is off, by NVIDIA_TF32_OVERRIDE=0"]
    install(dataclasses.replace(SMALL, listed=True))  # of 7.5
    assert gpus.precision() == []
    install()
    assert gpus.precision() == []


PROGRAM = """
import tensorflow as tf
from towers import devices, tf_private

assert not tf_private.has_listed_devices(), "importing lists devices"
devices.configure(gpu_memory_limit_mib=512)
devices.describe()
assert tf_private.has_listed_devices() and not tf_private.has_started(), "this starts nothing"
print(devices.tower_devices(2))
for options in dict(gpu_memory_limit_mib=600), dict(visible_gpus="1"):
    try:
        devices.configure(**options)
    except ValueError as error:
        print(str(error).split(":")[0])
print(devices.report(["/cpu:1"])[-1])
"""


@pytest.mark.slow
def test_a_program_with_the_real_tensorflow():
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": '"0,1"'}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines() == [
        "['/cpu:0', '/cpu:1']",
        "--gpu_memory_limit_mib=600 comes too late, TensorFlow has started",
        "--visible_gpus=1 comes too late, TensorFlow has listed its devices",
        NO_GPU.format("gpu_memory_limit_mib=512"),
    ], done.stderr


# ---------------------------------------------------------------------------- Read back


def test_a_limit_that_is_not_kept_is_an_error(install):
    machine = install(A100, A100)
    gpus.configure(gpu_memory_limit_mib=512)
    machine.memory = {"/gpu:1": 700 * MIB}
    with pytest.raises(RunError, match="/gpu:1 may take 700 MiB, 512 were asked for$"):
        gpus.read_back()


def test_the_parts_of_a_split_gpu_each_have_their_line(install):
    machine = install(A100, LIMITED)
    gpus.configure()
    machine.split(0, 1000, 2000)
    assert [line.split()[1:3] for line in gpus.read_back()[:3]] == [
        ["/gpu:0", "1000"],
        ["/gpu:1", "2000"],
        ["/gpu:2", "9400"],
    ]


def test_a_gpu_that_the_program_hides_is_not_taken_for_another(install):
    machine = install(A100, LIMITED)
    gpus.configure(per_process_gpu_memory_fraction=0.5)
    machine.hidden = [0]
    assert gpus.read_back() == ["memory      /gpu:0 5000 MiB, growth off", TF32_ON]
    visible = tf.config.get_visible_devices("GPU")
    assert [gpu.index for gpu in gpus.driver_gpus(visible)] == [1]


# ---------------------------------------------------------------------------- Trying them out


def found_on(*errors, copies=()):
    """What a probe of so many GPUs finds; each has its list of errors."""
    devices = {f"/gpu:{i}": {"errors": list(found), "gflops": {}} for i, found in enumerate(errors)}
    return {"gpus": [], "build": {}, "devices": devices, "copies": dict(copies)}


def test_each_gpu_is_tried_out_before_it_is_used(install, monkeypatch):
    asked = []
    found = found_on([], [], copies={"/gpu:0 to /gpu:2": None})
    monkeypatch.setattr(gpus.probe, "run_probe", lambda devices: asked.append(devices) or found)
    install()
    gpus.try_out()  # there is none
    machine = install(A100, A100, A100)
    machine.hidden = [1]
    gpus.try_out()
    machine.started = True
    gpus.try_out()  # its memory is this process' by now
    assert asked == [["/gpu:0", "/gpu:2"]]


@pytest.mark.parametrize(
    "found, message",
    [
        ("was ended by SIGABRT: bad ptx", "the GPUs cannot be used: the probe was ended by SIGAB"),
        (
            found_on([], ["matmul: off", "convolution: off"]),
            "/gpu:1: matmul: off (2 faults in all)",
        ),
        (found_on([], [], copies={"/gpu:0 to /gpu:1": "3 words"}), "copy from /gpu:0 to /gpu:1: 3"),
    ],
)
def test_a_gpu_that_does_not_compute_is_told_in_one_line(install, monkeypatch, found, message):
    install(A100, A100)
    monkeypatch.setattr(gpus.probe, "run_probe", lambda devices: found)
    with pytest.raises(RunError) as error:
        gpus.try_out()
    assert str(error.value).startswith(message) and str(error.value).endswith("type towers doctor")
