"""Which GPUs CUDA shows, and which of them TensorFlow took: CUDA's rules, in plain values."""

import pytest

from tests.fake_gpus import uuid
from towers.devices import cuda_visible_devices
from towers.devices.cuda_visible_devices import visible_in
from towers.devices.nvml import DriverGpu
from towers.errors import InputError
from towers.options.parts import GpuOptions

pytestmark = pytest.mark.unit

DRIVER = [DriverGpu(i, uuid=uuid(i), name="A100", compute_capability=(8, 0)) for i in range(4)]
SMALL = DriverGpu(1, name="T400", compute_capability=(7, 5))


def variable(value):
    return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}


# ---------------------------------------------------------------------------- CUDA's rules


@pytest.mark.parametrize(
    "value, indices",
    [
        (None, [0, 1, 2, 3]), ("1", [1]), ("3,0", [3, 0]), (" 2 , 1 ", [2, 1]),
        ("", []), ("-1", []), ("NoDevFiles", []), ("0,-1,1", [0]), ("0,9,1", [0]),
        (uuid(2), [2]), (f"{uuid(3)},{uuid(0)}", [3, 0]), ("GPU-2a5", [2]), ("GPU-9", []),
        (f"{uuid(1)},GPU-9,{uuid(2)}", [1]),
        ("GPU-", []),  # the beginning of four
    ],
)  # fmt: skip
def test_numbers_and_uuids(value, indices):
    assert [gpu.index for gpu in visible_in(variable(value), DRIVER)] == indices


# ---------------------------------------------------------------------------- --visible_gpus


@pytest.mark.parametrize(
    "asked, before, after",
    [
        ("", None, None), ("", ' "0,1" ', "0,1"), ("2, 0", "0,1,2", "2,0"), ("none", None, "-1"),
        ("1", f"{uuid(3)},{uuid(1)}", "1"), ("1", '"0,1"', "1"), ("GPU-2,0", None, "2,0"),
    ],
)  # fmt: skip
def test_others_are_hidden_and_quotes_are_taken_off(asked, before, after):
    for order in {}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"} if asked else {}:
        environ = variable(before) | order
        cuda_visible_devices.set_visible(GpuOptions(visible_gpus=asked), DRIVER, environ)
        assert environ == variable(after) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    "asked, driver, value, remedy",
    [
        ("0", [], None, "see towers doctor"),
        ("0,7", DRIVER[:2], None, "choose from --visible_gpus=0,1"),
        ("1", DRIVER, "0,2", "with CUDA_VISIBLE_DEVICES=0,2; choose from --visible_gpus=0,2"),
        ("1", DRIVER, "", "see towers doctor"),
        ("GPU-9", DRIVER[:1], None, "choose from --visible_gpus=0"),
    ],
)
def test_a_gpu_that_cannot_be_seen(asked, driver, value, remedy):
    environ = variable(value)
    with pytest.raises(InputError, match=f"^--visible_gpus={asked}: .*{remedy}$"):
        cuda_visible_devices.set_visible(GpuOptions(visible_gpus=asked), driver, environ)
    assert environ == variable(value) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
