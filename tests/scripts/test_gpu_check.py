"""scripts/gpu_check.py: questions, and checks that hang, die or raise."""

import signal
import sys

import pytest

from scripts import gpu_check
from scripts.gpu_checks import ON_ONE, ON_SEVERAL, Check, Question
from towers.devices import nvml

pytestmark = pytest.mark.unit

# What a check's process does in place of a check.
WAYS_TO_END = {
    "hangs": "import time; time.sleep(60)",
    "passes": "print('fine')",
    "dies": "import os; os.kill(os.getpid(), 9)",
    "raises": "raise ValueError('no kernel')",
    "cannot": "print('no cuDNN'); exit(4)",
}


@pytest.fixture(autouse=True)
def handlers():
    """Put back what `gpu_check.main` sets for signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.alarm(0)


@pytest.fixture
def machine(monkeypatch):
    """Set what TensorFlow's process finds on this machine."""
    found = {"gpus": [["A100", [8, 0]]], "build": {}}
    monkeypatch.setattr(gpu_check.self_test, "run_probe", lambda devices: found)
    return found


def test_the_questions_of_one_gpu_take_twelve_minutes_at_most(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        gpu_check.main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"{q.seconds:4} s  {q.asks}" in listed for q in ON_ONE + ON_SEVERAL)
    assert len(ON_ONE) == 12 and 0 < sum(q.seconds for q in ON_ONE) <= 715
    checks = [(i, c.name) for i, q in enumerate(ON_ONE + ON_SEVERAL, 1) for c in q.checks]
    assert len({name for _, name in checks}) == len(checks)
    assert all(name.startswith(f"{number} ") for number, name in checks)


@pytest.mark.process
def test_a_check_that_hangs_dies_or_raises_costs_the_others_nothing(
    machine, monkeypatch, capsys, tmp_path
):
    checks = [Check(f"1 {name}", 2 if name == "hangs" else 20, None) for name in WAYS_TO_END]
    monkeypatch.setattr(gpu_check, "ON_ONE", (Question("What happens?", *checks),))
    monkeypatch.setattr(gpu_check, "LAST_WORDS_SECONDS", 0.5)
    new = nvml.DriverGpu(0, name="RTX 5090", compute_capability=(12, 0))
    monkeypatch.setattr(gpu_check.nvml, "gpus", lambda: [new])
    asked = []

    def command_of(check, folder):
        asked.append(check.name[2:])
        return [sys.executable, "-c", WAYS_TO_END[check.name[2:]]]

    monkeypatch.setattr(gpu_check, "command_of", command_of)
    monkeypatch.setattr(gpu_check, "SLOWNESS", 1)
    folder = f"--folder={tmp_path}"
    assert gpu_check.main([folder]) == gpu_check.EXIT_FAILED
    rows = {row["check"][2:]: row for row in gpu_check.read_results(tmp_path) if "check" in row}
    assert {name: row["status"] for name, row in rows.items()} == {
        "hangs": gpu_check.HANGS,
        "passes": gpu_check.OK,
        "dies": gpu_check.FAILED,
        "raises": gpu_check.FAILED,
        "cannot": gpu_check.CANNOT,
    }
    assert "no kernel" in rows["raises"]["detail"] and "-9" in rows["dies"]["detail"]
    assert 'File "<string>", line 1' in (tmp_path / "1 hangs.log").read_text()
    out = capsys.readouterr().out
    assert "1 cannot: cannot be asked here" in out and "run towers doctor" in out
    # A second call makes the checks alone that have no result; --only makes all of a question.
    kept = (tmp_path / gpu_check.RESULTS).read_text()
    (tmp_path / gpu_check.RESULTS).write_text(kept[: kept.rindex("\n") + 9])
    asked.clear()
    assert gpu_check.main([folder]) == gpu_check.EXIT_FAILED
    assert asked == ["cannot"]
    monkeypatch.setattr(gpu_check, "ON_ONE", (Question("What happens?", checks[1], checks[4]),))
    assert gpu_check.main([folder, "--only=1"]) == 0
    assert asked == ["cannot", "passes", "cannot"]
