"""Images that are seen in a mirror, and losses of a whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tiny
from towers.data import augment
from towers.errors import InputError
from towers.training.run.setup import prepare

pytestmark = pytest.mark.graph


def of_all(labels, logits):
    labels = tf.cast(labels, tf.int32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def masks():
    """A model whose outputs are images."""
    return keras.Sequential([keras.Input(tiny.IMAGE_SHAPE), keras.layers.Conv2D(1, 3)])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"variables": "replicated", "loss": "tests.training.test_mirrored:of_all"},
            "--variables=replicated: tests.tiny:dense has a loss ",
        ),
        (
            {"test_time_flip": True, "loss": "mse", "model": "tests.training.test_mirrored:masks"},
            "--test_time_flip needs one row of numbers for each image",
        ),
    ],
)
def test_a_loss_of_the_whole_batch_has_no_examples(given, line):
    own = dict(dataset="tests.tiny:images", batch_size=7, model="tests.tiny:dense", num_towers=2)
    with pytest.raises(InputError) as error:
        prepare(towers.Options(**own | given))
    assert str(error.value).startswith(line)


def assert_mirrored(folder, found, kind):
    """Compare what an evaluation found with the mean of the outputs of both images."""
    _, (x, y), _ = tiny.images()
    inputs = augment.eval_images(x, kind)
    for ending, averages in ("", False), ("_ema", True):
        model = towers.load(folder, averages=averages)
        logits = (model(inputs) + model(inputs[:, :, ::-1])) / 2
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        assert found[f"loss{ending}"] == pytest.approx(float(np.mean(losses)), rel=1e-5)
        assert found[f"accuracy{ending}"] == pytest.approx(np.mean(np.argmax(logits, 1) == y))


@pytest.mark.run
def test_a_mirror_image_counts_as_much_in_evaluation(trained):
    folder = str(trained("classes"))
    found = towers.evaluate(train_dir=folder, num_towers=2, test_time_flip=True)
    assert_mirrored(folder, found, "tutorial")
    plain = towers.evaluate(train_dir=folder)["loss_ema"]
    assert plain != pytest.approx(found["loss_ema"], rel=1e-5)


@pytest.mark.run
def test_a_mirror_image_counts_as_much_for_a_compiled_model(tmp_path):
    given = dict(metrics="accuracy", test_time_flip=True, num_towers=1, ema_decay=0.5)
    result = towers.train(tiny.options(tmp_path, max_steps=2, **given))
    found = towers.evaluate(train_dir=str(tmp_path))
    assert_mirrored(str(tmp_path), found, "none")
    for name in found.keys() & {"loss", "loss_ema"}:
        assert result[f"test_{name}"] == found[name]
