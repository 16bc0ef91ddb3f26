"""The built-in shapes: the same bytes each time, kept on disk, and no task for a linear model."""

import hashlib
import os

import numpy as np
import pytest
import tensorflow as tf

from tests.data.splits import all_of, assert_same
from towers import data
from towers.data import shapes

pytestmark = pytest.mark.unit


def load(folder):
    loaded = data.load("shapes", str(folder))
    return all_of(loaded.train), all_of(loaded.test)


@pytest.fixture(scope="module")
def drawn():
    """Half as many training pictures, and the test pictures."""
    return shapes.draw(10_000, (2016, 0)), shapes.draw(4_000, (2016, 1))


@pytest.mark.run
def test_classes_are_balanced_and_look_alike_on_average_and_no_picture_is_there_twice(drawn):
    for images, labels in drawn:
        assert np.bincount(labels).tolist() == [len(labels) // 10] * 10
        # The mean of a class strays by chance alone: deviation of one picture's / sqrt(number).
        means = images.mean((1, 2, 3))
        of_class = [means[labels == label].mean() for label in range(10)]
        assert np.std(of_class) < 2 * means.std() / (len(labels) / 10) ** 0.5
    assert len({image.tobytes() for images, _ in drawn for image in images}) == 14_000


@pytest.mark.run
def test_a_linear_model_cannot_tell_them_apart(drawn):
    """Softmax regression on standardised pixels, fitted far beyond convergence on the test set."""
    (x, y), (test_x, test_y) = drawn
    x, test_x = (part.reshape(len(part), -1) / np.float32(255) for part in (x, test_x))
    mean, deviation = x.mean(0), x.std(0)
    x, test_x = (x - mean) / deviation, (test_x - mean) / deviation
    weights, bias = tf.Variable(tf.zeros([3072, 10])), tf.Variable(tf.zeros([10]))
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer.build([weights, bias])

    @tf.function
    def fit(x, y):
        with tf.GradientTape() as tape:
            logits = x @ weights + bias
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(loss) + 1e-2 * tf.nn.l2_loss(weights)
        optimizer.apply(tape.gradient(loss, [weights, bias]), [weights, bias])

    best = 0
    for _ in range(10):
        for start in range(0, 10_000, 500):
            fit(x[start : start + 500], y[start : start + 500])
        guess = tf.argmax(test_x @ weights + bias, 1)
        best = max(best, np.mean(guess == test_y))
    assert best < 0.4


def test_a_seed_is_one_set_and_any_number_can_be_drawn():
    images, labels = shapes.draw(105, (1, 2))
    found = hashlib.md5(images.tobytes() + labels.tobytes()).hexdigest()
    assert found == "e8bb0587d5a8bc6c9fc43e3d78c800b6"
    assert images.shape == (105, 32, 32, 3) and labels.dtype == np.int32
    assert np.bincount(labels).tolist() == [11] * 5 + [10] * 5
    assert not np.array_equal(images, shapes.draw(105, (1, 3))[0])


def test_outlines_have_equal_area_and_stay_within_the_crop():
    axis = np.linspace(-2.5, 2.5, 1001)
    x, y = np.meshgrid(axis, axis)
    for outline in shapes._OUTLINES.values():
        inside = outline(x, y) < 0
        np.testing.assert_allclose(inside.mean() * 25, np.pi, rtol=0.01)
        np.testing.assert_allclose([x[inside].mean(), y[inside].mean()], 0, atol=0.005)
        # The middle half of all pictures lies within the evaluation's crop, 24 pixels wide.
        reach = np.hypot(x, y)[inside].max() * np.mean(shapes._RADIUS) + shapes._MAX_SHIFT / 2
        assert reach < 12


def test_they_are_the_default_described_and_kept_in_the_cache(few_shapes, tmp_path):
    loaded = data.load()
    assert (loaded.name, loaded.num_classes, loaded.image_shape) == ("shapes", 10, (32, 32, 3))
    assert len(set(loaded.class_names)) == 10
    assert os.listdir(tmp_path / "cache/towers") == [shapes.FILE]


def test_the_second_time_reads_what_the_first_has_kept(few_shapes, tmp_path, monkeypatch, capsys):
    first = load(tmp_path / "new/folder")
    [path] = (tmp_path / "new/folder").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(shapes, "draw", None)
        assert_same(load(tmp_path / "new/folder"), first)
    for damaged in path.read_bytes()[:-1], path.read_bytes()[:50], b"":  # as after a crash
        path.write_bytes(damaged)
        assert_same(load(tmp_path / "new/folder"), first)
    assert [*path.parent.iterdir()] == [path]
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_done_without(few_shapes, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    kept = load(tmp_path / "a")
    monkeypatch.setattr(os, "replace", full)
    assert_same(load(tmp_path / "b"), kept)
    error = capsys.readouterr().err
    assert error.startswith(f"warning: {tmp_path}/b/{shapes.FILE} cannot be kept: No space left")
    assert os.listdir(tmp_path / "b") == []
