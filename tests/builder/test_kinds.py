"""`towers.builder.kinds`: which devices are GPUs, and which stand in for them."""

import pytest

from towers.builder import kinds

pytestmark = pytest.mark.unit
WHOLE = "/job:localhost/replica:0/task:0/device:"


def test_gpus_are_gpus_and_nothing_else_is_one():
    for device in "/gpu:0", "/GPU:3", f"{WHOLE}GPU:1", "/job:worker/task:1/gpu:0":
        assert kinds.is_gpu(device), device
    for device in "", "/cpu:0", "/cpu:1", f"{WHOLE}CPU:2":
        assert not kinds.is_gpu(device), device


def test_logical_cpus_stand_in_for_gpus_where_that_is_asked_for(monkeypatch):
    def found():
        return [kinds.is_gpu(device) for device in ("/cpu:0", "/cpu:1", f"{WHOLE}CPU:2")]

    with kinds.cpus_for_gpus():
        assert found() == [False, True, True]
    assert found() == [False, False, False]
    monkeypatch.setenv(kinds.SWITCH, "1")
    assert found() == [False, True, True]


@pytest.mark.parametrize(
    "device, machine",
    [
        ("/cpu:0", ""),
        ("", ""),
        (f"{WHOLE}GPU:1", ""),
        ("/job:localhost/cpu:0", ""),
        ("/job:worker/task:1/gpu:0", "/job:worker/task:1"),
        ("/job:worker/replica:0/task:2/device:CPU:3", "/job:worker/task:2"),
        ("/job:worker", "/job:worker/task:0"),
    ],
)
def test_the_machine_of_a_device_is_known(device, machine):
    assert kinds.machine_of(device) == machine
