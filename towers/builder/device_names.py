"""What the names of devices and ops tell: GPUs, machines, towers and layers.

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

from towers.errors import InputError

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


# Scopes that a tower, an inner function or a loop adds.
_OF_CALLS = (
    "PartitionedCall", "StatefulPartitionedCall", "while", "body", "cond", "gradient_tape",
    "seen_draw", "",
)  # fmt: skip
NO_LAYER = "the loss function itself"


def tower_of(name: str) -> int | None:
    """Return the number of the tower whose name scope an op is in, or None."""
    match = re.search(r"(?:^|/)tower_(\d+)(?:_\d+)?/", name)
    return int(match[1]) if match else None


def layer_of(name: str) -> str:
    """Return the layers whose name scopes an op is in, outermost first: "cnn/conv1"."""
    below = re.split(r"(?:^|/)tower_\d+(?:_\d+)?/", name)[-1]
    # TensorFlow makes a scope's name unique with a number.
    scopes = [re.sub(r"_\d+$", "", scope) for scope in below.split("/")[:-1]]
    return "/".join(scope for scope in scopes if scope not in _OF_CALLS) or NO_LAYER


def as_devices(devices: Sequence[str]) -> list[str]:
    """Return the towers' devices as a list; raise InputError if there is none."""
    names = [] if isinstance(devices, str | int) else list(devices)
    if not names or any(isinstance(name, int) for name in names):
        raise InputError(
            f"devices={devices!r} must be a list with one device for each tower, "
            'such as ["/gpu:0", "/gpu:1"], or towers.devices.tower_devices(2)'
        )
    return names


def check_devices(names: Sequence[str]) -> None:
    """Raise InputError for a missing device, for which TensorFlow would silently use the CPU."""
    existing = [device.name for device in tf.config.list_logical_devices()]
    for name in names:
        if not any(is_device(other, name) for other in existing):
            raise InputError(f"no device {name}: TensorFlow has {', '.join(existing)}")


def is_device(whole: str, name: str) -> bool:
    """Return whether a device matches a name.

    Args:
        whole: the device's full name, "/job:localhost/replica:0/task:0/device:GPU:0".
        name: may leave parts out, "/gpu:0".
    """
    here = tf.DeviceSpec(job="localhost", replica=0, task=0)
    device = here.make_merged_spec(tf.DeviceSpec.from_string(whole))
    return device.make_merged_spec(tf.DeviceSpec.from_string(name)) == device
