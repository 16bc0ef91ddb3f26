"""The GPUs of host memory themselves: what of a GPU they show."""

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.framework import kernel_def_pb2

pytestmark = pytest.mark.graph


def test_x():
    assert len(tf.config.list_logical_devices("GPU")) == 2
