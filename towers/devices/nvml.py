"""Reads the driver's view of the GPUs by NVML; without a driver there are none.

GPUs are numbered in PCI bus order, as in nvidia-smi. Values that the driver does not report are
None.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pynvml

MIB = 2**20
# The second, which is no NVMLError, is raised for functions that an older driver lacks.
_ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)


@dataclasses.dataclass(frozen=True)
class DriverGpu:
    """One GPU as the driver sees it."""

    index: int | None  # in PCI bus order, from 0
    uuid: str | None = None  # "GPU-..."
    pci_bus_id: str | None = None  # "00000000:65:00.0"
    name: str | None = None  # of the product
    compute_capability: tuple[int, int] | None = None
    total_bytes: int | None = None  # of its memory
    free_bytes: int | None = None
    processes: tuple[str, ...] = ()  # that hold its memory: "python (pid 17, 3000 MiB)"
    cuda_bytes: int | None = None  # CUDA's total: without the driver's reserve

    def __str__(self) -> str:
        """Return "0 (NVIDIA A100)"."""
        return f"{self.key} ({self.name or 'unreadable'})"

    @property
    def key(self) -> str:
        """The name in CUDA_VISIBLE_DEVICES and --visible_gpus: "0"."""
        return str(self.index)

    @property
    def full(self) -> bool:
        """True if less than 5 % of its memory is free: another process uses it."""
        return None not in (self.free_bytes, self.total_bytes) and (
            self.free_bytes < self.total_bytes / 20
        )


def gpus() -> list[DriverGpu]:
    """Return the GPUs of this machine, [] without a driver."""
    count = (_ask(pynvml.nvmlDeviceGetCount) or 0) if _is_there() else 0
    return [_read(index) for index in range(count)]


def driver_version() -> str | None:
    """Return the driver's version, None without a driver."""
    return _ask(pynvml.nvmlSystemGetDriverVersion) if _is_there() else None


def cuda_version() -> tuple[int, int]:
    """Return the newest CUDA of the driver's libraries, (12, 5); (0, 0) if it is not known.

    A package of newer libraries (cuda-compat) makes it newer than that of the driver's version.
    """
    number = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2) if _is_there() else None
    return divmod((number or 0) // 10, 100)


def _is_there() -> bool:
    try:
        pynvml.nvmlInit()  # stays open: it counts its calls
    except _ERRORS:
        return False
    return True


def _read(index: int) -> DriverGpu:
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:  # it has fallen off the bus
        return DriverGpu(index)
    # An older driver has only the first version of this call, without the reserve.
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory = memory or _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    mode, _ = _ask(pynvml.nvmlDeviceGetMigMode, handle) or (None, None)
    if mode == pynvml.NVML_DEVICE_MIG_ENABLE:
        memory = None  # a process has that of a part
    bus = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    processes = []
    for process in _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        name = _ask(pynvml.nvmlSystemGetProcessName, process.pid) or "?"
        used = f", {process.usedGpuMemory // MIB} MiB" if process.usedGpuMemory else ""
        processes.append(f"{name} (pid {process.pid}{used})")
    return DriverGpu(
        index,
        uuid=_ask(pynvml.nvmlDeviceGetUUID, handle),
        pci_bus_id=bus and bus.busId,
        name=_ask(pynvml.nvmlDeviceGetName, handle),
        compute_capability=capability and tuple(capability),
        total_bytes=memory and int(memory.total),
        free_bytes=memory and int(memory.free),
        processes=tuple(processes),
        cuda_bytes=memory and int(memory.total - getattr(memory, "reserved", 0)),
    )


def _ask(function: Callable, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (*_ERRORS, UnicodeDecodeError):  # not supported, no permission, GPU lost; odd names
        return None
