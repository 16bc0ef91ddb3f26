"""scripts/gpu_check.py and gpu_steps.py on logical CPUs or made-up GPUs: checks, steps, table."""

import dataclasses
import json
import subprocess

import pytest
import tensorflow as tf

from scripts import gpu_check, gpu_checks, gpu_steps
from scripts.gpu_steps import Setting, Skipped
from tests.fake_gpus import A100, MIB, SMALL, SPLIT, Card
from towers.devices import nvml
from towers.errors import RunError

pytestmark = pytest.mark.unit

TINY = {"model": "tests.tiny:dense", "dataset": "tests.tiny:images", "augment": "none"}


# Towers, on CPUs.


@pytest.mark.graph
@pytest.mark.parametrize(
    "check, found",
    [
        (gpu_checks.placement, "MatMul on /cpu:0 and /cpu:1"),
        (gpu_checks.gradients, "largest relative difference "),
        (gpu_checks.collectives, "exact on /cpu:0 and /cpu:1"),
        (gpu_checks.copies, "2 ways between 2 devices"),
        (gpu_checks.batch_norm, "largest relative difference "),
        (gpu_checks.profile, "MatMul on /cpu:0 "),
    ],
)
def test_checks_of_towers(check, found):
    assert check("cpu").startswith(found)


@pytest.fixture
def soft_placement():
    yield
    gpu_checks.devices.configure(allow_soft_placement=True)


@pytest.mark.run
@pytest.mark.parametrize(
    "check",
    [
        gpu_checks.STRICT,
        pytest.param("training with --variables=replicated", marks=pytest.mark.extended),
        pytest.param("training with --metrics, by a step of Keras", marks=pytest.mark.extended),
    ],
)
def test_short_runs(check, soft_placement, capsys):
    detail = gpu_checks.TOWER_CHECKS[check]("cpu", max_steps=6, log_every_steps=5, **TINY)
    assert detail.split(", loss ")[0].endswith(" examples/s")
    assert float(detail.split(", loss ")[1]) > 0


@pytest.mark.graph
def test_an_op_on_the_wrong_device_is_seen(monkeypatch):
    real = tf.device
    monkeypatch.setattr(tf, "device", lambda name: real("/cpu:0" if name == "/cpu:1" else name))
    with pytest.raises(RunError, match="^MatMul ran on /cpu:0$"):
        gpu_checks.placement("cpu")
    with pytest.raises(RunError, match="^/cpu:0 -> /cpu:1 ran on .*CPU:0$"):
        gpu_checks.copies("cpu")


def test_a_copy_that_loses_a_bit_is_seen(monkeypatch):
    real = tf.identity
    calls = []

    def broken(x):
        calls.append(x)
        return real(x) if len(calls) % 2 else tf.bitcast(tf.bitcast(x, tf.int32) ^ 1, tf.float32)

    monkeypatch.setattr(tf, "identity", broken)
    with pytest.raises(RunError, match="other bits arrive: /cpu:0 -> /cpu:1, /cpu:1 -> /cpu:0"):
        gpu_checks.copies("cpu")


@pytest.mark.graph
def test_towers_that_compute_something_else_are_seen(monkeypatch):
    real = gpu_checks.towers.TowerBuilder.gradients

    def wrong(builder, loss, weights, batch):
        value, [gradient] = real(builder, loss, weights, batch)
        return value, [gradient * (1 + 1e-9 * len(builder.devices))]

    monkeypatch.setattr(gpu_checks.towers.TowerBuilder, "gradients", wrong)
    with pytest.raises(RunError, match="^largest relative difference 1.0e-09$"):
        gpu_checks.gradients("cpu")


# Memory, made up.


def silent_about(name):
    return Card(silent=frozenset([name]))


@pytest.mark.parametrize(
    "check, cards, found",
    [
        ("fraction", [A100, A100], "/gpu:0 10240 MiB, growth off, of 40960 MiB"),
        ("visible", [SMALL, A100, Card(total_mib=81920)], "GPU 2 of 3"),
        ("visible", [SPLIT], "GPU MIG-0b0b0c3d-0000-4000-8000-000000000000 of 1"),
    ],
)
def test_what_gpus_have_is_told(install, check, cards, found):
    install(*cards)
    assert getattr(gpu_checks, check)() == found


def test_the_health_of_gpus(install):
    install(A100, SMALL)
    assert gpu_checks.health().startswith("utilisation_percent 97, memory_utilisation_percent 41")
    install(silent_about("nvmlDeviceGetUtilizationRates"))  # as a laptop's
    assert gpu_checks.health().startswith("memory_used_mib 424, power_watts 250.5")
    install(Card(lost=True))
    with pytest.raises(Skipped, match="the driver tells nothing"):
        gpu_checks.health()


def test_what_a_gpu_does_not_tell_is_no_fault(install):
    install(silent_about("nvmlDeviceGetMemoryInfo"))
    for check in (gpu_checks.fraction, gpu_checks.growth, gpu_checks.session):
        with pytest.raises(Skipped):
            check()


def test_another_fraction_and_other_gpus_than_were_asked_for_are_seen(install, monkeypatch):
    install(A100).memory = {"/gpu:0": 10241 * MIB}
    with pytest.raises(RunError, match="may take 10241 MiB, 10240 were asked for"):
        gpu_checks.fraction()
    install(A100, A100)
    monkeypatch.setattr(gpu_checks.devices, "configure", lambda **options: None)
    with pytest.raises(RunError, match=r"^--visible_gpus=1, and TensorFlow sees \[0, 1\]$"):
        gpu_checks.visible()


def test_a_limit(install, monkeypatch):
    install(A100)

    def exhausted(shape):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tf, "zeros", exhausted)
        assert gpu_checks.limit() == "/gpu:0 512 MiB, growth off; 1 GiB is refused"
    monkeypatch.setattr(tf, "zeros", lambda shape: tf.constant(0.0))
    with pytest.raises(RunError, match="1 GiB was given in spite of a limit of 512 MiB"):
        gpu_checks.limit()


def test_growth(install, monkeypatch):
    def takes(taken_mib):
        machine = install(A100)
        real = nvml.gpus

        def after():
            taken = taken_mib * MIB if machine.started else 0
            return [dataclasses.replace(gpu, free_bytes=gpu.free_bytes - taken) for gpu in real()]

        monkeypatch.setattr(nvml, "gpus", after)

    takes(500)
    says = "/gpu:0 40036 MiB, growth on; 4 MiB in use, 500 MiB taken"
    assert gpu_checks.growth() == says
    takes(30000)
    with pytest.raises(RunError, match="^4 MiB in use, 30000 MiB taken$"):
        gpu_checks.growth()


def test_two_devices(install):
    for cards, limits_mib in [
        ([A100], [[8192, 8192]]),
        ([Card(total_mib=4096, free_mib=3600)], [[1200, 1200]]),
        ([A100] * 3, [None, None, None]),
    ]:
        machine = install(*cards)
        assert gpu_checks.two_devices("gpu") == ["/gpu:0", "/gpu:1"]
        assert machine.limits_mib == limits_mib


# The table.


STATUS = {"collectives sum": "FAILED", "memory limit is read back and holds": "skipped"}


def outcomes(gpus, statuses=()):
    """Return a made-up `run`, which finds these GPUs, and what `statuses` say of checks."""

    def run(name, kind, seconds):
        if name == gpu_check.FIND:
            return gpus
        if name in statuses:
            return STATUS[name], f"no {kind}"
        steps = {"128": {"seconds_per_step": 0.01, "copies": None, "foretold": None}}
        return "ok", steps if name.startswith("{") else f"a {kind}"

    return run


GPU = ("ok", ["/gpu:0 -> A100"])


@pytest.mark.parametrize(
    "kind, gpus, statuses, code, last",
    [
        ("gpu", GPU, [], 0, "36 passed, 0 failed, 0 skipped"),
        ("gpu", GPU, STATUS, 1, "34 passed, 1 failed, 1 skipped"),
        ("gpu", ("ok", []), [], gpu_check.EXIT_NO_GPU, "no GPU here"),
        ("gpu", ("FAILED", "TensorFlow sees 0 GPUs"), [], 1, "TensorFlow sees 0 GPUs"),
        ("cpu", None, [], 0, "54 passed, 0 failed, 0 skipped"),
    ],
)
def test_the_table_the_json_and_the_exit_code(capsys, tmp_path, kind, gpus, statuses, code, last):
    file = tmp_path / "found.json"
    argv = [f"--kind={kind}", f"--json_file={file}"]
    assert gpu_check.main(argv, outcomes(gpus, statuses)) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split("; ")[0] == last
    assert [line for line in lines if line.startswith(("FAILED", "skipped"))] == [
        f"{STATUS[name]:8}{name:64}no {kind}" for name in statuses
    ]
    if "passed" in last:
        rows = json.loads(file.read_text())["checks"]
        assert sum(row["status"] == "ok" for row in rows) == int(last.split()[0])
        steps = [row["name"] for row in rows if row["name"].startswith("a step of")]
        towers = "1 tower" if kind == "gpu" else "2 towers"
        assert steps[:2] == [
            f"a step of {model}, {towers}, replicated, float32" for model in ("cnn", "resnet20")
        ]
        assert [row["name"] for row in rows][1:3] == steps[:2]  # before the other checks


@pytest.mark.process
def test_what_does_not_fit_into_the_time_is_skipped(capsys, tmp_path):
    argv = ["--kind=cpu", f"--json_file={tmp_path / 'found.json'}", "--minutes=0.2"]
    assert gpu_check.main(argv, outcomes(None)) == 0
    *_, late, last = capsys.readouterr().out.splitlines()
    assert late == "skipped 54 more: out of time" and last.startswith("0 passed, 0 failed, 54 sk")
    assert gpu_check.run_check("collectives sum", "cpu", 0.01) == ("skipped", "out of time")


@pytest.mark.process
def test_a_check_that_aborts_or_does_not_answer(monkeypatch):
    done = subprocess.CompletedProcess([], -6, stdout="", stderr="Traceback\nKeyError: 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *command, **details: done)
        found = gpu_check.run_check("collectives sum", "gpu")
    assert found == ("FAILED", "KeyError: 1 (exit code -6)")
    monkeypatch.setattr(gpu_check, "TIMEOUT_SECONDS", 0.01)
    assert gpu_check.run_check("collectives sum", "cpu") == ("FAILED", "no answer within 0.01 s")


@pytest.mark.process
def test_a_check_in_a_process_of_its_own():
    found = gpu_check.run_check("collectives sum", "cpu")
    assert found == ("ok", "exact on /cpu:1 and /cpu:2")  # /cpu:0 is the host
    status, found = gpu_check.run_check('{"model": "cnn", "towers": 3, "variables": "all"}', "cpu")
    assert status == "FAILED" and "--variables=all" in found


# Steps.


ONE = {way: {"number": 1.0, "bytes": 8.0} for way in gpu_steps.WAYS}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(gpu_steps.MODELS, "tiny", TINY | {"model": "tests.tiny:cnn"})
    monkeypatch.setattr(gpu_steps, "BATCH_SIZES", {"cpu": (4, 6)})
    monkeypatch.setattr(gpu_steps, "WINDOW_SECONDS", 0.01)
    monkeypatch.setattr(gpu_steps, "SUM_BYTES", {"1 KiB": 1024})


def test_settings_begin_with_what_a_run_does_by_default(small):
    assert [str(setting) for setting in gpu_steps.settings(1)[:7:3]] == [
        "cnn, 1 tower, replicated, float32",
        "cnn, 1 tower, cpu, float32",
        "cnn, 1 tower, replicated, mixed_bfloat16",
    ]
    several = gpu_steps.settings(4)
    assert str(several[0]) == "cnn, 4 towers, replicated, float32"
    assert len(several) == len(set(several)) == (3 + 2) * 2 * 2 * len(gpu_steps.MODELS)


@pytest.mark.run
def test_a_step_is_timed_at_each_batch_size(small):
    found = gpu_steps.measure(Setting("tiny", 2, "replicated"), "cpu")
    assert list(found) == ["4", "6"]
    for batch_size, steps in found.items():
        assert 0 < steps["seconds_per_step"] < 10
        assert steps["copies"] is None  # there is no GPU in a profile of CPUs
        rows = steps["foretold"]["host to GPU"]  # to each tower the int64 numbers of its examples
        assert rows == {"number": 2, "bytes": 8 * int(batch_size)}


@pytest.mark.graph
def test_what_cannot_be_had_is_no_fault(small, monkeypatch):
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


@pytest.mark.graph
def test_sums_are_exact_and_a_wrong_one_is_told(small, monkeypatch):
    names = ["/cpu:1", "/cpu:2"]
    found = gpu_steps.ring_against_nccl(names)
    assert list(found) == ["nccl", "ring"] and all(v["1 KiB"] > 0 for v in found.values())
    wrong = lambda *_: lambda: [tf.zeros(256), tf.zeros(256)]  # noqa: E731
    monkeypatch.setattr(gpu_steps, "_make_sums", wrong)
    with pytest.raises(ArithmeticError, match="nccl: a wrong sum of 1 KiB on /cpu:1"):
        gpu_steps.ring_against_nccl(names)
