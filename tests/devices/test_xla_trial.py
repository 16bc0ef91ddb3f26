"""A trial of XLA on GPUs that are newer than it."""

import dataclasses

import pytest

from tests import runs, tiny
from tests.fake_gpus import A100, RTX5090
from towers import devices, parallelize
from towers.devices import self_test, xla_trial
from towers.options.run import Options
from towers.training.run import setup

B200 = dataclasses.replace(RTX5090, name="NVIDIA B200", capability=(10, 0))


@pytest.fixture
def trials(monkeypatch):
    """Let trials end as {number among TensorFlow's GPUs: how}."""
    asked, ends = [], {}

    def run(module, number):
        asked.append(int(number))
        return ends.get(int(number), "")

    monkeypatch.setattr(self_test, "run_module", run)
    xla_trial._failure.cache_clear()
    yield asked, ends
    xla_trial._failure.cache_clear()


@pytest.mark.unit
def test_xla_is_tried_on_new_gpus_once_and_before_it_compiles_there(install, trials):
    asked, ends = trials
    install(A100, B200, RTX5090).hidden = [1]
    devices.try_xla(["/gpu:0", "/cpu:0", "/job:worker/task:0/gpu:1"])
    assert asked == []  # XLA knows an A100; others' GPUs are not seen
    for _ in range(2):
        devices.try_xla(["/gpu:0", "/gpu:1"])
    assert asked == [2]
    ends[1] = "was ended by SIGABRT: LLVM ERROR: PTX version 8.5"
    install(A100, B200)
    said = {
        runs.refusal(parallelize, tiny.dense(3, (4, 4, 1)), devices="/gpu:1", jit_compile=True),
        runs.refusal(setup.tower_devices, Options(devices="/gpu:1", jit_compile=True)),
    }
    for words in "/gpu:1", "NVIDIA B200", "10.0", "SIGABRT: LLVM ERROR", "--jit_compile=false":
        assert len(said) == 1 and words in [*said][0]
    assert asked == [2, 1]


@pytest.mark.process
def test_a_trial_of_xla_is_a_process_of_its_own():
    xla_trial._failure.cache_clear()
    assert xla_trial._failure(9).startswith("ended with code 1: IndexError")
