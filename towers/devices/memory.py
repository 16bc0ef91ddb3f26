"""Memory that is in use now, and the most that was: of a GPU by TensorFlow, or of this process."""

import contextlib
import resource

MIB = 2**20


def of_device(device: str) -> tuple[float, float] | None:
    """Return (now, peak), in MiB, of what TensorFlow has on a device; None if it does not tell.

    The logical CPU devices of a process share its memory: for each it is that of the process.
    """
    import tensorflow as tf

    if "gpu" not in device.lower():
        return _status("VmRSS:") or peak_mib(), peak_mib()
    try:
        info = tf.config.experimental.get_memory_info(device)
    except ValueError:  # no run ends for want of a curve
        return None
    return info["current"] / MIB, info["peak"] / MIB


def peak_mib() -> float:
    """Return the peak resident memory of this process, in MiB.

    Linux starts `ru_maxrss` of a new program at the memory of the process that started it; VmHWM is
    the program's own.
    """
    return _status("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _status(name: str) -> float | None:
    """Return a line of /proc/self/status in MiB, None on systems without it."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(name):
                return int(line.split()[1]) / 2**10
    return None
