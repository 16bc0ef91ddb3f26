"""What the driver, CUDA and TensorFlow say of the GPUs, and whether the devices compute right."""

import ctypes.util
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towers.commands.doctor.checks import INSTALL, NOTE, OK, PROBLEM, Check, installed
from towers.devices import nvml, probe, visibility
from towers.devices.nvml import MIB, DriverGpu

_LIBRARIES = {  # library: (its name, key of TensorFlow's build info, package of pip)
    "cudart": ("CUDA", "cuda_version", "nvidia-cuda-runtime-cu12"),
    "cudnn": ("cuDNN", "cudnn_version", "nvidia-cudnn-cu12"),
}


def check_devices(driver: Sequence[DriverGpu], environ: Mapping[str, str]) -> Iterator[Check]:
    """Look at all GPUs as the driver and as TensorFlow sees them, then use what a run would use."""
    visible = visibility.visible_in(environ, driver)
    start = probe.run_probe([], environ=environ)
    if isinstance(start, str):
        yield Check("TensorFlow starts", PROBLEM, f"its process {start}", INSTALL)
        yield from check_memory(driver, visible)
        return
    gpus = [(name, capability and tuple(capability)) for name, capability in start["gpus"]]
    yield check_gpus(driver, gpus, start["build"], environ)
    if visible and start["build"].get("is_cuda_build"):
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
    version = nvml.driver_version()
    if not driver and gpus:
        return Check("GPUs", NOTE, f"TensorFlow lists {len(gpus)}, the driver (NVML) none")
    if not driver:
        none = "no GPU here, only its driver" if version else "no GPU and no NVIDIA driver here"
        return Check("GPUs", OK, f"{none}: towers run on the CPU")
    says = f"the driver ({version}) has {', '.join(map(str, driver))}; TensorFlow"
    missing = visibility.skipped(gpus, visibility.visible_in(environ, driver))
    if missing:
        cause, remedy = visibility.why_skipped(missing, len(gpus), build)
        names = ", ".join(map(str, missing))
        return Check("GPUs", PROBLEM, f"{says} leaves out {names}: {cause}", remedy)
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return Check("GPUs", OK, f"{says} lists {len(gpus)}")
    entries = map(str.strip, value.split(","))
    meant = list(itertools.takewhile(lambda entry: entry not in ("", "-1"), entries))
    says += f" lists {len(gpus)}; CUDA_VISIBLE_DEVICES={value}"
    if len(gpus) < len(meant):
        shown = ",".join(str(gpu.index) for gpu in driver)
        remedy = f"unset CUDA_VISIBLE_DEVICES, or export CUDA_VISIBLE_DEVICES={shown} or fewer"
        return Check("GPUs", PROBLEM, f"{says} names others, which hides all from there on", remedy)
    return Check("GPUs", OK, says + (" hides the rest" if len(gpus) < len(driver) else ""))


def check_libraries(build: Mapping[str, Any], found_by_tensorflow: bool) -> Iterator[Check]:
    """Compare CUDA and cuDNN with those that TensorFlow was built for.

    If it lists a GPU, it has found them, though maybe not where they are looked for here.
    """
    for library, (name, key, package) in _LIBRARIES.items():
        needed = str(build.get(key, "?"))
        on_system = re.search(r"\.so\.([\d.]+)$", ctypes.util.find_library(library) or "")
        found = installed(package) or (on_system and on_system[1])  # "12" of libcudart.so.12
        detail = f"built for {needed}, found {found or 'none by pip or ldconfig'}"
        if found and found.split(".")[0] == needed.split(".")[0]:
            yield Check(name, OK, detail)
        elif found_by_tensorflow:
            yield Check(name, NOTE, detail)
        else:
            yield Check(name, PROBLEM, detail, INSTALL)


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
            leave_out = "leave it out with --visible_gpus, or type --devices=cpu"
            yield Check(name, PROBLEM, detail, leave_out if "gpu" in device else INSTALL)
        else:
            yield Check(name, OK, detail)
    broken = {pair: error for pair, error in found["copies"].items() if error}
    if broken:
        detail = "; ".join(f"{pair}: {error}" for pair, error in broken.items())
        remedy = "leave one out with --visible_gpus; in the BIOS, turn off IOMMU and PCIe ACS"
        yield Check("copies", PROBLEM, detail, remedy)
    elif found["copies"]:
        yield Check("copies", OK, f"{len(found['copies'])} pairs of devices, bit for bit")
