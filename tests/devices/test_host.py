"""What a run stands on, its memory, and that no secret is among what is written of it."""

import pytest
import tensorflow as tf

from towers.devices import host, memory

pytestmark = pytest.mark.unit


def test_variables_that_matter_are_read_and_no_others():
    read = {"CUDA_VISIBLE_DEVICES": "0,2", "PYTHONHASHSEED": "1"}
    read |= {"TF_ENABLE_ONEDNN_OPTS": "0", "XLA_FLAGS": ""}
    others = (
        "CUDA_SECRET_TOKEN TF_PASSWORD KERAS_API_KEY NVIDIA_NGC_API_KEY TF_CPP_MIN_LOG_LEVEL "
        "TF_CLI_CONFIG_FILE TF_LOG SOME_TF_FLAG PATH"  # TF_CLI, TF_LOG: Terraform's
    )
    assert host.environment(dict.fromkeys(others.split(), "hush") | read) == read


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
