"""scripts/gpu_check.py on logical CPUs or made-up GPUs: checks, steps, results."""

import signal

import pytest
import tensorflow as tf

from scripts import gpu_check, gpu_checks
from scripts.gpu_checks import Gpus
from towers.builder.device_types import cpus_for_gpus
from towers.devices import nvml
from towers.errors import RunError

pytestmark = pytest.mark.unit

TINY = {"model": "tests.tiny:cnn", "dataset": "tests.tiny:images", "augment": "none"}


@pytest.fixture
def dry(tmp_path):
    with cpus_for_gpus():
        yield Gpus(2, dry=True, folder=tmp_path)
    tf.config.experimental.enable_tensor_float_32_execution(True)  # as it was before `fit`


@pytest.fixture(autouse=True)
def handlers():
    """Put back what `gpu_check.main` sets for signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def last(check, gpus):
    """Return what a check finds last."""
    return list(check(gpus))[-1]


# Towers, on CPUs.


@pytest.mark.graph
def test_checks_of_towers(dry):
    assert last(gpu_checks.all_sum, dry) == "int32: exact"
    assert "6 ways between 3 devices" in last(gpu_checks.copies, dry)
    assert "largest_relative_difference" in last(gpu_checks.batch_norm, dry)
    assert "tower_1/MatMul" in str(last(gpu_checks.profile, dry))


@pytest.mark.extended
@pytest.mark.run
def test_fit_beside_fit_over_towers(dry):
    plain, over_towers, off = gpu_checks.fit(dry)
    assert len(plain["plain"]["losses"]) == len(over_towers["towers"]["losses"]) == 3
    assert off["largest_relative_difference"] < 1e-5


@pytest.mark.run
def test_a_command_and_what_it_prints(dry):
    flags = "--num_towers={all} --variables=replicated --model=tests.tiny:dense"
    found = last(gpu_checks.train("short", flags), dry)
    assert found["steps"] == 10 and found["num_towers"] == 2
    assert (dry.folder / "runs" / "short" / "result.json").exists()
    with pytest.raises(SystemExit, match="^2$"):
        last(gpu_checks.command("doctor --no_such_flag"), dry)


@pytest.mark.graph
def test_a_copy_that_loses_a_bit_and_an_op_on_the_wrong_device_are_seen(dry, monkeypatch):
    calls, device, identity = [], tf.device, tf.identity

    def broken(x):
        calls.append(x)
        odd = len(calls) % 2
        return identity(x) if odd else tf.bitcast(tf.bitcast(x, tf.int32) ^ 1, tf.float32)

    with monkeypatch.context() as patch:
        patch.setattr(tf, "identity", broken)
        with pytest.raises(RunError, match="other bits arrive: /cpu:0 -> /cpu:1, /cpu:0 -> /cpu:2"):
            last(gpu_checks.copies, dry)
    monkeypatch.setattr(tf, "device", lambda name: device("/cpu:0" if name == "/cpu:1" else name))
    with pytest.raises(RunError, match="^/cpu:0 -> /cpu:1 ran on .*CPU:0$"):
        last(gpu_checks.copies, dry)


# The results.


def test_no_gpu_and_a_tensorflow_that_does_not_start(monkeypatch, capsys, tmp_path):
    found = {"gpus": [], "build": {}}
    monkeypatch.setattr(gpu_check.self_test, "run_probe", lambda devices: found)
    assert gpu_check.main([f"--folder={tmp_path}"]) == gpu_check.EXIT_NO_GPU
    assert "no GPU here" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check.nvml, "gpus", lambda: [nvml.DriverGpu(0, name="A100")])
    assert gpu_check.main([f"--folder={tmp_path}"]) == 1
    assert "sees none of 0 (A100)" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check.self_test, "run_probe", lambda devices: "was ended by SIGILL")
    assert gpu_check.main([f"--folder={tmp_path}"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_table(capsys):
    assert gpu_check.main(["--dry=8", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:3] == ["one_gpu", "all_sum", "two_gpus"] and len(set(names)) == len(names)
    only_gpus = {check.name for check in gpu_checks.GPU_CHECKS}
    assert only_gpus < {check.name for check in gpu_checks.checks_for(Gpus(8))}
    assert not only_gpus & set(names)


@pytest.mark.extended
@pytest.mark.run
def test_a_step_is_timed(dry, monkeypatch):
    monkeypatch.setitem(gpu_checks.MODELS, "tiny", TINY)
    found = last(gpu_checks.step_check("tiny", 2, "128").run, dry)
    assert 0 < found["seconds_per_step"] < 10
    assert found["examples_per_second"] == pytest.approx(4 / found["seconds_per_step"])
