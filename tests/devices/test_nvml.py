"""The driver's view, with a made-up driver."""

import pynvml
import pytest

from tests.fake_gpus import A100, FULL, LOST, SMALL, SPLIT, Card, bus_id, part_uuid, uuid
from tests.fake_gpus import install_driver as install
from towers.devices import nvml
from towers.devices.nvml import MIB, DriverGpu

pytestmark = pytest.mark.unit


def test_no_driver_no_gpus(monkeypatch):
    install(monkeypatch, A100, there=False)
    assert nvml.gpus() == []
    assert nvml.driver_version() is None


def test_all_that_the_driver_tells(monkeypatch):
    still_open = install(monkeypatch, A100, FULL)
    first, second = nvml.gpus()
    assert first == DriverGpu(
        index=0,
        uuid=uuid(0),
        pci_bus_id=bus_id(0),
        name="NVIDIA A100",
        compute_capability=(8, 0),
        total_bytes=40960 * MIB,
        free_bytes=40536 * MIB,
        cuda_bytes=40960 * MIB,
    )
    assert second.processes == ("python (pid 17, 39000 MiB)", "blender (pid 18)")
    assert nvml.driver_version() == "555.42.02"
    assert not still_open


def test_a_lost_gpu_keeps_its_number(monkeypatch):
    install(monkeypatch, LOST, SMALL)
    assert nvml.gpus()[0] == DriverGpu(0)
    assert [str(gpu) for gpu in nvml.gpus()] == ["0 (unreadable)", "1 (NVIDIA T400)"]


def test_what_is_not_supported_is_none(monkeypatch):
    names = "MemoryInfo PciInfo CudaComputeCapability UUID Name ComputeRunningProcesses".split()
    silent = frozenset(f"nvmlDeviceGet{name}" for name in names)
    install(monkeypatch, Card(silent=silent, holders=((5, "x", 1),)))
    assert nvml.gpus() == [DriverGpu(0)] and not nvml.gpus()[0].full


def test_a_process_whose_name_cannot_be_read(monkeypatch):
    install(monkeypatch, Card(holders=((7, "", 3),)))
    assert nvml.gpus()[0].processes == ("? (pid 7, 3 MiB)",)
    monkeypatch.setattr(nvml.pynvml, "nvmlSystemGetProcessName", lambda pid: b"\xff".decode())
    assert nvml.gpus()[0].processes == ("? (pid 7, 3 MiB)",)


def test_a_gpu_that_mig_splits_is_there_by_its_parts(monkeypatch):
    install(monkeypatch, SMALL, SPLIT)
    _, first, second = nvml.gpus()
    assert (first.index, first.mig, first.key) == (1, 0, part_uuid(1, 0))
    assert (second.index, second.mig, second.name) == (1, 1, "NVIDIA A100 MIG 1g.5gb")
    assert second.other_names == (f"MIG-{uuid(1)}/8/0", uuid(1))
    assert (second.total_bytes, second.cuda_bytes) == (4864 * MIB, 4800 * MIB)
    # What a part does not tell is its GPU's.
    assert (second.compute_capability, second.pci_bus_id) == ((8, 0), bus_id(1))
    with nvml.opened():
        values = nvml.sample(second)
    assert values["memory_used_mib"] == 64 and values["power_watts"] == 250.5
    assert "utilisation_percent" not in values


def sample(monkeypatch, card):
    install(monkeypatch, card)
    with nvml.opened():
        return nvml.sample(DriverGpu(0))


@pytest.mark.parametrize(
    "function, missing",
    [
        ("MemoryInfo", {"memory_used_mib"}),
        ("UtilizationRates", {"utilisation_percent", "memory_utilisation_percent"}),
        ("PowerUsage", {"power_watts"}),
        ("Temperature", {"temperature_celsius"}),
        ("ClockInfo", {"sm_clock_mhz", "memory_clock_mhz"}),
    ],
)
def test_each_value_of_a_gpu_may_be_missing(monkeypatch, function, missing):
    told = sample(monkeypatch, Card(silent=frozenset([f"nvmlDeviceGet{function}"])))
    assert set(sample(monkeypatch, A100)) - set(told) == missing


@pytest.mark.parametrize("free, full", [(0, True), (4, True), (5, False), (100, False)])
def test_full_is_less_than_a_twentieth(free, full):
    assert DriverGpu(0, total_bytes=100, free_bytes=free).full is full


def test_a_driver_that_lacks_a_function_tells_the_rest(monkeypatch):
    """The library then raises an error that is no NVMLError."""
    install(monkeypatch, A100)

    def missing(*_):
        raise pynvml.NVMLLibraryMismatchError("use a versioned function")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", missing)
    assert [str(gpu) for gpu in nvml.gpus()] == ["0 (NVIDIA A100)"]
    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert nvml.gpus() == [] and nvml.driver_version() is None
