"""Sweeps: which runs they make, real ones, and those of a program that stands in for training."""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.runs import refusal as refused
from tests.worker_processes import ROOT
from towers import cli
from towers.commands.sweep import command
from towers.commands.sweep.options import plan
from towers.errors import InputError
from towers.options.run import Options

pytestmark = pytest.mark.process

FAKE = [sys.executable, str(ROOT / "tests" / "fake_train.py")]


@pytest.fixture
def folder(folder, monkeypatch):
    """Stand in an empty folder, where processes find towers and the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def run_fake(*argv):
    """Make a sweep of fake runs in S; return its result and its lines."""
    lines = []
    options = cli.parse("sweep", ["--sweep_dir=S", *argv])
    return command.run(options, lines.append, program=FAKE), lines


def started():
    path = Path("S/started")
    return path.read_text().splitlines() if path.exists() else []


def statuses(result):
    return {run["name"]: run["status"] for run in result["runs"]}


def test_a_grid_ends_with_the_table_the_best_first_and_a_command_that_can_be_typed(folder):
    given = ["--vary=learning_rate:0.1,0.3", "--vary=seed:1,3", "--model_args=a=1,b=x y"]
    result, lines = run_fake(*given)
    assert [line.rpartition(" (")[0] for line in lines if line.startswith("run ")] == [
        f"run learning_rate={rate},seed={seed}: finished" for rate in (0.1, 0.3) for seed in (1, 3)
    ]
    rows = [line.split() for line in lines[lines.index("") + 1 :][:3]]
    assert rows == [
        "learning_rate test accuracy runs failed".split(),
        "0.3 0.3200 2 0".split(),
        "0.1 0.1200 2 0".split(),
    ]
    assert "best        learning_rate=0.3" in lines
    assert json.loads(Path("S/sweep.json").read_text()) | {"interrupted": False} == result
    typed = result["best"]["command"]
    assert f"  {typed}" in lines
    verb, *words = shlex.split(typed)[1:]
    options = cli.parse(verb, words)
    assert (options.model_args, options.seed, options.learning_rate) == ("a=1,b=x y", 1, 0.3)
    assert options.train_dir == "S-best"


def test_failed_runs_do_not_end_the_others_and_are_tried_again(folder):
    argv = ["--vary=model:crashed,killed,nothing,fine", "--vary=seed:1"]
    result, lines = run_fake(*argv)
    errors = {run["flags"]["model"]: run["error"] for run in result["runs"]}
    assert errors == {
        "crashed": "exit code 1: RuntimeError: out of luck",
        "killed": "killed by SIGKILL: 2026-01-01 00:00:00: step 9, examples 90, loss = 1.0",
        "nothing": "exit code 0: 2026-01-01 00:00:00: step 9, examples 90, loss = 1.0",
        "fine": None,
    }
    assert (result["failed"], result["finished"]) == (3, 1)
    last = "exit code 1: RuntimeError: out of luck (S/model=crashed,seed=1.log)"
    assert any(re.search(f"^run model=crashed.*{re.escape(last)}$", line) for line in lines)
    run_fake(*argv)
    names = [run["name"] for run in result["runs"]]
    assert started() == [*names, *names[:3]]


def test_bad_input_ends_a_sweep_at_the_first_run(folder):
    argv = ["--vary=model:refused,fine", "--vary=seed:1"]
    line = refused(run_fake, *argv)
    assert "model=refused" in line and "exit code 2: --model=refused: no" in line
    assert started() == ["model=refused,seed=1"]
    document = json.loads(Path("S/sweep.json").read_text())
    assert (document["failed"], document["total"]) == (1, 2)


def entry(rate, seed, result):
    """Return what is known of a run; without a result it has failed."""
    status = "finished" if result else "failed"
    flags = {"learning_rate": rate, "seed": seed}
    return dict(name=f"{rate},{seed}", flags=flags, status=status, result=result, seconds=2.0)


@pytest.mark.unit
def test_the_average_counts_where_there_is_one_and_a_failure_puts_a_row_last():
    ends = [
        average and {"test_accuracy": 0.1, "test_accuracy_ema": average}
        for average in (0.9, None, 0.5, None)
    ]
    runs = [(1, 1), (1, 2), (2, 1), (3, 1)]
    entries = [entry(rate, seed, end) for (rate, seed), end in zip(runs, ends, strict=True)]
    lines = command.closing_lines(command.compare("S", entries))
    shown = ["2 0.5000 1 0", "1 0.9000 1 1", "3 - 0 1"]
    assert [line.split() for line in lines[2:5]] == list(map(str.split, shown))
    mae = {"monitor": "validation_mae", "direction": "min", "steps": 3}  # better if lower
    entries = [entry(n, 1, mae | {"validation_mae": 1 / n, "test_loss": 1 / n}) for n in (2, 4)]
    document = command.compare("S", entries)
    assert (document["monitor"], document["direction"]) == ("validation_mae", "min")
    assert document["best"]["flags"] == {"learning_rate": 4}


def test_what_is_finished_is_not_started_again_and_values_can_be_added(folder):
    run_fake("--vary=learning_rate:0.1", "--vary=seed:1")
    result, lines = run_fake("--vary=learning_rate:0.3,0.1", "--vary=seed:1,2")
    assert "sweep       S: 3 of 4 runs to train" in lines
    assert set(statuses(result).values()) == {"finished"}
    assert len(started()) == len(set(started())) == 4


def test_another_experiment_is_refused_with_both_values_and_no_other_change(folder):
    run_fake("--vary=seed:1", "--batch_size=32", "--log_every_steps=10")
    before = tiny.files(folder)
    with pytest.raises(InputError, match="^--batch_size=64.*: .* with --batch_size=32; "):
        run_fake("--vary=seed:1,2", "--batch_size=64")
    assert tiny.files(folder) == before
    run_fake("--vary=seed:1", "--batch_size=32", "--log_every_steps=20", "--allow_growth")
    assert len(started()) == 1


SWEEP = f"""
import sys
from towers import cli
from towers.commands.sweep.command import run
result = run(cli.parse("sweep", sys.argv[1:]), program={FAKE!r})
assert "tensorflow" not in sys.modules  # of which a sweep has no need
sys.exit(75 if result["interrupted"] else 0)
"""


@pytest.fixture
def background(folder):
    """Return what starts a sweep of fake runs in a process, and waits for its waiting run."""
    processes = []

    def start(*argv):
        os.mkfifo("ready")
        argv = [sys.executable, "-c", SWEEP, "--sweep_dir=S", *argv]
        environ = os.environ | {"READY": str(folder / "ready")}
        process = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        with open("ready") as ready:
            assert ready.read()
        return process

    yield start
    for process in processes:
        if process.poll() is None:  # the test has failed
            process.kill()
            process.communicate()


def test_a_stop_is_passed_on_and_the_same_command_goes_on(folder, background):
    argv = ["--vary=model:fine,waits,late", "--vary=seed:1"]
    process = background(*argv)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 75
    assert "run model=waits,seed=1: stopped" in out and "model  test accuracy" in out
    assert "1 of 3 runs are finished; the same command resumes" in out
    noted = json.loads(Path("S/sweep.json").read_text())
    assert list(statuses(noted).values()) == ["finished", "stopped", "waiting"]
    assert Path("S/model=waits,seed=1/saved").exists()
    result, _ = run_fake(*argv)
    assert result["finished"] == 3
    assert started().count("model=waits,seed=1") == 2 and len(started()) == 4


def test_the_runs_of_a_killed_sweep_save_and_end(folder, background):
    argv = ["--vary=model:fine,waits", "--vary=seed:1"]
    process = background(*argv)
    before = tiny.files(Path("S/model=fine,seed=1"))
    process.kill()
    process.communicate()
    held = os.open("S/model=waits,seed=1", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # which the run gives back when it has saved
    os.close(held)
    result, _ = run_fake(*argv)  # without $READY: the run finishes only if it finds itself saved
    assert result["finished"] == 2
    assert started() == ["model=fine,seed=1", "model=waits,seed=1", "model=waits,seed=1"]
    assert tiny.files(Path("S/model=fine,seed=1")) == before


# Which runs a sweep is made of.


def plan_of(*argv):
    return plan(cli.parse("sweep", ["--sweep_dir=S", *argv]))


@pytest.mark.unit
@pytest.mark.parametrize(
    "argv, remedy",
    [
        ("", "--vary=learning_rate:0.05,0.1,0.2"),
        ("--vary=learning_rat:1", "did you mean learning_rate?"),
        ("--vary=train_dir:a,b", "the sweep sets --train_dir for each run"),
        ("--vary=batch_size:8,0", "the run batch_size=0: --batch_size=0: a whole number"),
        ("--vary=jit_compile:maybe", "--jit_compile=maybe: "),
        ("--vary=schedule:step", "--schedule=step needs --decay_epochs"),
        ("--vary=seed:1 --vary=seed:2", "--vary=seed:... is given twice"),
    ],
)
def test_a_bad_vary_gets_one_line(argv, remedy):
    assert remedy in refused(plan_of, *argv.split())


@pytest.mark.unit
def test_vary_may_stand_in_a_flagfile_and_flags_be_whole_only_together(tmp_path):
    path = tmp_path / "sweep.cfg"
    path.write_text("--batch_size=8\n--vary=seed:1,2\n--vary=model_args:a=1,b=2;a=2,b=2\n")
    runs = plan_of(f"--flagfile={path}", "--vary", "momentum:0,0.9")
    assert len(runs) == 8 and {run.options.batch_size for run in runs} == {8}
    assert list(runs[0].flags) == ["seed", "model_args", "momentum"]
    runs = plan_of("--schedule=step", "--vary=decay_epochs:80,120;60,90")
    assert [run.options.decay_epochs for run in runs] == ["80,120", "60,90"]


@pytest.mark.unit
def test_a_grid_is_all_combinations_and_names_do_not_depend_on_how_flags_are_given():
    runs = plan_of("--batch_size=8", "--vary=learning_rate:.05,0.10", "--vary=seed:1,2,3")
    assert [run.name for run in runs] == [
        f"learning_rate={rate},seed={seed}" for rate in ("0.05", "0.1") for seed in (1, 2, 3)
    ]
    folder = "S/learning_rate=0.05,seed=2"
    assert runs[1].options == Options(learning_rate=0.05, seed=2, batch_size=8, train_dir=folder)
    assert plan_of("--vary=seed:1,2,3", "--vary=learning_rate:5e-2")[1].name == runs[1].name
