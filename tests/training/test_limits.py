"""Data that fail on the way, and a device with too little memory, are one line."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.runs import command
from towers.training.run.tensorflow_errors import out_of_memory

pytestmark = pytest.mark.graph


# Data that fail on the way. Each is read twice before the first step.

X, Y = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
GOOD_READS = 2


def load(error):
    """Return halves; the first generator ends after 45 examples, raises, or gives another shape."""
    reads = iter(range(100))

    def generate():
        good = next(reads) < GOOD_READS
        for i in range(60 if good else 45):
            yield X[i], Y[i]
        if isinstance(error, Exception) and not good:
            raise error
        if error and not good:
            yield X[0, :3], 0

    specs = tf.TensorSpec([4], tf.float32), tf.TensorSpec([], tf.int32)
    return (tf.data.Dataset.from_generator(generate, output_signature=specs), 60), (X, Y), 3


ends_early, raises = functools.partial(load, None), functools.partial(load, ValueError("mine"))
gives_others = functools.partial(load, "others")


def line_of(num_classes):
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(num_classes)])


def train(tmp_path, capsys, dataset):
    """Return the lines on standard error of a run that fails."""
    flags = f"--model={__name__}:line_of", f"--dataset={__name__}:{dataset}", "--batch_size=12"
    code, _, err = command(capsys, "train", *flags, f"--train_dir={tmp_path}/run", "--max_steps=60")
    assert code == 1
    return err.splitlines()


@pytest.mark.run
@pytest.mark.parametrize("dataset", ["ends_early", "raises", "gives_others"])
def test_data_that_fail_on_the_way_say_why_and_at_which_step(tmp_path, capsys, dataset):
    *above, line = train(tmp_path, capsys, dataset)
    words = r"towers: --dataset cannot be read at step ([1-9]\d*): "
    step = int(re.match(words, line)[1])
    if dataset == "raises":  # the traceback of the user's own code stands above
        assert "ValueError: mine; the error comes" in line and above[-1] == "ValueError: mine"
        assert above[0].startswith("Traceback") and any("test_limits.py" in row for row in above)
    elif dataset == "gives_others":
        assert "shape" in line and "please report" not in line and "gallery.py" not in line
    else:
        assert "contained only 45 elem" in line and above == []
    assert tiny.saved_steps(tmp_path / "run") == [0, step]  # no step that was made is lost


# A device with too little memory.

NODE = "{{node while/body/_1/tower_1/model/conv2d/Conv2D}}"
GPU = "/job:localhost/replica:0/task:0/device:GPU:1"
# As TensorFlow's allocators, the copies between devices, and XLA put it.
TEXTS = {
    f"OOM when allocating tensor with shape[128,64,64,256] and type float on {GPU} by allocator "
    f"GPU_1_bfc\n\t [[{NODE}]]\nHint: If you want to see a list of allocated tensors": (
        "tower 1 on /gpu:1, in layer model/conv2d: OOM when allocating tensor with shape[128,64,"
    ),
    f"Failed copying input tensor from /job:localhost/replica:0/task:0/device:CPU:0 to {GPU} in "
    "order to run AssignVariableOp: Dst tensor is not initialized.": "/gpu:1: Failed copying",
    "Out of memory while trying to allocate 4294967296 bytes.": "a device: Out of memory while try",
    "failed to allocate request for 2.00GiB (2147483648B) on device ordinal 1": "a device: failed",
}
LOWER = "try a lower --batch_size, or more --accumulate_steps for the same update"


@pytest.mark.parametrize("text", TEXTS)
def test_what_tensorflow_says_is_understood(text):
    tf.config.list_logical_devices()  # starts TensorFlow
    line = out_of_memory(text)
    assert line.startswith(f"out of memory: {TEXTS[text]}") and LOWER in line
