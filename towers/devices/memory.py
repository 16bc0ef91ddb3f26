"""Memory of devices and of this process: total, in use, and peak."""

import re
from pathlib import Path

MIB = 2**20


def of_device(device: str) -> tuple[float, float] | None:
    """Return the MiB that TensorFlow uses on a device, (now, peak); None if unknown.

    For a logical CPU device it is the memory of this process. That of other machines is unknown.
    """
    import tensorflow as tf

    from towers.builder.device_names import machine_of

    if machine_of(device):
        return None
    if "gpu" not in device.lower():
        status = Path("/proc/self/status").read_text("ascii")
        kib = (re.search(rf"{name}:\s*(\d+)", status)[1] for name in ("VmRSS", "VmHWM"))
        now, peak = (int(value) / 2**10 for value in kib)
        return now, peak
    try:
        info = tf.config.experimental.get_memory_info(device)
    except ValueError:  # a missing curve must not end a run
        return None
    return info["current"] / MIB, info["peak"] / MIB


def peak_mib() -> float:
    """Return the peak resident memory of this process, in MiB."""
    # `ru_maxrss` of a new program would start at the memory of the process that started it.
    return of_device("/cpu:0")[1]
