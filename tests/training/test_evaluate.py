"""Evaluation: every example of the test set counts once, whatever the batch and the towers."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tiny
from tests.runs import command, result_of
from towers.builder import replica_context
from towers.data import ArraySplit, augment
from towers.devices import xla_trial
from towers.training.run.setup import prepare

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
@pytest.mark.parametrize("flag", [None, "--num_towers=3"])
def test_the_command_repeats_the_numbers_of_the_run(trained, capsys, flag):
    """Bit for bit; towers and batches change only roundings."""
    folder, more = trained("classes"), [flag] if flag else []
    result = result_of(folder)
    code, out, err = command(capsys, "evaluate", f"--train_dir={folder}", "--json", *more)
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert " ".join(found) == ("loss accuracy loss_ema accuracy_ema examples step num_towers")
    for name in "accuracy", "accuracy_ema", "loss", "loss_ema":
        exact = "accuracy" in name or not flag
        assert found[name] == pytest.approx(result[f"test_{name}"], rel=0 if exact else 1e-6, abs=0)
    assert found["loss"] != found["loss_ema"]
    assert (found["examples"], found["step"]) == (23, 18)
    assert flag or "step 18, 23 test examples, 2 towers" in err


@pytest.mark.run
def test_a_mirror_image_counts_as_much(trained):
    """That is, the outputs of both images are averaged."""
    folder, (_, (x, y), _) = str(trained("classes")), tiny.images()
    inputs = augment.eval_images(x, "tutorial")
    found = towers.evaluate(train_dir=folder, num_towers=2, test_time_flip=True)
    for ending, averages in ("", False), ("_ema", True):
        model = towers.load(folder, averages=averages)
        logits = (model(inputs) + model(inputs[:, :, ::-1])) / 2
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        assert found[f"loss{ending}"] == pytest.approx(float(np.mean(losses)), rel=1e-5)
        assert found[f"accuracy{ending}"] == pytest.approx(np.mean(np.argmax(logits, 1) == y))
    plain = towers.evaluate(train_dir=folder)["loss_ema"]
    assert plain != pytest.approx(found["loss_ema"], rel=1e-5)


@pytest.mark.run
def test_an_evaluation_needs_no_xla(trained, monkeypatch):
    """A run that had --jit_compile can be evaluated on a GPU that XLA does not know."""
    monkeypatch.setattr(replica_context, "compiled_by_xla", None)
    monkeypatch.setattr(xla_trial, "try_xla", None)
    assert towers.evaluate(train_dir=str(trained("classes")), jit_compile=True)["step"] == 18


@pytest.mark.run
def test_another_model_is_refused_without_a_word_of_overwriting(trained, capsys):
    model = "--model=tests.tiny:dense"
    code, _, err = command(capsys, "evaluate", f"--train_dir={trained('classes')}", model)
    assert code == 2 and "has --model=tests.tiny:cnn; leave --model out" in err
    assert "--overwrite" not in err and err.count("\n") == 1
