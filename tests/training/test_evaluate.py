"""Evaluation: every example of the test set counts once, whatever the batch and the towers."""

import functools
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tiny
from tests.runs import command, refusal, result_of
from towers.data import ArraySplit
from towers.options.run import Options
from towers.training.run.model import check_data
from towers.training.run.setup import prepare
from towers.training.step.evaluation import Evaluation

pytestmark = pytest.mark.graph


def logits_of(model, images):
    mean, deviation = images.mean((1, 2, 3), keepdims=True), images.std((1, 2, 3), keepdims=True)
    return model((images - mean) / deviation, training=False).numpy()


def by_numpy(model, images, labels):
    """Return the figures of an evaluation in numpy, all images at once."""
    logits = logits_of(model, images.astype(np.float64))
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    right = logits.argmax(1) == labels
    return dict(accuracy=right.mean(), loss=losses.mean())


def turned_around(run):
    """Let the averages be the model's weights turned around; return a model that has these."""
    model = keras.models.clone_model(run.train_state.model)
    model.set_weights([np.flip(weight, 0) for weight in run.train_state.model.get_weights()])
    for variable, average in run.train_state.averages:
        average.assign(np.flip(variable.numpy(), 0))
    return model


@pytest.mark.run
@pytest.mark.parametrize(("num_towers", "batch_size"), [(3, 4), (4, 100)])
def test_counts_are_exact_at_every_remainder(num_towers, batch_size):
    given = dict(num_towers=num_towers, batch_size=batch_size, ema_decay=0.5, dtype="float64")
    run = prepare(tiny.options("unused", **given))
    averaged = turned_around(run)
    for size in range(10, 10 + min(batch_size, 4)):
        images, labels = tiny.arrays(size, seed=5)
        result = run.task.make_evaluator(ArraySplit(images, labels))()
        found = result.metrics
        expected = by_numpy(run.train_state.model, images, labels)
        assert result.examples == size
        assert found["accuracy"] == expected["accuracy"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        expected = by_numpy(averaged, images, labels)
        assert found["accuracy_ema"] == expected["accuracy"]
        assert found["loss_ema"] == pytest.approx(expected["loss"], rel=1e-12)


@pytest.mark.run
@pytest.mark.parametrize("flag", [None, "--num_towers=3", "--batch_size=23"])
def test_the_command_repeats_the_numbers_of_the_run(trained, capsys, flag):
    """Bit for bit; towers and batches change only roundings."""
    folder, more = trained("classes"), [flag] if flag else []
    result = result_of(folder)
    code, out, err = command(capsys, "evaluate", f"--train_dir={folder}", "--json", *more)
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert " ".join(found) == ("accuracy accuracy_ema loss loss_ema examples step num_towers")
    for name in "accuracy", "accuracy_ema", "loss", "loss_ema":
        exact = "accuracy" in name or not flag
        assert found[name] == pytest.approx(result[f"test_{name}"], rel=0 if exact else 1e-6, abs=0)
    assert found["loss"] != found["loss_ema"]
    assert (found["examples"], found["step"]) == (23, 18)
    assert flag or "step 18, 23 test examples, 2 towers" in err


def broken_tests():
    """A test set whose reading fails in the middle, as with a damaged file."""
    images, labels = tiny.arrays(20)

    def check(image, label):
        with tf.control_dependencies([tf.debugging.assert_less(label, 9, "file 7 is bad")]):
            return image, tf.identity(label)

    labels[13] = 9
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    return tiny.arrays(60), (dataset.map(check), 20), tiny.NUM_CLASSES


def two_classes():
    images, labels = tiny.arrays(60)
    return (images, labels % 2), (images, labels % 2)


@pytest.mark.run
@pytest.mark.parametrize(
    "argv, remedy",
    [
        (["--model=tests.tiny:dense"], "has --model=tests.tiny:cnn: leave --model out"),
        (
            [f"--dataset={__name__}:two_classes"],
            "has other classes than the run was trained on (missing: 2)",
        ),
    ],
)
def test_another_model_or_other_classes_are_refused_without_a_word_of_overwriting(
    trained, capsys, argv, remedy
):
    code, _, err = command(capsys, "evaluate", f"--train_dir={trained('classes')}", *argv)
    assert code == 2 and remedy in err and "--overwrite" not in err and err.count("\n") == 1


@pytest.mark.unit
def test_names_that_would_stand_for_others_are_refused():
    data, part = types.SimpleNamespace(class_names=("b", "c"), image_shape=None), "class_names"
    for then in {}, {part: ["b", "c"]}, {part: ["b", "c", "d"]}:
        check_data(data, Options(), then)
    refused = functools.partial(refusal, check_data, data, Options())
    for trains in False, True:
        said = refused({part: ["a", "b", "c"]}, trains=trains)
        assert "(missing: a)" in said and "--init_from" in said
    assert "(missing: d)" in refused({part: ["b", "c", "d"]}, number=True)
    assert "in another order" in refused({part: ["c", "b"]})


@pytest.mark.run
def test_a_test_set_that_is_held_out_of_a_changed_file_is_told(tmp_path, capsys):
    table, x = tmp_path / "t.npz", np.arange(20.0)[:, None]
    y = np.arange(20) % 2
    np.savez(table, x=x, y=y)
    given = dict(train_dir=tmp_path / "run", dataset=str(table))
    given["model"] = lambda: keras.Sequential([keras.layers.Dense(2)])
    towers.train(**given, max_steps=1)
    capsys.readouterr()
    towers.evaluate(**given)
    out = capsys.readouterr().out
    assert "warning" not in out and f"by chance: {table} has none" in out
    np.savez(table, x=x[1:], y=y[1:])
    for max_steps in 2, 3:  # also after the run has gone on with these, as it had seen the others
        towers.evaluate(**given)
        assert "(data.test) differs" in capsys.readouterr().out
        towers.train(**given, max_steps=max_steps)
        told = [line for line in capsys.readouterr().out.splitlines() if "differs" in line]
        assert len(told) == 2 and "held out" in told[1]
    np.savez(other := tmp_path / "other.npz", x=x[::-1], y=y[::-1])
    towers.evaluate(**given | dict(dataset=str(other)))
    assert "(data.test) differs" in capsys.readouterr().out


@pytest.mark.run
def test_a_test_set_that_cannot_be_read_is_one_line(trained, capsys):
    name = f"{__name__}:broken_tests"
    flags = f"--train_dir={trained('classes')}", f"--dataset={name}"
    code, out, err = command(capsys, "evaluate", *flags)
    assert (code, out) == (1, "")
    assert err.startswith(f"towers: --dataset={name} cannot be read: file 7 is bad")
    assert err.count("\n") == 1


def test_the_table_in_full():
    metrics = {"accuracy": 0.5, "accuracy_ema": 0.75, "loss": 1.25, "loss_ema": 1.0}
    assert Evaluation(metrics, 4).table() == [
        "               weights       EMA",
        "accuracy        0.5000    0.7500",
        "loss            1.2500    1.0000",
    ]
    alone = Evaluation({n: None if "ema" in n else v for n, v in metrics.items()}, 4)
    assert alone.table()[:2] == ["               weights", "accuracy        0.5000"]
    assert len({len(line) for line in Evaluation({"kind_accuracy": 0.5}, 4).table()}) == 1
