"""The driver's view of the GPUs, by NVML; without a driver there are simply none.

TensorFlow shows what it uses; NVML shows what there is: names, memory, who holds it. GPUs are
numbered in PCI bus order, as nvidia-smi numbers them. What a driver does not tell is None.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class DriverGpu:
    """One GPU as the driver sees it."""

    index: int  # in PCI bus order, from 0
    uuid: str | None = None  # "GPU-..."
    pci_bus_id: str | None = None  # "00000000:65:00.0"
    name: str | None = None  # of the product
    compute_capability: tuple[int, int] | None = None
    total_bytes: int | None = None  # of its memory
    free_bytes: int | None = None
    processes: tuple[str, ...] = ()  # that hold its memory: "python (pid 17, 3000 MiB)"

    def __str__(self) -> str:
        """Return "0 (NVIDIA A100)"."""
        return f"{self.index} ({self.name or 'unreadable'})"

    @property
    def full(self) -> bool:
        """Whether less than a twentieth of its memory is free: somebody else uses it."""
        return None not in (self.free_bytes, self.total_bytes) and (
            self.free_bytes < self.total_bytes / 20
        )


def gpus() -> list[DriverGpu]:
    """Return the GPUs of this machine, [] where there is no driver."""
    with opened() as there:
        return [_gpu(i) for i in range(_ask(pynvml.nvmlDeviceGetCount) or 0)] if there else []


def sample(index: int) -> dict[str, float]:
    """Return how the GPU `index` is doing, without what it does not tell; NVML must be `opened`."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return {}
    busy = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    milliwatts = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    values = {
        "utilisation_percent": busy and busy.gpu,
        "memory_utilisation_percent": busy and busy.memory,
        "memory_used_mib": memory and (memory.total - memory.free) / MIB,
        "power_watts": None if milliwatts is None else milliwatts / 1000,
        "temperature_celsius": _ask(
            pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "sm_clock_mhz": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def driver_version() -> str | None:
    """Return the driver's version, None where there is no driver."""
    with opened() as there:
        return _ask(pynvml.nvmlSystemGetDriverVersion) if there else None


@contextlib.contextmanager
def opened() -> Iterator[bool]:
    """Tell whether there is a driver, and keep NVML open meanwhile."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> DriverGpu:
    """Ask the driver about one GPU; one that has fallen off the bus answers nothing."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return DriverGpu(index)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    bus = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    processes = []
    for process in _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        name = _ask(pynvml.nvmlSystemGetProcessName, process.pid) or "?"
        used = f", {process.usedGpuMemory // MIB} MiB" if process.usedGpuMemory else ""
        processes.append(f"{name} (pid {process.pid}{used})")
    return DriverGpu(
        index=index,
        uuid=_ask(pynvml.nvmlDeviceGetUUID, handle),
        pci_bus_id=bus and bus.busId,
        name=_ask(pynvml.nvmlDeviceGetName, handle),
        compute_capability=capability and tuple(capability),
        total_bytes=memory and int(memory.total),
        free_bytes=memory and int(memory.free),
        processes=tuple(processes),
    )


def _ask(function: Callable, *arguments: Any) -> Any:
    """Call NVML; None where it does not answer: not supported, no permission, GPU lost."""
    try:
        return function(*arguments)
    except (pynvml.NVMLError, UnicodeDecodeError):  # a process may bear any name
        return None
