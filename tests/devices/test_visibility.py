"""Which GPUs CUDA shows, and which of them TensorFlow took: CUDA's rules, in plain values."""

import pytest

from tests.fake_gpus import CUDA_BUILD, uuid
from towers.devices import visibility
from towers.devices.nvml import DriverGpu
from towers.errors import InputError
from towers.options.gpu import GpuOptions

DRIVER = [DriverGpu(i, uuid=uuid(i), name="A100", compute_capability=(8, 0)) for i in range(4)]
SMALL = DriverGpu(1, name="T400", compute_capability=(7, 5))
OLD = DriverGpu(1, name="K80", compute_capability=(3, 7))


def visible(value, driver=DRIVER):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    return [gpu.index for gpu in visibility.visible_in(environ, driver)]


# ---------------------------------------------------------------------------- CUDA's rules


@pytest.mark.parametrize(
    "value, indices",
    [
        (None, [0, 1, 2, 3]),
        ("1", [1]),
        ("3,0", [3, 0]),
        (" 2 , 1 ", [2, 1]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", [0]),
        ("0,9,1", [0]),
        ("1gpu2,2ampere", [1, 2]),
        ("0;1", [0]),
        ("0,1,0", []),
        ("MIG-0a5b0c3d", []),
    ],
)
def test_numbers(value, indices):
    assert visible(value) == indices


@pytest.mark.parametrize(
    "value, indices",
    [
        (uuid(2), [2]),
        (f"{uuid(3)},{uuid(0)}", [3, 0]),
        ("GPU-2a5", [2]),
        ("GPU-", []),  # the beginning of four
        ("GPU-9", []),
        (f"{uuid(1)},GPU-9,{uuid(2)}", [1]),
        (f"{uuid(1)},GPU-1", []),
        (uuid(1)[4:], []),
    ],
)
def test_uuids(value, indices):
    if value[0] in "123":  # without GPU- it is a number
        indices = [int(value[0])]
    assert visible(value) == indices


PARTS = [
    DRIVER[0],
    *(DriverGpu(1, f"MIG-{n}", mig=n, other_names=(f"MIG-{uuid(1)}/{n}/0", uuid(1))) for n in "ab"),
]


@pytest.mark.parametrize(
    "value, key",
    [
        (None, "MIG-a"),
        ("0", "0"),
        ("1", "MIG-a"),
        ("0,1", "MIG-a"),
        ("MIG-b", "MIG-b"),
        ("MIG-b,MIG-a", "MIG-b"),
        (f"MIG-{uuid(1)}/b/0", "MIG-b"),
        (uuid(1), "MIG-a"),
        ("MIG-", None),
    ],
)
def test_a_process_sees_the_first_part_and_nothing_beside_it(value, key):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [gpu.key for gpu in visibility.visible_in(environ, PARTS)] == [key] * bool(key)


def test_to_cuda_quotes_are_no_number_so_they_are_taken_off():
    assert visible('"0,1"') == []
    for value in ('"0,1"', "'0,1'", ' "0,1" ', "0,1 "):
        environ = {"CUDA_VISIBLE_DEVICES": value}
        visibility.tidy(environ)
        assert environ == {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    "value, on_purpose",
    [("", True), ("-1", True), ("None", True), ("NoDevFiles", True), ("7", False), ("0,0", False)],
)
def test_what_hides_all_gpus_on_purpose(value, on_purpose):
    assert visibility.hides_all({"CUDA_VISIBLE_DEVICES": value}) is on_purpose
    assert not visibility.hides_all({})


# ---------------------------------------------------------------------------- --visible_gpus


@pytest.mark.parametrize(
    "asked, before, after",
    [
        ("", None, None),
        ("", '"2"', "2"),
        ("0,2", None, "0,2"),
        ("2,0", None, "2,0"),
        ("2, 0", "0,1,2", "2,0"),
        ("none", None, "-1"),
        ("none", "1", "-1"),
        ("1", f"{uuid(3)},{uuid(1)}", "1"),
        ("1", '"0,1"', "1"),
        (uuid(2), None, "2"),
        ("GPU-2,0", None, "2,0"),
    ],
)
def test_others_are_hidden(asked, before, after):
    environ = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    visibility.set_visible(GpuOptions(visible_gpus=asked), DRIVER, environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == after
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_numbers_are_the_drivers_whatever_the_order_was():
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    visibility.set_visible(GpuOptions(visible_gpus="1"), DRIVER, environ)
    assert environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    "asked, driver, environ, says",
    [
        ("0", [], {}, "there is no GPU 0; no NVIDIA driver answers here: leave the flag out"),
        ("0,7", DRIVER[:2], {}, "there is no GPU 7; the driver has 0 (A100), 1 (A100): type --vis"),
        (
            "1",
            DRIVER,
            {"CUDA_VISIBLE_DEVICES": "0,2"},
            "GPU 1 is hidden by CUDA_VISIBLE_DEVICES=0,2, which leaves 0,2: type unset CUDA_VISIB",
        ),
        ("1", DRIVER, {"CUDA_VISIBLE_DEVICES": ""}, "which leaves none:"),
        ("GPU-9", DRIVER[:1], {}, "there is no GPU GPU-9; the driver has 0 (A100): type --visible"),
        ("1", PARTS, {}, "1 may be MIG-a (unreadable), MIG-b (unreadable): type one of them"),
        ("0,MIG-b", PARTS, {}, "and nothing beside it: type --visible_gpus=MIG-b"),
    ],
)
def test_a_gpu_that_cannot_be_seen(asked, driver, environ, says):
    before = dict(environ)
    with pytest.raises(InputError, match=f"^--visible_gpus={asked}: ") as error:
        visibility.set_visible(GpuOptions(visible_gpus=asked), driver, environ)
    assert says in str(error.value)
    assert environ == before | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


# ---------------------------------------------------------------------------- TensorFlow's choice


def seen(*gpus):
    return [(gpu.name, gpu.compute_capability) for gpu in gpus]


def test_each_of_tensorflows_gpus_has_the_drivers():
    big = DRIVER[0]
    visible_gpus = [big, SMALL, DRIVER[2]]
    assert visibility.match(seen(*visible_gpus), visible_gpus) == visible_gpus
    assert visibility.match(seen(big, DRIVER[2]), visible_gpus) == [big, DRIVER[2]]
    assert visibility.skipped(seen(big, DRIVER[2]), visible_gpus) == [SMALL]
    assert visibility.skipped([], visible_gpus) == visible_gpus
    assert visibility.skipped(seen(*visible_gpus), visible_gpus) == []


def test_one_gpu_is_the_drivers_one_whatever_its_name():
    assert visibility.match([("Orin", (8, 7))], [DriverGpu(0, name="Orin (nvgpu)")])[0].index == 0


def test_a_session_sees_only_the_part_that_cuda_shows():
    options = GpuOptions(visible_gpus="MIG-b")
    assert visibility.visible_positions(options, PARTS, {"CUDA_VISIBLE_DEVICES": "MIG-b"}) == [0]
    with pytest.raises(InputError, match="here MIG-a .*: type export CUDA_VISIBLE_DEVICES=MIG-b$"):
        visibility.visible_positions(options, PARTS, {})


def test_gpus_of_one_name_differ_by_capability():
    newer = DriverGpu(0, name="A100", compute_capability=(9, 0))
    assert visibility.match(seen(DRIVER[1]), [newer, DRIVER[1]]) == [DRIVER[1]]


def test_more_gpus_than_the_driver_shows_are_unknown():
    assert visibility.match(seen(SMALL, DRIVER[0]), [DRIVER[0]]) == [None, DRIVER[0]]
    assert visibility.match(seen(SMALL), []) == [None]


def test_what_either_side_does_not_tell_is_no_difference():
    unknown = DriverGpu(0, name="A100")
    assert visibility.match(seen(DRIVER[0]), [unknown]) == [unknown]
    assert visibility.match([(None, None)], [SMALL]) == [SMALL]
    assert visibility.match([("A100", None)], [SMALL, DRIVER[2]]) == [DRIVER[2]]
    lost = DriverGpu(0)
    assert visibility.match(seen(DRIVER[1]), [lost, DRIVER[1]]) == [DRIVER[1]]


# ---------------------------------------------------------------------------- Why some are skipped

INSTALL = "type pip install 'tensorflow[and-cuda]>=2.21,<2.22'"


@pytest.mark.parametrize(
    "missing, build, cause, remedy",
    [
        (DRIVER, {"is_cuda_build": False}, "this TensorFlow was built without CUDA", INSTALL),
        ([DRIVER[0], DriverGpu(1)], CUDA_BUILD, "the driver cannot read GPU 1", "see nvidia-smi"),
        (
            [SMALL, OLD],
            CUDA_BUILD,
            "GPU 1 (K80) has compute capability 3.7, this TensorFlow needs 6.0",
            "leave it out with --visible_gpus",
        ),
        (
            DRIVER,
            CUDA_BUILD | {"cuda_compute_capabilities": ["sm_90a", "compute_120f"]},
            "GPU 0 (A100) has compute capability 8.0, this TensorFlow needs 9.0",
            "leave it out with --visible_gpus",
        ),
    ],
)
def test_why_gpus_are_left_out(missing, build, cause, remedy):
    found = visibility.why_skipped(missing, 1, build)
    assert found[0] == cause and found[1].startswith(remedy)


@pytest.mark.parametrize("build", [CUDA_BUILD, CUDA_BUILD | {"cuda_compute_capabilities": []}])
def test_why_gpus_of_a_good_capability_are_left_out(build):
    oldest = DriverGpu(0, name="P100", compute_capability=(6, 0))
    cause, remedy = visibility.why_skipped([oldest], 0, build)
    assert cause.startswith("CUDA 12.5.1 or cuDNN 9 is not found") and remedy == INSTALL
    cause, remedy = visibility.why_skipped([oldest], 1, build)
    assert "far fewer multiprocessors" in cause and "TF_MIN_GPU_MULTIPROCESSOR_COUNT=1" in remedy
