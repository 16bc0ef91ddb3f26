"""Finds which GPUs CUDA shows this process, and which of them TensorFlow uses.

CUDA reads CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER once, when TensorFlow first lists devices.
This module does not import TensorFlow: its GPUs are passed as (name, compute capability).
"""

import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from towers.devices.nvml import DriverGpu
from towers.errors import InputError
from towers.options.parts import GpuOptions

_NO_GPU = ("", "-1", "none", "nodevfiles")  # values that hide all GPUs; the last is Slurm's
_PINNED = Path(__file__).resolve().parents[2] / "scripts/cuda-constraints.txt"  # of a checkout
_PIP = [sys.executable, "-m", "pip", "install", *(["-c", str(_PINNED)] if _PINNED.exists() else [])]
INSTALL = "TensorFlow's CUDA libraries or the driver may be missing or too old: type " + shlex.join(
    [*_PIP, "tensorflow[and-cuda]>=2.18"]
)
FORCED_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"  # "true" and "false" override what a program sets

Seen = tuple[str | None, tuple[int, int] | None]  # one of TensorFlow's GPUs


def tidy(environ: MutableMapping[str, str]) -> None:
    """Make CUDA number GPUs as the driver does, not by speed; unquote CUDA_VISIBLE_DEVICES.

    CUDA takes quotes for part of a name, and shows no GPU.
    """
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None:
        environ["CUDA_VISIBLE_DEVICES"] = value.strip().strip("\"'").strip()


def set_visible(
    options: GpuOptions, driver: Sequence[DriverGpu], environ: MutableMapping[str, str]
) -> None:
    """Change CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as the options say, see `choose`."""
    tidy(environ)
    if options.chosen() is not None:
        chosen = choose(options, visible_in(environ, driver), environ)
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.key for gpu in chosen) or "-1"


def choose(
    options: GpuOptions, visible: Sequence[DriverGpu], environ: Mapping[str, str]
) -> list[DriverGpu]:
    """Return the GPUs of `visible_gpus`.

    Args:
        options: `visible_gpus` is read.
        visible: the GPUs to choose from.
        environ: CUDA_VISIBLE_DEVICES is read, for messages.

    Raises:
        InputError: not exactly one GPU has such a name.
    """
    flag, chosen = f"--visible_gpus={options.visible_gpus}", []
    for entry in options.chosen() or []:
        named = _named(entry, visible)
        if len(named) != 1:
            how = "several GPUs match" if named else "no GPU matches"
            shown = ", ".join(map(str, visible)) or "none"
            if (value := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
                shown += f" with CUDA_VISIBLE_DEVICES={value}"
            keys = ",".join(gpu.key for gpu in visible)
            remedy = f"choose from --visible_gpus={keys}" if visible else "see towers doctor"
            raise InputError(f"{flag}: {how} {entry}, the driver shows {shown}; {remedy}")
        chosen += [gpu for gpu in named if gpu not in chosen]
    return chosen


def visible_in(environ: Mapping[str, str], driver: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return the GPUs that CUDA shows a process, in CUDA's order, by CUDA's rules.

    An entry is a number, or the beginning of one GPU's UUID. Another entry hides all that follow;
    a part of a GPU ("MIG-...") is not found.

    Args:
        environ: if it has no such variable, all GPUs are returned.
        driver: all GPUs of the machine.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(driver)
    listed: list[DriverGpu] = []
    for entry in map(str.strip, value.split(",")):
        named = _named(entry, driver)
        if len(named) != 1:
            break
        listed += named
    return listed


def _named(entry: str, driver: Sequence[DriverGpu]) -> list[DriverGpu]:
    if entry.startswith("GPU-"):
        return [gpu for gpu in driver if (gpu.uuid or "").startswith(entry)]
    return [gpu for gpu in driver if entry.isdecimal() and gpu.index == int(entry)]


def hides_all(environ: Mapping[str, str]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs on purpose, not by a wrong name."""
    return environ.get("CUDA_VISIBLE_DEVICES", "0").strip().lower() in _NO_GPU


def match(gpus: Sequence[Seen], visible: Sequence[DriverGpu]) -> list[DriverGpu | None]:
    """Return the driver's GPU for each of TensorFlow's, None if none matches.

    TensorFlow keeps the order and may skip small GPUs, so each of its GPUs is the next visible one
    of the same name and compute capability. If both have one GPU, the name does not matter.

    Args:
        gpus: (name, compute capability) of those that TensorFlow lists; None: unknown.
        visible: those that CUDA shows, in its order.
    """
    if len(gpus) == len(visible) == 1:
        return list(visible)
    rest, matches = list(visible), []
    for name, capability in gpus:
        alike = (
            place
            for place, gpu in enumerate(rest)
            if name in (None, gpu.name)
            and (gpu.compute_capability is None or capability in (None, gpu.compute_capability))
        )
        place = next(alike, None)
        matches.append(None if place is None else rest[place])
        rest = rest if place is None else rest[place + 1 :]
    return matches
