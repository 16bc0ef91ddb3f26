"""Which GPUs a process sees and how much of their memory it takes: set, then read back."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.devices import nvml, probe, visibility
from towers.devices.nvml import MIB, DriverGpu
from towers.errors import InputError, RunError
from towers.options.gpu import GpuOptions

_in_force = GpuOptions()  # what this process has set, once, before TensorFlow starts
_environ: dict[str, str] = {}  # as CUDA will read it or, once devices are listed, has read it


def configure(**options: Any) -> None:
    """Set what this process sees and takes of the GPUs; nothing is started, no memory is taken.

    Options that are left at their defaults ask for nothing, so a second call may repeat some of
    what the first one set. `allow_soft_placement` may change at any time: the last call counts.

    Args:
        **options: fields of `towers.options.gpu.GpuOptions`: `visible_gpus`,
            `per_process_gpu_memory_fraction`, `gpu_memory_limit_mib`, `allow_growth`,
            `allow_soft_placement`.

    Raises:
        InputError: an option is out of range or cannot be had here, a GPU is full, or the call
            comes too late.
    """
    global _in_force
    asked, before = GpuOptions(**options), _in_force.demands()
    new = {name: value for name, value in asked.demands().items() if before.get(name) != value}
    asked = dataclasses.replace(asked, **before | new)
    if new or not (before or tf_private.has_started()):
        _check_in_time(asked, new)
        _set(asked)
    tf.config.set_soft_device_placement(asked.allow_soft_placement)
    _in_force = asked


def _set(asked: GpuOptions) -> None:
    """Hide what `asked` leaves out, and limit the memory of the others."""
    driver = nvml.gpus()
    choice = visible_gpus(driver)
    if not tf_private.has_listed_devices():
        visibility.set_visible(asked, driver, os.environ)
    visible = visible_gpus(driver)
    gpus = tf.config.list_physical_devices("GPU")
    _check_all_found(asked, gpus, visible)
    limits = []
    for seen in visibility.match(_details(gpus), visible):
        limits.append(_limit_mib(asked, seen))
        _check_room(seen, limits[-1], choice)
    for gpu, limit in zip(gpus, limits, strict=True):
        if asked.allow_growth:
            tf.config.experimental.set_memory_growth(gpu, True)
        if limit:
            part = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
            tf.config.set_logical_device_configuration(gpu, [part])


def read_back() -> list[str]:
    """Return lines that say what is in force, read from TensorFlow; it is started if need be.

    Raises:
        RunError: it is not what `configure` was asked for.
    """
    asked = _in_force
    tf.config.list_logical_devices()
    actual = tf_private.device_memory_bytes()
    lines, wrong = [], []
    gpus = tf.config.get_visible_devices("GPU")
    for gpu, seen in zip(gpus, driver_gpus(gpus), strict=True):
        growth, limit = _grows(gpu), _limit_mib(asked, seen)
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]:
            device = f"/gpu:{len(lines)}"
            memory = actual[device] // MIB
            lines.append(f"memory      {device} {memory} MiB, growth {'on' if growth else 'off'}")
            if limit and memory != limit:
                wrong.append(f"{device} may take {memory} MiB, {limit} were asked for")
        if asked.allow_growth and not growth:
            wrong.append(f"{gpu.name} does not grow: see TF_FORCE_GPU_ALLOW_GROWTH")
    if not tf.config.get_soft_device_placement():
        lines.append("placement   soft placement is off")
    elif not asked.allow_soft_placement:
        wrong.append("soft placement is on")
    if wrong:
        raise RunError(f"TensorFlow did not take the options: {'; '.join(wrong)}")
    given = [f"--{name}={value}" for name, value in asked.demands().items() if value != "none"]
    if given and not gpus:
        lines.append(f"memory      no GPU here: {', '.join(given)} has nothing to act on")
    name = "CUDA_VISIBLE_DEVICES"
    if os.environ.get(name) != cuda_environ().get(name):
        now = f"{name}={os.environ[name]}" if name in os.environ else f"unset {name}"
        lines.append(f"warning     {now} came too late: TensorFlow had listed its devices by then")
    return lines


def try_out() -> None:
    """Let each GPU compute a little in another process, before this one depends on it.

    A CUDA or cuDNN that does not fit is found before any data is read, and an abort deep inside is
    a message. It takes some seconds; nothing is done without a GPU, or once TensorFlow has started.

    Raises:
        RunError: a GPU computes wrong or not at all, or a copy between two arrives changed.
    """
    everything = tf.config.list_physical_devices("GPU")
    visible = tf.config.get_visible_devices("GPU")
    if not visible or tf_private.has_started():
        return
    found = probe.run_probe([f"/gpu:{everything.index(gpu)}" for gpu in visible])
    if isinstance(found, str):
        raise RunError(f"the GPUs cannot be used: the probe {found}; type towers doctor")
    faults = [f"{name}: {e}" for name, device in found["devices"].items() for e in device["errors"]]
    faults += [f"copy from {pair}: {error}" for pair, error in found["copies"].items() if error]
    if faults:
        remedy = "leave that GPU out with --visible_gpus, or type towers doctor"
        raise RunError(f"{faults[0]} ({len(faults)} faults in all); {remedy}")


def cuda_environ() -> Mapping[str, str]:
    """Return the environment from which CUDA takes its GPUs: it reads it once, before it lists."""
    listed = tf_private.has_listed_devices()
    if not listed:
        visibility.tidy(os.environ)
    if not (listed and _environ):
        _environ.clear()
        _environ.update(os.environ)
    return _environ


def visible_gpus(driver: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return those of the driver's GPUs that CUDA shows this process."""
    return visibility.visible_in(cuda_environ(), driver)


def driver_gpus(gpus: Sequence[tf.config.PhysicalDevice]) -> list[DriverGpu | None]:
    """Return the driver's view of each of TensorFlow's GPUs."""
    everything = tf.config.list_physical_devices("GPU")
    seen = visibility.match(_details(everything), visible_gpus(nvml.gpus()))
    return [seen[everything.index(gpu)] for gpu in gpus]


def missing_gpus(visible: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return those of the driver's GPUs that TensorFlow does not list."""
    return visibility.skipped(_details(tf.config.list_physical_devices("GPU")), visible)


def _grows(gpu: tf.config.PhysicalDevice) -> bool:
    """Return whether TensorFlow takes a GPU's memory as it is needed."""
    forced = {"true": True, "false": False}.get(os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", ""))
    return bool(tf.config.experimental.get_memory_growth(gpu)) if forced is None else forced


def _details(gpus: Sequence[tf.config.PhysicalDevice]) -> list[visibility.Seen]:
    """Return name and compute capability of TensorFlow's GPUs."""
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return [(d.get("device_name"), d.get("compute_capability")) for d in details]


def _limit_mib(options: GpuOptions, gpu: DriverGpu | None) -> int | None:
    """Return the memory limit that `options` mean on a GPU, in MiB; None for no limit."""
    total = gpu and gpu.total_bytes and gpu.total_bytes // MIB
    limit, fraction = options.gpu_memory_limit_mib, options.per_process_gpu_memory_fraction
    if limit and total and limit > total:
        raise InputError(
            f"--gpu_memory_limit_mib={limit}: GPU {gpu} has {total} MiB; "
            f"type --gpu_memory_limit_mib={total} or less"
        )
    if not fraction:
        return limit or None
    if not total:
        raise InputError(
            f"--per_process_gpu_memory_fraction={fraction} is of the total memory, which the "
            "driver (NVML) does not tell here: type --gpu_memory_limit_mib=4096, or what you need"
        )
    if fraction * total < 1:
        raise InputError(
            f"--per_process_gpu_memory_fraction={fraction} is less than 1 of the {total} MiB "
            f"of GPU {gpu}; type --per_process_gpu_memory_fraction=0.4, or what you need"
        )
    return int(fraction * total)


def _check_in_time(asked: GpuOptions, new: dict[str, Any]) -> None:
    """Refuse options that can no longer be set."""
    event = None
    if "visible_gpus" in new and tf_private.has_listed_devices():
        event = "listed its devices"
    elif new and tf_private.has_started():
        event = "started"
    if event and not (asked.visible_gpus == "none" and not tf.config.list_physical_devices("GPU")):
        given = ", ".join(f"--{name}={value}" for name, value in new.items())
        raise InputError(
            f"{given} comes too late, TensorFlow has {event}: call towers.devices.configure() "
            "before anything that lists devices or creates a tensor"
        )


def _check_all_found(
    asked: GpuOptions, gpus: Sequence[tf.config.PhysicalDevice], visible: Sequence[DriverGpu]
) -> None:
    """Refuse to go on with other GPUs than were asked for by number."""
    if asked.visible_gpus and len(gpus) > len(visible):
        raise InputError(
            f"--visible_gpus={asked.visible_gpus}: TensorFlow lists {len(gpus)} all the same: CUDA "
            "had started before; call towers.devices.configure() first, or type "
            f"export CUDA_VISIBLE_DEVICES={cuda_environ()['CUDA_VISIBLE_DEVICES']}"
        )
    missing = visibility.skipped(_details(gpus), visible)
    if asked.indices() and missing:
        cause, remedy = visibility.why_skipped(missing, len(gpus), tf.sysconfig.get_build_info())
        raise InputError(
            f"--visible_gpus={asked.visible_gpus}: TensorFlow does not list GPU "
            f"{', '.join(map(str, missing))}: {cause}; {remedy}"
        )


def _check_room(gpu: DriverGpu | None, limit: int | None, choice: Sequence[DriverGpu]) -> None:
    """Refuse a GPU on which others have left too little memory, and name those to choose from."""
    if gpu is None or gpu.free_bytes is None:
        return
    needs_more = bool(limit and gpu.processes and limit * MIB > gpu.free_bytes)
    if not (gpu.full or needs_more):
        return
    holders = ", ".join(map(str, gpu.processes)) or "another process"
    others = ",".join(str(other.index) for other in choice if not other.full and other != gpu)
    raise InputError(
        f"GPU {gpu} has {gpu.free_bytes // MIB} of {gpu.total_bytes // MIB} MiB free"
        + (f", {limit} are needed" if needs_more else "")
        + f": {holders} holds the rest; choose others with --visible_gpus={others or 'none'}"
    )
