"""The health of GPUs, with a made-up driver."""

import pytest

from tests import fake_gpus
from tests.fake_gpus import A100, Card
from towers.devices import gpus

pytestmark = pytest.mark.unit

TAGS = {
    "utilisation_percent": 97, "memory_utilisation_percent": 41, "memory_used_mib": 700,
    "power_watts": 250.5, "temperature_celsius": 64, "sm_clock_mhz": 1410, "memory_clock_mhz": 1215,
}  # fmt: skip
CARD = Card(total_mib=1000, free_mib=300)


def test_all_that_the_driver_tells_of_what_this_process_sees(monkeypatch):
    still_open = fake_gpus.install_driver(monkeypatch, CARD, A100)
    values = gpus.health()
    assert set(values) == {f"gpu_{i}/{tag}" for i in (0, 1) for tag in TAGS}
    assert {tag: values[f"gpu_0/{tag}"] for tag in TAGS} == TAGS
    assert {type(value) for value in values.values()} == {float}
    assert not still_open
    mute = Card(silent=frozenset(["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetClockInfo"]))
    fake_gpus.install(monkeypatch, A100, mute, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    left = ("memory_used_mib", "power_watts", "temperature_celsius")
    assert set(gpus.health()) == {f"gpu_2/{tag}" for tag in TAGS} | {f"gpu_1/{tag}" for tag in left}


def test_without_a_gpu_or_a_driver_there_is_nothing(monkeypatch):
    for cards, driver in ([], True), ([A100], False):
        fake_gpus.install(monkeypatch, *cards, driver=driver)
        assert gpus.health() == {}
