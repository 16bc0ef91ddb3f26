"""The GPUs of host memory themselves: what of a GPU they show."""

import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

pytestmark = pytest.mark.graph


def kernels_of(op):
    """Return [(types of T, arguments in host memory)] of an op's kernels for GPUs."""
    found = kernels.get_registered_kernels_for_op(op).kernel
    types = lambda k: {t for c in k.constraint for t in c.allowed_values.list.type}  # noqa: E731
    return [(types(k), list(k.host_memory_arg)) for k in found if k.device_type == "GPU"]


def test_kernels_are_those_of_cuda():
    """As TensorFlow's CUDA build registers them: none of strings, int32 in the host's memory."""
    assert kernels_of("StringLower") == []
    assert any(tf.float32.as_datatype_enum in types for types, _ in kernels_of("MatMul"))
    assert ({tf.int32.as_datatype_enum}, ["x", "y", "z"]) in kernels_of("Sub")


def test_values_are_on_the_gpu_that_made_them_and_copies_arrive():
    x = tf.constant(np.arange(6.0))
    with tf.device("/gpu:0"):
        first = tf.identity(x) + 1
    with tf.device("/gpu:1"):
        second = first * 2
    with tf.device("/cpu:0"):
        third = second + first
    assert [t.device[-5:] for t in (first, second, third)] == ["GPU:0", "GPU:1", "CPU:0"]
    np.testing.assert_array_equal(third, 3 * (np.arange(6.0) + 1))


def test_without_soft_placement_what_gpus_cannot_is_an_error():
    def lower():
        with tf.device("/gpu:0"):
            return tf.strings.lower("A")

    assert lower().device.endswith("CPU:0")
    tf.config.set_soft_device_placement(False)
    try:
        with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape("types [CPU]")):
            lower()
    finally:
        tf.config.set_soft_device_placement(True)
