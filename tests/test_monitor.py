"""What a run shows: lines, event files, and a speed that leaves out what is not training."""

import io
import re
import shlex
import sys

import pytest

from tests import tiny
from towers.monitor import Monitor, tensorboard_command

METRICS = {"loss": 1.25, "penalty": 0.5, "gradient_norm": 2.0, "learning_rate": 0.05}
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


class Clock:
    """A clock that stands still until it is told to go on."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def monitor(tmp_path, clock, out):
    monitor = Monitor(tmp_path, total_steps=100, out=out, clock=clock)
    yield monitor
    monitor.close()


def points(folder, tag):
    return [(step, value) for step, name, value in tiny.events(folder) if name == tag]


def test_the_lines_in_full(monitor, clock, out):
    monitor.train_point(1, 128, 0.0128, METRICS)
    clock.now += 4
    monitor.train_point(11, 1408, 0.1408, METRICS | {"loss": 0.5})
    scalars = {"accuracy": 0.75, "accuracy_ema": None, "loss": 1.0, "loss_ema": None}
    monitor.eval_point(11, 0.1408, scalars)
    monitor.eval_point(11, 0.1408, scalars | {"accuracy_ema": 0.5, "loss_ema": 0.25})
    start, trained, raw, both = out.getvalue().splitlines()
    assert re.fullmatch(
        rf"{TIME}: step 0, examples 128, loss = 1\.2500, learning rate 0\.05000", start
    )
    assert re.fullmatch(
        rf"{TIME}: step 10, examples 1408, loss = 0\.5000, learning rate 0\.05000 "
        r"\(320\.0 examples/s; 0\.400 s/step\)",
        trained,
    )
    assert re.fullmatch(rf"{TIME}: epoch 0\.14, test: accuracy 0\.7500, loss 1\.0000", raw)
    assert re.fullmatch(
        rf"{TIME}: epoch 0\.14, test: accuracy 0\.7500, accuracy_ema 0\.5000, loss 1\.0000, "
        r"loss_ema 0\.2500",
        both,
    )


def test_the_points_stand_where_the_weights_were(monitor, clock, tmp_path):
    monitor.train_point(1, 128, 0.5, METRICS)
    assert {step for step, _, _ in tiny.events(tmp_path / "train")} == {0}  # flushed at once
    clock.now += 4
    monitor.train_point(11, 1408, 5.5, METRICS)
    monitor.eval_point(11, 5.5, {"accuracy": 0.75, "accuracy_ema": None})
    found = {(step, tag): value for step, tag, value in tiny.events(tmp_path / "train")}
    every = {
        "loss/data": 1.25,
        "loss/regularisation": 0.5,
        "loss/total": 1.75,
        "learning_rate": pytest.approx(0.05),
        "gradient_norm": 2.0,
    }
    speed = {"speed/examples_per_second": 320.0, "speed/seconds_per_step": pytest.approx(0.4)}
    start = every | {"progress/examples": 128, "progress/epoch": 0.5}
    later = every | {"progress/examples": 1408, "progress/epoch": 5.5} | speed
    assert found == {(0, tag): value for tag, value in start.items()} | {
        (10, tag): value for tag, value in later.items()
    }
    assert tiny.events(tmp_path / "eval") == [(11, "accuracy", 0.75)]


def test_pauses_are_no_training_time(monitor, clock, tmp_path):
    monitor.train_point(1, 10, 0, METRICS)
    for seconds in 30, 50:
        clock.now += 1
        with monitor.pause():
            clock.now += seconds
    monitor.train_point(5, 50, 0, METRICS)  # 40 examples in 2 seconds
    clock.now += 4
    monitor.train_point(9, 90, 0, METRICS)  # 40 in 4: the pauses before count no more
    assert points(tmp_path / "train", "speed/examples_per_second") == [(4, 20.0), (8, 10.0)]
    assert points(tmp_path / "train", "speed/seconds_per_step") == [(4, 0.5), (8, 1.0)]


def test_the_speed_is_the_median_without_the_first_window(monitor, clock):
    assert monitor.examples_per_second() is None
    examples = 0
    monitor.train_point(1, examples, 0, METRICS)
    medians = []
    for step, rate in enumerate([1.0, 100.0, 300.0, 110.0], start=2):
        examples += 100
        clock.now += 100 / rate
        monitor.train_point(step, examples, 0, METRICS)
        medians.append(monitor.examples_per_second())
    assert medians == pytest.approx([1.0, 100.0, 200.0, 110.0])


def test_a_continued_run_has_no_speed_at_its_first_point(tmp_path, clock, out):
    monitor = Monitor(tmp_path, total_steps=100, step=50, out=out, clock=clock)
    monitor.train_point(51, 510, 0, METRICS)
    monitor.close()
    assert "examples/s" not in out.getvalue() and "step 50," in out.getvalue()
    assert points(tmp_path / "train", "speed/examples_per_second") == []
    assert points(tmp_path / "train", "loss/data") == [(50, 1.25)]


def test_lines_may_follow_the_end_of_the_bar(tmp_path, out):
    monitor = Monitor(tmp_path, total_steps=3, out=out)
    monitor.progress(2)
    monitor.close()
    monitor.say("done")
    monitor.say()
    assert out.getvalue() == "done\n\n"


def test_lines_go_to_standard_output_unless_told_otherwise(tmp_path, capsys):
    monitor = Monitor(tmp_path, total_steps=3)
    monitor.say("a line")
    monitor.close()
    assert capsys.readouterr() == ("a line\n", "")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """An executable tensorboard in a folder of its own."""
    path = tmp_path / "the bin" / "tensorboard"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    return path


def test_tensorboard_is_named_as_it_is_found(program, monkeypatch):
    monkeypatch.setenv("PATH", str(program.parent))
    assert tensorboard_command("runs/a") == "tensorboard --logdir runs/a"
    command = tensorboard_command("my runs/it's")
    assert shlex.split(command) == ["tensorboard", "--logdir", "my runs/it's"]


def test_tensorboard_of_an_environment_that_is_not_active(program, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    assert shlex.split(tensorboard_command("runs/a")) == [str(program), "--logdir", "runs/a"]
    monkeypatch.chdir(program.parents[1])
    assert tensorboard_command("runs/a") == "'the bin/tensorboard' --logdir runs/a"


def test_tensorboard_without_its_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = shlex.split(tensorboard_command("runs/a"))
    assert command == [sys.executable, "-m", "tensorboard.main", "--logdir", "runs/a"]
