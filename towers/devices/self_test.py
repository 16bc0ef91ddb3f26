"""Self-test: a few kinds of kernels on every device, and a copy from each device to the next.

It runs in a process of its own, `python -m towers.devices.self_test DEVICE...`, which sees only the
GPUs that it is asked for, and prints one JSON object:

    {"gpus": [["NVIDIA A100", [8, 0]]],                   all that TensorFlow lists
     "build": {"cuda_version": "12.5.1"},                 tf.sysconfig.get_build_info()
     "errors": {"/cpu:0": null, "/gpu:0": null}}          null, or what was wrong
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from towers.devices import nvml
from towers.errors import first_line
from towers.options import search_path

TIMEOUT_SECONDS = 180
COMPILING_SECONDS = 1800  # with a GPU for which the driver compiles TensorFlow's kernels first
NEWER = (10, 0)  # the first compute capability of which TensorFlow 2.21's wheel has PTX alone
TOLERANCE = 1e-2  # relative to the largest value: TensorFloat-32 is off by 5e-4
SIZE = 1024


def compiling(gpus: Sequence[nvml.DriverGpu | None]) -> list[nvml.DriverGpu]:
    """Return the GPUs for which TensorFlow has no machine code, so that the driver compiles it."""
    known = [gpu for gpu in gpus if gpu and gpu.compute_capability]
    return [gpu for gpu in known if gpu.compute_capability >= NEWER]


def compiling_note(gpus: Sequence[nvml.DriverGpu]) -> str:
    """Return a line for the GPUs, at least one, that `compiling` has found."""
    named = ", ".join(map(str, gpus))
    return (
        f"GPU {named}: TensorFlow has no machine code for it, so the driver compiles each kernel. "
        "The first start takes minutes; later starts read CUDA's cache (~/.nv/ComputeCache)"
    )


def run_probe(devices: Sequence[str]) -> dict[str, Any] | str:
    """Test devices in a process of its own; return the module's JSON, or how the process failed.

    Args:
        devices: "/cpu:0", "/gpu:1", numbered as TensorFlow lists them; none are started without.
    """
    return run_module("towers.devices.self_test", *devices)


def run_module(module: str, *arguments: str) -> Any:
    """Run a module that prints JSON in a process of its own.

    Args:
        module: its name.
        *arguments: on its command line.

    Returns:
        The JSON; if the process failed, a text such as "was ended by SIGABRT: last line".
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    environ = search_path.child_environment(os.environ) | quiet
    command = [sys.executable, "-m", module, *arguments]
    pipes = dict(stdin=subprocess.DEVNULL, capture_output=True)
    seconds = COMPILING_SECONDS if compiling(nvml.gpus()) else TIMEOUT_SECONDS
    try:
        done = subprocess.run(command, env=environ, timeout=seconds, **pipes)
    except subprocess.TimeoutExpired as expired:
        return f"did not answer within {seconds:g} s: {_last_words(expired.stderr)}"
    if not (code := done.returncode):
        return json.loads(done.stdout.splitlines()[-1])
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{how}: {_last_words(done.stderr)}"


def _last_words(output: bytes | None) -> str:
    # Without TensorFlow's usual log and C++ stack traces.
    lines = (output or b"").decode(errors="replace").splitlines()
    chatter = re.compile(r"\s*$|[IW]\d{4} |WARNING: All log messages before|\s*(@ +0x|\*\*\*)")
    said = [line.strip()[:200] for line in lines if not chatter.match(line)]
    return said[-1] if said else "without a message"


# ------------------------------------------------------------------------ runs in the process


def run_in_process(devices: Sequence[str]) -> dict[str, Any]:
    """Test devices in this process, in which TensorFlow must not have started."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return {
        "gpus": [[d.get("device_name"), d.get("compute_capability")] for d in details],
        "build": dict(tf.sysconfig.get_build_info()),
        "errors": find_errors(_make_visible(devices, gpus)) if devices else {},
    }


def _make_visible(devices: Sequence[str], gpus: Sequence[Any]) -> dict[str, str]:
    # Hides the other GPUs, which may be full; returns {device: its name in this process}.
    import tensorflow as tf

    tf.config.set_soft_device_placement(False)
    numbers = sorted(int(d.rpartition(":")[2]) for d in devices if "gpu" in d)
    shown = [number for number in numbers if number < len(gpus)]
    tf.config.set_visible_devices([gpus[number] for number in shown], "GPU")
    now = {f"/gpu:{number}": f"/gpu:{place}" for place, number in enumerate(shown)}
    return {device: now.get(device, device) for device in devices}


def find_errors(names: Mapping[str, str]) -> dict[str, str | None]:
    """Test devices; return {device: what went wrong, or None}.

    Args:
        names: {device: TensorFlow's name of it}, in the order in which data are copied.
    """
    import numpy as np
    import tensorflow as tf

    def draw(_: Any) -> tf.Tensor:
        return tf.random.stateless_uniform([SIZE, SIZE], [1, 2], alg="philox")

    a, b = np.random.default_rng(0).standard_normal((2, SIZE, SIZE), np.float32)
    with tf.device("/cpu:0"):
        drawn = draw(None).numpy()
    # The last ones have kernels of TensorFlow's own, of which the wheel may have only PTX.
    tests = {
        "a matrix product": (lambda x: tf.matmul(x, b), a @ b),
        "a multiplication": (lambda x: tf.multiply(x, b), a * b),
        "a cast": (lambda x: tf.cast(x, tf.float64), a.astype(np.float64)),
        "a reduction": (lambda x: tf.reduce_sum(x, axis=0), a.sum(axis=0)),
        "generation of random numbers": (draw, drawn),
    }

    def error_on(x: tf.Tensor) -> str | None:
        results = {}
        for name, (compute, _) in tests.items():
            try:
                results[name] = compute(x).numpy()
            except Exception as error:
                return f"{name} fails: {first_line(error)}"
        if wrong := int((x.numpy() != a).sum()):
            return f"{wrong} of {a.size} copied numbers have changed"
        for name, (_, expected) in tests.items():
            off = np.abs(results[name] - expected).max() / np.abs(expected).max()
            if not off < TOLERANCE:  # NaN is not
                return f"{name} is off by {off:.2g} of its largest value"
        return None

    errors, x = {}, tf.constant(a)
    for device, name in names.items():
        try:
            with tf.device(name):
                x = tf.identity(x)
                errors[device] = error_on(x)
        except Exception as error:  # one failure must not hide the others
            errors[device] = f"a copy to it fails: {first_line(error)}"
        if errors[device]:
            x = tf.constant(a)
    return errors


if __name__ == "__main__":
    print(json.dumps(run_in_process(sys.argv[1:])))
