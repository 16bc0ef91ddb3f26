"""When `towers train` checks its towers, and what follows."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import towers
from tests import tiny
from tests.runs import command, result_of
from tests.worker_processes import ROOT
from towers import cli
from towers.builder.check import Check
from towers.commands.sweep import command as sweep
from towers.errors import RunError
from towers.training.callbacks import preemption
from towers.training.train import train

pytestmark = [pytest.mark.run, pytest.mark.checked]
CHECKS = type(towers.TowerBuilder(["/cpu:0"]).checks)
FOUND = "mixed examples: layer mixer lets the examples of a batch see each other"
FLAGS = (
    "--model=tests.tiny:dense --dataset=tests.tiny:images --augment=standardize --batch_size=7 "
    "--num_towers=2 --max_steps=12 --log_every_steps=5 --evaluate_every_epochs=0"
).split()


def at_steps(monkeypatch, actions):
    """Let a check be due after each step of {step: action(checks)}, or later, once."""

    def after_step(checks, step):
        for number in [number for number in actions if number <= step]:
            actions.pop(number)(checks)

    monkeypatch.setattr(CHECKS, "after_step", after_step)


def find(checks):
    checks.inexact.append(FOUND)


def stop(checks):
    raise RunError(FOUND)


def trained(train_dir, **changes):
    return train(tiny.options(train_dir, **dict(num_towers=2) | changes))


def test_towers_are_checked_after_the_first_step_is_shown_and_warnings_follow(
    tmp_path, monkeypatch, capsys
):
    steps, line = [], "towers differ from one device: layer mixer; --on_inexact=one_device"
    at_steps(monkeypatch, {1: lambda checks: checks.warn([line])})
    monitored = CHECKS.after_step

    def after_step(checks, step):
        steps.append((step, checks.is_deferred))
        monitored(checks, step)

    monkeypatch.setattr(CHECKS, "after_step", after_step)
    assert trained(tmp_path)["steps"] == 12
    lines = capsys.readouterr().out.splitlines()
    first, later = (
        next(i for i, text in enumerate(lines) if f": step {n} of" in text) for n in "05"
    )
    assert first < lines.index(f"warning     {line}") < later
    assert steps[0] == (1, True) and steps == sorted(steps)
    assert [step for step, _ in steps[-2:]] == [12, 12]  # the last one for the evaluation


@pytest.mark.unit
def test_a_long_check_is_told_once_and_is_no_stall(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    checkpoints = SimpleNamespace(snapshot=dict, is_remote=False)
    handler = preemption.PreemptionHandler(checkpoints, said.append, stall_seconds=3)
    handler.listener = SimpleNamespace(asked=None, save_asked=False, waited=lambda: 0)
    for step, ticks in (1, 3), (10, 3), (100, 30):
        with handler.check(step):
            for _ in range(ticks):
                now[0] += 0.5
                handler._tick()
        assert said == ["checking    that towers compute the same as one device"] * (ticks > 3)
    with handler.check(1000):
        now[0] += 2.5
        handler._tick()
    assert len(said) == 2  # each check that is long


BLOCKED = """
import time, towers
from towers.__main__ import main

def after_step(checks, step):
    print("in a check", flush=True)
    time.sleep(120)

type(towers.TowerBuilder(["/cpu:0"]).checks).after_step = after_step
main()
"""


@pytest.mark.process
def test_a_signal_in_a_long_check_saves_and_leaves_soon(folder):
    run = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, "train", *FLAGS, "--train_dir=run"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        while "in a check" not in (line := run.stdout.readline()):
            assert line, run.communicate()
        begun = time.monotonic()
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=60)
    finally:
        run.kill()
        run.communicate()
    assert time.monotonic() - begun < 15
    assert run.returncode == 75 and "SIGTERM: step 1 is saved; the same command" in err
    assert max(tiny.saved_steps(folder / "run")) == 1


# What is done if towers differ: real checks of a model that mixes examples, unless "later"

MIXING = dict(model="tests.tiny:mixing")


@pytest.mark.parametrize("compiled", [False, True])
def test_one_device_trains_the_run_of_one_tower_and_says_why(tmp_path, capsys, compiled):
    given = MIXING | dict(model_args=f"compiled={compiled}", learning_rate=0.05)  # the default
    result = trained(tmp_path / "a", on_inexact="one_device", accumulate_steps=2, **given)
    out = capsys.readouterr().out
    assert (result["num_towers"], result["devices"]) == (1, ["/cpu:0"])
    (line,) = [line for line in out.splitlines() if line.startswith("one device  ")]
    assert line.startswith("one device  trains only on /cpu:0, ")
    assert "centered" in line and "warning" not in out and "results  " not in out
    assert "exactness: one tower" in out
    flags = (tmp_path / "a/flags.cfg").read_text()
    assert "--num_towers=2\n" in flags and "--accumulate_steps=2\n" in flags

    trained(tmp_path / "b", num_towers=1, **given)
    tiny.assert_identical(tiny.saved(tmp_path / "a"), tiny.saved(tmp_path / "b"))


def test_a_run_on_one_device_is_resumed_there_until_the_model_is_mended(
    tmp_path, monkeypatch, capsys
):
    given = MIXING | dict(on_inexact="one_device", batch_size=6)
    for steps in 5, 8:
        assert trained(tmp_path / "run", max_steps=steps, **given)["num_towers"] == 1
    assert "continuing  " in capsys.readouterr().out
    monkeypatch.setattr(tiny.Centered, "call", lambda layer, x: x)
    assert trained(tmp_path / "run", max_steps=10, **given)["num_towers"] == 2


def saved_and_ended(capsys, flags, train_dir):
    """Run a command that ends with code 1; return its last step, which is saved, and its error."""
    code, out, err = command(capsys, "train", *flags)
    assert code == 1, err
    (saved,) = re.findall(r"^saved +step (\d+)", out, re.MULTILINE)
    assert int(saved) in tiny.saved_steps(train_dir)
    return int(saved), err


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_one_device_ends_a_run_that_is_found_inexact_later_and_one_tower_continues_it(
    tmp_path, monkeypatch, capsys, in_evaluation
):
    flags = [*FLAGS, f"--train_dir={tmp_path}/run", "--on_inexact=one_device"]
    if in_evaluation:
        flags += ["--model=tests.tiny:mixing", "--model_args=when=inference"]
    else:
        at_steps(monkeypatch, {6: find})
    step, err = saved_and_ended(capsys, flags, tmp_path / "run")
    assert step == 12 if in_evaluation else 6 <= step < 12
    found = "centered" if in_evaluation else "mixer"
    assert re.search(rf"towers: .*{found}.* same command with --num_towers=1 resumes exactly", err)
    code, _, err = command(capsys, "train", *flags, "--num_towers=1")
    assert code == 0, err
    assert result_of(tmp_path / "run")["num_towers"] == 1


def test_stop_ends_a_run_before_it_writes_or_with_what_it_has_trained(
    tmp_path, monkeypatch, capsys
):
    flags = [*FLAGS, f"--train_dir={tmp_path}/run", "--on_inexact=stop"]
    code, out, err = command(capsys, "train", *flags, "--model=tests.tiny:mixing")
    assert code == 1 and re.search("towers: inexact: .*centered.*--on_inexact=one_device", err)
    assert not (tmp_path / "run").exists() and "step 0" not in out
    at_steps(monkeypatch, {6: stop})
    step, err = saved_and_ended(capsys, flags, tmp_path / "run")
    assert 6 <= step < 12 and f"towers: {FOUND}\n" in err


def test_warn_trains_on_and_off_says_nothing(tmp_path, capsys):
    for check, warnings in ("once", 1), ("off", 0):
        assert trained(tmp_path / check, check=check, **MIXING)["steps"] == 12
        out = capsys.readouterr().out
        assert len(re.findall("^warning .*centered", out, re.MULTILINE)) == warnings, out
        assert "results  " not in out


# What is not checked again


def test_what_has_passed_is_not_checked_again_by_a_resumed_run_or_an_evaluation(
    tmp_path, monkeypatch
):
    made, run = [], Check.run
    monkeypatch.setattr(Check, "run", lambda check, *again: made.append(1) or run(check, *again))
    trained(tmp_path / "run", max_steps=5, evaluate_every_epochs=0.5)
    assert len(made) == 3  # of the step, and of the evaluation, whose last batch is smaller
    keys = json.loads((tmp_path / "run/manifest.json").read_text())["passed"]
    assert len(keys) == 3
    trained(tmp_path / "run", max_steps=10)
    towers.evaluate(train_dir=f"{tmp_path}/run")
    assert len(made) == 3
    assert json.loads((tmp_path / "run/manifest.json").read_text())["passed"] == keys
    trained(tmp_path / "other", max_steps=5)  # another run may be of another model
    assert len(made) == 6


COUNTED = """
import sys
from towers import cli
from towers.builder.check import Check

run = Check.run

def counted(check, *again):
    with open("checked", "a") as file:
        file.write(".")
    return run(check, *again)

Check.run = counted
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


@pytest.mark.process
def test_the_second_trial_of_a_sweep_checks_nothing_that_the_first_has_passed(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = cli.parse("sweep", ["--sweep_dir=S", *FLAGS, "--vary=learning_rate:0.1,0.2"])
    result = sweep.run(options, program=[sys.executable, "-c", COUNTED])
    assert result["finished"] == 2
    assert (folder / "checked").read_text() == "..."  # the step, and the evaluation of two sizes
