"""A device with too little memory: one line that says which, how much, and what to type."""

import keras
import pytest
import tensorflow as tf

from tests.runs import command
from towers.errors import RunError
from towers.options.run import Options
from towers.training.run.tensorflow_errors import out_of_memory, user_facing_errors
from towers.training.step.train_state import TrainState

pytestmark = pytest.mark.unit

NODE = "{{node while/body/_1/tower_1/model/conv2d/Conv2D}}"
GPU = "/job:localhost/replica:0/task:0/device:GPU:1"
# As TensorFlow's allocators, the copies between devices, and XLA put it.
TEXTS = {
    f"OOM when allocating tensor with shape[128,64,64,256] and type float on {GPU} by allocator "
    f"GPU_1_bfc\n\t [[{NODE}]]\nHint: If you want to see a list of allocated tensors": (
        "tower 1 on /gpu:1 asked for 512.0 MiB, float32[128, 64, 64, 256], in layer model/conv2d"
    ),
    f"OOM when allocating tensor with shape[1024] and type half on {GPU} by allocator gpu_async_1 "
    "[Op:AddV2]": "/gpu:1 asked for 0.0 MiB, float16[1024]",
    "OOM when allocating tensor with shape[] and type double on /job:localhost/replica:0/task:0/"
    "device:CPU:0 by allocator mklcpu": "/cpu:0 asked for 0.0 MiB, float64[]",
    f"Failed copying input tensor from /job:localhost/replica:0/task:0/device:CPU:0 to {GPU} in "
    "order to run AssignVariableOp: Dst tensor is not initialized.": (
        "/gpu:1 asked for room for a copy"
    ),
    "Out of memory while trying to allocate 4294967296 bytes.": "a device asked for 4.0 GiB",
    "RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.": "a device asked for 1.0 GiB",
    "failed to allocate 2.00G (2147483648 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY": (
        "a device asked for 2.0 GiB"
    ),
    "failed to allocate request for 2.00GiB (2147483648B) on device ordinal 1": (
        "/gpu:1 asked for 2.0 GiB"
    ),
}
LOWER = "type a lower --batch_size, or more --accumulate_steps for the same update"


@pytest.mark.parametrize("text", TEXTS)
def test_what_tensorflow_says_is_understood(text):
    line = out_of_memory(text)
    assert line.startswith(f"out of memory: {TEXTS[text]}") and LOWER in line


def test_other_things_that_are_exhausted_are_left_alone():
    for text in "No space left on device", "Too many open files", "Dst tensor", "MemoryError: ":
        assert out_of_memory(text) is None


class Large(keras.layers.Layer):
    """Takes 4 PiB in a step: not when it is built."""

    def call(self, x):
        size = tf.cast(tf.reduce_max(tf.abs(x)), tf.int64) * 0 + 2**25
        return x + tf.reduce_sum(tf.fill([size, size], tf.reduce_sum(x)))

    def compute_output_shape(self, shape):
        return shape


def large(num_classes, image_shape):
    layers = [Large(), keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


@pytest.mark.run
@pytest.mark.extended  # TensorFlow tries it for ten seconds
def test_a_run_that_needs_too_much_ends_in_one_line(tmp_path, capsys):
    flags = f"--model={__name__}:large", "--dataset=tests.tiny:images", "--augment=none"
    flags = *flags, f"--train_dir={tmp_path}/run", "--num_towers=2", "--batch_size=6"
    code, _, err = command(capsys, "train", *flags, "--max_steps=2")
    (line,) = err.splitlines()
    assert code == 1
    assert line.startswith("towers: out of memory: tower ") and "on /cpu:" in line
    assert "asked for 4.0 PiB, float32[33554432, 33554432], in layer sequential" in line
    assert "; the host has " in line and LOWER in line


def test_arrays_of_python():
    with pytest.raises(RunError, match="out of memory: Unable to all.*the error comes from tests/"):
        with user_facing_errors(Options()):
            raise MemoryError("Unable to allocate 8.00 PiB for an array with shape (2,)")


@pytest.mark.run
def test_copies_of_weights_that_do_not_fit_are_one_line(tmp_path, capsys, monkeypatch):
    def full(train_state):
        shape = "OOM when allocating tensor with shape[192,20000] and type float"
        raise tf.errors.ResourceExhaustedError(None, None, f"{shape} on {GPU} by allocator GPU_1")

    monkeypatch.setattr(TrainState, "set_copies", full)
    flags = "--model=tests.tiny:dense --dataset=tests.tiny:images --max_steps=1".split()
    code, _, err = command(capsys, "train", f"--train_dir={tmp_path}/run", *flags)
    assert code == 1 and len(err.splitlines()) == 1
    assert "/gpu:1 asked for 14.6 MiB, float32[192, 20000]" in err
