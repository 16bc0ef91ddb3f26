"""Chooses and describes the towers' devices.

devices.configure(visible_gpus="0,2", per_process_gpu_memory_fraction=0.4)
names = devices.tower_devices()
print(devices.report(names))
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder import device_names
from towers.builder.device_names import are_remote, as_devices, machine_of
from towers.devices import cuda_visible_devices, memory, nvml, remote, shown_names
from towers.devices.gpus import (
    driver_gpus,
    hide_gpus,
    logical_gpus,
    missing_gpus,
    read_back,
    visible_gpus,
)
from towers.devices.nvml import MIB, DriverGpu
from towers.devices.shown_names import NewName, new_name, shown_name
from towers.errors import InputError
from towers.formatting import count, print_line, table

_MOST_TOWERS = 1000


@dataclasses.dataclass(frozen=True)
class Device:
    """A tower's device; None where unknown or for a CPU."""

    tower: int
    device: str  # "/gpu:0", numbered as before other GPUs were hidden
    name: str | None  # of the product
    pci_bus_id: str | None = None
    driver_index: int | None = None  # the GPU's number in nvidia-smi
    total_bytes: int | None = None  # of its memory
    free_bytes: int | None = None

    def __str__(self) -> str:
        """Return "/gpu:0 -> NVIDIA A100, GPU 2 of the driver, PCI bus id 00000000:65:00.0"."""
        where = f", GPU {self.driver_index} of the driver, PCI bus id {self.pci_bus_id}"
        known = self.driver_index is not None
        return f"{self.device} -> {self.name or 'unknown'}" + (where if known else "")


def tower_devices(
    num_towers: int = 0, devices: str | Sequence[str] = "", divide_cores: bool = False
) -> list[str]:
    """Return the device of each tower; create logical CPU devices if there is no GPU.

    Args:
        num_towers: 0 for one tower on each visible GPU, or one on the CPU if there is none. N for
            exactly N GPUs, or N logical CPU devices if there is no GPU. If TensorFlow has started
            with fewer of these, towers share them, and a message says so.
        devices: devices to use instead of the first ones ("/gpu:0,/gpu:2" or a list), or a kind.
            "cpu": logical CPU devices, even if there are GPUs. "gpu": only the first GPUs. "any":
            GPUs if TensorFlow can use some, otherwise two logical CPU devices.
        divide_cores: whether each of several towers on the CPU computes an op on its share of the
            cores, unless a number of threads is set already.

    Returns:
        Device strings such as "/gpu:0", in tower order.

    Raises:
        InputError: more towers than GPUs, a device that does not exist, or a malformed device.
    """
    if not isinstance(num_towers, int | np.integer) or not 0 <= num_towers <= _MOST_TOWERS:
        raise InputError(
            f"--num_towers={num_towers!r}: a whole number from 0 to {_MOST_TOWERS} is needed"
        )
    if not isinstance(devices, str):  # of an earlier call, too
        devices = [shown_name(d) if isinstance(d, NewName) else d for d in as_devices(devices)]
    names = devices if isinstance(devices, str) else ",".join(devices)
    kind = names.strip().lower()
    if "/job:" in names:  # of another machine
        return names.split(",")
    if kind == "cpu":
        hide_gpus()
    gpus = [shown_name(f"/gpu:{i}") for i in range(len(logical_gpus()))]
    if kind == "cpu":
        chosen = _cpus(num_towers)
    elif kind in ("", "gpu", "any"):
        chosen = _first_devices(num_towers, gpus, kind)
    else:
        chosen = _named_devices(num_towers, names)
    threads = tf.config.threading
    is_set = "TF_NUM_INTRAOP_THREADS" in os.environ or threads.get_intra_op_parallelism_threads()
    if divide_cores and len(chosen) > 1 and all("cpu" in name for name in chosen) and not is_set:
        # Else, on 2 cores, ResNet-20's step took 1.10 times as long with 2 towers, 1.19 with 4.
        share = -(-len(os.sched_getaffinity(0)) // len(chosen))
        with contextlib.suppress(RuntimeError):  # it has started
            threads.set_intra_op_parallelism_threads(share)
    cpus = [f"/cpu:{i}" for i in range(_provide_cpus(chosen))]
    existing = gpus + cpus
    missing = [device for device in chosen if device not in existing]
    if not missing:
        shown_names.in_use |= any("gpu" in device for device in chosen)
        unused = [gpu for gpu in gpus if gpu not in chosen]
        if kind not in ("", "cpu", "any", "gpu") and unused and tf_internals.has_started():
            _print_once(_charged(unused, chosen))
        return list(map(new_name, chosen))
    if kind in ("", "cpu", "any") and not device_names.stand_in():
        _print_once(
            f"note        {len(chosen)} towers share {', '.join(cpus)}, because TensorFlow has "
            "already started; the results are the same; for one device each, call "
            f"towers.devices.tower_devices({len(chosen)}) before the first model (in a notebook, "
            "restart the kernel first)"
        )
        return [cpus[tower % len(cpus)] for tower in range(len(chosen))]
    why = ", and has already started, so no CPU devices can be added"
    if "gpu" in missing[0]:
        why = _driver_says(nvml.gpus())
        if shown_names.renumbered():
            why = (
                ", because an earlier call hid the others; first name all GPUs of the program: "
                'towers.devices.configure(devices="/gpu:0,/gpu:1")'
            )
    raise InputError(
        f"--devices={names}: no {missing[0]}; TensorFlow sees {', '.join(existing)}{why}; "
        f"type --devices={existing[0]}, or --devices=cpu"
    )


def loose_ops_on(devices: str) -> contextlib.AbstractContextManager:
    """Place ops without a device on the first of these devices, and not on /gpu:0.

    Args:
        devices: an option of a run. If it names none, or TensorFlow's /gpu:0 is among them, or it
            will start without the others, nothing changes.
    """
    cpu = "/cpu:0" if devices.strip().lower() == "cpu" else ""
    names = [cpu or new_name(shown_names.parse_device(name)) for name in devices.split(",")]
    others = all(names) and "/gpu:0" not in names
    if others and tf_internals.has_started() and tf.config.get_soft_device_placement():
        return tf.device(names[0])
    return contextlib.nullcontext()


def _charged(unused: Sequence[str], chosen: Sequence[str]) -> str:
    # Says what this process holds of GPUs that it does not use.
    limits, parts = tf_internals.device_memory_bytes(), []
    for name in unused:
        _, peak = memory.of_device(new_name(name)) or (0, 0)
        gpu = logical_gpus()[int(new_name(name)[5:])]
        growth = tf.config.experimental.get_memory_growth(gpu)
        taken = peak if growth or not peak else limits[new_name(name)] / MIB
        parts.append(f"{name} ({taken:.0f} MiB)")
    return (
        f"note        TensorFlow started before the devices were named, so it also holds memory "
        f"of {', '.join(parts)}; to leave these GPUs to others, call "
        f'towers.devices.configure(devices="{",".join(chosen)}") before the first model'
    )


def most_towers(devices: str | Sequence[str] = "") -> int | None:
    """Return how many towers can stand on devices, see `tower_devices`; None for any number."""
    kind = devices.strip().lower() if isinstance(devices, str) else devices
    if kind == "cpu" or (kind in ("", "any") and not logical_gpus()):
        return None  # TensorFlow has not started: it will have as many as are asked for
    return len(tower_devices(0, devices))


@functools.cache
def _print_once(line: str) -> None:
    """Print a line that a notebook's next cells need not repeat."""
    print_line(line, sys.stderr)


def describe(devices: Sequence[str] | None = None) -> list[Device]:
    """Return a description of each tower's device; TensorFlow is not started.

    Args:
        devices: of the towers, from `tower_devices`; by default all visible GPUs, or the CPU if
            there is none.
    """
    gpus = logical_gpus()
    if devices is None:
        devices = [f"/gpu:{i}" for i in range(len(gpus))] or ["/cpu:0"]
    seen = driver_gpus(gpus)
    rows = []
    for tower, device in enumerate(devices):
        number, device = int(device.rpartition(":")[2]), shown_name(device)
        if machine_of(device):
            rows.append(Device(tower, device, None))
        elif "cpu" in device:
            name = f"CPU, {os.cpu_count()} cores shared by all its devices"
            rows.append(Device(tower, device, name))
        else:
            name = tf.config.experimental.get_device_details(gpus[number]).get("device_name")
            gpu = seen[number] or DriverGpu(None)
            where = gpu.pci_bus_id, gpu.index, gpu.total_bytes, gpu.free_bytes
            rows.append(Device(tower, device, name or gpu.name, *where))
    return rows


def report(devices: Sequence[str]) -> list[str]:
    """Return the lines that a run prints about its devices: a table, then the settings in force.

    Raises:
        RunError: TensorFlow's settings differ from those of `configure`.
    """
    if are_remote(devices) and (cluster := remote.current_cluster()):
        return [*cluster.report(), *read_back()]
    header = ("tower", "device", "PCI bus id", "driver", "total MiB", "free MiB", "name")
    rows = []
    for row in describe(devices):
        mib = [b and b // MIB for b in (row.total_bytes, row.free_bytes)]
        rows.append((row.tower, row.device, row.pci_bus_id, row.driver_index, *mib, row.name))
    return ["devices"] + [f"  {line}" for line in table(header, rows)] + read_back()


def _first_devices(num_towers: int, gpus: list[str], kind: str) -> list[str]:
    # If TensorFlow sees none of the driver's GPUs and nobody hid them, CPUs are an error unless
    # `kind` is "any": a run would silently take days.
    driver, listed = nvml.gpus(), tf.config.list_physical_devices("GPU")
    are_hidden = listed or not driver or cuda_visible_devices.hides_all(os.environ)
    see = count(len(gpus), "GPU") + (f" ({', '.join(gpus)})" if gpus else "")
    if not gpus and kind == "any":
        chosen = _cpus(num_towers or 2)
        if not are_hidden:
            says = f"TensorFlow sees {see}{_driver_says(driver)}"
            using = f"using {count(len(chosen), 'CPU device')}"
            _print_once(f"note        {using}: {says}; --devices=cpu hides this note")
        return chosen
    if not gpus and kind != "gpu" and are_hidden:
        return _cpus(num_towers)
    if gpus and num_towers <= len(gpus):
        return gpus[: num_towers or len(gpus)]
    asked = f"--num_{'gpus' if kind == 'gpu' else 'towers'}={num_towers}, but "
    fewer = f"ask for at most {len(gpus)}, or " if gpus else ""
    says, end, remedy = _driver_says(driver).partition("; ")
    raise InputError(
        f"{asked if num_towers else ''}TensorFlow sees {see}{says}; {fewer}type --devices=cpu "
        f"--num_towers={num_towers or 1} for towers on the CPU{end}{remedy}"
    )


def _cpus(num_towers: int) -> list[str]:
    first = int(device_names.stand_in())  # the host does not stand in for a GPU
    return [f"/cpu:{i}" for i in range(first, first + (num_towers or 1))]


def _driver_says(driver: Sequence[DriverGpu]) -> str:
    # A clause: what the driver sees, and what to do if TensorFlow sees less.
    if not driver:
        return "" if logical_gpus() else ", and no NVIDIA driver was found"
    says, visible = f", the driver has {', '.join(map(str, driver))}", visible_gpus(driver)
    if len(visible) < len(driver) and "CUDA_VISIBLE_DEVICES" in os.environ:
        says += (
            f", and CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides some of them"
        )
    return f"{says}; {cuda_visible_devices.INSTALL}" if missing_gpus(visible) else says


def _named_devices(num_towers: int, names: str) -> list[str]:
    option, chosen = f"--devices={names}", []
    for name in names.split(","):
        if not (device := shown_names.parse_device(name)):
            raise InputError(
                f"{option}: {name!r} is not a device; "
                "type names such as /gpu:0,/gpu:2 or /cpu:0, or --devices=cpu"
            )
        if device in chosen and "gpu" in device:
            raise InputError(f"{option}: {device} is named twice; each GPU takes one tower")
        chosen.append(device)
    if num_towers not in (0, len(chosen)):
        raise InputError(
            f"--num_towers={num_towers} and {option} disagree, since it names {len(chosen)}; leave "
            "out --num_towers, or use the first devices with --devices="
        )
    return chosen


def _provide_cpus(chosen: Sequence[str]) -> int:
    # Creates the logical CPUs that `chosen` needs, unless TensorFlow has started; returns how many
    # there are.
    needed = max((int(d.split(":")[1]) + 1 for d in chosen if d.startswith("/cpu")), default=1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    if needed > len(configured or [None]):
        with contextlib.suppress(RuntimeError):  # it has started
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * needed
            )
    return len(device_names.devices_here("CPU"))
