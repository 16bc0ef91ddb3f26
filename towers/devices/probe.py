"""A small computation on every device and a copy between every two, checked and timed.

It runs in a process of its own, so that an abort deep inside CUDA becomes a message:

    found = probe.run_probe(["/cpu:0", "/gpu:0"])
    if isinstance(found, str):
        print("the probe", found)

That process is `python -m towers.devices.probe DEVICE...`. It sees the GPUs that it is asked for
and no others, and prints one JSON object:

    {"gpus": [["NVIDIA A100", [8, 0]]],                   all that TensorFlow lists
     "build": {"cuda_version": "12.5.1"},                 tf.sysconfig.get_build_info()
     "devices": {"/cpu:0": {"errors": [], "gflops": {"matmul": 90.0, "convolution": 80.0}}, ...},
     "copies": {"/cpu:0 to /gpu:0": null, ...}}           null, or what was wrong
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 180  # a GPU that is newer than TensorFlow compiles its kernels first
TIMED_SECONDS = 0.2  # of each operation on each device, at least
TOLERANCE = 1e-2  # relative to the largest value: TensorFloat-32 is off by 5e-4, bfloat16 by 3e-3
MATMUL_SIZE = 1024  # 2.1 GFLOP
COPY_BYTES = 2**22


def run_probe(
    devices: Sequence[str],
    timeout_seconds: float = TIMEOUT_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any] | str:
    """Probe devices in a process of its own, and in one for each if that one fails.

    Args:
        devices: "/cpu:1", "/gpu:0", numbered as TensorFlow lists them; logical CPUs are made as
            needed. None at all tells "gpus" and "build" without starting any device.
        timeout_seconds: that a process may take.
        environ: what the process sees in place of os.environ.

    Returns:
        What the module's docstring says; a device whose process failed has that as its error. Or,
        where no process came to its end, how that was: "was ended by SIGABRT: last words".
    """
    environ = os.environ if environ is None else environ
    found = _run_process(devices, timeout_seconds, environ)
    if isinstance(found, dict) or len(devices) < 2:
        return found
    alone = {device: _run_process([device], timeout_seconds, environ) for device in devices}
    ended = [result for result in alone.values() if isinstance(result, dict)]
    if not ended:
        return found
    copies = {"all together": f"the probe {found}"} if len(ended) == len(devices) else {}
    results = {
        device: {"errors": [f"the probe {result}"], "gflops": {}}
        if isinstance(result, str)
        else result["devices"][device]
        for device, result in alone.items()
    }
    return ended[0] | {"devices": results, "copies": copies}


def _run_process(
    devices: Sequence[str], timeout_seconds: float, environ: Mapping[str, str]
) -> dict[str, Any] | str:
    """Return what one process found, or how it failed."""
    root = str(Path(__file__).resolve().parents[2])
    environ = {
        **environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")])),
        "PYTHONSAFEPATH": "1",  # no random.py of the current folder
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command = [sys.executable, "-m", "towers.devices.probe", *devices]
    try:
        process = subprocess.Popen(command, env=environ, **pipes)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired as expired:
        return f"gave no answer within {timeout_seconds:g} s: {_last_words(expired.stderr)}"
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
                process.communicate(timeout=5)
    if process.returncode:
        code = process.returncode
        end = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        return f"{end}: {_last_words(err)}"
    try:
        found = json.loads(out.splitlines()[-1])
        if found["devices"].keys() == set(devices):
            return found
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return f"printed what is no result: {_last_words(out)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(output: bytes | None) -> str:
    """Return the last line that is neither TensorFlow's usual chatter nor of a C++ stack trace."""
    lines = (output or b"").decode(errors="replace").splitlines()
    chatter = re.compile(r"\s*$|[IW]\d{4} |WARNING: All log messages before|\s*(@ +0x|\*\*\*)")
    said = [line.strip()[:200] for line in lines if not chatter.match(line)]
    return said[-1] if said else "without a word"


# ------------------------------------------------------------------ what the process itself runs


def probe(devices: Sequence[str]) -> dict[str, Any]:
    """Return what the module's docstring says; TensorFlow must not have started."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    names = _make_visible(devices, gpus) if devices else {}
    return {
        "gpus": [[d.get("device_name"), d.get("compute_capability")] for d in details],
        "build": dict(tf.sysconfig.get_build_info()),
        "devices": {device: probe_device(name) for device, name in names.items()},
        "copies": {
            f"{source} to {target}": _error(probe_copy, names[source], names[target])
            for source in devices
            for target in devices
            if source != target
        },
    }


def _make_visible(devices: Sequence[str], gpus: Sequence[Any]) -> dict[str, str]:
    """Hide the GPUs that are not asked for, make logical CPUs; return {device: its name now}."""
    import tensorflow as tf

    tf.config.set_soft_device_placement(False)
    numbers = {device: int(device.rpartition(":")[2]) for device in devices}
    cpus = [number for device, number in numbers.items() if "cpu" in device]
    parts = [tf.config.LogicalDeviceConfiguration()] * (max(cpus, default=0) + 1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, parts)
    shown = sorted(n for device, n in numbers.items() if "gpu" in device and n < len(gpus))
    tf.config.set_visible_devices([gpus[number] for number in shown], "GPU")
    now = {f"/gpu:{number}": f"/gpu:{place}" for place, number in enumerate(shown)}
    return {device: now.get(device, device) for device in devices}


def probe_device(device: str) -> dict[str, Any]:
    """Check and time a matmul and a convolution; return {"errors": [], "gflops": {}}."""
    errors, gflops = [], {}
    for name, measure in (("matmul", measure_matmul), ("convolution", measure_convolution)):
        error = _error(lambda name=name, measure=measure: gflops.update({name: measure(device)}))
        errors += [f"{name}: {error}"] if error else []
    return {"errors": errors, "gflops": gflops}


def measure_matmul(device: str) -> float:
    """Return the GFLOP/s of a matmul.

    Raises:
        ArithmeticError: numpy has another result.
    """
    import numpy as np
    import tensorflow as tf

    a, b = np.random.default_rng(0).standard_normal((2, MATMUL_SIZE, MATMUL_SIZE), np.float32)
    return _measure(device, tf.matmul, a, b, expected=a @ b, gflop=2e-9 * MATMUL_SIZE**3)


def measure_convolution(device: str) -> float:
    """Return the GFLOP/s of a 3x3 convolution, `[8, 34, 34, 64]` to `[8, 32, 32, 64]`.

    Raises:
        ArithmeticError: numpy has another result.
    """
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    images = random.standard_normal((8, 34, 34, 64), np.float32)
    kernel = random.standard_normal((3, 3, 64, 64), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2))
    expected = np.tensordot(windows, kernel, ([4, 5, 3], [0, 1, 2]))

    def convolve(images, kernel):
        return tf.nn.conv2d(images, kernel, 1, "VALID")

    gflop = 2e-9 * expected.size * kernel[..., 0].size
    return _measure(device, convolve, images, kernel, expected=expected, gflop=gflop)


def _measure(device: str, function: Callable, *arrays: Any, expected: Any, gflop: float) -> float:
    """Compare a function's result with what is expected; return its GFLOP/s on a device."""
    import numpy as np
    import tensorflow as tf

    with tf.device(device):
        inputs = [tf.identity(tf.constant(array)) for array in arrays]
        error = np.abs(function(*inputs).numpy() - expected).max() / np.abs(expected).max()
        if not error < TOLERANCE:  # NaN is not
            raise ArithmeticError(f"the result is off by {error:.2g} of its largest value")
        number, seconds = 1, 0.0
        while seconds < TIMED_SECONDS:  # one wait for the device at the end of ever more calls
            number *= 2
            start = time.perf_counter()
            for _ in range(number):
                function(*inputs)
            tf.test.experimental.sync_devices()
            seconds = time.perf_counter() - start
    return gflop * number / seconds


def probe_copy(source: str, target: str) -> None:
    """Copy random bits from one device to another and compare them.

    Raises:
        ArithmeticError: they differ.
    """
    import numpy as np
    import tensorflow as tf

    words = np.random.default_rng(1).integers(0, 2**32, COPY_BYTES // 4, np.uint32)
    with tf.device(source):
        there = tf.identity(tf.constant(words.view(np.float32)))  # int32 would stay on the host
    with tf.device(target):
        copied = tf.identity(there)
    wrong = int((copied.numpy().view(np.uint32) != words).sum())
    if wrong:
        raise ArithmeticError(f"{wrong} of {words.size} words arrived wrong")


def _error(function: Callable, *arguments: Any) -> str | None:
    """Return what a function raises, in one line: one failure must not hide the other results."""
    try:
        function(*arguments)
    except Exception as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1:])))
