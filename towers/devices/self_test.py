"""Self-test: a small computation on every device and a copy between every two, checked and timed.

It runs in a process of its own, `python -m towers.devices.self_test DEVICE...`, so that an abort
inside CUDA becomes a message. That process sees only the GPUs that it is asked for, and prints one
JSON object:

    {"gpus": [["NVIDIA A100", [8, 0]]],                   all that TensorFlow lists
     "build": {"cuda_version": "12.5.1"},                 tf.sysconfig.get_build_info()
     "devices": {"/cpu:0": {"errors": [], "gflops": {"matmul": 90.0, "convolution": 80.0}}, ...},
     "copies": {"/cpu:0 to /gpu:0": null, ...}}           null, or what was wrong

With --all_sum before the devices the process sums over all of them instead, as towers do, and
prints {"float32": null, ...}, null or what was wrong.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from towers.formatting import first_line
from towers.options import search_path

TIMEOUT_SECONDS = 180  # a GPU that is newer than TensorFlow compiles its kernels first
TIMED_SECONDS = 0.2  # of each operation on each device, at least
TOLERANCE = 1e-2  # relative to the largest value: TensorFloat-32 is off by 5e-4, bfloat16 by 3e-3
MATMUL_SIZE = 1024
COPY_BYTES = 2**22
SUM_TIMEOUT_SECONDS = 120
SUM_ELEMENTS = 100_003
# The types that are rarest in collectives come last: a failure ends all that follow.
SUM_TYPES = ("float32", "float64", "float16", "int64", "bfloat16", "int32")


def run_probe(
    devices: Sequence[str],
    timeout_seconds: float = TIMEOUT_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any] | str:
    """Test devices in a process of its own.

    Args:
        devices: "/cpu:1", "/gpu:0", numbered as TensorFlow lists them; logical CPUs are made as
            needed. Without any, "gpus" and "build" are found without starting a device.
        timeout_seconds: of the process.
        environ: environment of the process, by default os.environ.

    Returns:
        The object in the module's docstring; if the process failed, how it ended: "was ended by
        SIGABRT: last line".
    """
    environ = {
        **search_path.child_environment(os.environ if environ is None else environ),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    command = [sys.executable, "-m", "towers.devices.self_test", *devices]
    pipes = dict(stdin=subprocess.DEVNULL, capture_output=True)
    try:
        done = subprocess.run(command, env=environ, timeout=timeout_seconds, **pipes)
    except subprocess.TimeoutExpired as expired:
        return f"gave no answer within {timeout_seconds:g} s: {_last_words(expired.stderr)}"
    if not (code := done.returncode):
        return json.loads(done.stdout.splitlines()[-1])
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{how}: {_last_words(done.stderr)}"


def run_all_sum(
    devices: Sequence[str], environ: Mapping[str, str] | None = None
) -> dict[str, str | None] | str:
    """Sum over all devices in a process of its own, once in each of SUM_TYPES.

    Args:
        devices: two or more, as for `run_probe`.
        environ: environment of the process, by default os.environ.

    Returns:
        {type: None, or what was wrong}; if the process failed, how it ended, as `run_probe`.
    """
    return run_probe(["--all_sum", *devices], SUM_TIMEOUT_SECONDS, environ)


def _last_words(output: bytes | None) -> str:
    # Without TensorFlow's usual log and C++ stack traces.
    lines = (output or b"").decode(errors="replace").splitlines()
    chatter = re.compile(r"\s*$|[IW]\d{4} |WARNING: All log messages before|\s*(@ +0x|\*\*\*)")
    said = [line.strip()[:200] for line in lines if not chatter.match(line)]
    return said[-1] if said else "without a word"


# ------------------------------------------------------------------------ runs in the process


def run_in_process(devices: Sequence[str]) -> dict[str, Any]:
    """Test devices in this process, in which TensorFlow must not have started."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    names = _make_visible(devices, gpus) if devices else {}
    return {
        "gpus": [[d.get("device_name"), d.get("compute_capability")] for d in details],
        "build": dict(tf.sysconfig.get_build_info()),
        "devices": {device: probe_device(name) for device, name in names.items()},
        "copies": {
            f"{source} to {target}": probe_copy(names[source], names[target])
            for source, target in itertools.permutations(devices, 2)
        },
    }


def _make_visible(devices: Sequence[str], gpus: Sequence[Any]) -> dict[str, str]:
    # Hides the other GPUs, creates logical CPUs, and returns {device: its name in this process}.
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
    for name, *operation in _operations():
        try:
            gflops[name] = _gflops(device, *operation)
        except Exception as error:  # one failure must not hide the other results
            errors.append(f"{name}: {first_line(error)}")
    return {"errors": errors, "gflops": gflops}


def _operations() -> Iterator[tuple[str, Callable, list[Any], Any, float]]:
    # Yields (name, function, inputs, expected result, GFLOP).
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, MATMUL_SIZE, MATMUL_SIZE), np.float32)
    yield "matmul", tf.matmul, [a, b], a @ b, 2e-9 * MATMUL_SIZE**3
    images = random.standard_normal((8, 34, 34, 64), np.float32)
    kernel = random.standard_normal((3, 3, 64, 64), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2))
    expected = np.tensordot(windows, kernel, ([4, 5, 3], [0, 1, 2]))
    gflop = 2e-9 * expected.size * kernel[..., 0].size
    convolve = lambda images, kernel: tf.nn.conv2d(images, kernel, 1, "VALID")  # noqa: E731
    yield "convolution", convolve, [images, kernel], expected, gflop


def _gflops(device: str, function: Callable, arrays: list[Any], expected: Any, gflop: float):
    # Checks a function's result on a device, and returns its GFLOP/s.
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


def probe_copy(source: str, target: str) -> str | None:
    """Copy random bits from one device to another; return what went wrong, or None.

    Args:
        source: TensorFlow's name of a device, as "/gpu:0".
        target: likewise.
    """
    import numpy as np
    import tensorflow as tf

    words = np.random.default_rng(1).integers(0, 2**32, COPY_BYTES // 4, np.uint32)
    try:
        with tf.device("/cpu:0"):
            copied = tf.constant(words.view(np.float32))  # int32 would stay on the host
        for device in source, target:
            with tf.device(device):
                copied = tf.identity(copied)
        wrong = int((copied.numpy().view(np.uint32) != words).sum())
    except Exception as error:
        return first_line(error)
    return f"{wrong} of {words.size} words arrived wrong" if wrong else None


def all_sum(devices: Sequence[str]) -> dict[str, str | None]:
    """Sum over all devices, as towers do; return {type: None, or what was wrong}.

    A failure ends all collectives of the process: later types are not tested.
    """
    import numpy as np
    import tensorflow as tf

    from towers.builder import collectives

    numbers = np.arange(SUM_ELEMENTS) % 16  # whole and small: each type holds their sum
    errors: dict[str, str | None] = {}
    for name in SUM_TYPES:
        dtype = tf.as_dtype(name)
        print(f"{name}: an all-sum over {', '.join(devices)}", file=sys.stderr, flush=True)

        @tf.function(autograph=False)
        def sums(*values: Any) -> list[Any]:
            return [total for (total,) in collectives.all_sum([[v] for v in values], devices)]

        values, added = [], sum(numbers + tower for tower in range(len(devices)))
        try:
            for tower, device in enumerate(devices):
                with tf.device(device):
                    values.append(tf.identity(tf.constant(numbers + tower, dtype)))
            totals = [total.numpy() for total in sums(*values)]
            expected = tf.constant(added, dtype).numpy()
        except Exception as error:
            return errors | {name: first_line(error)}
        pairs = zip(devices, totals, strict=True)
        wrong = [device for device, total in pairs if not np.array_equal(total, expected)]
        errors[name] = f"a wrong sum on {', '.join(wrong)}" if wrong else None
    return errors


if __name__ == "__main__":
    if sys.argv[1:2] == ["--all_sum"]:
        import tensorflow as tf

        visible = _make_visible(sys.argv[2:], tf.config.list_physical_devices("GPU"))
        print(json.dumps(all_sum(list(visible.values()))))
    else:
        print(json.dumps(run_in_process(sys.argv[1:])))
