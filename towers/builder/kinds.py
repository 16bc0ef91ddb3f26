"""What is good for a CPU and what is good for a GPU, where the two differ.

The same numbers can be had in several ways. A CPU is slow at bytes, and waits for nobody; a GPU is
slow at beginning an op, and at what must come from the host. Where it matters, the way is chosen by
the device, and this is the one place that tells which kind a device is.

A machine without a GPU can go a GPU's ways, too, on logical CPU devices:

    with cpus_for_gpus():  # or TOWERS_CPUS_FOR_GPUS=1 in the environment
        is_gpu("/cpu:1")   # True; "/cpu:0" is the host
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

HOST = "/cpu:0"
# The process that holds the graph; others are "/job:NAME/task:1", from whose block a device
# takes each part that it does not name.
PROGRAM = "/job:localhost/replica:0/task:0"
SWITCH = "TOWERS_CPUS_FOR_GPUS"
_in_block = False


def is_gpu(device: str) -> bool:
    """Tell whether a device is a GPU, or stands in for one; of "" it is not known: False."""
    match = re.search(r"(gpu|cpu):(\d+)$", device.lower())
    if not match:
        return False
    return match[1] == "gpu" or (stand_in() and match[2] != "0")


def are_gpus(devices: Sequence[str]) -> bool:
    """Tell whether all these devices are GPUs."""
    return all(map(is_gpu, devices))


def machine_of(device: str) -> str:
    """Return the machine of a device, "/job:NAME/task:1"; "" for this process."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.job in (None, "localhost"):
        return ""
    return f"/job:{spec.job}/task:{spec.task or 0}"


def are_remote(devices: Iterable[str]) -> bool:
    """Tell whether any of these devices is on another machine, or of another process."""
    return any(map(machine_of, devices))


def devices_here(kind: str | None = None) -> list[str]:
    """Return TensorFlow's names of this process' logical devices, of a kind: "GPU".

    Once other machines are connected `tf.config.list_logical_devices` has theirs, too.
    """
    found = [device.name for device in tf.config.list_logical_devices(kind)]
    return [name for name in found if not machine_of(name)]


def stand_in() -> bool:
    """Tell whether logical CPU devices but the first, which is the host, stand in for GPUs."""
    return _in_block or os.environ.get(SWITCH, "") not in ("", "0")


@contextlib.contextmanager
def cpus_for_gpus() -> Iterator[None]:
    """Let logical CPU devices stand in for GPUs in the block: for tests, and to read what is made.

    What is traced or built in the block stays as it is after it.
    """
    global _in_block
    before, _in_block = _in_block, True
    try:
        yield
    finally:
        _in_block = before
