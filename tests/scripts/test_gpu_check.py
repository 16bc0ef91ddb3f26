"""scripts/gpu_check.py: its checks on logical CPUs or made-up GPUs, its table and exit codes."""

import dataclasses
import subprocess

import pytest
import tensorflow as tf

from scripts import gpu_check
from tests.fake_gpus import A100, MIB, SMALL, Card
from towers.devices import nvml
from towers.errors import RunError

TINY = {"model": "tests.tiny:dense", "dataset": "tests.tiny:images", "augment": "none"}


# ---------------------------------------------------------------------------- Towers, on CPUs


@pytest.mark.parametrize(
    "check, found",
    [
        (gpu_check.placement, "MatMul on /cpu:0 and /cpu:1"),
        (gpu_check.gradients, "largest relative difference "),
        (gpu_check.collectives, "exact on /cpu:0 and /cpu:1"),
        (gpu_check.copies, "2 ways between 2 devices"),
        (gpu_check.batch_norm, "largest relative difference "),
        (gpu_check.profile, "MatMul on /cpu:0 "),
    ],
)
def test_checks_of_towers(check, found):
    assert check("cpu").startswith(found)


@pytest.fixture
def soft_placement():
    yield
    gpu_check.devices.configure(allow_soft_placement=True)


@pytest.mark.parametrize(
    "check",
    [
        "the same with --placement=strict",
        "the same with --variables=replicated",
        "the same with --metrics, by a step of Keras",
    ],
)
def test_short_runs(check, soft_placement, capsys):
    detail = gpu_check.TOWER_CHECKS[check]("cpu", max_steps=6, log_every_steps=5, **TINY)
    assert detail.split(", loss ")[0].endswith(" examples/s")
    assert float(detail.split(", loss ")[1]) > 0


def on_first(function):
    """Let TensorFlow run what is put on the second device on the first."""
    real = tf.device
    return lambda name: real("/cpu:0" if name == "/cpu:1" else name)


def test_an_op_on_the_wrong_device_is_seen(monkeypatch):
    monkeypatch.setattr(tf, "device", on_first(tf.device))
    with pytest.raises(RunError, match="^MatMul ran on /cpu:0$"):
        gpu_check.placement("cpu")
    with pytest.raises(RunError, match="^/cpu:0 -> /cpu:1 ran on .*CPU:0$"):
        gpu_check.copies("cpu")


def test_a_copy_that_loses_a_bit_is_seen(monkeypatch):
    real = tf.identity
    calls = []

    def broken(x):
        calls.append(x)
        return real(x) if len(calls) % 2 else tf.bitcast(tf.bitcast(x, tf.int32) ^ 1, tf.float32)

    monkeypatch.setattr(tf, "identity", broken)
    with pytest.raises(RunError, match="other bits arrive: /cpu:0 -> /cpu:1, /cpu:1 -> /cpu:0"):
        gpu_check.copies("cpu")


def test_towers_that_compute_something_else_are_seen(monkeypatch):
    real = gpu_check.towers.TowerBuilder.gradients

    def wrong(builder, loss, weights, batch):
        value, [gradient] = real(builder, loss, weights, batch)
        return value, [gradient * (1 + 1e-9 * len(builder.devices))]

    monkeypatch.setattr(gpu_check.towers.TowerBuilder, "gradients", wrong)
    with pytest.raises(RunError, match="^largest relative difference 1.0e-09$"):
        gpu_check.gradients("cpu")


# ---------------------------------------------------------------------------- Memory, made up


def test_a_fraction(install):
    install(A100, A100)
    assert gpu_check.fraction() == "/gpu:0 10240 MiB, growth off, of 40960 MiB"
    install(A100).memory = {"/gpu:0": 10241 * MIB}
    with pytest.raises(RunError, match="may take 10241 MiB, 10240 were asked for"):
        gpu_check.fraction()


def test_a_limit(install, monkeypatch):
    install(A100)

    def exhausted(shape):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tf, "zeros", exhausted)
        assert gpu_check.limit() == "/gpu:0 512 MiB, growth off; 1 GiB is refused"
    monkeypatch.setattr(tf, "zeros", lambda shape: tf.constant(0.0))
    with pytest.raises(RunError, match="1 GiB was given in spite of a limit of 512 MiB"):
        gpu_check.limit()


@pytest.mark.parametrize("taken_mib, good", [(500, True), (30000, False)])
def test_growth(install, monkeypatch, taken_mib, good):
    machine = install(A100)
    real = nvml.gpus

    def after():
        taken = taken_mib * MIB if machine.started else 0
        return [dataclasses.replace(gpu, free_bytes=gpu.free_bytes - taken) for gpu in real()]

    monkeypatch.setattr(nvml, "gpus", after)
    says = f"4 MiB in use, {taken_mib} MiB taken"
    if good:
        assert gpu_check.growth() == f"/gpu:0 40036 MiB, growth on; {says}"
    else:
        with pytest.raises(RunError, match=f"^{says}$"):
            gpu_check.growth()


def test_the_largest_gpu_is_made_visible(install, monkeypatch):
    install(SMALL, A100, Card(total_mib=81920))
    assert gpu_check.visible() == "GPU 2 of 3"
    install(A100, A100)
    monkeypatch.setattr(gpu_check.devices, "configure", lambda **options: None)
    with pytest.raises(RunError, match=r"^--visible_gpus=1, and TensorFlow sees \[0, 1\]$"):
        gpu_check.visible()


def test_the_health_of_gpus(install):
    install(A100, SMALL)
    assert gpu_check.health().startswith("utilisation_percent 97, memory_utilisation_percent 41")
    install(A100, Card(silent=frozenset(["nvmlDeviceGetPowerUsage"])))
    with pytest.raises(RunError, match=r"^of 7 values, GPUs tell {0: 7, 1: 6}: "):
        gpu_check.health()


@pytest.mark.parametrize(
    "cards, limits_mib",
    [
        ([A100], [[8192, 8192]]),
        ([Card(total_mib=4096, free_mib=3600)], [[1200, 1200]]),
        ([A100] * 3, [None, None, None]),
    ],
)
def test_two_devices(install, cards, limits_mib):
    machine = install(*cards)
    assert gpu_check.two_devices("gpu") == ["/gpu:0", "/gpu:1"]
    assert machine.limits_mib == limits_mib


# ---------------------------------------------------------------------------- The table


def outcomes(gpus, failing=()):
    """Return a made-up `run`, which finds these GPUs and lets these checks fail."""

    def run(name, kind):
        if name == gpu_check.FIND:
            return gpus
        return (False, f"no {kind}") if name in failing else (True, f"a {kind}")

    return run


GPU = (True, ["/gpu:0 -> A100"])


@pytest.mark.parametrize(
    "kind, gpus, failing, code, last",
    [
        ("gpu", GPU, [], 0, "19 of 19 passed"),
        ("gpu", GPU, ["collectives sum"], 1, "18 of 19 passed"),
        ("gpu", (True, []), [], gpu_check.EXIT_NO_GPU, "no GPU here"),
        ("gpu", (False, "TensorFlow sees 0 GPUs"), [], 1, "TensorFlow sees 0 GPUs"),
        ("cpu", None, [], 0, "13 of 13 passed"),
    ],
)
def test_the_table_and_the_exit_code(capsys, kind, gpus, failing, code, last):
    assert gpu_check.main([f"--kind={kind}"], outcomes(gpus, failing)) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert [line for line in lines if "FAILED" in line] == [
        f"FAILED  {name:42}no {kind}" for name in failing
    ]


def test_a_check_that_aborts_or_does_not_answer(monkeypatch):
    done = subprocess.CompletedProcess([], -6, stdout="", stderr="Traceback\nKeyError: 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *command, **details: done)
        found = gpu_check.run_check("collectives sum", "gpu")
    assert found == (False, "KeyError: 1 (exit code -6)")
    monkeypatch.setattr(gpu_check, "TIMEOUT_SECONDS", 0.01)
    assert gpu_check.run_check("collectives sum", "cpu") == (False, "no answer within 0.01 s")


def test_a_check_in_a_process_of_its_own():
    assert gpu_check.run_check("collectives sum", "cpu") == (True, "exact on /cpu:0 and /cpu:1")
