"""What a run shows: lines, event files, and a speed that leaves out what is not training."""

import io
import re
import shlex
import sys
import types

import pytest
import tensorflow as tf

from tests import tiny
from towers.monitoring.monitor import Monitor, tensorboard_command
from towers.options.run import Options
from towers.options.triggers import Timetable

pytestmark = pytest.mark.graph

METRICS = {
    "loss": 1.25, "penalty": 0.5, "learning_rate": 0.05,
    "gradient_norm": 2.0, "data_gradient_norm": 1.5,
    "tower_examples": [64.0, 64.0], "tower_loss": [1.0, 1.5],
    "tower_gradient_norm": [3.0, 2.0],
}  # fmt: skip
DEVICES = ["/cpu:0", "/cpu:1"]


def timetable(first=0, last=100, batch_size=128, **options):
    return Timetable(first, first * batch_size, last, 10_000, batch_size, 10, Options(**options))


def call(num_steps, **seconds):
    """Return what the train loop gives for a call of so many steps."""
    each = {"input_wait": 0.001, "compute": 0.3, "gather": 0.002, "update": 0.003} | seconds
    values = {f"{name}_seconds": num_steps * value for name, value in each.items()}
    values |= {"tower_seconds": [num_steps * 0.25, num_steps * 0.3], "tower_examples": [64.0, 64.0]}
    return {name: tf.constant(value) for name, value in values.items()}


@pytest.fixture
def clock():
    """A clock that stands still until it is told to go on."""
    return types.SimpleNamespace(now=100.0)


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def make(tmp_path, clock, out):
    """Make monitors of the run."""

    def monitor(first=0, last=100, devices=DEVICES, **options):
        plan = timetable(first, last, log_every_steps=1, **options)
        return Monitor(tmp_path, plan, devices, out=out, clock=lambda: clock.now)

    return monitor


def step_to(monitor, before, step, metrics=METRICS):
    """Make the steps from `before` to `step`, and a point of the last."""
    of_last = {name: tf.constant(value) for name, value in metrics.items()}
    monitor.after_step(step, call(step - before) | of_last, lambda: None)


def points(folder, tag):
    return [(step, value) for step, name, value in tiny.events(folder) if name == tag]


def test_the_lines_in_full(make, clock, out):
    monitor = make()
    step_to(monitor, 0, 1)
    clock.now += 4
    step_to(monitor, 1, 11, METRICS | {"loss": 0.5})
    scalars = {"accuracy": 0.75, "accuracy_ema": None, "loss": 1.0, "loss_ema": None}
    monitor.eval_point(11, scalars)
    monitor.eval_point(12, scalars | {"accuracy_ema": 0.5, "loss_ema": 0.25})
    start, trained, raw, both = out.getvalue().splitlines()
    point = "step {} of 100, examples {}, loss = {}, learning rate 0.05000 "
    expected = {
        start: point.format(0, 128, "1.2500") + "(ETA ?)",
        trained: point.format(10, 1408, "0.5000") + "(320.0 examples/s; 0.400 s/step; ETA 0:00:36)",
        raw: "after 11 of 100 steps, epoch 0.14, test: accuracy 0.7500, loss 1.0000",
        both: "after 12 of 100 steps, epoch 0.15, test: accuracy 0.7500, accuracy_ema 0.5000, "
        "loss 1.0000, loss_ema 0.2500",
    }
    for line, words in expected.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: " + re.escape(words), line)


def test_the_speed_is_the_median_without_the_first_window(clock, make):
    monitor = make(last=5, batch_size=100)
    assert monitor.examples_per_second() is None
    step_to(monitor, 0, 1)
    medians = []
    for step, rate in enumerate([1.0, 100.0, 300.0, 110.0], start=2):
        clock.now += 100 / rate
        step_to(monitor, step - 1, step, METRICS | {"loss": step / 2})
        medians.append(monitor.examples_per_second())
    assert medians == pytest.approx([1.0, 100.0, 200.0, 110.0])


def test_pauses_are_no_training_time(tmp_path, clock, make):
    monitor = make(batch_size=10)
    step_to(monitor, 0, 1)
    for seconds in 30, 50:
        clock.now += 1
        with monitor.pause(), monitor.pause():
            clock.now += seconds
    step_to(monitor, 1, 5)  # 40 examples in 2 seconds
    clock.now += 4
    step_to(monitor, 5, 9)  # 40 in 4: the pauses before count no more
    assert points(tmp_path / "train", "speed/examples_per_second") == [(4, 20.0), (8, 10.0)]
    assert points(tmp_path / "train", "speed/seconds_per_step") == [(4, 0.5), (8, 1.0)]


@pytest.mark.parametrize(
    "path, expected", [("{bin}", "tensorboard"), ("/nowhere", "the bin/tensorboard")]
)
def test_the_command_is_named_as_it_can_be_typed(tmp_path, monkeypatch, path, expected):
    folder = tmp_path / "the bin"
    folder.mkdir()
    (folder / "tensorboard").touch(0o755)
    monkeypatch.setenv("PATH", path.format(bin=folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    command = shlex.split(tensorboard_command("my runs/it's"))
    assert command == [expected, "--logdir=my runs/it's"]
