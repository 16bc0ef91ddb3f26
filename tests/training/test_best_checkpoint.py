"""Which evaluation is the best, and what a run does with it."""

import dataclasses
import json
import shutil

import pytest

import towers
from tests import tiny
from tests.runs import command, done, forget_after
from towers.training.callbacks.best_checkpoint import step_of
from towers.training.train import train

pytestmark = pytest.mark.run

GIVEN = dict(validation_fraction=0.25, evaluate_every_epochs=0.5, keep_best=True, batch_size=9)


def points(train_dir):
    return json.loads((train_dir / "best.json").read_text())["points"]


def test_the_best_checkpoint_is_kept_and_is_what_the_test_set_sees(tmp_path, capsys):
    options = tiny.options(tmp_path, **GIVEN, max_steps=40, keep_checkpoints=1, learning_rate=1.0)
    result = train(options)
    best = step_of(tmp_path)
    highest = max(value for *_, value in points(tmp_path))
    assert [step for step, _, value in points(tmp_path) if value == highest][0] == best < 40
    assert tiny.saved_steps(tmp_path) == [best, 40]
    assert result["validation_accuracy"] == highest
    assert (result["monitor"], result["direction"]) == ("validation_accuracy", "max")
    found = json.loads(done(capsys, "evaluate", tmp_path, "--json"))
    assert found["step"] == best and found["accuracy"] == result["test_accuracy"]
    assert found["examples"] == tiny.TEST_SIZE


def test_without_the_evaluations_of_before_no_other_checkpoint_is_the_best(tmp_path, capsys):
    options = tiny.options(tmp_path / "run", **GIVEN, max_steps=10)
    train(options)
    (tmp_path / "run/best.json").write_text('{"points": [[1, 2]], "step": 3}')
    before = tiny.files(tmp_path)
    for verb, more in ("train", "--max_steps=20"), ("evaluate", "--json"):
        code, _, error = command(capsys, verb, f"--train_dir={tmp_path}/run", more)
        assert code == 2 and error.count("towers: ") == 1
        assert f"{tmp_path}/run/best.json is damaged; replace it" in error
    assert tiny.files(tmp_path) == before
    train(dataclasses.replace(options, overwrite=True))
    assert step_of(tmp_path / "run") and (tmp_path / "run.1").is_dir()


def test_evaluations_of_other_examples_are_not_compared(tmp_path):
    """Or no later evaluation could become the best, and the weights of before would be kept."""
    images, labels = tiny.arrays(60)
    given = GIVEN | dict(keep_checkpoints=1, learning_rate=1.0)

    def run(labels, steps):
        data = (images, labels), (images, labels)
        towers.train(dataset=data, model=tiny.dense, train_dir=tmp_path, max_steps=steps, **given)

    run(labels, 20)
    before = max(v for *_, v in points(tmp_path))
    run((labels + 1) % 3, 40)  # what was learned is wrong
    assert max(v for *_, v in points(tmp_path)) < before
    assert points(tmp_path)[0][0] >= 20 and step_of(tmp_path) >= 20


def test_a_run_stops_early_and_where_it_would_have_if_it_is_killed(tmp_path, capsys):
    given = GIVEN | dict(max_steps=60, learning_rate=0.3, checkpoint_every_steps=4)
    folder, cut, patience = tmp_path / "whole", tmp_path / "cut", dict(early_stopping_epochs=1.5)
    whole = train(tiny.options(folder, **given, **patience))
    assert whole["steps"] < 60 and "stopping    early" in capsys.readouterr().out
    before = tiny.files(folder)
    assert train(tiny.options(folder, **given, **patience)) == whole  # it is finished
    assert "ended early" in (said := capsys.readouterr().out) and "--early_stopping_epochs" in said
    assert tiny.files(folder) == before

    shutil.copytree(folder, cut)
    forget_after(cut, 8)
    again = train(tiny.options(cut, **given, **patience))
    assert points(cut) == points(folder)
    for name in ("steps", "test_loss", "validation_accuracy"):
        assert again[name] == whole[name]
    more = train(tiny.options(folder, **given, early_stopping_epochs=4))
    assert more["steps"] > whole["steps"]
