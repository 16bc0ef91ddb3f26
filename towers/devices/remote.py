"""Devices of other machines: the interface of `towers.workers` for the rest of the library.

Without other machines `current_cluster()` is None, and nothing here does anything. `MACHINE` and
`MACHINES` are what messages call them.
"""

from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import HOST, PROGRAM, machine_of
from towers.options.lazy import lazily

__getattr__ = lazily(
    __name__,
    {
        "Recovery": "towers.workers.recovery",
        "alternating_devices": "towers.workers.cluster",
        "connect": "towers.workers.cluster",
        "connect_run": "towers.workers.cluster",
    },
)
MACHINE, MACHINES = "worker", "workers"
_cluster: Any = None  # the `Cluster` of this program


class DevicesChanged(Exception):
    """Machines were lost or came back: the run must be rebuilt on those that are there."""


def set_cluster(cluster: Any) -> None:
    """Set the machines that this program is connected to, or None."""
    global _cluster
    _cluster = cluster


def current_cluster() -> Any:
    """Return the machines that this program is connected to, or None."""
    return _cluster


def find_machine(name: str) -> Any:
    """Return a machine, by its name in devices, "/job:worker/task:1"; None if unknown."""
    machines = _cluster.workers if _cluster else ()
    return next((machine for machine in machines if machine.name == name), None)


def name_of(machine: str) -> str:
    """Return a machine's name for messages."""
    return str(find_machine(machine) or machine)


def folder_of(machine: str) -> str:
    """Return the folder of a machine's relative paths."""
    found = find_machine(machine)
    return found.info.folder if found else ""


def device_info(device: str) -> Any:
    """Return a machine's `DeviceInfo` of one of its devices, None if unknown."""
    if not (machine := find_machine(machine_of(device))):
        return None
    kind, _, number = device.rpartition("/")[2].partition(":")
    infos = [d for d in machine.info.devices if f"/{kind}:" in d.name]
    return infos[min(int(number), len(infos) - 1)] if infos else None


def read_text(machine: str, path: str) -> str | None:
    """Return the text of a file on a machine, None if the machine does not answer.

    Args:
        machine: "/job:worker/task:1".
        path: of the file there.
    """
    try:
        return read_file(f"{machine}{HOST}", path).decode(errors="replace")
    except tf.errors.OpError:  # the next step finds that it is lost
        return None


def read_file(device: str, path: str) -> bytes:
    """Return the content of a file on a device's machine.

    Args:
        device: a CPU, as "/job:worker/task:1/cpu:0".
        path: of the file there; a relative one is below the folder of its server.

    Raises:
        tf.errors.OpError: the machine does not answer, or the file cannot be read.
    """
    # Python's lock is held while an eager tensor is created on another machine or read from there:
    # if that hangs, no thread can run. So only ops whose inputs and outputs are local are used.
    with tf_internals.unary_rpcs():
        with tf.device(PROGRAM + HOST):
            path = tf.constant(path)
        with tf.device(device):
            text = tf.raw_ops.ReadFile(filename=path)
        with tf.device(PROGRAM + HOST):
            return tf.identity(text).numpy()
