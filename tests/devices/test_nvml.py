"""The driver's view, with a made-up driver."""

import re
from pathlib import Path

import pynvml
import pytest

from tests.fake_gpus import A100, LOST, SMALL, SPLIT, Card
from tests.fake_gpus import install_driver as install
from towers.devices import nvml
from towers.devices.nvml import DriverGpu

pytestmark = pytest.mark.unit


def test_what_is_not_supported_is_none_and_a_lost_gpu_keeps_its_number(monkeypatch):
    names = "MemoryInfo PciInfo CudaComputeCapability UUID Name ComputeRunningProcesses".split()
    silent = frozenset(f"nvmlDeviceGet{name}" for name in names)
    install(monkeypatch, Card(silent=silent, holders=((5, "x", 1),)), LOST, SMALL)
    assert nvml.gpus()[:2] == [DriverGpu(0), DriverGpu(1)] and not nvml.gpus()[0].full
    assert [str(gpu) for gpu in nvml.gpus()[1:]] == ["1 (unreadable)", "2 (NVIDIA T400)"]


SOURCE = Path(nvml.__file__).read_text()
LACKING = [
    pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
    pynvml.NVMLLibraryMismatchError("use a versioned function"),  # no NVMLError
]


@pytest.mark.parametrize("error", LACKING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", sorted(set(re.findall(r"pynvml\.(nvml[A-Z][A-Za-z]+)\b", SOURCE))))
def test_a_driver_that_lacks_any_function_tells_the_rest(monkeypatch, name, error):
    install(monkeypatch, SPLIT, A100)

    def missing(*_):
        raise error

    monkeypatch.setattr(pynvml, name, missing)
    found = nvml.gpus()
    nvml.driver_version()
    assert len(found) == {"nvmlInit": 0, "nvmlDeviceGetCount": 0}.get(name, len(found))
