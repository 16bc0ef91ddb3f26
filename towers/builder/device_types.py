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
_shown: dict[str, str] = {}  # {TensorFlow's name of a GPU: its name before others were hidden}
in_use = False  # whether `tower_devices` has returned a GPU, whose name must not change


def is_gpu(device: str) -> bool:
    """Return whether a device is a GPU or stands in for one; False for "", any device."""
    match = re.search(r"(gpu|cpu):(\d+)$", device.lower())
    if not match:
        return False
    return match[1] == "gpu" or (stand_in() and match[2] != "0")


def are_gpus(devices: Sequence[str]) -> bool:
    """Return whether all these devices are GPUs."""
    return all(map(is_gpu, devices))


class NewName(str):
    """TensorFlow's name of a GPU, where `renumber` has changed names."""


def renumber(names: Iterable[str]) -> None:
    """Note that TensorFlow numbers the GPUs of these names from 0, since others are hidden."""
    _shown.clear()
    _shown.update({f"/gpu:{i}": name for i, name in enumerate(names)})


def renumbered() -> bool:
    """Return whether GPUs were hidden, so that TensorFlow may number the others differently."""
    return bool(_shown)


def shown_name(device: str) -> str:
    """Return a device's name in messages and files: that of before other GPUs were hidden."""
    return _shown.get(device, device)


def new_name(device: str) -> str:
    """Return TensorFlow's name of a device, from the name that is shown."""
    names = {shown: NewName(name) for name, shown in _shown.items()}
    return names.get(device, device)


def parse_device(text: str) -> str:
    """Return "/gpu:0" for any spelling, such as "GPU:0" or "/device:gpu:00"; "" for other text."""
    match = re.fullmatch(r"/?(?:device:)?(gpu|cpu):(\d{1,3})", text.strip().lower())
    return f"/{match[1]}:{int(match[2])}" if match else ""


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


def physical_gpus() -> list[tf.config.PhysicalDevice]:
    """Return the physical GPU of each of /gpu:0, /gpu:1, ...: one with logical parts repeats.

    `tf.config.list_logical_devices` would start TensorFlow, and no logical CPU could be created.
    """
    return [
        gpu
        for gpu in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]
    ]


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
