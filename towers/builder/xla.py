"""Compiles a tower by XLA, for `TowerBuilder(..., jit_compile=True)`.

XLA cannot read a variable on another device, as masters are. So each variable that a compiled tower
reads is read outside of the program, once, on the tower's device, and passed in as a tensor.

On GPUs that are newer than it XLA may end the process, as TensorFlow 2.21's does on compute
capability 12.0 by an error of LLVM. So it is first tried there in a process of its own.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import machine_of, physical_gpus, shown_name
from towers.builder.replica_scope import ReplicaScope
from towers.errors import InputError

_TRIAL_SECONDS = 600.0
_TRIAL = """
import sys
import tensorflow as tf

kind, number = sys.argv[1].split(":")
tf.config.set_visible_devices([tf.config.list_physical_devices(kind)[int(number)]], kind)
with tf.device(f"/{kind}:0"):
    length = tf.function(lambda x: tf.sqrt(tf.reduce_sum(x * x)), jit_compile=True)
    assert float(length(tf.constant([3.0, 4.0]))) == 5.0
"""


def tried_out(devices: Sequence[str]) -> bool:
    """Return True after a trial of XLA on each new GPU among the devices of this machine.

    Args:
        devices: of the towers.

    Raises:
        InputError: a trial has failed.
    """
    gpus, physical = physical_gpus(), tf.config.list_physical_devices("GPU")
    for device in devices:
        match = re.search(r"gpu:(\d+)$", device.lower())
        if not match or machine_of(device) or int(match[1]) >= len(gpus):
            continue
        gpu = gpus[int(match[1])]
        details = tf.config.experimental.get_device_details(gpu)
        capability = details.get("compute_capability") or (0, 0)
        if capability >= (10, 0) and (why := _failure(f"GPU:{physical.index(gpu)}")):
            raise InputError(
                f"--jit_compile: XLA cannot compile for {shown_name(device)}, a "
                f"{details.get('device_name')} of compute capability "
                f"{'.'.join(map(str, capability))}: a trial in another process {why}; leave out "
                "--jit_compile, or type --jit_compile=false if the run that you resume has it"
            )
    return True


@functools.cache
def _failure(device: str) -> str:
    """Return how XLA fails on one of TensorFlow's physical devices, "GPU:1"; "" if it works."""
    others = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    others["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # this process may hold most of the memory
    streams = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    command = [sys.executable, "-c", _TRIAL, device]
    try:
        done = subprocess.run(command, env=os.environ | others, timeout=_TRIAL_SECONDS, **streams)
    except subprocess.TimeoutExpired:
        return f"gave no answer within {_TRIAL_SECONDS:g} s"
    if not (code := done.returncode):
        return ""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    errors = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
    return f"{how}: {errors[-1][:200]}" if errors else how


def compiled(
    fn: Callable, on_read: Callable[[tf.Variable, tf.Tensor], None] = lambda *_: None
) -> tuple[ReplicaScope, Any]:
    """Compile `fn` by XLA, run it, and return its scope and structure of tensors.

    Args:
        fn: returns (the scope that records its assignments, a structure of tensors).
        on_read: is called with each trainable variable that `fn` reads and the value outside of the
            program, before the program runs, so that a tape can watch the value.

    Raises:
        ValueError: `fn` does something else with a variable than read it, or calls a `tf.function`
            that was traced in another tower.
    """
    outside = tf.init_scope if tf.executing_eagerly() else _current_graph().as_default
    scopes: list[ReplicaScope] = []
    reads: dict[int, tuple[tf.Variable, tf.Tensor, tf.Tensor]] = {}  # its value outside, inside

    def program() -> tuple[Any, list[tf.Tensor]]:
        graph = _current_graph()

        def read(variable: tf.Variable, original: Callable) -> tf.Tensor:
            if id(variable) not in reads:
                with outside():
                    value = tf.identity(original(variable))  # moves it to the tower's device
                with graph.as_default():
                    reads[id(variable)] = variable, value, tf.identity(value)
            return reads[id(variable)][2]

        with tf_internals.patch_reads(read):
            scope, results = fn()
            scope.apply_deferred()  # which reads the moving averages
        scopes.append(scope)
        return results, [value for _, value in scope.updates.values()]

    try:
        function = tf.function(program, jit_compile=True, autograph=False).get_concrete_function()
        for tensor, _ in function.graph.captures:
            if tensor.dtype == tf.resource:
                names = [v.name for v in function.graph.variables if v.handle is tensor]
                raise ValueError(
                    "jit_compile: a compiled tower reads variables, and can do nothing else with "
                    f"{names[0] if names else tensor.name!r}: read it by tf.convert_to_tensor or "
                    "tf.gather"
                )
        for variable, value, _ in reads.values():
            if variable.trainable:
                on_read(variable, value)
        results, assigned = function()
    except tf_internals.InaccessibleTensorError as error:
        raise ValueError(
            "a tf.function that loss_fn calls was traced for one tower, and would use its weights "
            "in the others: make a tf.function of the whole step instead"
        ) from error
    (scope,) = scopes
    scope.updates = {
        key: (variable, value)
        for (key, (variable, _)), value in zip(scope.updates.items(), assigned, strict=True)
    }
    return scope, results


def read_outside() -> contextlib.AbstractContextManager[None]:
    """Make functions that the block calls read variables outside, on the block's device.

    XLA cannot read a variable on another device in a function with `jit_compile`.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    graph, values = _current_graph(), {}

    def read(variable: tf.Variable, original: Callable) -> tf.Tensor:
        if _current_graph() is graph:
            return original(variable)
        if id(variable) not in values:
            with graph.as_default():
                values[id(variable)] = tf.identity(original(variable))
        return values[id(variable)]

    return tf_internals.patch_reads(read)


def _current_graph() -> tf.Graph:
    return tf.compat.v1.get_default_graph()
