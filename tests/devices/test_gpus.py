"""Set, then read back: what a process sees and takes of GPUs, on made-up machines."""

import dataclasses
import os
import re

import pytest
import tensorflow as tf

from tests import fake_gpus
from tests.fake_gpus import A100, FULL, LOST, MIB, OLD, SMALL, Card
from towers.devices import gpus
from towers.errors import InputError, RunError

LIMITED = Card(total_mib=10000, free_mib=9900)


def refusal(**options):
    with pytest.raises(InputError) as error:
        gpus.configure(**options)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def install(monkeypatch):
    return lambda *cards, **details: fake_gpus.install(monkeypatch, *cards, **details)


# ---------------------------------------------------------------------------- Which are seen


def test_nothing_is_asked_for(install):
    machine = install(A100, SMALL)
    gpus.configure()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert machine.growth == [None] and machine.limits_mib == [None]
    assert machine.started_at is None
    assert gpus.read_back() == ["memory      /gpu:0 40036 MiB, growth off"]


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
    assert gpus.read_back() == [
        "memory      no GPU here: --allow_growth=True has nothing to act on"
    ]


def test_quotes_are_taken_off_before_cuda_reads_them(install, monkeypatch):
    machine = install(A100, A100, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", '"0,2"')
    gpus.configure()
    assert len(machine.physical()) == 2


def test_a_gpu_that_tensorflow_skips_is_refused_by_number_only(install):
    install(A100, SMALL, A100)
    gpus.configure()
    install(A100, SMALL, A100)
    assert refusal(visible_gpus="1,2") == (
        "--visible_gpus=1,2: TensorFlow does not list GPU 1 (NVIDIA T400): it leaves out GPUs with "
        "far fewer multiprocessors than the largest; "
        "type export TF_MIN_GPU_MULTIPROCESSOR_COUNT=1, or leave them out with --visible_gpus"
    )


def test_a_gpu_too_old_is_refused(install):
    install(A100, OLD)
    assert refusal(visible_gpus="1") == (
        "--visible_gpus=1: TensorFlow does not list GPU 1 (Tesla K80): GPU 1 (Tesla K80) has "
        "compute capability 3.7, this TensorFlow needs 6.0; "
        "leave it out with --visible_gpus, or use the CPU with --devices=cpu"
    )


def test_a_lost_gpu_is_refused(install):
    install(A100, LOST)
    assert refusal(visible_gpus="0,1") == (
        "--visible_gpus=0,1: TensorFlow does not list GPU 1 (unreadable): "
        "the driver cannot read GPU 1; see nvidia-smi, and restart the machine"
    )


def test_cuda_that_another_library_started_shows_more(install):
    machine = install(A100, A100)
    machine.extra = 2
    assert refusal(visible_gpus="1") == (
        "--visible_gpus=1: TensorFlow lists 3 GPUs all the same: CUDA had started before, by "
        "another library; call towers.devices.configure() first, or type "
        "export CUDA_VISIBLE_DEVICES=1"
    )
    machine = install(A100)
    machine.extra = 1
    assert "lists 1 GPU all the same" in refusal(visible_gpus="none")


def test_the_missing_driver(install):
    install(driver=False)
    assert refusal(visible_gpus="0").startswith("--visible_gpus=0: there is no GPU 0: no NVIDIA")
    gpus.configure(visible_gpus="none")
    gpus.configure(per_process_gpu_memory_fraction=0.4)
    assert gpus.read_back() == [
        "memory      no GPU here: --per_process_gpu_memory_fraction=0.4 has nothing to act on"
    ]


# ---------------------------------------------------------------------------- Memory


def test_a_fraction_is_of_each_gpus_total(install):
    machine = install(LIMITED, Card(total_mib=501, free_mib=500), A100)
    gpus.configure(per_process_gpu_memory_fraction=0.5)
    assert machine.limits_mib == [[5000], [250], [20480]]
    assert gpus.read_back() == [
        "memory      /gpu:0 5000 MiB, growth off",
        "memory      /gpu:1 250 MiB, growth off",
        "memory      /gpu:2 20480 MiB, growth off",
    ]


def test_all_of_the_memory(install):
    machine = install(LIMITED)
    gpus.configure(per_process_gpu_memory_fraction=1)
    assert machine.limits_mib == [[10000]]


def test_a_limit_in_mib(install):
    machine = install(LIMITED, A100)
    gpus.configure(gpu_memory_limit_mib=10000)
    assert machine.limits_mib == [[10000], [10000]]
    assert machine.growth == [None, None]


def test_a_limit_above_the_total(install):
    machine = install(A100, LIMITED)
    assert refusal(gpu_memory_limit_mib=10001) == (
        "--gpu_memory_limit_mib=10001: GPU 1 (NVIDIA A100) has 10000 MiB; "
        "type --gpu_memory_limit_mib=10000 or less"
    )
    assert machine.limits_mib == [None, None]  # nothing is set by halves


def test_a_fraction_that_is_nothing(install):
    install(LIMITED)
    assert refusal(per_process_gpu_memory_fraction=0.00009) == (
        "--per_process_gpu_memory_fraction=9e-05 is less than 1 of the 10000 MiB of GPU 0 (NVIDIA "
        "A100); type --per_process_gpu_memory_fraction=0.4, or what you need"
    )


def test_a_fraction_of_what_the_driver_does_not_tell(install):
    machine = install(Card(silent=frozenset(["nvmlDeviceGetMemoryInfo"])))
    assert refusal(per_process_gpu_memory_fraction=0.5) == (
        "--per_process_gpu_memory_fraction=0.5 is of the total memory, which the driver (NVML) "
        "does not tell here: type --gpu_memory_limit_mib=4096, or what you need"
    )
    gpus.configure(gpu_memory_limit_mib=4096)
    assert machine.limits_mib == [[4096]]


def test_growth_is_set_on_all(install):
    machine = install(A100, LIMITED, SMALL, A100)
    gpus.configure(allow_growth=True)
    assert machine.growth == [True, True, True]
    assert gpus.read_back()[1] == "memory      /gpu:1 9400 MiB, growth on"


# ---------------------------------------------------------------------------- A full GPU


def test_a_full_gpu_names_who_fills_it_and_another(install):
    install(A100, FULL, A100, FULL)
    assert refusal() == (
        "GPU 1 (NVIDIA A100) has 1000 of 40960 MiB free: python (pid 17, 39000 MiB), "
        "blender (pid 18) holds the rest; choose others with --visible_gpus=0,2"
    )


def test_the_gpu_to_choose_is_not_hidden(install, monkeypatch):
    install(A100, FULL, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert refusal(visible_gpus="1").endswith("choose others with --visible_gpus=2")


def test_the_only_gpu_is_full(install):
    install(dataclasses.replace(FULL, holders=()))
    assert refusal().endswith(
        "MiB free: another process holds the rest; choose others with --visible_gpus=none"
    )


def test_a_full_gpu_is_no_matter_if_it_is_hidden_or_skipped(install):
    install(A100, FULL)
    gpus.configure(visible_gpus="0")
    install(A100, dataclasses.replace(FULL, name="T400", listed=False))
    gpus.configure()


def test_too_little_room_for_the_limit(install):
    holder = ((17, "python", 6000),)
    shared = Card(total_mib=10000, free_mib=4000, holders=holder)
    machine = install(shared, A100)
    assert refusal(per_process_gpu_memory_fraction=0.5) == (
        "GPU 0 (NVIDIA A100) has 4000 of 10000 MiB free, 5000 are needed: "
        "python (pid 17, 6000 MiB) holds the rest; choose others with --visible_gpus=1"
    )
    gpus.configure(gpu_memory_limit_mib=4000)
    assert machine.limits_mib == [[4000], [4000]]


def test_what_this_process_has_taken_itself_is_not_held_against_it(install):
    machine = install(FULL)
    machine.list_gpus()
    machine.started_at = "program.py:4"
    gpus.configure()


# ---------------------------------------------------------------------------- In time


def test_memory_options_after_the_start(install):
    machine = install(A100)
    machine.list_gpus()
    machine.started_at = "program.py:4 (x = tf.zeros([2]))"
    assert refusal(visible_gpus="", gpu_memory_limit_mib=512) == (
        "--gpu_memory_limit_mib=512 comes too late, TensorFlow started at program.py:4 "
        "(x = tf.zeros([2])): call towers.devices.configure() before that line"
    )
    assert machine.limits_mib == [None]


def test_visible_gpus_after_listing(install):
    machine = install(A100, A100)
    machine.list_gpus("program.py:3")
    assert refusal(visible_gpus="1", allow_growth=True) == (
        "--visible_gpus=1, --allow_growth=True comes too late, TensorFlow listed the devices at "
        "program.py:3: call towers.devices.configure() before that line"
    )
    assert "comes too late" in refusal(visible_gpus="none")
    gpus.configure(allow_growth=True)  # but this is in time
    assert machine.growth == [True, True]


def test_hiding_what_is_not_there_is_never_too_late(install):
    machine = install()
    machine.list_gpus()
    machine.started_at = "program.py:4"
    gpus.configure(visible_gpus="none")


def test_the_same_again_is_fine_at_any_time(install):
    machine = install(A100, A100)
    gpus.configure(visible_gpus="1", gpu_memory_limit_mib=512)
    gpus.configure(visible_gpus="1", gpu_memory_limit_mib=512)
    gpus.configure(gpu_memory_limit_mib=512)
    gpus.read_back()
    assert machine.started_at
    gpus.configure()
    gpus.configure(visible_gpus="1")
    assert gpus.read_back() == ["memory      /gpu:0 512 MiB, growth off"]
    assert "comes too late" in refusal(gpu_memory_limit_mib=513)


def test_what_came_first_is_kept(install):
    machine = install(A100)
    gpus.configure(gpu_memory_limit_mib=512)
    machine.split(0, 256, 256)  # the program's own wish
    gpus.configure()
    assert machine.limits_mib == [[256, 256]]
    assert refusal(allow_growth=True) == (
        "--gpu_memory_limit_mib and --allow_growth exclude each other in TensorFlow: "
        "give one of them"
    )


def test_soft_placement_may_change_at_any_time(install):
    machine = install()
    machine.list_gpus()
    machine.started_at = "program.py:4"
    gpus.configure(allow_soft_placement=False)
    assert machine.soft_placement is False
    assert gpus.read_back() == ["placement   soft placement is off"]
    gpus.configure()
    assert machine.soft_placement is True
    assert gpus.read_back() == []


def test_a_refused_call_changes_nothing(install):
    machine = install(FULL)
    refusal(allow_soft_placement=False, allow_growth=True)
    assert machine.soft_placement and machine.growth == [None]
    assert "nothing to act on" not in str(gpus.read_back())


# ---------------------------------------------------------------------------- Read back


def test_a_limit_that_is_not_kept_is_an_error(install):
    machine = install(A100, A100)
    gpus.configure(gpu_memory_limit_mib=512)
    machine.memory = {"/gpu:1": 700 * MIB}
    with pytest.raises(RunError) as error:
        gpus.read_back()
    assert str(error.value) == (
        "TensorFlow did not take the options: /gpu:1 may take 700 MiB, 512 were asked for"
    )


@pytest.mark.parametrize("forced, growth", [("true", "on"), ("false", None), ("1", "on")])
def test_growth_is_what_the_environment_leaves_of_it(install, monkeypatch, forced, growth):
    install(A100)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", forced)
    gpus.configure(allow_growth=True)
    if growth:
        assert gpus.read_back() == [f"memory      /gpu:0 40036 MiB, growth {growth}"]
    else:
        with pytest.raises(RunError, match="GPU:0 does not grow: see TF_FORCE_GPU_ALLOW_GROWTH$"):
            gpus.read_back()


def test_growth_that_the_environment_forces_goes_with_a_limit(install, monkeypatch):
    install(A100)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    gpus.configure(gpu_memory_limit_mib=512)
    assert gpus.read_back() == ["memory      /gpu:0 512 MiB, growth on"]


def test_growth_that_the_program_set_itself_is_no_difference(install):
    machine = install(A100, A100)
    gpus.configure(visible_gpus="1")
    machine.set_growth(machine.physical()[0], True)
    assert gpus.read_back() == ["memory      /gpu:0 40036 MiB, growth on"]


def test_growth_that_is_off_in_spite_of_the_option(install):
    machine = install(A100)
    gpus.configure(allow_growth=True)
    machine.set_growth(machine.physical()[0], False)
    with pytest.raises(RunError, match="does not grow"):
        gpus.read_back()


def test_soft_placement_that_somebody_turned_on_again(install):
    machine = install()
    gpus.configure(allow_soft_placement=False)
    machine.soft_placement = True
    with pytest.raises(RunError, match="^TensorFlow did not take the options: soft placement is"):
        gpus.read_back()


def test_the_parts_of_a_split_gpu_each_have_their_line(install):
    machine = install(A100, LIMITED)
    gpus.configure()
    machine.split(0, 1000, 2000)
    assert gpus.read_back() == [
        "memory      /gpu:0 1000 MiB, growth off",
        "memory      /gpu:1 2000 MiB, growth off",
        "memory      /gpu:2 9400 MiB, growth off",
    ]


def test_a_gpu_that_the_program_hides_is_not_taken_for_another(install):
    machine = install(A100, dataclasses.replace(LIMITED))
    gpus.configure(per_process_gpu_memory_fraction=0.5)
    machine.hidden = [0]
    assert gpus.read_back() == ["memory      /gpu:0 5000 MiB, growth off"]
    visible = tf.config.get_visible_devices("GPU")
    assert [gpu.index for gpu in gpus.driver_gpus(visible)] == [1]


# ---------------------------------------------------------------------------- The environment


def test_a_change_after_listing_is_told(install, monkeypatch):
    machine = install(A100, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpus.configure()
    assert not re.search("warning", str(gpus.read_back()))
    line = f"came too late: TensorFlow had listed its devices by then, at {machine.listed_at}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus.read_back()[-1] == f"warning     CUDA_VISIBLE_DEVICES=1 {line}"
    gpus.configure()
    assert gpus.read_back()[-1] == f"warning     CUDA_VISIBLE_DEVICES=1 {line}"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus.read_back()[-1] == f"warning     unset CUDA_VISIBLE_DEVICES {line}"


def test_after_listing_the_environment_is_left_alone(install, monkeypatch):
    machine = install(A100, LIMITED)
    gpus.configure(visible_gpus="1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpus.configure(per_process_gpu_memory_fraction=0.5)
    assert machine.limits_mib == [[5000]]
    assert gpus.read_back()[-1].startswith("warning     CUDA_VISIBLE_DEVICES=0 came too late")


def test_after_listing_the_gpus_are_those_that_cuda_showed_then(install, monkeypatch):
    machine = install(LIMITED, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    machine.list_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus.configure(per_process_gpu_memory_fraction=0.5)
    assert machine.limits_mib == [[5000]]


def test_without_configure_there_is_no_warning(install, monkeypatch):
    install(A100, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus.read_back() == ["memory      /gpu:0 40036 MiB, growth off"]


def test_gpus_that_tensorflow_does_not_list(install):
    install(A100, SMALL)
    driver = gpus.nvml.gpus()
    assert [gpu.index for gpu in gpus.missing_gpus(gpus.visible_gpus(driver))] == [1]


# ---------------------------------------------------------------------------- Trying them out


def found_on(*errors, copies=()):
    """What a probe of so many GPUs finds; each has its list of errors."""
    devices = {f"/gpu:{i}": {"errors": list(found), "gflops": {}} for i, found in enumerate(errors)}
    return {"gpus": [], "build": {}, "devices": devices, "copies": dict(copies)}


def test_each_gpu_is_tried_out_before_it_is_used(monkeypatch):
    machine = fake_gpus.install(monkeypatch, A100, A100, A100)
    asked = []

    def run_probe(devices):
        asked.append(devices)
        return found_on([], [], copies={"/gpu:0 to /gpu:2": None})

    monkeypatch.setattr(gpus.probe, "run_probe", run_probe)
    machine.hidden = [1]
    gpus.try_out()
    assert asked == [["/gpu:0", "/gpu:2"]]
    machine.started_at = "program.py:1"
    gpus.try_out()  # its memory is this process' by now
    assert len(asked) == 1


@pytest.mark.parametrize(
    "found, message",
    [
        (
            "was ended by SIGABRT: bad ptx",
            "the GPUs cannot be used: the probe was ended by SIGABRT",
        ),
        (
            found_on([], ["matmul: off", "convolution: off"]),
            "/gpu:1: matmul: off, and 1 more; leave",
        ),
        (
            found_on([], [], copies={"/gpu:0 to /gpu:1": "3 words"}),
            "copy from /gpu:0 to /gpu:1: 3 w",
        ),
    ],
)
def test_a_gpu_that_does_not_compute_is_told_in_one_line(monkeypatch, found, message):
    fake_gpus.install(monkeypatch, A100, A100)
    monkeypatch.setattr(gpus.probe, "run_probe", lambda devices: found)
    with pytest.raises(RunError) as error:
        gpus.try_out()
    assert str(error.value).startswith(message) and str(error.value).endswith("type towers doctor")


def test_without_a_gpu_nothing_is_tried(monkeypatch):
    fake_gpus.install(monkeypatch)
    monkeypatch.setattr(gpus.probe, "run_probe", None)
    gpus.try_out()
