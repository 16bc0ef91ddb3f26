"""The built-in shapes: the same bytes each time, kept on disk, and no task for a linear model."""

import hashlib
import os

import numpy as np
import pytest
import tensorflow as tf

from towers import data
from towers.data import cifar10, records, shapes
from towers.errors import InputError


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(shapes, "NUM_TRAIN", 50)
    monkeypatch.setattr(shapes, "NUM_TEST", 20)


def everything(split):
    images, labels, weights = next(iter(split.eval_batches(split.size)))
    assert weights.numpy().all()
    return images.numpy(), labels.numpy()


def load_few(folder):
    loaded = data.load("shapes", str(folder))
    return *everything(loaded.train), *everything(loaded.test)


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return data.load("shapes", str(tmp_path_factory.mktemp("shapes")))


def test_describes_itself(loaded):
    assert (loaded.name, loaded.num_classes, loaded.image_shape) == ("shapes", 10, (32, 32, 3))
    assert (loaded.train.size, loaded.test.size) == (20_000, 4_000)
    assert len(set(loaded.class_names)) == 10


def test_classes_are_balanced_and_look_alike_on_average(loaded):
    for split in (loaded.train, loaded.test):
        images, labels = everything(split)
        assert np.bincount(labels).tolist() == [split.size // 10] * 10
        # The mean of a class strays by chance alone: deviation of one picture's / sqrt(number).
        means = images.mean((1, 2, 3))
        of_class = [means[labels == label].mean() for label in range(10)]
        assert np.std(of_class) < 2 * means.std() / (split.size / 10) ** 0.5


def test_no_picture_twice(loaded):
    pictures = {
        image.tobytes() for split in (loaded.train, loaded.test) for image in everything(split)[0]
    }
    assert len(pictures) == 24_000


def test_a_linear_model_cannot_tell_them_apart(loaded):
    """Softmax regression on standardised pixels, fitted far beyond convergence on the test set."""
    (x, y), (test_x, test_y) = everything(loaded.train), everything(loaded.test)
    x, y = x[:10_000].reshape(10_000, -1) / np.float32(255), y[:10_000]
    mean, deviation = x.mean(0), x.std(0)
    x, test_x = (
        (x - mean) / deviation,
        (test_x.reshape(4000, -1) / np.float32(255) - mean) / deviation,
    )
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
    assert images.shape == (105, 32, 32, 3) and images.dtype == np.uint8
    assert labels.dtype == np.int32
    assert np.bincount(labels).tolist() == [11] * 5 + [10] * 5
    assert_same((images, labels), shapes.draw(105, (1, 2)))
    assert not np.array_equal(images, shapes.draw(105, (1, 3))[0])


@pytest.mark.parametrize("name", shapes.CLASS_NAMES)
def test_outlines_have_equal_area_and_stay_within_the_crop(name):
    axis = np.linspace(-2.5, 2.5, 1001)
    x, y = np.meshgrid(axis, axis)
    inside = shapes._OUTLINES[name](x, y) < 0
    np.testing.assert_allclose(inside.mean() * 25, np.pi, rtol=0.01)
    np.testing.assert_allclose([x[inside].mean(), y[inside].mean()], 0, atol=0.005)
    # The middle half of all pictures lies within the evaluation's crop, 24 pixels wide.
    reach = np.hypot(x, y)[inside].max() * np.mean(shapes._RADIUS) + shapes._MAX_SHIFT / 2
    assert reach < 12


def test_the_second_time_reads_what_the_first_has_kept(tmp_path, few, monkeypatch, capsys):
    first = load_few(tmp_path / "new/folder")
    folder = tmp_path / "new/folder/shapes-v1"
    assert sorted(os.listdir(folder)) == ["test.bin", "train.bin"]
    assert_same(records.read(str(folder / "train.bin"), 50), first[:2])
    with monkeypatch.context() as patch:
        patch.setattr(shapes, "draw", None)
        assert_same(load_few(tmp_path / "new/folder"), first)
    (folder / "test.bin").unlink()
    assert_same(load_few(tmp_path / "new/folder"), first)
    assert sorted(os.listdir(folder)) == ["test.bin", "train.bin"]
    assert capsys.readouterr() == ("", "")


def test_shapes_are_the_default_and_are_not_taken_for_cifar10(tmp_path, few, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.load().name == "shapes"
    assert (tmp_path / "towers/shapes-v1/train.bin").exists()
    assert cifar10.find(str(tmp_path)) == []


def test_damage_is_named_with_the_way_out(tmp_path, few):
    load_few(tmp_path)
    path = tmp_path / "shapes-v1/train.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError) as error:
        load_few(tmp_path)
    assert str(error.value).startswith(f"{path} has ")
    assert str(error.value).endswith(f"; delete {tmp_path}/shapes-v1: it will be drawn again")


def test_a_full_disk_is_done_without(tmp_path, few, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    kept = load_few(tmp_path)
    assert capsys.readouterr() == (
        "",
        f"warning: cannot keep {tmp_path}/shapes-v1: No space left on device; the shapes are drawn "
        "at each start (--data_dir names another folder)\n",
    )
    assert os.listdir(tmp_path / "shapes-v1") == []
    monkeypatch.undo()
    assert len(kept) == 4


def test_two_processes_may_draw_at_the_same_time(tmp_path, few, monkeypatch):
    draw = shapes.draw

    def slower_than_another(num, seed):
        result = draw(num, seed)
        os.makedirs(tmp_path / "shapes-v1", exist_ok=True)
        for name, num, index in (("train", 50, 0), ("test", 20, 1)):
            path = str(tmp_path / f"shapes-v1/{name}.bin")
            records.write(path, *draw(num, (shapes._SEED, index)))
        return result

    alone = load_few(tmp_path / "alone")
    monkeypatch.setattr(shapes, "draw", slower_than_another)
    assert_same(load_few(tmp_path), alone)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path / "shapes-v1")) == ["test.bin", "train.bin"]
