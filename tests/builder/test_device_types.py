"""`towers.builder.device_types`: which devices are GPUs, and which stand in for them."""

import pytest

from towers.builder import device_types

pytestmark = pytest.mark.unit
WHOLE = "/job:localhost/replica:0/task:0/device:"


def test_gpus_are_gpus_and_logical_cpus_stand_in_for_them_where_that_is_asked_for(monkeypatch):
    def found():
        return [device_types.is_gpu(device) for device in ("", "/cpu:0", "/cpu:1", f"{WHOLE}CPU:2")]

    for device in "/gpu:0", "/GPU:3", f"{WHOLE}GPU:1", "/job:worker/task:1/gpu:0":
        assert device_types.is_gpu(device), device
    with device_types.cpus_for_gpus():
        assert found() == [False, False, True, True]
    assert found() == [False] * 4
    monkeypatch.setenv(device_types.SWITCH, "1")
    assert found() == [False, False, True, True]


def test_the_machine_of_a_device_is_known():
    for here in "", "/cpu:0", f"{WHOLE}GPU:1", "/job:localhost/cpu:0":
        assert device_types.machine_of(here) == ""
    for device, task in ("task:1/gpu:0", 1), ("replica:0/task:2/device:CPU:3", 2), ("", 0):
        assert device_types.machine_of(f"/job:worker/{device}") == f"/job:worker/task:{task}"
