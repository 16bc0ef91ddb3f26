"""Every test process sees four CPU devices, which stand in for GPUs."""

import os
import signal

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what runs in the background, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Make the devices before a test is read, which may make tensors; the options need none."""
    if all("tests/options" in argument for argument in config.args):
        return
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )


@pytest.fixture
def float64():
    """Let Keras compute in float64, so that rounding cannot hide a fault."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy(before)
