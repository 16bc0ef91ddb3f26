"""The memory of devices, as a run shows it."""

import pytest
import tensorflow as tf

from towers.devices import memory

pytestmark = pytest.mark.unit


def test_a_cpu_device_has_the_memory_of_the_process_and_a_gpu_what_tensorflow_tells(monkeypatch):
    now, peak = memory.of_device("/cpu:1")
    assert 50 < now <= peak < 100_000
    assert peak == pytest.approx(memory.peak_mib(), rel=0.05)
    assert memory.of_device("/gpu:7") is None
    assert {"current", "peak"} <= set(tf.config.experimental.get_memory_info("/cpu:1"))
    info = {"/gpu:1": {"current": 3 * 2**20, "peak": 5 * 2**20}}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info.pop)
    assert memory.of_device("/gpu:1") == (3, 5)
    assert info == {}
