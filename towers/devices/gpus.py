"""Sets which GPUs a process sees and how much memory it uses of them, and reads it back."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.devices import cuda_visible_devices, nvml, self_test, shown_names
from towers.devices.cuda_visible_devices import FORCED_GROWTH
from towers.devices.nvml import MIB, DriverGpu
from towers.devices.shown_names import shown_name
from towers.errors import InputError, RunError
from towers.formatting import print_line
from towers.options.parts import GpuOptions

_THREAD_MODE = "TF_GPU_THREAD_MODE"
_in_force = GpuOptions()  # set once, before TensorFlow starts


def configure(*, devices: str | Sequence[str] = "", **options: Any) -> None:
    """Set which GPUs this process sees and how it uses them; TensorFlow is not started.

    Defaults change nothing, so a second call may repeat some options of the first one.
    `allow_soft_placement` and `tf32` may change at any time, and the last call counts.
    `deterministic` cannot be switched off again.

    Args:
        devices: of the towers, as for `tower_devices`; GPUs that it leaves out are hidden.
        **options: fields of `towers.options.parts.GpuOptions`: `visible_gpus`,
            `per_process_gpu_memory_fraction`, `gpu_memory_limit_mib`, `allow_growth`,
            `allow_soft_placement`, `tf32`, `deterministic`.

    Raises:
        InputError: an option is out of range or impossible here, a GPU is full or not there, or
            TensorFlow has started.
    """
    _configure(devices, options)
    known = [shown_name(f"/gpu:{i}") for i in range(len(logical_gpus()))]
    for name in _named(devices):
        if "gpu" in name and name not in known:
            raise InputError(
                f"devices={devices!r}: no {name}; TensorFlow sees {', '.join(known) or 'no GPU'}; "
                "type `towers doctor` to see why"
            )


def configure_run(options: Any) -> None:
    """Do the same with the options of a run; no GPU is hidden if TensorFlow has started."""
    devices = "" if tf_internals.has_started() else options.devices
    _configure(devices, dataclasses.asdict(options.gpu_options()))


def _configure(devices: str | Sequence[str], options: Mapping[str, Any]) -> None:
    global _in_force
    asked, before = GpuOptions(**options), _in_force.demands()
    new = {name: value for name, value in asked.demands().items() if before.get(name) != value}
    asked = dataclasses.replace(asked, **before | new)
    if new or not (before or tf_internals.has_started()):
        event = "started" if new and tf_internals.has_started() else ""
        if "visible_gpus" in new and tf_internals.has_listed_devices():
            event = "listed its devices"
        chosen = new.get("visible_gpus", "none") != "none"
        if event and (chosen or tf.config.list_physical_devices("GPU")):
            flags = ", ".join(f"--{name}={value}" for name, value in new.items())
            raise InputError(
                f"{flags} comes too late, TensorFlow has already {event}; call "
                "towers.devices.configure() before anything lists devices or creates a tensor"
            )
        _set_before_start(asked, devices)
    hide_others(devices)
    if tf_internals.has_started() and _if_others_are_hidden(devices) is not None:
        raise InputError(
            f"devices={devices!r} comes too late, TensorFlow has already started; call "
            "towers.devices.configure() before anything creates a tensor"
        )
    tf.config.set_soft_device_placement(asked.allow_soft_placement)
    if asked.tf32 != _in_force.tf32:  # else it stays as the program has it
        tf.config.experimental.enable_tensor_float_32_execution(asked.tf32)
    if asked.deterministic:
        tf.config.experimental.enable_op_determinism()
    _in_force = asked


def hide_gpus() -> None:
    """Leave the GPUs to other processes, unless TensorFlow has started and uses them already."""
    if not tf_internals.has_started():
        tf.config.set_visible_devices([], "GPU")


def hide_others(devices: str | Sequence[str]) -> None:
    """Hide the GPUs that the towers' devices leave out, unless TensorFlow has started.

    TensorFlow numbers the others from 0; `shown_names.shown_name` returns their names of before.
    Once `tower_devices` has returned a GPU nothing more is hidden.

    Args:
        devices: as for `tower_devices`; nothing is hidden if one of them is not there.
    """
    if isinstance(devices, str) and devices.strip().lower() == "cpu":
        hide_gpus()
    fixed = shown_names.in_use or tf_internals.has_started()
    if not fixed and (kept := _if_others_are_hidden(devices)) is not None:
        tf.config.set_visible_devices(list(dict.fromkeys(kept.values())), "GPU")
        shown_names.renumber(kept)


def _if_others_are_hidden(
    devices: str | Sequence[str],
) -> dict[str, tf.config.PhysicalDevice] | None:
    # {name: GPU} of those that stay visible, with all parts of each; None if all do, since one of
    # the devices is not there, or none is named.
    names = _named(devices)
    known = {} if "" in names else logical_gpus()
    known = {shown_name(f"/gpu:{i}"): gpu for i, gpu in enumerate(known)}
    used = [known.get(name) for name in names if "gpu" in name]
    kept = {name: gpu for name, gpu in known.items() if gpu in used}
    return kept if None not in used and len(kept) < len(known) else None


def _named(devices: str | Sequence[str]) -> list[str]:
    listed = devices.split(",") if isinstance(devices, str) else map(str, devices)
    return list(map(shown_names.parse_device, listed))


def logical_gpus() -> list[tf.config.PhysicalDevice]:
    """Return the physical GPU of each of /gpu:0, /gpu:1, ...: one with logical parts repeats.

    `tf.config.list_logical_devices` would start TensorFlow, and no logical CPU could be created.
    """
    cuda_visible_devices.tidy(os.environ)  # sets CUDA's order before CUDA lists the GPUs
    return [
        gpu
        for gpu in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]
    ]


def _set_before_start(asked: GpuOptions, devices: str | Sequence[str]) -> None:
    driver = nvml.gpus()
    cuda_visible_devices.tidy(os.environ)
    choice = cuda_visible_devices.visible_in(os.environ, driver)
    if not tf_internals.has_listed_devices():
        cuda_visible_devices.set_visible(asked, driver, os.environ)
    visible = visible_gpus(driver)
    gpus = tf.config.list_physical_devices("GPU")
    if asked.chosen() and (missing := missing_gpus(visible)):
        raise InputError(
            f"--visible_gpus={asked.visible_gpus}: TensorFlow does not list GPU "
            f"{', '.join(map(str, missing))}; {cuda_visible_devices.INSTALL}"
        )
    hide_others(devices)
    limits, gpus = [], tf.config.get_visible_devices("GPU")
    matched = driver_gpus(gpus)
    _check_driver(matched, choice)
    for gpu, seen in zip(gpus, matched, strict=True):
        limits.append(_limit_mib(asked, seen))
        if seen and seen.free_bytes is not None:
            _check_free_memory(seen, limits[-1], choice)
        _check_own_parts(asked, gpu, (limits[-1], _limit_mib(_in_force, seen)))
    for gpu, limit in zip(gpus, limits, strict=True):
        if asked.allow_growth:
            tf.config.experimental.set_memory_growth(gpu, True)
        if limit:
            part = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
            tf.config.set_logical_device_configuration(gpu, [part])
    if len(gpus) > 1:  # read when TensorFlow starts; else one pool of threads serves all of them
        os.environ.setdefault(_THREAD_MODE, "gpu_private")


def _check_own_parts(
    asked: GpuOptions, gpu: tf.config.PhysicalDevice, ours: tuple[int | None, int | None]
) -> None:
    """Raise InputError for options that exclude the parts into which the program splits a GPU."""
    flags = [f"--{n}={value}" for n, value in asked.demands().items() if n != "visible_gpus"]
    parts = [part.memory_limit for part in tf.config.get_logical_device_configuration(gpu) or []]
    if flags and parts and parts not in [[limit] for limit in ours]:
        number = gpu.name.rpartition(":")[2]
        raise InputError(
            f"{', '.join(flags)}: this program has split GPU {number} into parts of "
            f"{', '.join(f'{mib:g}' for mib in parts)} MiB with "
            "tf.config.set_logical_device_configuration; leave out that call, or the option"
        )


def _check_driver(gpus: Sequence[DriverGpu | None], choice: Sequence[DriverGpu]) -> None:
    """Raise InputError for a GPU whose kernels the driver must compile, if it is too old for it.

    For 9.0 TensorFlow 2.21 has machine code of most kernels, and PTX of the elementwise ones.
    """
    version, cuda, needed = nvml.driver_version(), nvml.cuda_version(), {}
    with_ptx = [gpu for gpu in choice if (gpu.compute_capability or (0, 0)) >= (9, 0)]
    for gpu in with_ptx if version else ():
        new = gpu.compute_capability >= (10, 0)
        driver, least_cuda = (570, (12, 8)) if new else (555, (12, 5))
        if int(version.partition(".")[0]) < driver and cuda < least_cuda:
            needed[gpu] = driver
    for gpu in filter(needed.get, gpus):
        capability = ".".join(map(str, gpu.compute_capability))
        others = ",".join(other.key for other in choice if other not in needed)
        raise InputError(
            f"GPU {gpu} of compute capability {capability} needs driver {needed[gpu]} or newer, "
            f"but the driver is {version}; update it, or leave the GPU out with "
            f"--visible_gpus={others or 'none'}"
        )


def _limit_mib(options: GpuOptions, gpu: DriverGpu | None) -> int | None:
    fraction = options.per_process_gpu_memory_fraction
    if not fraction:
        return options.gpu_memory_limit_mib or None
    if not (gpu and gpu.cuda_bytes):
        raise InputError(
            f"--per_process_gpu_memory_fraction={fraction} needs the total memory, which the "
            "driver (NVML) does not report here; type --gpu_memory_limit_mib=4096, or another limit"
        )
    return max(1, int(fraction * (gpu.cuda_bytes // MIB)))  # as TensorFlow does in sessions


def _check_free_memory(gpu: DriverGpu, limit_mib: int | None, choice: Sequence[DriverGpu]) -> None:
    # An older driver does not report its reserve.
    most = gpu.free_bytes if gpu.processes else gpu.cuda_bytes
    if not gpu.full and (limit_mib or 0) * MIB <= most:
        return
    holders = ", ".join(gpu.processes) or "another process"
    others = ",".join(other.key for other in choice if not other.full and other != gpu)
    raise InputError(
        f"GPU {gpu} has {gpu.free_bytes // MIB} of {gpu.total_bytes // MIB} MiB free"
        + (f", but {limit_mib} are needed" if limit_mib else "")
        + (f": {holders} uses the rest" if gpu.full or gpu.processes else ": ask for less")
        + f"; choose others with --visible_gpus={others or 'none'}"
    )


def read_back() -> list[str]:
    """Return lines on the settings in force, read from TensorFlow, which is started.

    Raises:
        RunError: they differ from those of `configure`.
    """
    asked = _in_force
    tf.config.list_logical_devices()
    actual = tf_internals.device_memory_bytes()
    lines, wrong = [], []
    gpus = tf.config.get_visible_devices("GPU")
    for gpu, seen in zip(gpus, driver_gpus(gpus), strict=True):
        limit = _limit_mib(asked, seen)
        growth = "on" if tf.config.experimental.get_memory_growth(gpu) else "off"
        growth = {"true": "on", "false": "off"}.get(os.environ.get(FORCED_GROWTH), growth)
        if asked.allow_growth and growth == "off":
            wrong.append(f"{FORCED_GROWTH}=false turns off --allow_growth: unset it")
        parts = tf.config.get_logical_device_configuration(gpu)
        for _ in parts or [None]:
            device = f"/gpu:{len(lines)}"
            memory, device = actual[device] // MIB, shown_name(device)
            text = f"{memory} MiB, growth {growth}"
            if os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
                to_have = f": unset it for a limit of {memory} MiB" if parts else ""
                text = f"has no limit with TF_GPU_ALLOCATOR=cuda_malloc_async{to_have}"
            lines.append(f"memory      {device} {text}")
            if limit and memory != limit:
                wrong.append(f"the limit of {device} is {memory} MiB, not {limit}")
    if wrong:
        raise RunError(f"TensorFlow did not apply the options: {'; '.join(wrong)}")
    if len(gpus) > 1 and (mode := os.environ.get(_THREAD_MODE)):
        lines.append(f"threads     {_THREAD_MODE}={mode}")
    lines += precision()
    if tf_internals.ops_are_deterministic():
        lines.append("determinism ops give the same bits each time, or raise an error")
    if not tf.config.get_soft_device_placement():
        lines.append("placement   soft placement is off")
    flags = [f"--{name}={value}" for name, value in asked.demands().items() if value != "none"]
    if flags and not gpus:
        lines.append(f"memory      no GPU found: {', '.join(flags)} has no effect")
    return lines


def precision() -> list[str]:
    """Return a line on whether TF32 is on, if there is a GPU that has it."""
    gpus = _names_and_capabilities(tf.config.get_visible_devices("GPU"))
    if not any((capability or (0,)) >= (8, 0) for _, capability in gpus):
        return []
    enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    if not enabled or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return ["precision   TF32 is off"]
    return ["precision   TF32 is on: float32 products use 10 of 23 bits; --tf32=false uses all"]


def try_out() -> None:
    """Test each GPU by a small computation in another process.

    A CUDA that does not fit is found before any data is read, and an abort inside CUDA becomes a
    message. It takes some seconds, the first time minutes with a GPU that is newer than TensorFlow,
    and does nothing without a GPU or once TensorFlow has started.

    Raises:
        RunError: a GPU computes wrong results or none, or a copy to it arrives changed.
    """
    everything = tf.config.list_physical_devices("GPU")
    visible = tf.config.get_visible_devices("GPU")
    if not visible or tf_internals.has_started():
        return
    if newer := self_test.compiling(driver_gpus(visible)):
        print_line(f"compiling   {self_test.compiling_note(newer)}", sys.stderr)
    probe = self_test.run_probe([f"/gpu:{everything.index(gpu)}" for gpu in visible])
    if isinstance(probe, str):
        raise RunError(f"the GPUs cannot be used: the probe {probe}; type towers doctor")
    if faults := [f"{name}: {error}" for name, error in probe["errors"].items() if error]:
        raise RunError(f"{faults[0]}; leave it out with --visible_gpus, or type towers doctor")


def visible_gpus(driver: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return the driver's GPUs that CUDA shows this process."""
    cuda_visible_devices.tidy(os.environ)
    return cuda_visible_devices.visible_in(os.environ, driver)


def driver_gpus(gpus: Sequence[tf.config.PhysicalDevice]) -> list[DriverGpu | None]:
    """Return the driver's view of each of TensorFlow's GPUs."""
    everything = tf.config.list_physical_devices("GPU")
    visible = visible_gpus(nvml.gpus())
    seen = cuda_visible_devices.match(_names_and_capabilities(everything), visible)
    return [seen[everything.index(gpu)] for gpu in gpus]


def missing_gpus(visible: Sequence[DriverGpu]) -> list[DriverGpu]:
    """Return the driver's GPUs that TensorFlow does not list."""
    listed = _names_and_capabilities(tf.config.list_physical_devices("GPU"))
    matched = cuda_visible_devices.match(listed, visible)
    return [gpu for gpu in visible if gpu not in matched]


def _names_and_capabilities(
    gpus: Sequence[tf.config.PhysicalDevice],
) -> list[cuda_visible_devices.Seen]:
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return [(d.get("device_name"), d.get("compute_capability")) for d in details]


def config_proto(
    *, log_device_placement: bool = False, num_cpus: int = 1, **options: Any
) -> tf.compat.v1.ConfigProto:
    """Return a `ConfigProto` with the same options, for sessions of `tf.compat.v1`.

    Args:
        log_device_placement: whether the session prints the device of every op.
        num_cpus: number of CPU devices; several stand in for GPUs.
        **options: as for `configure`.

    Raises:
        InputError: an option is out of range, or a GPU of `visible_gpus` does not exist.
    """
    asked = GpuOptions(**options)
    config = tf.compat.v1.ConfigProto(
        allow_soft_placement=asked.allow_soft_placement,
        log_device_placement=log_device_placement,
        device_count={"CPU": num_cpus},
    )
    gpu_options = config.gpu_options
    gpu_options.allow_growth = asked.allow_growth
    gpu_options.per_process_gpu_memory_fraction = asked.per_process_gpu_memory_fraction
    chosen = visible = visible_gpus(nvml.gpus())
    if asked.visible_gpus:
        chosen = cuda_visible_devices.choose(asked, visible, os.environ)
        gpu_options.visible_device_list = ",".join(str(visible.index(gpu)) for gpu in chosen)
        config.device_count["GPU"] = len(chosen)
    if limit := asked.gpu_memory_limit_mib:
        for _ in chosen or [None]:
            gpu_options.experimental.virtual_devices.add(memory_limit_mb=[limit])
    return config
