"""Tests on two GPUs of host memory; without them they are skipped."""

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True, scope="session")
def gpus():
    if not tf.config.list_logical_devices("GPU"):  # starts TensorFlow, else runs try GPUs first
        pytest.skip("there are no GPUs of host memory: type scripts/test --gpu")
