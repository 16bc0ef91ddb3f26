"""Which GPUs CUDA shows this process, and which of them TensorFlow took.

CUDA reads CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER once, when TensorFlow first lists devices.
Nothing here needs TensorFlow: its GPUs come as (name, compute capability).
"""

import re
from collections.abc import Mapping, MutableMapping, Sequence

from towers.devices.nvml import DriverGpu
from towers.errors import InputError
from towers.options.gpu import GpuOptions

_NO_GPU = ("", "-1", "none", "nodevfiles")  # so one says it; the last is Slurm's
_NO_DRIVER = "no NVIDIA driver answers here: leave the flag out, or see towers doctor"

Seen = tuple[str | None, tuple[int, int] | None]  # one of TensorFlow's GPUs


def tidy(environ: MutableMapping[str, str]) -> None:
    """Let CUDA number GPUs as the driver does, and take quotes off CUDA_VISIBLE_DEVICES.

    To CUDA, quotes are part of the name of a GPU that does not exist; its own order is by speed.
    """
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None:
        environ["CUDA_VISIBLE_DEVICES"] = value.strip().strip("\"'").strip()


def set_visible(
    options: GpuOptions, driver: Sequence[DriverGpu], environ: MutableMapping[str, str]
) -> None:
    """Hide those of the driver's GPUs that `options` leave out: changes `environ`.

    Raises:
        InputError: a GPU does not exist, or CUDA_VISIBLE_DEVICES already hides it.
    """
    tidy(environ)
    indices = options.indices()
    if indices is None:
        return
    visible_positions(options, driver, environ)
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices)) or "-1"


def visible_positions(
    options: GpuOptions, driver: Sequence[DriverGpu], environ: Mapping[str, str]
) -> list[int]:
    """Return the place of each GPU of `visible_gpus` among those that CUDA shows now.

    Raises:
        InputError: a GPU does not exist, or CUDA_VISIBLE_DEVICES hides it.
    """
    there = [gpu.index for gpu in driver]
    visible = [gpu.index for gpu in visible_in(environ, driver)]
    given = f"--visible_gpus={options.visible_gpus}"
    for index in options.indices() or []:
        if index not in there:
            numbers = ",".join(map(str, there))
            raise InputError(
                f"{given}: there is no GPU {index}; "
                + (f"the driver has {', '.join(map(str, driver))}: " if there else "")
                + (f"type --visible_gpus={numbers} or some of these" if there else _NO_DRIVER)
            )
        if index not in visible:
            numbers = ",".join(map(str, visible)) or "none"
            raise InputError(
                f"{given}: GPU {index} is hidden by "
                f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']}, which leaves {numbers}: "
                "type unset CUDA_VISIBLE_DEVICES, or choose among those"
            )
    return [visible.index(index) for index in options.indices() or []]


def visible_in(environ: Mapping[str, str], driver: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, by CUDA's own rules.

    An entry begins with a number, or is the beginning of one GPU's UUID; the first that is neither
    hides all that come after it. A GPU that is named twice hides all.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(driver)
    visible: list[DriverGpu] = []
    for entry in map(str.strip, value.split(",")):
        number = re.match("[0-9]+", entry)
        matches = [
            gpu
            for gpu in driver
            if (number and gpu.index == int(number[0]))
            or (entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry))
        ]
        if len(matches) != 1:
            break
        if matches[0] in visible:
            return []
        visible += matches
    return visible


def hides_all(environ: Mapping[str, str]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs on purpose, not by a GPU it mistakes."""
    return environ.get("CUDA_VISIBLE_DEVICES", "0").strip().lower() in _NO_GPU


def match(gpus: Sequence[Seen], visible: Sequence[DriverGpu]) -> list[DriverGpu | None]:
    """Return the driver's GPU for each of TensorFlow's, None where the driver does not tell.

    TensorFlow keeps the order and may skip some (a small one beside a large one), so each of its
    GPUs is the next visible one of the same name and compute capability.
    """
    rest, matches = list(visible), []
    for name, capability in gpus:
        same = [
            gpu
            for gpu in rest
            if name in (None, gpu.name)
            and (capability is None or gpu.compute_capability in (None, capability))
        ]
        matches.append(same[0] if same else None)
        rest = rest[rest.index(same[0]) + 1 :] if same else rest
    return matches


def skipped(gpus: Sequence[Seen], visible: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return the visible GPUs that TensorFlow does not list."""
    matched = match(gpus, visible)
    return [gpu for gpu in visible if gpu not in matched]


def why_skipped(
    missing: Sequence[DriverGpu], num_listed: int, build: Mapping[str, object]
) -> tuple[str, str]:
    """Return the likely cause why TensorFlow, of that build, leaves GPUs out, and what to type."""
    install = "type pip install 'tensorflow[and-cuda]>=2.21,<2.22'"
    lost = [gpu.index for gpu in missing if gpu.name is None]
    if lost:
        return f"the driver cannot read GPU {lost[0]}", "see nvidia-smi, and restart the machine"
    if not build.get("is_cuda_build"):
        return "this TensorFlow was built without CUDA", install
    oldest = min(map(_capability, build.get("cuda_compute_capabilities", ())), default=(0, 0))
    for gpu in missing:
        if gpu.compute_capability and gpu.compute_capability < oldest:
            has, needs = (".".join(map(str, c)) for c in (gpu.compute_capability, oldest))
            return (
                f"GPU {gpu} has compute capability {has}, this TensorFlow needs {needs}",
                "leave it out with --visible_gpus, or use the CPU with --devices=cpu",
            )
    if num_listed:
        return (
            "it leaves out GPUs with far fewer multiprocessors than the largest",
            "type export TF_MIN_GPU_MULTIPROCESSOR_COUNT=1, or leave them out with --visible_gpus",
        )
    return (
        f"CUDA {build.get('cuda_version')} or cuDNN {build.get('cudnn_version')} is not found, or "
        "the driver is too old for it",
        install,
    )


def _capability(name: str) -> tuple[int, int]:
    """Return (8, 9) for "sm_89" and "compute_89", (9, 0) for "sm_90a"."""
    digits = re.search("([0-9]+)([0-9])", name)
    return int(digits[1]), int(digits[2])
