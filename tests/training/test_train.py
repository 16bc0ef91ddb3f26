"""Whole runs: what they leave behind, and that nothing is lost or changed by stopping them."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers import cli
from towers.errors import InputError, RunError
from towers.monitoring.monitor import Monitor
from towers.training import manifest
from towers.training.classification import Classification
from towers.training.run import Run
from towers.training.train import train

# All that could be lost between two parts of a run: slots, averages, statistics, seeds, clocks.
GIVEN = dict(
    model="tests.tiny:cnn",
    augment="tutorial",
    num_towers=2,
    num_epochs=2.0,  # 18 steps of 7 examples
    optimizer="adamw",
    weight_decay=0.01,
    ema_decay=0.9,
    evaluate_every_epochs=0.5,
    log_every_steps=4,
)
LAST = 18
FLAGS = (
    "--model=tests.tiny:dense", "--dataset=tests.tiny:images", "--augment=none", "--batch_size=7",
)  # fmt: skip


def command(capsys, *argv):
    """Return the exit code, standard output and standard error of a command line."""
    capsys.readouterr()
    code = cli.main(list(argv))
    return code, *capsys.readouterr()


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def points(folder, tag="loss/total"):
    return [(step, value) for step, name, value in tiny.events(folder) if name == tag]


def assert_each_point_once(folder):
    """Curves go forward, and nothing of any stands twice."""
    for part in "train", "train/tower_0", "train/tower_1", "eval":
        found = [(step, value.tag) for step, value in tiny.records(folder / part)]
        for tag in {tag for _, tag in found}:
            steps = [step for step, name in found if name == tag]
            assert steps == sorted(set(steps)), f"{part} {tag}: {steps}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(tiny.options(folder, **GIVEN))
    return folder


@pytest.fixture
def at_step(monkeypatch):
    """Return a function that has an action done once, after the step with a number."""

    def arrange(number, action):
        real, done = Monitor.progress, []

        def progress(monitor, step, values):
            real(monitor, step, values)
            if step >= number and not done:
                done.append(step)
                action()

        monkeypatch.setattr(Monitor, "progress", progress)

    return arrange


def send(number):
    return lambda: os.kill(os.getpid(), number)


def crash():
    raise RuntimeError("lightning")


# What a run leaves


def test_the_result_says_what_was_trained_and_how_fast(whole):
    result = result_of(whole)
    assert result["steps"] == LAST and result["examples"] == LAST * 7
    assert result["num_towers"] == 2 and result["devices"] == ["/cpu:0", "/cpu:1"]
    assert result["train_dir"] == str(whole)
    assert result["test_examples"] == 23 and result["batch_size"] == 7
    for name in "test_accuracy", "test_accuracy_ema", "test_loss", "test_loss_ema":
        shown = points(whole / "eval", name.replace("_", "/", 1))[-1][1]
        assert result[name] == pytest.approx(shown, rel=1e-6)
    assert result["train_loss"] == points(whole / "train", "loss/data")[-1][1]
    assert result["examples_per_second"] > 0 and result["seconds_to_first_step"] > 0


def test_a_run_leaves_these_files(whole):
    (events,) = whole.glob("events.out.tfevents.*")
    assert {path.name for path in whole.iterdir()} == {
        "checkpoints", "eval", events.name, "flags.cfg", "manifest.json", "result.json", "train",
    }  # fmt: skip
    for part in "train", "eval":
        assert len(list((whole / part).glob("events.*"))) == 1
    assert tiny.saved_steps(whole) == [0, LAST]
    assert f"--train_dir={whole}" in (whole / "flags.cfg").read_text().splitlines()


def test_tensorboard_shows_training_and_evaluation(whole):
    of_a_tower = "loss gradient_norm cosine_to_mean step_seconds memory_mib peak_memory_mib"
    tags = {tag for _, tag, _ in tiny.events(whole / "train")}
    assert tags - {"noise_scale/examples"} == {  # which cannot always be told
        *("loss/data", "loss/regularisation", "loss/total", "learning_rate", "gradient_norm"),
        *("progress/examples", "progress/epoch"),
        *("speed/examples_per_second", "speed/seconds_per_step"),
        *(f"speed/{name}_seconds" for name in ("input_wait", "compute", "gather", "update")),
        *("noise_scale/trace", "noise_scale/squared_norm"),
        *(f"tower_{i}/{name}" for i in (0, 1) for name in of_a_tower.split()),
    }
    # A point stands at the updates before its step; the last step has one, too.
    assert [step for step, _ in points(whole / "train")] == [0, 4, 8, 12, 16, 17]
    assert points(whole / "train", "progress/examples")[1] == (4, 35)
    of_eval = {f"test/{name}" for name in ("accuracy", "accuracy_ema", "loss", "loss_ema")}
    assert {tag for _, tag, _ in tiny.events(whole / "eval")} == of_eval
    # Half an epoch is 30 examples: passed after 5, 9, 13 and 18 steps.
    assert [step for step, _ in points(whole / "eval", "test/accuracy")] == [5, 9, 13, 18]


def test_points_are_written_at_once_and_nothing_is_traced_twice(tmp_path, monkeypatch):
    """Calls of other lengths, evaluations and checkpoints in between: one graph each."""
    seen, compiled = [], []

    def keep(owner, name, call):
        make = getattr(owner, name)

        def made(*args, **kwargs):
            compiled.append(make(*args, **kwargs))
            return call(compiled[-1])

        monkeypatch.setattr(owner, name, made)

    def observed(loop):
        def call(batches, num_steps, *measured):
            seen.append([step for step, _ in points(tmp_path / "train")])
            return loop(batches, num_steps, *measured)

        call.get_concrete_function = loop.get_concrete_function
        return call

    keep(Run, "train_loop", observed)
    keep(Classification, "_make_eval_step", lambda step: step)
    train(tiny.options(tmp_path, **GIVEN, checkpoint_every_steps=7, steps_per_loop=3))
    assert seen[:3] == [[], [], [0]]  # the first call makes no step, it shows the placement
    assert [made.experimental_get_tracing_count() for made in compiled] == [1, 1]


def test_flags_cfg_repeats_the_run_and_the_steps_of_a_call_change_no_bit(whole, tmp_path, capsys):
    flags = f"--flagfile={whole}/flags.cfg", f"--train_dir={tmp_path}", "--steps_per_loop=3"
    code, out, _ = command(capsys, "train", *flags)
    assert code == 0
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(whole))
    for tag in "loss/total", "gradient_norm", "learning_rate", "progress/examples":
        assert points(tmp_path / "train", tag) == points(whole / "train", tag)
    speeds = {"examples_per_second", "seconds_to_first_step", "train_dir"}
    ours, theirs = result_of(tmp_path), result_of(whole)
    assert all(ours[name] == theirs[name] for name in ours.keys() - speeds)
    lines = out.splitlines()
    assert lines[0] == "towers      2: /cpu:0, /cpu:1; gather on /cpu:0"
    assert f"new run     {tmp_path}, 18 steps" in lines
    watch = next(line for line in lines if line.startswith("watch it"))
    assert watch.endswith(f"towers tensorboard --train_dir={tmp_path}")
    assert lines[-1] == watch.removeprefix("watch it    ")
    assert f"  test_accuracy          {ours['test_accuracy']:.4f}" in lines


def test_with_json_the_result_alone_is_on_standard_output(tmp_path, capsys):
    flags = *FLAGS, f"--train_dir={tmp_path}", "--json", "--max_steps=3"
    for words in ["new run", "step 0,"], ["finished"]:  # once more: it is finished
        code, out, err = command(capsys, "train", *flags)
        assert code == 0 and json.loads(out) == result_of(tmp_path)
        assert out.count("\n") == 1
        assert all(word in err for word in words)


# Going on


def test_a_run_in_two_parts_is_the_run_in_one(whole, tmp_path):
    train(tiny.options(tmp_path, **GIVEN, max_steps=8))
    assert tiny.saved_steps(tmp_path) == [0, 8]
    result = train(tiny.options(tmp_path, **GIVEN))
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(whole))
    assert result["test_loss"] == result_of(whole)["test_loss"]
    assert result["steps"] == LAST and result["examples"] == LAST * 7
    assert set(points(tmp_path / "train")) >= set(points(whole / "train"))
    assert (tmp_path / "flags.cfg").read_text().count("--max_steps=0\n") == 1

    ours, theirs = manifest.read(tmp_path), manifest.read(whole)
    for name in "weights", "state", "step":
        assert ours["final"][name] == theirs["final"][name]
    assert [session["step"] for session in ours["sessions"]] == [0, 8]
    assert [session["flags"]["max_steps"] for session in ours["sessions"]] == [8, 0]


def test_a_run_goes_on_with_another_number_of_towers(tmp_path):
    given = dict(GIVEN, model="tests.tiny:dense", dtype="float64", evaluate_every_epochs=0)
    train(tiny.options(tmp_path / "whole", **given))
    for num_towers, steps in (3, 5), (1, 0):
        parts = given | dict(num_towers=num_towers)
        train(tiny.options(tmp_path / "parts", **parts, max_steps=steps))
    whole, parts = tiny.saved(tmp_path / "whole"), tiny.saved(tmp_path / "parts")
    tiny.assert_close(parts, whole, 1e-10)
    assert parts["step"] == LAST


def test_the_clock_of_examples_goes_on_with_another_batch_size(tmp_path):
    given = dict(num_epochs=2.0, log_every_steps=1)
    train(tiny.options(tmp_path, **given, batch_size=7, max_steps=6))
    result = train(tiny.options(tmp_path, **given, batch_size=13))
    assert (result["steps"], result["examples"]) == (12, 120)  # 6 x 7 + 6 x 13
    assert tiny.saved(tmp_path)["examples"] == 120
    clock = [value for _, value in points(tmp_path / "train", "progress/examples")]
    assert clock == [7, 14, 21, 28, 35, 42, 55, 68, 81, 94, 107, 120]
    before = np.array([0, *clock[:-1]])
    rates = [value for _, value in points(tmp_path / "train", "learning_rate")]
    np.testing.assert_allclose(rates, 0.05 * (1 + np.cos(np.pi * before / 120)), rtol=1e-5)


def test_a_process_that_is_killed_has_the_curves_of_one_that_was_not(tmp_path):
    """Between a checkpoint and the points after it: what came after the checkpoint is done anew."""
    flags = [*FLAGS, "--num_towers=2", "--max_steps=200", "--log_every_steps=20"]
    flags += ["--checkpoint_every_steps=30", "--evaluate_every_epochs=5", "--ema_decay=0.9"]
    line = [sys.executable, "-m", "towers", "train", *flags, f"--train_dir={tmp_path}/ended"]
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=quiet) as process:
        for text in process.stdout:
            if ": step 80, " in text:
                process.kill()
    assert process.returncode == -signal.SIGKILL
    for name in "ended", "whole":
        assert cli.main(["train", *flags, f"--train_dir={tmp_path}/{name}"]) == 0
    assert_each_point_once(tmp_path / "ended")
    for part, tag in ("train", "loss/total"), ("train", "gradient_norm"), ("eval", "test/accuracy"):
        ours = dict(points(tmp_path / "ended" / part, tag))
        theirs = dict(points(tmp_path / "whole" / part, tag))
        assert len(theirs) >= 5 and ours.items() >= theirs.items()
    tiny.assert_identical(tiny.saved(tmp_path / "ended"), tiny.saved(tmp_path / "whole"))


def test_a_crash_between_the_last_evaluation_and_the_result(whole, tmp_path, monkeypatch):
    options = tiny.options(tmp_path, **GIVEN)
    with monkeypatch.context() as patch:
        patch.setattr("towers.training.train.result_of", lambda *_: crash())
        with pytest.raises(RuntimeError, match="lightning"):
            train(options)
    train(options)
    assert_each_point_once(tmp_path)
    assert points(tmp_path / "eval", "test/accuracy") == points(whole / "eval", "test/accuracy")
    for name in "test_accuracy", "train_loss", "gradient_noise_scale":
        assert result_of(tmp_path)[name] == result_of(whole)[name]
    assert result_of(tmp_path)["examples_per_second"] > 0


def test_a_profile_that_is_asked_for_too_early_ends_no_run(tmp_path, monkeypatch):
    from towers.training.train import build

    def early(*arguments):
        os.kill(os.getpid(), signal.SIGUSR2)
        return build(*arguments)

    monkeypatch.setattr("towers.training.train.build", early)
    assert cli.main(["train", f"--train_dir={tmp_path}/run", *FLAGS, "--max_steps=1"]) == 0


def test_curves_go_on_over_what_they_began_with(tmp_path):
    train(tiny.options(tmp_path, max_steps=1))
    before = tiny.files(tmp_path)
    given = dict(max_steps=5, tensorboard_x="examples")
    with pytest.raises(InputError, match="--tensorboard_x=step there and --tensorboard_x=examples"):
        train(tiny.options(tmp_path, **given))
    assert tiny.files(tmp_path) == before
    train(tiny.options(tmp_path, **given, overwrite=True))
    assert points(tmp_path / "train", "progress/examples") == [(0, 7), (28, 35)]


def test_the_curves_of_another_program_are_left_alone(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "events.out.tfevents.1.other").write_bytes(b"theirs")
    before = tiny.files(tmp_path)
    with pytest.raises(InputError, match="event files in its train or eval"):
        train(tiny.options(tmp_path))
    assert tiny.files(tmp_path) == before


def test_two_cannot_train_in_one_folder(tmp_path, at_step):
    said = []

    def second():
        for overwrite in False, True:
            with pytest.raises(InputError) as caught:
                train(tiny.options(tmp_path, overwrite=overwrite))
            said.append(str(caught.value))

    at_step(4, second)
    assert train(tiny.options(tmp_path))["steps"] == 12
    assert len(said) == 2 and all(f"--train_dir={tmp_path}: another process" in s for s in said)
    assert tiny.saved_steps(tmp_path) == [0, 12]
    train(tiny.options(tmp_path))  # the lock is gone


def test_a_finished_run_says_so_and_is_left_alone(whole, tmp_path, capsys):
    before = tiny.files(whole)
    result = train(tiny.options(whole, **GIVEN | dict(num_towers=1)))
    assert tiny.files(whole) == before
    assert result == result_of(whole)  # also the speed and the towers that it had then
    out = capsys.readouterr().out
    assert out.startswith(f"finished    {whole} has all its 18 steps: more --num_epochs continue")
    assert "  num_towers             2\n" in out
    moved = shutil.copytree(whole, tmp_path / "moved here")
    assert train(tiny.options(moved, **GIVEN))["train_dir"] == str(moved)
    assert train(tiny.options(moved, **GIVEN | dict(num_epochs=2.2)))["steps"] == 19


def test_overwrite_moves_the_old_run_aside(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    first = tiny.files(folder)
    assert train(tiny.options(folder, seed=4, max_steps=1, overwrite=True))["steps"] == 1
    assert tiny.files(tmp_path / "run.1") == first
    assert "--seed=4" in (folder / "flags.cfg").read_text()
    assert len(list(tmp_path.iterdir())) == 2


# Refusals


def without_weights(num_classes, image_shape):
    head = keras.layers.Dense(num_classes, trainable=False)
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), head])


REFUSED = {
    "--model=tests.tiny:cnn there and --model=tests.tiny:dense here": dict(
        model="tests.tiny:dense"
    ),
    "optimizer/sgd/iteration is absent there and int64[] here": dict(optimizer="sgd"),
    "has no trainable weights": dict(model="tests.training.test_train:without_weights"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_run_writes_nothing(whole, words):
    before = tiny.files(whole)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        train(tiny.options(whole, **GIVEN | REFUSED[words]))
    assert "\n" not in str(caught.value)
    assert tiny.files(whole) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_model_that_cannot_be_had_leaves_no_folder_and_moves_none(whole, tmp_path, overwrite):
    with pytest.raises(InputError):
        train(tiny.options(tmp_path / "new", model="tests.tiny:none", overwrite=overwrite))
    assert list(tmp_path.iterdir()) == []
    before = tiny.files(whole)
    with pytest.raises(InputError):
        train(tiny.options(whole, model="tests.tiny:none", overwrite=overwrite))
    assert tiny.files(whole) == before and len(list(whole.parent.iterdir())) == 1


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "checkpoints").glob("*.index"):
        path.write_bytes(b"")
    before = tiny.files(tmp_path)
    flags = f"--flagfile={tmp_path}/flags.cfg", f"--train_dir={tmp_path}"
    code, out, err = command(capsys, "train", *flags)
    assert (code, out) == (2, "") and err.count("\n") == 3
    assert f"towers: none of the 2 checkpoints in {tmp_path}/checkpoints can be read" in err
    assert tiny.files(tmp_path) == before


@pytest.mark.parametrize("later", [False, True])
def test_a_full_disk_is_one_line_and_told_before_the_first_step(tmp_path, capsys, at_step, later):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))

    at_step(3, fill) if later else fill()
    try:
        flags = *FLAGS, f"--train_dir={tmp_path}/run", "--log_every_steps=1", "--max_steps=9"
        code, out, err = command(capsys, "train", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and ("step 0" in out) == later
    assert re.fullmatch(r"towers: \S+/ckpt-\d cannot be written: File too large\n", err)
    assert ("ckpt-9" in err, out.count("curves of train cannot be written")) == (later, later)


# Numbers that are none


class Poison(keras.layers.Layer):
    """Gives infinite values, or only a gradient that is NaN, from its n-th call in training on."""

    def __init__(self, after, where):
        super().__init__()
        self.after, self.where = after, where

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs, training=False):
        if not training:
            return inputs
        bad = self.calls >= self.after
        self.calls.assign_add(1)
        one, nan = tf.ones([], inputs.dtype), tf.constant(np.nan, inputs.dtype)
        if self.where == "loss":
            return inputs * tf.where(bad, nan, one)

        @tf.custom_gradient
        def poison(values):
            return values, lambda upstream: upstream * tf.where(bad, nan, one)

        return poison(inputs)


def poisoned(num_classes, image_shape, after, where="loss"):
    layers = [keras.layers.Flatten(), keras.layers.Dense(4), Poison(after, where)]
    return keras.Sequential([keras.Input(image_shape), *layers, keras.layers.Dense(num_classes)])


def poison_options(folder, where, **changes):
    given = dict(model="tests.training.test_train:poisoned", model_args=f"after=7,where={where}")
    return tiny.options(folder, **given | dict(checkpoint_every_steps=3, num_towers=2) | changes)


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    with pytest.raises(RunError) as caught:
        train(poison_options(tmp_path, "loss"))
    assert str(caught.value) == (
        "the loss is nan at step 7 (epoch 0.82), towers 0 (/cpu:0), 1 (/cpu:1): layer "
        "sequential/poison is the first whose output is not finite for all 7 examples: try a lower "
        "--learning_rate or --clip_global_norm=1, or --on_nan=rollback; `towers replay "
        f"--train_dir={tmp_path}` makes it again"
    )
    assert tiny.saved_steps(tmp_path) == [0, 3, 6]
    assert all(np.all(np.isfinite(v)) for v in tiny.saved(tmp_path).values())
    assert not (tmp_path / "result.json").exists()


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    with pytest.raises(RunError, match="a gradient is not finite at step 7 .* sequential/dense/bi"):
        train(poison_options(tmp_path, "gradient", max_steps=8))
    assert tiny.saved_steps(tmp_path) == [0, 3, 6]


def test_a_loss_scale_is_lowered_before_a_run_is_given_up(tmp_path):
    given = dict(dtype="mixed_float16", max_steps=40, log_every_steps=1, evaluate_every_epochs=0)
    with pytest.raises(RunError, match="the loss is nan at step 22 "):  # 7 good ones, 15 halvings
        train(poison_options(tmp_path, "loss", **given))
    for value in tiny.saved(tmp_path).values():
        assert np.all(np.isfinite(value))


# Stopping


def test_a_signal_saves_and_the_same_command_goes_on(whole, tmp_path, capsys, at_step):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    flags = f"--flagfile={whole}/flags.cfg", f"--train_dir={tmp_path}", "--json"
    at_step(9, send(signal.SIGINT))
    code, out, err = command(capsys, "train", *flags)
    assert (code, out) == (75, "")
    assert err.endswith("stopped at step 9 of 18: saved; the same command continues the run\n")
    assert tiny.saved_steps(tmp_path) == [0, 9] and not (tmp_path / "result.json").exists()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers

    code, out, _ = command(capsys, "train", *flags)
    assert code == 0
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(whole))
    for name in "steps", "examples", "test_loss", "test_accuracy_ema", "train_loss":
        assert json.loads(out)[name] == result_of(whole)[name]


@pytest.mark.parametrize("evaluation", [2, 4])  # one in the middle, and that of the end
def test_a_signal_stops_an_evaluation(whole, tmp_path, monkeypatch, capsys, evaluation):
    real, batches = Classification._make_eval_step, []

    def make_eval_step(task):
        eval_step = real(task)

        def signalled(*batch):
            batches.append(1)
            if len(batches) == 4 * (evaluation - 1) + 2:  # the second batch of four
                send(signal.SIGTERM)()
            return eval_step(*batch)

        return signalled

    monkeypatch.setattr(Classification, "_make_eval_step", make_eval_step)
    options = tiny.options(tmp_path, **GIVEN, histogram_every_epochs=0.5)
    assert train(options) is None
    stopped = {2: 9, 4: 18}[evaluation]
    assert f"stopped at step {stopped} of 18: saved; " in capsys.readouterr().err
    assert len(points(tmp_path / "eval", "test/accuracy")) == evaluation - 1  # no part of one
    assert tiny.saved_steps(tmp_path) == [0, stopped]

    result = train(options)
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(whole))
    assert result["test_loss"] == result_of(whole)["test_loss"]
    assert_each_point_once(tmp_path)


def test_a_second_signal_at_once_changes_nothing(tmp_path, capsys, at_step):
    def both():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(5, both)
    code, _, err = command(capsys, "train", *FLAGS, f"--train_dir={tmp_path}", "--max_steps=9")
    assert code == 75 and re.fullmatch(r"towers: stopped at step (\d) of 9: saved; .*\n", err)
    assert tiny.saved_steps(tmp_path)[-1] == int(err.split()[4])


def test_a_run_may_be_in_a_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tiny.options(tmp_path))))
    thread.start()
    thread.join()
    assert results[0]["steps"] == 12 and results[0] == result_of(tmp_path)


# Odd runs


@pytest.mark.parametrize(
    "given, steps, examples",
    [
        (dict(num_epochs=0.001), 1, 7),
        (dict(batch_size=100, num_epochs=4, num_towers=3), 3, 300),  # larger than the data set
    ],
)
def test_short_runs(tmp_path, given, steps, examples):
    result = train(tiny.options(tmp_path, **given))
    assert (result["steps"], result["examples"]) == (steps, examples)
    assert result["test_examples"] == 23 and result["train_loss"] > 0


def test_the_loss_that_is_shown_is_that_of_all_towers(tmp_path, capsys):
    """The tutorial shows the last tower's."""
    shown = {}
    for num_towers in 1, 4:
        given = dict(num_towers=num_towers, log_every_steps=1, dtype="float64", max_steps=3)
        train(tiny.options(tmp_path / str(num_towers), **given))
        shown[num_towers] = re.findall(r"loss = (\S+),", capsys.readouterr().out)
    assert shown[1] == shown[4] and len(set(shown[1])) == 3
    one, four = (points(tmp_path / name / "train") for name in ("1", "4"))
    assert one == [(step, pytest.approx(value, rel=1e-6)) for step, value in four]


def broken_images():
    """A training set whose reading fails in the second epoch at one example."""
    images, labels = tiny.arrays(60)

    def read():
        for number, example in enumerate(zip(images, labels, strict=True)):
            if number == 33 and read.passes > 2:  # labels are counted, and a batch is looked at
                raise ValueError("file 33 is damaged")
            yield example
        read.passes += 1

    read.passes = 0
    signature = tf.TensorSpec(tiny.IMAGE_SHAPE, tf.uint8), tf.TensorSpec([], tf.int32)
    dataset = tf.data.Dataset.from_generator(read, output_signature=signature)
    return (dataset, 60), tiny.arrays(23), tiny.NUM_CLASSES


def test_a_data_set_that_breaks_in_the_middle_says_where_and_whose_code(tmp_path, capsys):
    name = "tests.training.test_train:broken_images"
    flags = [f"--train_dir={tmp_path}", f"--dataset={name}", "--batch_size=10", "--num_epochs=5"]
    code, _, err = command(capsys, "train", FLAGS[0], *flags)
    assert code == 1
    *above, line = err.splitlines()
    assert above[0].startswith("Traceback") and above[-1] == "ValueError: file 33 is damaged"
    assert line.startswith(f"towers: --dataset={name} cannot be read at step 12: ValueError: file")
    assert "the error comes from tests/training/test_train.py, line " in line
    assert tiny.saved_steps(tmp_path) == [0, 12]  # no step that was made is lost


def test_a_run_whose_output_nobody_reads_any_more_is_saved(tmp_path, monkeypatch):
    def train_point(monitor, step, metrics):
        if step > 3:
            raise BrokenPipeError

    monkeypatch.setattr(Monitor, "train_point", train_point)
    with pytest.raises(BrokenPipeError):
        train(tiny.options(tmp_path, log_every_steps=1, max_steps=9))
    assert tiny.saved_steps(tmp_path) == [0, 4]
