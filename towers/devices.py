"""Which devices hold the towers.

Options become TensorFlow settings before TensorFlow starts; what is in force is read back.
"""

import re
from collections.abc import Sequence

import tensorflow as tf

from towers.errors import InputError


def tower_devices(num_towers: int = 0, devices: str | Sequence[str] = "") -> list[str]:
    """Return the device of each tower, making logical CPU devices where they stand in for GPUs.

    Args:
        num_towers: 0 for one tower on each visible GPU, else one on the CPU; N for exactly N GPUs,
            or, where there is no GPU, N logical CPU devices.
        devices: devices to use in place of the first ones ("/gpu:0,/gpu:2" or a list), or "cpu" for
            logical CPU devices although there are GPUs.

    Returns:
        Device strings such as "/gpu:0", in tower order.

    Raises:
        InputError: more towers than GPUs, a device that does not exist, a malformed device, or
            TensorFlow has started with fewer CPU devices than are needed.
    """
    if num_towers < 0:
        raise InputError(f"--num_towers={num_towers}: 0 or more is needed")
    gpus = [f"/gpu:{i}" for i in range(_count_gpus())]
    names = devices.split(",") if isinstance(devices, str) else list(devices)
    if names in ([""], []):
        chosen = _first_devices(num_towers, gpus)
    elif [name.strip().lower() for name in names] == ["cpu"]:
        chosen = [f"/cpu:{i}" for i in range(num_towers or 1)]
    else:
        chosen = _named_devices(num_towers, names)
    existing = gpus + [f"/cpu:{i}" for i in range(_provide_cpus(chosen))]
    for device in chosen:
        if device not in existing:
            raise InputError(
                f"--devices={','.join(names)}: there is no {device}; "
                f"TensorFlow sees {', '.join(existing)}; "
                "its log (TF_CPP_MIN_LOG_LEVEL=0) may say why"
            )
    return chosen


def _count_gpus() -> int:
    """Return the number of GPUs that towers can have, without starting TensorFlow.

    `tf.config.list_logical_devices` would start it, and then no logical CPU device can be made. A
    GPU that is split into several logical ones counts as those.
    """
    settings = map(tf.config.get_logical_device_configuration, tf.config.get_visible_devices("GPU"))
    return sum(len(parts or [None]) for parts in settings)


def _first_devices(num_towers: int, gpus: list[str]) -> list[str]:
    """Return the first devices of the kind that this machine has, never fewer than asked for."""
    if not gpus:
        return [f"/cpu:{i}" for i in range(num_towers or 1)]
    if num_towers > len(gpus):
        raise InputError(
            f"--num_towers={num_towers}, but TensorFlow sees {len(gpus)} "
            f"GPU{'s' * (len(gpus) > 1)} ({', '.join(gpus)}): ask for at most {len(gpus)}, "
            "see nvidia-smi and CUDA_VISIBLE_DEVICES for the others, "
            f"or try it out on CPU devices with --devices=cpu --num_towers={num_towers}"
        )
    return gpus[: num_towers or len(gpus)]


def _named_devices(num_towers: int, names: Sequence[str]) -> list[str]:
    """Return "/gpu:0" for any of gpu:0, /GPU:0, /device:GPU:0, and so on for each name."""
    option = f"--devices={','.join(names)}"
    chosen = []
    for name in names:
        match = re.fullmatch(r"/?(?:device:)?(gpu|cpu):(\d{1,3})", name.strip().lower())
        if not match:
            raise InputError(
                f"{option}: {name!r} is not a device; "
                "name them as /gpu:0,/gpu:2 or /cpu:0, or give --devices=cpu"
            )
        device = f"/{match[1]}:{int(match[2])}"
        if device in chosen:
            raise InputError(f"{option}: {device} is named twice; each device takes one tower")
        chosen.append(device)
    if num_towers not in (0, len(chosen)):
        raise InputError(
            f"--num_towers={num_towers} and {option} disagree: {len(chosen)} devices are named; "
            "leave out --num_towers, or take the first ones with --devices="
        )
    return chosen


def _provide_cpus(chosen: Sequence[str]) -> int:
    """Make as many logical CPU devices as `chosen` names; return how many there are."""
    needed = max((int(d.split(":")[1]) + 1 for d in chosen if d.startswith("/cpu")), default=1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    if needed > len(configured or [None]):
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * needed
            )
        except RuntimeError:
            raise InputError(
                f"{needed} CPU devices are needed, but TensorFlow has started with "
                f"{len(tf.config.list_logical_devices('CPU'))}: "
                "call towers.devices.tower_devices() before anything creates a tensor"
            ) from None
    return len(tf.config.list_logical_devices("CPU"))
