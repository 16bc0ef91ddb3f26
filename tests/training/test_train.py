"""Whole runs: what they leave behind, and that nothing is lost or changed by stopping them."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import keras
import numpy as np
import pytest

import towers
from tests import runs, tiny, trained_runs
from tests.runs import command, points, result_of
from tests.tensorboard_server import read_scalars
from towers import cli
from towers.errors import InputError
from towers.formatting import figure
from towers.training.callbacks import saver
from towers.training.run import manifest
from towers.training.run.setup import RunContext
from towers.training.step import evaluation
from towers.training.train import train

pytestmark = pytest.mark.run
# All that could be lost between two parts of a run: slots, averages, statistics, seeds, clocks.
GIVEN = trained_runs.flags("classes") | dict(histogram_every_epochs=0)
LAST = trained_runs.CLASSES_STEPS


def assert_each_point_once(folder):
    """Curves go forward, and nothing of any stands twice."""
    for part in "train", "train/tower_0", "train/tower_1", "eval":
        found = [(step, value.tag) for step, value in tiny.records(folder / part)]
        for tag in {tag for _, tag in found}:
            steps = [step for step, name in found if name == tag]
            assert steps == sorted(set(steps)), f"{part} {tag}: {steps}"


def curves_of(folder):
    """Return the points of a run but for what a clock or the system says."""
    timed = "speed", "seconds", "memory", "tower/step", "workers"
    return {
        (part, x, tag): value
        for part in ("train", "train/tower_0", "train/tower_1")
        for x, values in read_scalars(folder / part).items()
        for tag, value in values.items()
        if not any(word in tag for word in timed)
    }


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    """The folder of a run that was not interrupted, moved to another place."""
    return trained.copy("classes", tmp_path_factory.mktemp("runs") / "whole")


def crash(*_):
    raise RuntimeError("lightning")


# What a run leaves


def test_the_result_says_what_was_trained_and_how_fast(trained):
    folder = trained("classes")
    result = result_of(folder)
    assert result["steps"] == LAST and result["examples"] == LAST * 7
    assert result["num_towers"] == 2 and result["devices"] == ["/cpu:0", "/cpu:1"]
    assert result["train_dir"] == str(folder)
    assert result["test_examples"] == 23 and result["batch_size"] == 7
    for name in "test_accuracy", "test_accuracy_ema", "test_loss", "test_loss_ema":
        shown = points(folder / "eval", name.replace("_", "/", 1))[-1][1]
        assert result[name] == pytest.approx(shown, rel=1e-6)
    assert result["train_loss"] == points(folder / "train", "loss/data")[-1][1]
    assert result["examples_per_second"] > 0 and result["seconds_to_first_step"] > 0


def test_a_run_leaves_these_files(trained):
    folder = trained("classes")
    (events,) = folder.glob("events.out.tfevents.*")
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints", "eval", events.name, "flags.cfg", "manifest.json", "result.json", "train",
    }  # fmt: skip
    for part in "train", "eval":
        assert len(list((folder / part).glob("events.*"))) == 1
    assert tiny.saved_steps(folder) == [0, 6, 12, LAST]
    flags = (folder / "flags.cfg").read_text().splitlines()
    assert {f"--train_dir={folder}", "--variables=default"} <= set(flags)


OF_PARTS = dict(checkpoint_every_steps=0, histogram_every_epochs=0)


def in_parts(whole, folder):
    flags = [f"--{name}={value}" for name, value in OF_PARTS.items()]
    return f"--flagfile={whole}/flags.cfg", f"--train_dir={folder}", *flags


# Going on


def stopped_in_an_evaluation(monkeypatch, flags):
    """Run with signals in the second evaluation; return what it has traced, with the exit code."""
    make, evaluate, batches, traced = RunContext.train_loop, evaluation.traced, [], []

    def observed(*args, **kwargs):
        traced.append(make(*args, **kwargs))
        return traced[-1]

    def signaled(model, call):
        batches.append(1)
        if len(batches) == 6:  # the second of the evaluation after 9 steps; one has four
            os.kill(os.getpid(), signal.SIGINT), os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(model, call)

    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(RunContext, "train_loop", observed)
        patch.setattr(evaluation, "traced", signaled)
        code = cli.main(["train", *flags, "--steps_per_loop=3"])
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    return code, [loop.function.experimental_get_tracing_count() for loop in traced]


def test_a_run_in_parts_is_the_run_in_one(whole, tmp_path, monkeypatch, capsys):
    """It is ended in an evaluation, by a crash after all steps, and not at all.

    That one which --max_steps ended goes on so, test_determinism tells. One graph makes calls of
    all lengths, between evaluations and checkpoints.
    """
    flags = *in_parts(whole, tmp_path), "--json"
    assert stopped_in_an_evaluation(monkeypatch, flags) == (75, [1])
    err = capsys.readouterr().err
    line = "towers: stopped at step 9 of 18: saved; the same command resumes the run\n"
    assert err.endswith(line) and err.count("towers: ") == 1
    assert tiny.saved_steps(tmp_path) == [0, 9] and not (tmp_path / "result.json").exists()
    evaluated = [step for step, _ in points(tmp_path / "eval", "test/accuracy")]
    assert evaluated == [5]  # and no part of that after 9

    with monkeypatch.context() as patch:
        patch.setattr("towers.training.run.manifest.finish", crash)
        with pytest.raises(RuntimeError, match="lightning"):
            train(tiny.options(tmp_path, **GIVEN | OF_PARTS))
    for words in ["continuing", "after 18 of"], ["finished"]:  # once more: it is finished
        code, out, err = command(capsys, "train", *flags)
        assert code == 0 and json.loads(out) == result_of(tmp_path) and out.count("\n") == 1
        assert all(word in err for word in words) and "other values" not in err, err
    _, _, err = command(capsys, "train", *flags, "--clip_norm=3")
    assert "finished" in err and "not trained with --clip_norm=3" in err
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(whole))
    result, expected = result_of(tmp_path), result_of(whole)
    speeds = {"examples_per_second", "seconds_to_first_step", "train_dir"}
    assert result.keys() == expected.keys() and result["examples_per_second"] > 0
    assert all(result[name] == expected[name] for name in result.keys() - speeds)
    lines = err.splitlines()
    assert f"  test_accuracy          {result['test_accuracy']:.4f}" in lines
    assert lines[-1].endswith(f"tensorboard --logdir={tmp_path}")
    assert_each_point_once(tmp_path)
    of_test = [points(folder / "eval", "test/accuracy") for folder in (tmp_path, whole)]
    assert of_test[0] == of_test[1]
    assert curves_of(tmp_path).items() >= curves_of(whole).items()
    ours, theirs = manifest.read(tmp_path), manifest.read(whole)
    for name in "weights", "state", "step":
        assert ours["final"][name] == theirs["final"][name]
    assert [session["step"] for session in ours["sessions"]] == [0, 9, 18]


def test_a_run_goes_on_with_other_towers_and_places_and_shows_the_same_loss(tmp_path, capsys):
    """That of all towers; the tutorial shows the last one's. A checkpoint knows no place."""
    given = GIVEN | dict(model="tests.tiny:dense", model_args="", dtype="float64")
    given |= dict(
        augment="standardize", evaluate_every_epochs=0, checkpoint_every_steps=0, log_every_steps=1
    )
    whole = tiny.Loop(tiny.options("unused", **given | dict(num_towers=1)))
    expected = [whole() for _ in range(LAST)]
    for num_towers, variables, steps in (2, "cpu", 5), (3, "replicated", 11), (1, "cpu", 0):
        parts = dict(num_towers=num_towers, variables=variables, placement="strict")
        train(tiny.options(tmp_path, **given | parts, max_steps=steps))
    saved = tiny.saved(tmp_path)
    state = {name.replace("/", ".S"): value for name, value in whole.state().items()}
    tiny.assert_close(saved, state, 1e-10)
    assert saved["step"] == LAST
    losses = [step["loss"] for step in expected]
    shown = re.findall(r"loss = (\S+),", capsys.readouterr().out)
    assert shown == [figure(loss) for loss in losses] and len(set(shown)) > 9
    totals = [pytest.approx(step["loss"] + step["penalty"], rel=1e-6) for step in expected]
    assert points(tmp_path / "train") == list(enumerate(totals))


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


def test_two_cannot_train_in_one_folder(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(saver, "_SAVE_SECONDS", 0.0)  # no saves: none by clock

    def second():
        for overwrite in False, True:
            with pytest.raises(InputError) as caught:
                train(tiny.options(tmp_path, overwrite=overwrite))
            said.append(str(caught.value))

    runs.at_step(monkeypatch, {4: second})
    assert train(tiny.options(tmp_path))["steps"] == 12
    assert len(said) == 2 and all(f"--train_dir={tmp_path}: another process" in s for s in said)
    assert tiny.saved_steps(tmp_path) == [0, 12]
    train(tiny.options(tmp_path))  # the lock is gone


def test_a_finished_run_says_so_and_is_left_alone_until_it_is_to_go_on(
    whole, trained, tmp_path, capsys
):
    before = tiny.files(whole)
    result = train(tiny.options(whole, **GIVEN | dict(num_towers=1)))
    assert tiny.files(whole) == before
    # Also the speed and the towers that it had then.
    assert result == result_of(trained("classes")) | dict(train_dir=str(whole))
    out = capsys.readouterr().out
    assert out.startswith(f"finished    {whole} has all its 18 steps; to train longer, ")
    assert "  num_towers             2\n" in out
    moved = shutil.copytree(whole, tmp_path / "moved here")
    assert train(tiny.options(moved, **GIVEN | dict(num_epochs=2.2)))["steps"] == 19
    first = tiny.files(moved)
    capsys.readouterr()
    assert train(tiny.options(moved, seed=4, max_steps=1, overwrite=True))["steps"] == 1
    assert f"moved aside {moved} to {moved}.1\n" in capsys.readouterr().out
    assert tiny.files(tmp_path / "moved here.1") == first
    assert "--seed=4" in (moved / "flags.cfg").read_text()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_overwrite_has_begun_is_gone_on_with_by_the_same_command_alone(
    tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"

    def stopped(**changes):
        runs.at_step(monkeypatch, {6: lambda: os.kill(os.getpid(), signal.SIGTERM)})
        assert train(tiny.options(folder, overwrite=True, **changes)) is None
        assert tiny.saved_steps(folder)[0] == 0 < (step := tiny.saved_steps(folder)[-1]) < 12
        return step, sorted(path.name for path in tmp_path.iterdir())

    train(tiny.options(folder, max_steps=1))
    step, names = stopped()
    assert names == ["run", "run.1"]
    capsys.readouterr()
    assert train(tiny.options(folder, overwrite=True))["steps"] == 12  # a job that is queued again
    assert f"continuing  {folder} at step {step} of 12" in capsys.readouterr().out
    for number, changes in (2, {}), (3, {"seed": 1}):  # finished; of other flags
        assert stopped(**changes)[1][-1] == f"run.{number}"


def test_a_run_is_not_ended_by_a_length_that_it_has_passed(tmp_path):
    given = dict(train_dir=tmp_path, model=tiny.dense, dataset=tiny.images, batch_size=6)
    towers.train(**given, max_steps=9)
    (tmp_path / "result.json").unlink()  # as of a run that was stopped
    before = (tmp_path / "flags.cfg").read_text()
    for shorter in {"max_steps": 6}, {"num_epochs": 0.5}:
        with pytest.raises(
            InputError, match=f"--{[*shorter][0]}.*longer .9 steps.; raise it, .*evaluate"
        ):
            towers.train(**given, **shorter)
    assert (tmp_path / "flags.cfg").read_text() == before
    assert towers.train(**given, max_steps=9)["steps"] == 9


def test_a_finished_run_is_not_taken_for_one_of_other_data(tmp_path, capsys):
    """A notebook's cell that is run again with other arrays would show the old figures."""
    images, labels = np.random.rand(8, 8, 8, 3), np.arange(8) % 2
    given = dict(train_dir=tmp_path, model=tiny.dense, batch_size=4, max_steps=2)
    first = towers.train(dataset=((images, labels), (images, labels)), **given)
    assert "warning" not in capsys.readouterr().out
    second = towers.train(dataset=((images, 1 - labels), (images, labels)), **given)
    out = capsys.readouterr().out
    assert second == first and "(data.train) differs" in out
    assert "--overwrite" in out
    with pytest.raises(InputError, match="has other classes than .*new: 2.*init_from"):
        towers.train(dataset=((images, np.arange(8) % 3), (images, labels)), **given)
    half = images[:, ::2, ::2]
    with pytest.raises(InputError, match="images of 4x4x3, .* 8x8x3; type --image_size=8"):
        towers.train(dataset=((half, labels), (half, labels)), **given | dict(max_steps=3))


# Refusals


def without_weights(num_classes, image_shape):
    head = keras.layers.Dense(num_classes, trainable=False)
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), head])


REFUSED = {
    "--model=tests.tiny:cnn there and --model=tests.tiny:dense here": dict(
        model="tests.tiny:dense", model_args=""
    ),
    "optimizer/sgd/iteration is absent there and int64[] here": dict(optimizer="sgd"),
    "has no trainable weights": dict(model=f"{__name__}:without_weights", model_args=""),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_run_writes_nothing_and_moves_none(whole, tmp_path, words):
    before, new = tiny.files(whole), tmp_path / "new"
    impossible = [(whole, True), (new, False)] if "weights" in words else []
    for folder, overwrite in [(whole, False), *impossible]:
        given = GIVEN | REFUSED[words]
        said = runs.refusal(train, tiny.options(folder, **given, overwrite=overwrite))
        assert words in said
    assert tiny.files(whole) == before and len(list(whole.parent.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), Path.unlink])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(
    whole, tmp_path, capsys, damage
):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "checkpoints").glob("*.index"):
        damage(path)
    before = tiny.files(tmp_path)
    flags = f"--flagfile={tmp_path}/flags.cfg", f"--train_dir={tmp_path}"
    code, out, err = command(capsys, "train", *flags)
    assert (code, out) == (2, "") and err.count("\n") == 4 + 1
    assert f"towers: no checkpoint in {tmp_path}/checkpoints can be read" in err
    assert tiny.files(tmp_path) == before


def test_quiet_prints_the_result_alone(trained, tmp_path, capsys):
    run = trained.copy("classes", tmp_path / "run")
    code, out, err = command(capsys, "train", f"--train_dir={run}", "--quiet", "--max_steps=20")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first == "result" and any("test_accuracy" in line for line in lines)
    assert all(line.startswith("  ") for line in lines[:-1])  # the last is how to watch it
