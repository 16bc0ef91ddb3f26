"""Which GPUs a process sees and how much of their memory it takes: set, read back, and felt."""

import json

import pytest

from tests import programs

pytestmark = pytest.mark.process

# Tells how much address space the first allocation takes, and which of some fit on the last GPU.
_ALLOCATE = """
import json, os, sys
import tensorflow as tf
from towers import devices

def mapped_mib():
    return int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE") // 2**20

def fits(mib, device):
    with tf.device(device):
        try:
            return float(tf.fill([mib, 2**18], 1.0)[-1, -1]) == 1
        except tf.errors.ResourceExhaustedError:
            return False

options, sizes = map(json.loads, sys.argv[1:])
devices.configure(**options)
lines = devices.read_back()
device = tf.config.list_logical_devices("GPU")[-1].name
before = mapped_mib()
fits(1, device)
taken = mapped_mib() - before
print(json.dumps([device[-5:], lines, taken, [fits(mib, device) for mib in sizes]]))
"""


def allocate(mib, **options):
    """Return (last GPU, lines, MiB taken at first, whether a third of `mib` fits, and 10 more).

    What does not fit is an error only after ten seconds, in which TensorFlow waits for others.
    """
    argv = json.dumps(options), json.dumps([mib // 3, mib + 10])
    done = programs.python("-c", _ALLOCATE, *argv, variables={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert done.returncode == 0, done.stderr
    device, lines, taken, fits = json.loads(done.stdout)
    return device, "\n".join(lines), taken, fits


def test_all_memory_is_taken_at_first():
    device, lines, taken, fits = allocate(1024)
    assert device == "GPU:1"
    assert "/gpu:0 1024 MiB, growth off" in lines and "/gpu:1 1024 MiB, growth off" in lines
    assert taken >= 1024 and fits == [True, False]


def test_memory_grows():
    _, lines, taken, fits = allocate(1024, allow_growth=True)
    assert "/gpu:0 1024 MiB, growth on" in lines and "/gpu:1 1024 MiB, growth on" in lines
    assert taken < 1024 and fits == [True, False]


@pytest.mark.parametrize(
    "mib, option",
    [
        (409, {"per_process_gpu_memory_fraction": 0.4}),
        (200, {"gpu_memory_limit_mib": 200}),
        (256, {"per_process_gpu_memory_fraction": 0.25, "visible_gpus": "1"}),
    ],
)
def test_a_limit_is_kept(mib, option):
    device, lines, taken, fits = allocate(mib, **option)
    assert device == ("GPU:0" if "visible_gpus" in option else "GPU:1")
    assert f"/gpu:0 {mib} MiB, growth off" in lines
    assert taken >= mib and fits == [True, False]


@pytest.mark.parametrize("way, most", [("fit", 3.5), ("train", 4.5)])
def test_a_step_takes_little_memory_beside_its_variables(way, most):
    """By Adam these are 3 times the weights; `train` tests all gradients before it updates."""
    row = json.dumps([[30, 1000], way, 1, {}])
    done = programs.python("scripts/step_memory.py", f"--row={row}")
    assert done.returncode == 0, done.stderr
    held, peak = json.loads(done.stdout.splitlines()[-1])
    assert 3 <= held <= peak <= most


_OWN = """
import sys
import tensorflow as tf
from towers import devices

[gpu, *_] = tf.config.list_physical_devices("GPU")
tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(256)] * 2)
for options in {"allow_growth": True}, {"gpu_memory_limit_mib": 128}, {}:
    try:
        devices.configure(**options)
    except ValueError as error:
        print(error)
print(*devices.read_back(), sep="\\n")
"""


@pytest.mark.parametrize("variable", ["", "TF_GPU_ALLOCATOR", "TF_FORCE_GPU_ALLOW_GROWTH"])
def test_what_a_program_has_set_is_kept(variable):
    value = {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}.get(variable, "true")
    variables = {"TF_CPP_MIN_LOG_LEVEL": "3"} | ({variable: value} if variable else {})
    done = programs.python("-c", _OWN, variables=variables)
    growth, limit, *lines = done.stdout.splitlines()
    assert growth.startswith("--allow_growth=True: this program has split GPU 0"), done.stderr
    assert limit.startswith("--gpu_memory_limit_mib=128: this program has split GPU 0")
    how = "on" if "GROWTH" in variable else "off"
    if variable == "TF_GPU_ALLOCATOR":
        assert all("/gpu:" in line and "no limit" in line for line in lines[:3])
    else:
        found = [
            f"memory      /gpu:{i} {n} MiB, growth {how}" for i, n in enumerate((256, 256, 1024))
        ]
        assert lines[:3] == found
