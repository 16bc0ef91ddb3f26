"""The health of GPUs, with a made-up driver; the time between two samples is made up, too."""

import threading

import pynvml
import pytest

from tests import fake_gpus
from tests.fake_gpus import A100, MIB, Card
from towers.devices.gpu_health import PERIOD_SECONDS, GpuHealth

pytestmark = pytest.mark.unit

TAGS = {
    "utilisation_percent": 97, "memory_utilisation_percent": 41, "memory_used_mib": 700,
    "power_watts": 250.5, "temperature_celsius": 64, "sm_clock_mhz": 1410, "memory_clock_mhz": 1215,
}  # fmt: skip
CARD = Card(total_mib=1000, free_mib=300)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "gpu_health"]


def join():
    """Wait for the threads: `close` waits for some time only."""
    for thread in threads():
        thread.join(60)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    join()
    assert threads() == []


def sampled():
    """Return what is read after one sample; the thread has ended then."""
    waited = []
    health = GpuHealth(lambda seconds: not waited.append(seconds))
    join()
    assert waited == [PERIOD_SECONDS]
    return health.read()


def vary(monkeypatch, name, answers):
    """Let one of NVML's functions give these answers, one after the other."""
    answers = iter(answers)
    monkeypatch.setattr(pynvml, name, lambda *_: next(answers))


def test_all_that_the_driver_tells_of_what_this_process_sees(monkeypatch):
    still_open = fake_gpus.install_driver(monkeypatch, CARD, A100)
    values = sampled()
    assert set(values) == {f"gpu_{i}/{tag}" for i in (0, 1) for tag in TAGS}
    assert {tag: values[f"gpu_0/{tag}"] for tag in TAGS} == TAGS
    assert {type(value) for value in values.values()} == {float}
    assert not still_open
    mute = Card(silent=frozenset(["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetClockInfo"]))
    fake_gpus.install(monkeypatch, A100, mute, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    left = ("memory_used_mib", "power_watts", "temperature_celsius")
    assert set(sampled()) == {f"gpu_2/{tag}" for tag in TAGS} | {f"gpu_1/{tag}" for tag in left}


def test_means_and_peaks_since_the_last_read(monkeypatch):
    fake_gpus.install_driver(monkeypatch, CARD)
    vary(monkeypatch, "nvmlDeviceGetPowerUsage", [100_000, 400_000, 160_000])
    vary(monkeypatch, "nvmlDeviceGetTemperature", [80, 71, 65])
    free = [0, 2, 5, 8]  # the first at the start
    memory = [fake_gpus.SimpleNamespace(total=9 * MIB, free=mib * MIB) for mib in free]
    vary(monkeypatch, "nvmlDeviceGetMemoryInfo", memory)
    taken, go_on = threading.Semaphore(0), threading.Semaphore(0)
    rounds = iter([False, False, True])

    def wait(seconds):
        taken.release()
        return next(rounds) if go_on.acquire(timeout=60) else True

    health = GpuHealth(wait)
    assert taken.acquire(timeout=60)
    seen = [health.read()]
    go_on.release(3)
    join()
    seen += [health.read(), health.read()]
    assert [values.get("gpu_0/power_watts") for values in seen] == [100, 280, None]
    assert [values.get("gpu_0/temperature_celsius") for values in seen] == [80, 71, None]
    assert [values.get("gpu_0/memory_used_mib") for values in seen] == [7, 4, None]
    assert seen[2] == {}


def test_without_a_gpu_there_is_no_thread_and_a_driver_that_goes_mad_ends_it(monkeypatch):
    for cards, driver in ([], True), ([A100], False):
        fake_gpus.install(monkeypatch, *cards, driver=driver)
        health = GpuHealth()
        assert threads() == [] and health.read() == {}
        health.close()
    fake_gpus.install_driver(monkeypatch, A100)
    vary(monkeypatch, "nvmlDeviceGetUtilizationRates", [None])
    vary(monkeypatch, "nvmlDeviceGetPowerUsage", ["?"])
    health = GpuHealth()
    join()
    assert health.read() == {}


def test_a_driver_that_hangs_holds_nobody_up(monkeypatch):
    fake_gpus.install_driver(monkeypatch, A100)
    monkeypatch.setattr("towers.devices.gpu_health._CLOSE_SECONDS", 0.01)
    asked, answer = threading.Event(), threading.Event()
    hang = lambda handle: asked.set() or answer.wait(60)  # noqa: E731
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", hang)
    health = GpuHealth()
    assert asked.wait(60)
    assert health.read() == {}
    health.close()
    [thread] = threads()
    assert thread.daemon
    answer.set()


def test_close_ends_the_thread_in_the_middle_of_a_wait_and_may_be_repeated(monkeypatch):
    monkeypatch.setattr("towers.devices.gpu_health.PERIOD_SECONDS", 600)
    monkeypatch.setattr("towers.devices.gpu_health._CLOSE_SECONDS", 60)
    still_open = fake_gpus.install_driver(monkeypatch, A100)
    health = GpuHealth()
    assert len(threads()) == 1
    health.close()
    assert threads() == [] and not still_open
    health.close()
