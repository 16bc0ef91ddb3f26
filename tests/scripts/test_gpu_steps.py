"""scripts/gpu_steps.py: settings, steps and sums, on logical CPUs and with made-up traces."""

import pytest
import tensorflow as tf

from scripts import gpu_steps
from scripts.gpu_steps import Setting

TINY = {"model": "tests.tiny:cnn", "dataset": "tests.tiny:images", "augment": "none"}
ONE = {way: {"number": 1.0, "bytes": 8.0} for way in gpu_steps.WAYS}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(gpu_steps.MODELS, "tiny", TINY)
    monkeypatch.setattr(gpu_steps, "BATCH_SIZES", {"cpu": (4, 6)})
    monkeypatch.setattr(gpu_steps, "WINDOW_SECONDS", 0.01)
    monkeypatch.setattr(gpu_steps, "SUM_BYTES", {"1 KiB": 1024})


def test_settings_begin_with_what_a_run_does_by_default():
    assert [str(setting) for setting in gpu_steps.settings(1)[:7:3]] == [
        "cnn, 1 tower, replicated, float32",
        "cnn, 1 tower, cpu, float32",
        "cnn, 1 tower, replicated, mixed_bfloat16",
    ]
    several = gpu_steps.settings(4)
    assert str(several[0]) == "cnn, 4 towers, replicated, float32"
    assert len(several) == len(set(several)) == (3 + 2) * 2 * 2 * len(gpu_steps.MODELS)


def test_a_step_is_timed_at_each_batch_size():
    found = gpu_steps.measure(Setting("tiny", 2, "replicated"), "cpu")
    assert list(found) == ["4", "6"]
    for batch_size, steps in found.items():
        assert 0 < steps["seconds_per_step"] < 10
        assert steps["copies"] is None  # there is no GPU in a profile of CPUs
        rows = steps["foretold"]["host to GPU"]  # to each tower the int64 numbers of its examples
        assert rows == {"number": 2, "bytes": 8 * int(batch_size)}


def test_what_cannot_be_had_is_no_fault(monkeypatch):
    with pytest.raises(gpu_steps.Skipped, match="XLA|jit_compile"):
        gpu_steps.measure(Setting("tiny", 2, "cpu", jit_compile=True), "cpu")  # it has BatchNorm

    def full(run, batches):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    monkeypatch.setattr(gpu_steps, "_measured", full)
    found = gpu_steps.measure(Setting("tiny", 1, "cpu"), "cpu")
    assert gpu_steps.in_words(found) == "at 4: OOM when allocating; at 6: OOM when allocating"


def test_copies_are_those_of_a_step(monkeypatch):
    made = []

    def copies(trace):
        return {way: (2 + 3 * made[-1], 10 * made[-1]) for way in gpu_steps.WAYS}

    monkeypatch.setattr(gpu_steps.profile_summary, "copies", copies)
    found = gpu_steps._profiled(made.append)
    assert found == {way: {"number": 3.0, "bytes": 10.0} for way in gpu_steps.WAYS}
    line = {"128": {"seconds_per_step": 0.012, "copies": found, "foretold": ONE}}
    assert gpu_steps.in_words(line) == "12.00 ms at 128, copies 3 3 3, foretold 1 1 1"


def test_sums_are_exact_and_a_wrong_one_is_told(monkeypatch):
    names = ["/cpu:1", "/cpu:2"]
    found = gpu_steps.ring_against_nccl(names)
    assert list(found) == ["nccl", "ring"] and all(v["1 KiB"] > 0 for v in found.values())
    wrong = lambda *_: lambda: [tf.zeros(256), tf.zeros(256)]  # noqa: E731
    monkeypatch.setattr(gpu_steps, "_make_sums", wrong)
    with pytest.raises(ArithmeticError, match="nccl: a wrong sum of 1 KiB on /cpu:1"):
        gpu_steps.ring_against_nccl(names)
