"""For programs that still use sessions: the ConfigProto that the options mean."""

from typing import Any

import tensorflow as tf

from towers.devices import nvml, visibility
from towers.devices.gpus import cuda_environ
from towers.options.gpu import GpuOptions


def config_proto(
    *, log_device_placement: bool = False, num_cpus: int = 1, **options: Any
) -> tf.compat.v1.ConfigProto:
    """Return the `ConfigProto` with which a session does what the options mean.

        config = towers.devices.config_proto(allow_growth=True)
        with tf.compat.v1.Session(config=config) as session: ...

    Args:
        log_device_placement: let the session print the device of every op.
        num_cpus: number of CPU devices; several stand in for GPUs.
        **options: fields of `towers.options.gpu.GpuOptions`, as for `configure`.

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
    driver, environ = nvml.gpus(), cuda_environ()
    num_visible = len(visibility.visible_in(environ, driver))
    if asked.visible_gpus:
        positions = visibility.visible_positions(asked, driver, environ)
        gpu_options.visible_device_list = ",".join(map(str, positions))
        num_visible = config.device_count["GPU"] = len(positions)
    if asked.gpu_memory_limit_mib:
        for _ in range(num_visible or 1):
            gpu_options.experimental.virtual_devices.add(
                memory_limit_mb=[asked.gpu_memory_limit_mib]
            )
    return config
