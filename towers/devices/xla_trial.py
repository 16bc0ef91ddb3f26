"""A trial of XLA on the towers' GPUs, in a process of its own.

On GPUs that are newer than it XLA may end the process, as TensorFlow 2.21's does on compute
capability 12.0 by an error of LLVM.
"""

import functools
import json
import sys
from collections.abc import Sequence

import tensorflow as tf

from towers.devices import gpus, self_test
from towers.devices.shown_names import shown_name
from towers.errors import InputError


def try_xla(devices: Sequence[str]) -> None:
    """Compile a function by XLA on each new GPU of this machine that has a tower.

    Raises:
        InputError: a trial has failed.
    """
    physical = tf.config.list_physical_devices("GPU")
    for device, gpu in ((f"/gpu:{i}", gpu) for i, gpu in enumerate(gpus.logical_gpus())):
        details = tf.config.experimental.get_device_details(gpu)
        capability = details.get("compute_capability") or (0, 0)
        if device not in devices or capability < (10, 0):
            continue
        if why := _failure(physical.index(gpu)):
            raise InputError(
                f"--jit_compile: XLA cannot compile for {shown_name(device)}, a "
                f"{details.get('device_name')} of compute capability "
                f"{'.'.join(map(str, capability))}: a trial in another process {why}; leave out "
                "--jit_compile, or type --jit_compile=false if the run that you resume has it"
            )


@functools.cache
def _failure(number: int) -> str:
    """Return how XLA fails on one of TensorFlow's physical GPUs; "" if it works."""
    return self_test.run_module("towers.devices.xla_trial", str(number))


def _compile_on(number: int) -> None:
    tf.config.set_visible_devices([tf.config.list_physical_devices("GPU")[number]], "GPU")
    with tf.device("/gpu:0"):
        length = tf.function(lambda x: tf.sqrt(tf.reduce_sum(x * x)), jit_compile=True)
        assert float(length(tf.constant([3.0, 4.0]))) == 5.0


if __name__ == "__main__":
    _compile_on(int(sys.argv[1]))
    print(json.dumps(""))
