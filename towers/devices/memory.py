"""Memory of devices and of this process: total, in use, and peak."""

import re
from pathlib import Path

MIB = 2**20
_STATUS = "/proc/self/status"


def of_device(device: str) -> tuple[float, float] | None:
    """Return the MiB that TensorFlow uses on a device, (now, peak); None if unknown.

    For a logical CPU device it is the memory of this process. That of other machines is unknown.
    """
    import tensorflow as tf

    from towers.builder.device_names import machine_of

    if machine_of(device):
        return None
    if "gpu" not in device.lower():
        status = Path(_STATUS).read_text("ascii")
        return _mib("VmRSS", status), _mib("VmHWM", status)
    try:
        info = tf.config.experimental.get_memory_info(device)
    except ValueError:  # a missing curve must not end a run
        return None
    return info["current"] / MIB, info["peak"] / MIB


def peak_mib() -> float:
    """Return the peak resident memory of this process, in MiB.

    `ru_maxrss` of a new program starts at the memory of the process that started it; VmHWM is the
    program's own.
    """
    return _mib("VmHWM", Path(_STATUS).read_text("ascii"))


def in_words(num_bytes: float) -> str:
    """Return a number of bytes as "1.5 GiB", in MiB, GiB, TiB or PiB."""
    power = next((p for p in (50, 40, 30) if num_bytes >= 2**p), 20)
    return f"{num_bytes / 2**power:.1f} {'MGTP'[power // 10 - 2]}iB"


def _mib(name: str, status: str) -> float:
    return int(re.search(rf"{name}:\s*(\d+)", status)[1]) / 2**10
