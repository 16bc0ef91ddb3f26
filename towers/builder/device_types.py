"""Tells apart GPUs, CPUs, and devices of other machines.

Some results can be computed in several ways: a CPU is limited by bytes, a GPU by launches and by
copies from the host. Code that depends on the device asks this module.

A machine without a GPU can run the code for GPUs on logical CPU devices:

    with cpus_for_gpus():  # or TOWERS_CPUS_FOR_GPUS=1 in the environment
        is_gpu("/cpu:1")   # True; "/cpu:0" is the host
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

HOST = "/cpu:0"
SWITCH = "TOWERS_CPUS_FOR_GPUS"
_in_block = False


def is_gpu(device: str) -> bool:
    """Return whether a device is a GPU or stands in for one; False for "", any device."""
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


def devices_here(kind: str) -> list[str]:
    """Return the names of this process' logical devices, of a kind such as "GPU".

    `tf.config.list_logical_devices` also lists those of connected machines.
    """
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    return [name for name in names if not machine_of(name)]


def stand_in() -> bool:
    """Return whether logical CPU devices except the first, the host, stand in for GPUs."""
    return _in_block or os.environ.get(SWITCH, "") not in ("", "0")


@contextlib.contextmanager
def cpus_for_gpus() -> Iterator[None]:
    """Make logical CPU devices stand in for GPUs in the block."""
    global _in_block
    before, _in_block = _in_block, True
    try:
        yield
    finally:
        _in_block = before
