"""Memory of this process, and of devices as TensorFlow names them."""

import pytest
import tensorflow as tf

from towers.devices import memory


def test_a_cpu_device_has_the_memory_of_the_process():
    now, peak = memory.of_device("/cpu:1")
    assert 50 < now <= peak < 100_000
    assert peak == pytest.approx(memory.peak_mib(), rel=0.05)


def test_a_gpu_has_what_tensorflow_tells(monkeypatch):
    asked = []

    def info(device):
        asked.append(device)
        return {"current": 3 * 2**20, "peak": 5 * 2**20}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    assert memory.of_device("/gpu:1") == (3, 5)
    assert asked == ["/gpu:1"]


def test_tensorflow_knows_devices_by_that_form_of_name():
    assert {"current", "peak"} <= set(tf.config.experimental.get_memory_info("/cpu:1"))


def test_a_device_that_tells_nothing_is_no_error():
    assert memory.of_device("/gpu:7") is None
