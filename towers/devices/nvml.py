"""Reads the driver's view of the GPUs by NVML; without a driver there are none.

GPUs are numbered in PCI bus order, as in nvidia-smi. A GPU that MIG splits is listed as its parts.
Values that the driver does not report, as for a laptop, a virtual GPU or a part, are None.
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
    """One GPU, or one part of a GPU that MIG splits, as the driver sees it."""

    index: int  # of the GPU, in PCI bus order, from 0
    uuid: str | None = None  # "GPU-..."; of a part "MIG-..."
    pci_bus_id: str | None = None  # "00000000:65:00.0"
    name: str | None = None  # of the product
    compute_capability: tuple[int, int] | None = None
    total_bytes: int | None = None  # of its memory
    free_bytes: int | None = None
    processes: tuple[str, ...] = ()  # that hold its memory: "python (pid 17, 3000 MiB)"
    cuda_bytes: int | None = None  # CUDA's total: without the driver's reserve
    mig: int | None = None  # number of a part on its GPU
    other_names: tuple[str, ...] = ()  # of a part: its older name, and the UUID of its GPU

    def __str__(self) -> str:
        """Return "0 (NVIDIA A100)"."""
        return f"{self.key} ({self.name or 'unreadable'})"

    @property
    def key(self) -> str:
        """The name in CUDA_VISIBLE_DEVICES and --visible_gpus: "0", of a part "MIG-..."."""
        return str(self.index) if self.mig is None else self.uuid or str(self.index)

    @property
    def full(self) -> bool:
        """True if less than 5 % of its memory is free: another process uses it."""
        return None not in (self.free_bytes, self.total_bytes) and (
            self.free_bytes < self.total_bytes / 20
        )


def gpus() -> list[DriverGpu]:
    """Return the GPUs of this machine, [] without a driver."""
    count = (_ask(pynvml.nvmlDeviceGetCount) or 0) if _is_there() else 0
    return [gpu for index in range(count) for gpu in _gpus(index)]


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


def _gpus(index: int) -> list[DriverGpu]:
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:  # it has fallen off the bus
        return [DriverGpu(index)]
    whole = _read(handle, DriverGpu(index))
    mode, _ = _ask(pynvml.nvmlDeviceGetMigMode, handle) or (None, None)
    if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
        return [whole]
    parts = []
    for number in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is not None:  # numbers may be left out
            instance = _ask(pynvml.nvmlDeviceGetGpuInstanceId, part)
            compute = _ask(pynvml.nvmlDeviceGetComputeInstanceId, part)
            names = (f"MIG-{whole.uuid}/{instance}/{compute}", whole.uuid or "")
            unlike = dict(total_bytes=None, cuda_bytes=None, free_bytes=None, uuid=None)
            like_whole = dataclasses.replace(whole, mig=number, other_names=names, **unlike)
            parts.append(_read(part, like_whole))
    return parts or [whole]


def _read(handle: Any, known: DriverGpu) -> DriverGpu:
    # An older driver has only the first version of this call, without the reserve.
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory = memory or _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    bus = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    processes = []
    for process in _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        name = _ask(pynvml.nvmlSystemGetProcessName, process.pid) or "?"
        used = f", {process.usedGpuMemory // MIB} MiB" if process.usedGpuMemory else ""
        processes.append(f"{name} (pid {process.pid}{used})")
    values = {
        "uuid": _ask(pynvml.nvmlDeviceGetUUID, handle),
        "pci_bus_id": bus and bus.busId,
        "name": _ask(pynvml.nvmlDeviceGetName, handle),
        "compute_capability": capability and tuple(capability),
        "total_bytes": memory and int(memory.total),
        "cuda_bytes": memory and int(memory.total - getattr(memory, "reserved", 0)),
        "free_bytes": memory and int(memory.free),
    }
    values = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(known, processes=tuple(processes), **values)


def _ask(function: Callable, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (*_ERRORS, UnicodeDecodeError):  # not supported, no permission, GPU lost; odd names
        return None
