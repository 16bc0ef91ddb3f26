"""Finds which GPUs CUDA shows this process, and which of them TensorFlow uses.

CUDA reads CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER once, when TensorFlow first lists devices.
This module does not import TensorFlow: its GPUs are passed as (name, compute capability).
"""

import re
from collections.abc import Mapping, MutableMapping, Sequence

from towers.devices.nvml import DriverGpu
from towers.errors import InputError
from towers.options.gpu import GpuOptions

_NO_GPU = ("", "-1", "none", "nodevfiles")  # values that hide all GPUs; the last is Slurm's
_NO_DRIVER = "no NVIDIA driver answers here: leave the flag out, or see towers doctor"

INSTALL = (
    "its CUDA libraries or the driver may be missing or too old: type pip install "
    "'tensorflow[and-cuda]>=2.21,<2.22'"
)
ONE_PART = "CUDA shows a process one part of a GPU that MIG splits, and nothing beside it"

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
    """Hide the GPUs that the options leave out.

    Args:
        options: `visible_gpus` is read.
        driver: all GPUs of the machine.
        environ: changed: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

    Raises:
        InputError: a GPU does not exist, or CUDA_VISIBLE_DEVICES already hides it.
    """
    tidy(environ)
    if options.chosen() is None:
        return
    chosen = choose(options, driver, environ, listed_in(environ, driver))
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.key for gpu in chosen) or "-1"


def choose(
    options: GpuOptions,
    driver: Sequence[DriverGpu],
    environ: Mapping[str, str],
    visible: Sequence[DriverGpu],
) -> list[DriverGpu]:
    """Return the GPUs of `visible_gpus`.

    Args:
        options: `visible_gpus` is read.
        driver: all GPUs of the machine.
        environ: CUDA_VISIBLE_DEVICES is read, for messages.
        visible: the GPUs to choose from.

    Raises:
        InputError: a GPU does not exist, or is hidden.
    """
    flag, chosen = f"--visible_gpus={options.visible_gpus}", []
    for entry in options.chosen() or []:
        named = _named(entry, driver)
        if not named:
            keys = ",".join(gpu.key for gpu in driver)
            raise InputError(
                f"{flag}: there is no GPU {entry}; "
                + (f"the driver has {', '.join(map(str, driver))}: " if driver else "")
                + (f"type --visible_gpus={keys} or some of these" if driver else _NO_DRIVER)
            )
        if len(named) > 1:
            raise InputError(
                f"{flag}: {entry} may be {', '.join(map(str, named))}: type one of them, as "
                f"--visible_gpus={named[0].key}"
            )
        if named[0] not in visible:
            if (value := environ.get("CUDA_VISIBLE_DEVICES")) is None:
                set_it = f"type export CUDA_VISIBLE_DEVICES={named[0].key}"
                raise InputError(f"{flag}: {ONE_PART}, here {visible[0]}: {set_it}")
            keys = ",".join(gpu.key for gpu in visible) or "none"
            raise InputError(
                f"{flag}: GPU {entry} is hidden by CUDA_VISIBLE_DEVICES={value}, which leaves "
                f"{keys}: type unset CUDA_VISIBLE_DEVICES, or choose among those"
            )
        chosen += [gpu for gpu in named if gpu not in chosen]
    if len(chosen) > 1 and (parts := [gpu for gpu in chosen if gpu.mig is not None]):
        raise InputError(f"{flag}: {ONE_PART}: type --visible_gpus={parts[0].key}")
    return chosen


def visible_in(environ: Mapping[str, str], driver: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return the GPUs that CUDA shows a process, in CUDA's order.

    If a part of a GPU that MIG splits is among them, a process sees the first part alone.

    Args:
        environ: of the process.
        driver: all GPUs of the machine.
    """
    listed = listed_in(environ, driver)
    return [gpu for gpu in listed if gpu.mig is not None][:1] or listed


def listed_in(environ: Mapping[str, str], driver: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order, by CUDA's rules.

    An entry begins with a number, or is a prefix of one GPU's UUID or the full name of a part. An
    invalid entry hides all that follow; a GPU that is named twice hides all.

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
        if len({gpu.index for gpu in named}) != 1:
            break
        if named[0] in listed:
            return []
        listed += named[:1]
    return listed


def _named(entry: str, driver: Sequence[DriverGpu]) -> list[DriverGpu]:
    if number := re.match("[0-9]+", entry):
        return [gpu for gpu in driver if gpu.index == int(number[0])]
    names = [(gpu, (gpu.uuid or "", *gpu.other_names)) for gpu in driver]
    if entry.startswith("GPU-"):
        return [gpu for gpu, ids in names if any(name.startswith(entry) for name in ids)]
    return [gpu for gpu, ids in names if entry.startswith("MIG-") and entry in ids]


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
        alike = [gpu for gpu in rest if name in (None, gpu.name)]
        if capability:
            alike = [gpu for gpu in alike if gpu.compute_capability in (None, capability)]
        matches.append(alike[0] if alike else None)
        rest = rest[rest.index(alike[0]) + 1 :] if alike else rest
    return matches


def skipped(gpus: Sequence[Seen], visible: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return the visible GPUs that TensorFlow does not list.

    Args:
        gpus: as for `match`.
        visible: as for `match`.
    """
    matched = match(gpus, visible)
    return [gpu for gpu in visible if gpu not in matched]
