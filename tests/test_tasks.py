"""Six kinds of tasks, through the whole of a run: trained, killed, resumed, verified, loaded."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tasks, tiny
from towers import cli, tf_private
from towers.training import checkpoint

STEPS = 9


def flags(name, **more):
    given = dict(
        model=f"tests.tasks:{name}",
        dataset=f"tests.tasks:{name}_data",
        num_towers=2,
        batch_size=8,
        max_steps=STEPS,
        checkpoint_every_steps=4,
        log_every_steps=4,
        ema_decay=0.0 if name == "two" else 0.5,  # its optimizer has averages of its own
    )
    return given | more


def command(verb, **given):
    return cli.main([verb, *(f"--{name}={value}" for name, value in given.items())])


def forget_after(train_dir, step):
    """Leave a run's folder as a kill after `step` steps, and before the next checkpoint, would."""
    (train_dir / "result.json").unlink()
    for number, prefix in checkpoint.find(train_dir / "checkpoints"):
        if number > step:
            for path in (train_dir / "checkpoints").glob(f"{prefix.rpartition('/')[2]}.*"):
                path.unlink()


@pytest.fixture(scope="module", params=tasks.TASKS)
def trained(request, tmp_path_factory):
    """The name of a task, and the folder of its run from the command line."""
    train_dir = tmp_path_factory.mktemp("runs") / request.param
    assert command("train", **flags(request.param), train_dir=train_dir) == 0
    return request.param, train_dir


def by_keras(name, num_steps):
    """Return the weights and the logs of plain Keras, which is given a run's batches."""
    keras.utils.set_random_seed(0)
    with tf_private.named_as_in_a_new_process():
        model = getattr(tasks, name)()
    options = towers.Options(**flags(name))
    data = towers.data.load(options.dataset)
    batches = data.train.train_batches(8, seed=0).take(num_steps)
    for example, _ in batches:
        example = tf.nest.map_structure(lambda t: t.numpy(), example)
        logs = model.train_on_batch(*example, return_dict=True)
        model.reset_metrics()
    return model, logs


def test_a_run_reports_what_its_model_says(trained):
    name, train_dir = trained
    result = json.loads((train_dir / "result.json").read_text())
    model, _ = by_keras(name, 1)
    names = model.get_metrics_result().keys()
    assert {f"test_{metric}" for metric in names} <= result.keys()
    assert result["steps"] == STEPS and np.isfinite(result["test_loss"])
    assert result["objective"].removeprefix("test_") in names


def test_a_killed_run_goes_on_bit_for_bit(trained):
    name, train_dir = trained
    before, result = tiny.saved(train_dir), (train_dir / "result.json").read_text()
    forget_after(train_dir, 4)
    assert command("train", train_dir=train_dir) == 0
    tiny.assert_identical(tiny.saved(train_dir), before)
    again = json.loads((train_dir / "result.json").read_text())
    for figure, value in json.loads(result).items():
        if figure.startswith("test_"):
            assert again[figure] == value


def test_from_python_it_is_the_same_run(trained, tmp_path):
    name, train_dir = trained
    given = flags(name, model=getattr(tasks, name), dataset=getattr(tasks, f"{name}_data"))
    result = towers.train(**given, train_dir=str(tmp_path))
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(train_dir))
    assert result["test_loss"] == json.loads((train_dir / "result.json").read_text())["test_loss"]


def test_evaluate_repeats_the_figures_on_more_towers(trained, capsys):
    name, train_dir = trained
    capsys.readouterr()
    assert command("evaluate", train_dir=train_dir, json=True, num_towers=3) == 0
    found = json.loads(capsys.readouterr().out)
    result = json.loads((train_dir / "result.json").read_text())
    figures = {k.removeprefix("test_"): v for k, v in result.items() if k.startswith("test_")}
    for figure, value in figures.items():
        assert found[figure] == pytest.approx(value, rel=1e-5), figure


def test_what_is_loaded_computes_what_the_run_computed(trained):
    name, train_dir = trained
    model = towers.load(str(train_dir))
    assert model.compiled
    data = towers.data.load(f"tests.tasks:{name}_data")
    example, _ = next(iter(data.test.eval_batches(data.test.size)))
    batches = tf.data.Dataset.from_tensors(example).unbatch().batch(8)
    found = model.evaluate(batches, verbose=0, return_dict=True)
    result = json.loads((train_dir / "result.json").read_text())
    for figure, value in found.items():
        if not figure.endswith("_loss"):  # of an output: Keras weighs the last batch as the others
            assert value == pytest.approx(result[f"test_{figure}"], rel=1e-4), figure


def test_verify_proves_it_on_2_and_3_towers(trained, capsys):
    name, _ = trained
    given = flags(name, num_towers="2,3")
    given = {n: v for n, v in given.items() if not n.endswith("every_steps") and n != "max_steps"}
    capsys.readouterr()
    assert command("verify", **given, steps=3, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and max(found["max_relative_difference"].values()) < 1e-9
    kinds = {array.partition("/")[0] for array in found["differences"]}
    assert {"loss", "metric", "model", "optimizer", "evaluation"} <= kinds


def test_the_first_step_is_that_of_keras(trained, tmp_path):
    """Without dropout and averages: what Keras draws for a batch is drawn by example here."""
    name, _ = trained
    if name in ("images", "text", "table"):
        pytest.skip("the model has dropout: `verify` compares it")
    given = flags(name, max_steps=1, train_dir=str(tmp_path), ema_decay=0.0, num_towers=3)
    towers.train(**given)
    model, logs = by_keras(name, 1)
    point = dict((tag, value) for _, tag, value in tiny.events(tmp_path / "train"))
    assert point["loss/total"] == pytest.approx(logs["loss"], rel=1e-5)
    if name == "two":
        model.optimizer.finalize_variable_values(model.trainable_variables)
    saved = tiny.saved(tmp_path)
    for variable in model.trainable_variables:
        key = f"model/{variable.path}".replace("/", ".S")
        np.testing.assert_allclose(saved[key], variable.numpy(), rtol=1e-4, atol=1e-6)


def test_on_gpus_too_keras_squares_each_example_s_row_of_an_embedding(monkeypatch):
    monkeypatch.setenv("TOWERS_CPUS_FOR_GPUS", "1")
    task = "--model=tests.tasks:text --dataset=tests.tasks:text_data --devices=cpu"
    assert cli.main(f"verify {task} --num_towers=2 --batch_size=7 --steps=1".split()) == 0
