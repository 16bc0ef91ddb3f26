"""Devices of other machines: all that the rest of the library asks of `towers.workers`.

Without other machines `current()` is None, and nothing here does anything.
"""

from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import HOST, PROGRAM, is_gpu, machine_of
from towers.options.lazy import lazily

__getattr__ = lazily(
    __name__,
    {
        "Recovery": "towers.workers.recovery",
        "MachineCurves": "towers.workers.curves",
        "alternating_devices": "towers.workers.cluster",
        "check_network": "towers.workers.network_test",
        "connect": "towers.workers.cluster",
        "connect_run": "towers.workers.cluster",
    },
)
_cluster: Any = None  # a `towers.workers.cluster.Cluster`


class DevicesChanged(Exception):
    """Other machines were lost or came back: the run is built anew on those that are there."""


def set_cluster(cluster: Any) -> None:
    """Set the machines that this program is connected to, None for none."""
    global _cluster
    _cluster = cluster


def current_cluster() -> Any:
    """Return the machines that this program is connected to, None if it is to none."""
    return _cluster


def name_of(machine: str) -> str:
    """Return the name for people of a machine, "/job:worker/task:1"."""
    found = _machine(machine)
    return str(found) if found else machine


def folder_of(machine: str) -> str:
    """Return the folder to which paths of a machine are relative."""
    found = _machine(machine)
    return found.info.folder if found else ""


def device_info(device: str) -> Any:
    """Return what a machine says of one of its devices, a `DeviceInfo`; None if nothing."""
    if not (owner := _machine(machine_of(device))):
        return None
    kind, _, number = device.rpartition("/")[2].partition(":")
    found = [d for d in owner.info.devices if f"/{kind}:" in d.name]
    return found[min(int(number), len(found) - 1)] if found else None


def memory_of(device: str) -> int | None:
    """Return the bytes that TensorFlow may take of a device, None if its machine does not say.

    Logical CPU devices share a machine's memory: each tower has its part.
    """
    found = device_info(device)
    if not found or found.memory_bytes is None:
        return None
    num_towers = 1 if is_gpu(device) else len(_machine(machine_of(device)).devices)
    return found.memory_bytes // max(num_towers, 1)


def read_text(machine: str, path: str) -> str | None:
    """Return a file of a machine, None if that does not answer."""
    try:
        return read_file(f"{machine}{HOST}", path).decode(errors="replace")
    except tf.errors.OpError:  # the next step tells that it is lost
        return None


def read_file(device: str, path: str) -> bytes:
    """Return a file that is where a device is.

    A tensor that is made elsewhere, or taken from there, is copied while Python's lock is held: if
    the machine hangs, no thread could do anything about it. An op that is given tensors of here, or
    copies them to here, is waited for without the lock.
    """
    with tf_internals.unary_rpcs():
        with tf.device(PROGRAM + HOST):
            path = tf.constant(path)
        with tf.device(device):
            text = tf.raw_ops.ReadFile(filename=path)
        with tf.device(PROGRAM + HOST):
            return tf.identity(text).numpy()


def _machine(name: str) -> Any:
    machines = _cluster.workers if _cluster else ()
    return next((machine for machine in machines if machine.name == name), None)
