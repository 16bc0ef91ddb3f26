"""Six kinds of tasks, through the whole of a run: trained, killed, resumed, evaluated, loaded."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tasks, tiny, trained_runs
from tests.runs import released, result_of
from towers import cli, tf_private
from towers.training import checkpoint

pytestmark = pytest.mark.run


def command(verb, **given):
    return cli.main([verb, *(f"--{name}={value}" for name, value in given.items())])


def forget_after(train_dir, step):
    """Leave a run's folder as a kill after `step` steps, and before the next checkpoint, would."""
    (train_dir / "result.json").unlink()
    for number, prefix in checkpoint.find(train_dir / "checkpoints"):
        if number > step:
            for path in (train_dir / "checkpoints").glob(f"{prefix.rpartition('/')[2]}.*"):
                path.unlink()


@pytest.mark.parametrize("name", released(tasks.TASKS, "images", "two"))
def test_a_killed_run_goes_on_bit_for_bit(trained, tmp_path, name):
    before, train_dir = trained(name), trained.copy(name, tmp_path / "run")
    forget_after(train_dir, 4)
    assert command("train", train_dir=train_dir) == 0
    tiny.assert_identical(tiny.saved(train_dir), tiny.saved(before))
    again, result = result_of(train_dir), result_of(before)
    figures = [figure for figure in result if figure.startswith("test_")]
    assert figures and [again[figure] for figure in figures] == [result[f] for f in figures]


@pytest.mark.parametrize("name", released(tasks.TASKS, "two"))
def test_from_functions_it_is_the_same_run(trained, tmp_path, name):
    functions = dict(model=getattr(tasks, name), dataset=getattr(tasks, f"{name}_data"))
    result = towers.train(**trained_runs.flags(name) | functions, train_dir=str(tmp_path))
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(trained(name)))
    assert result["test_loss"] == result_of(trained(name))["test_loss"]


@pytest.mark.parametrize("name", released(tasks.TASKS, "images", "two"))
def test_figures_are_those_of_the_run_evaluated_on_more_towers_and_by_keras(trained, capsys, name):
    result = result_of(trained(name))
    assert result["steps"] == trained_runs.STEPS and np.isfinite(result["test_loss"])
    capsys.readouterr()
    assert command("evaluate", train_dir=trained(name), json=True, num_towers=3) == 0
    found = json.loads(capsys.readouterr().out)
    figures = {k.removeprefix("test_"): v for k, v in result.items() if k.startswith("test_")}
    for figure, value in figures.items():
        assert found[figure] == pytest.approx(value, rel=1e-5), figure
    model = towers.load(str(trained(name)))
    assert model.compiled
    data = towers.data.load(f"tests.tasks:{name}_data")
    example, _ = next(iter(data.test.eval_batches(data.test.size)))
    batches = tf.data.Dataset.from_tensors(example).unbatch().batch(8)
    found = model.evaluate(batches, verbose=0, return_dict=True)
    assert found.keys() <= figures.keys()
    assert result["objective"].removeprefix("test_") in found
    for figure, value in found.items():
        if not figure.endswith("_loss"):  # of an output: Keras weighs the last batch as the others
            assert value == pytest.approx(figures[figure], rel=1e-4), figure


@pytest.mark.parametrize("name", released(("two", "masks", "several"), "two"))
def test_the_first_step_is_that_of_keras(tmp_path, name):
    """Without dropout and averages: what Keras draws for a batch is drawn by example here."""
    changes = dict(max_steps=1, ema_decay=0.0, num_towers=3, train_dir=str(tmp_path))
    options = towers.Options(**trained_runs.flags(name) | changes)
    towers.train(**trained_runs.flags(name) | changes)
    keras.utils.set_random_seed(0)
    with tf_private.named_as_in_a_new_process():
        model = getattr(tasks, name)()
    batches = towers.data.load(options.dataset).train.train_batches(options.batch_size, seed=0)
    example = tf.nest.map_structure(lambda t: t.numpy(), next(iter(batches))[0])
    logs = model.train_on_batch(*example, return_dict=True)
    point = dict((tag, value) for _, tag, value in tiny.events(tmp_path / "train"))
    assert point["loss/total"] == pytest.approx(logs["loss"], rel=1e-5)
    if name == "two":
        model.optimizer.finalize_variable_values(model.trainable_variables)
    saved = tiny.saved(tmp_path)
    for variable in model.trainable_variables:
        key = f"model/{variable.path}".replace("/", ".S")
        np.testing.assert_allclose(saved[key], variable.numpy(), rtol=1e-4, atol=1e-6)
