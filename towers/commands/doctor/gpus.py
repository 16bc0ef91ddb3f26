"""What the driver, CUDA and TensorFlow say of the GPUs, and whether the devices compute right."""

import ctypes.util
import importlib.metadata
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towers.commands.doctor.check import NOTE, OK, PROBLEM, Check
from towers.commands.doctor.versions import INSTALL
from towers.devices import nvml, probe, visibility
from towers.devices.nvml import MIB, DriverGpu

_LIBRARIES = {  # library: (its name, key of TensorFlow's build info, package of pip)
    "cudart": ("CUDA", "cuda_version", "nvidia-cuda-runtime-cu12"),
    "cudnn": ("cuDNN", "cudnn_version", "nvidia-cudnn-cu12"),
}
_LEAVE_OUT = (
    "leave it out with --visible_gpus, or type --devices=cpu; do driver and CUDA fit, above?"
)


def check_devices(driver: Sequence[DriverGpu], environ: Mapping[str, str]) -> Iterator[Check]:
    """Look at the GPUs from the driver's side and from TensorFlow's, then use all devices.

    Args:
        driver: all GPUs of the machine.
        environ: what a run would see.
    """
    visible = visibility.visible_in(environ, driver)
    start = probe.run_probe([], environ=environ)
    if isinstance(start, str):
        yield Check("TensorFlow starts", PROBLEM, f"its process {start}", INSTALL)
        yield from check_memory(driver, visible)
        return
    gpus = [(name, capability and tuple(capability)) for name, capability in start["gpus"]]
    yield check_gpus(driver, gpus, start["build"], environ)
    if visible:
        yield from check_libraries(start["build"], bool(gpus))
    yield from check_memory(driver, visible)
    numbered = enumerate(visibility.match(gpus, visible))
    devices = [f"/gpu:{number}" for number, gpu in numbered if not (gpu and gpu.full)]
    devices = ["/cpu:0", *(devices if gpus else ["/cpu:1"])]
    yield from check_probe(probe.run_probe(devices, environ=environ), devices)


def check_gpus(
    driver: Sequence[DriverGpu],
    gpus: Sequence[visibility.Seen],
    build: Mapping[str, object],
    environ: Mapping[str, str],
) -> Check:
    """Compare the driver's GPUs with those that TensorFlow lists."""
    visible = visibility.visible_in(environ, driver)
    value = environ.get("CUDA_VISIBLE_DEVICES")
    version = nvml.driver_version()
    says = f"the driver ({version}) has {', '.join(map(str, driver))}"
    if not driver and gpus:
        return Check("GPUs", NOTE, f"TensorFlow lists {len(gpus)}, the driver (NVML) none")
    if not driver:
        none = "no GPU here, only its driver" if version else "no GPU and no NVIDIA driver here"
        return Check("GPUs", OK, f"{none}: towers run on the CPU")
    missing = visibility.skipped(gpus, visible)
    if missing:
        cause, remedy = visibility.why_skipped(missing, len(gpus), build)
        names = ", ".join(map(str, missing))
        return Check("GPUs", PROBLEM, f"{says}; TensorFlow leaves out {names}: {cause}", remedy)
    if value is not None and len(gpus) < len(_entries(value)):
        shown = ",".join(str(gpu.index) for gpu in driver)
        detail = f"{says}; CUDA_VISIBLE_DEVICES={value} names others, which hides all from there on"
        remedy = f"unset CUDA_VISIBLE_DEVICES, or export CUDA_VISIBLE_DEVICES={shown} or fewer"
        return Check("GPUs", PROBLEM, detail, remedy)
    if not gpus:
        return Check("GPUs", OK, f"{says}; all are hidden by CUDA_VISIBLE_DEVICES={value}")
    hidden = f"; CUDA_VISIBLE_DEVICES={value} hides the rest" if len(gpus) < len(driver) else ""
    return Check("GPUs", OK, f"{says}; TensorFlow lists {len(gpus)}{hidden}")


def _entries(value: str) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES means to show: all before an empty entry or -1."""
    entries = map(str.strip, value.split(","))
    return list(itertools.takewhile(lambda entry: entry not in ("", "-1"), entries))


def check_libraries(build: Mapping[str, Any], found_by_tensorflow: bool) -> Iterator[Check]:
    """Compare CUDA and cuDNN with those that TensorFlow was built for.

    Args:
        build: of TensorFlow.
        found_by_tensorflow: it lists a GPU, so it has found them, if not where they are looked for.
    """
    if not build.get("is_cuda_build"):
        yield Check("CUDA", PROBLEM, "this TensorFlow was built without CUDA", INSTALL)
        return
    for library, (name, key, package) in _LIBRARIES.items():
        needed = str(build.get(key, "?"))
        found = _pip_version(package) or _system_version(library)
        detail = f"built for {needed}, found {found or 'none by pip or ldconfig'}"
        fits = found is not None and found.split(".")[0] == needed.split(".")[0]
        if fits or found_by_tensorflow:
            yield Check(name, OK if fits else NOTE, detail)
        else:
            yield Check(name, PROBLEM, detail, INSTALL)


def _pip_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system_version(library: str) -> str | None:
    """Return "12" for libcudart.so.12."""
    match = re.search(r"\.so\.([\d.]+)$", ctypes.util.find_library(library) or "")
    return match and match[1]


def check_memory(driver: Sequence[DriverGpu], visible: Sequence[DriverGpu]) -> Iterator[Check]:
    """Tell who holds the memory of each GPU that a run would use."""
    for gpu in visible:
        name = f"memory of GPU {gpu.index}"
        if None in (gpu.free_bytes, gpu.total_bytes):
            yield Check(name, NOTE, "the driver does not tell")
            continue
        detail = f"{gpu.free_bytes // MIB} of {gpu.total_bytes // MIB} MiB free"
        if gpu.processes:
            detail += f"; held by {', '.join(map(str, gpu.processes))}"
        if not gpu.full:
            yield Check(name, OK, detail)
            continue
        others = ",".join(str(other.index) for other in driver if not other.full)
        instead = f"--visible_gpus={others}" if others else "--devices=cpu"
        yield Check(name, PROBLEM, f"full: {detail}", f"type {instead}, or end what holds it")


def check_probe(found: dict[str, Any] | str, devices: Sequence[str]) -> Iterator[Check]:
    """Say what the probe of the devices found."""
    if isinstance(found, str):
        command = f"type python -m towers.devices.probe {' '.join(devices)}, which shows all of it"
        yield Check("computing", PROBLEM, f"the probe {found}", command)
        return
    cpu = found["devices"].get("/cpu:0", {}).get("gflops", {})
    for device, result in found["devices"].items():
        speeds = [
            f"{name} {gflops:.0f} GFLOP/s"
            + (f" ({gflops / cpu[name]:.1f} x CPU)" if "gpu" in device and name in cpu else "")
            for name, gflops in result["gflops"].items()
        ]
        detail = "; ".join(result["errors"] + speeds)
        name = f"computing on {device}"
        if result["errors"]:
            yield Check(name, PROBLEM, detail, _LEAVE_OUT if "gpu" in device else INSTALL)
        else:
            yield Check(name, OK, detail)
    broken = {pair: error for pair, error in found["copies"].items() if error}
    if broken:
        detail = "; ".join(f"{pair}: {error}" for pair, error in broken.items())
        remedy = "leave one out with --visible_gpus; in the BIOS, turn off IOMMU and PCIe ACS"
        yield Check("copies", PROBLEM, detail, remedy)
    elif found["copies"]:
        yield Check("copies", OK, f"{len(found['copies'])} pairs of devices, bit for bit")
