"""Which devices are GPUs, and which are on other machines.

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
    """Return whether a device is a GPU, or stands in for one; False for "", which may be any."""
    match = re.search(r"(gpu|cpu):(\d+)$", device.lower())
    if not match:
        return False
    return match[1] == "gpu" or (stand_in() and match[2] != "0")


def are_gpus(devices: Sequence[str]) -> bool:
    """Return whether all these devices are GPUs."""
    return all(map(is_gpu, devices))


def machine_of(device: str) -> str:
    """Return the machine of a device, "/job:NAME/task:1"; "" for this process."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.job in (None, "localhost"):
        return ""
    return f"/job:{spec.job}/task:{spec.task or 0}"


def are_remote(devices: Iterable[str]) -> bool:
    """Return whether any of these devices is of another machine or process."""
    return any(map(machine_of, devices))


def devices_here(kind: str | None = None) -> list[str]:
    """Return TensorFlow's names of this process' logical devices, of a kind: "GPU".

    Once other machines are connected `tf.config.list_logical_devices` has theirs, too.
    """
    found = [device.name for device in tf.config.list_logical_devices(kind)]
    return [name for name in found if not machine_of(name)]


def stand_in() -> bool:
    """Return whether logical CPU devices but the first, which is the host, stand in for GPUs."""
    return _in_block or os.environ.get(SWITCH, "") not in ("", "0")


@contextlib.contextmanager
def cpus_for_gpus() -> Iterator[None]:
    """Make logical CPU devices stand in for GPUs in what is traced or built in the block."""
    global _in_block
    before, _in_block = _in_block, True
    try:
        yield
    finally:
        _in_block = before
