"""Image files and TFRecord files: batches as pure functions of (seed, step, examples)."""

import itertools
import json
import pickle
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.data.image_files import (
    CLASSES,
    SHAPE,
    WRITE,
    assert_same,
    flat,
    image,
    numbers_of,
    png,
    take,
)
from towers import cli, data
from towers.data import encoded
from towers.errors import InputError

KINDS = list(WRITE)
TRAIN, TEST = 14, 10


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keep the places of records in a folder of the test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    """14 training and 10 test images."""
    top = tmp_path_factory.mktemp(kind)
    WRITE[kind](top, range(TRAIN))
    WRITE[kind](top, range(500, 500 + TEST), split="test")
    return top


@pytest.fixture(scope="module")
def loaded(kind, folder):
    return data.load(kind, str(folder))


# What there is


def test_the_data_set_is_described(kind, loaded):
    assert (loaded.name, loaded.train.size, loaded.test.size) == (kind, TRAIN, TEST)
    assert loaded.image_shape == SHAPE and loaded.num_classes == 3
    assert loaded.class_names == (CLASSES if kind == "folder" else ("0", "1", "2"))


@pytest.mark.parametrize("name", ["val", "validation"])
def test_a_third_split_is_for_validation(kind, tmp_path, name):
    for number, split in enumerate(("train", name)):
        WRITE[kind](tmp_path, range(6 * number, 6 * number + 6), split=split)
    loaded = data.load(kind, str(tmp_path))
    assert (loaded.test.size, loaded.validation) == (6, None)
    WRITE[kind](tmp_path, range(12, 15), split="test")
    loaded = data.load(kind, str(tmp_path))
    for split, expected in {loaded.validation: range(6, 12), loaded.test: range(12, 15)}.items():
        [(images, *_)] = flat(split.eval_batches(split.size))
        assert sorted(numbers_of(images)) == list(expected)


def test_images_come_as_they_were_written_with_their_labels(loaded):
    for images, labels, _ in itertools.chain(
        take(loaded.train, 7, 2, seed=1), flat(loaded.test.eval_batches(5))
    ):
        for pixels, label, number in zip(images, labels, numbers_of(images), strict=True):
            np.testing.assert_array_equal(pixels, image(number))
            assert label == number % 3


def test_slow_reads_change_no_order(loaded, monkeypatch):
    expected, real = take(loaded.train, 4, 4, seed=3), loaded.train.source.read
    first, another_has_read = [], threading.Event()

    def read(row):
        if not first:
            first.append(threading.get_ident())
        if threading.get_ident() != first[0]:
            another_has_read.set()
        assert another_has_read.wait(30)  # the first batch is read after the second
        return real(row)

    monkeypatch.setattr(encoded, "_CORES", 2)
    monkeypatch.setattr(loaded.train.source, "read", read)
    assert_same(take(loaded.train, 4, 4, seed=3), expected)


# Evaluation


@pytest.mark.parametrize("batch_size", [3, 11])
def test_one_pass_in_order_counts_each_image_once(kind, loaded, batch_size):
    batches = flat(loaded.test.eval_batches(batch_size))
    images, labels, weights = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    expected = list(range(500, 500 + TEST))
    if kind == "folder":
        expected.sort(key=lambda number: (number % 3, number))
    assert len(batches) == -(-TEST // batch_size)
    np.testing.assert_array_equal(numbers_of(images)[:TEST], expected)
    np.testing.assert_array_equal(labels[:TEST], np.array(expected) % 3)
    np.testing.assert_array_equal(weights, np.arange(len(weights)) < TEST)
    assert not images[TEST:].any() and not labels[TEST:].any()


# Sizes


def sized(size):
    return lambda pixels: tf.io.encode_png(tf.image.resize(pixels, size, "nearest")).numpy()


def test_images_of_different_sizes_need_one(kind, tmp_path):
    WRITE[kind](tmp_path, range(3), encode=sized((8, 4)))
    WRITE[kind](tmp_path, range(3, 6), split="test", encode=sized((9, 9)))
    with pytest.raises(InputError, match="is 9x9 .* but others are 8x4: .* --image_size=8x4$"):
        data.load(kind, str(tmp_path))
    loaded = data.load(kind, str(tmp_path), (4, 2))
    assert loaded.image_shape == (4, 2, 3)
    batch, _, _ = take(loaded.train, 3, 1, seed=1)[0]
    assert batch.shape == (3, 4, 2, 3) and batch.dtype == np.uint8
    assert len(list(loaded.test.eval_batches(2))) == 2


def test_an_image_of_its_own_size_is_left_as_it_is_by_resizing(kind, loaded, folder):
    same = data.load(kind, str(folder), SHAPE[:2])
    assert_same(take(same.train, 5, 2, seed=1), take(loaded.train, 5, 2, seed=1))


def test_a_smaller_image_is_the_mean_of_its_pixels(kind, tmp_path):
    stripes = np.zeros((8, 8, 1), np.uint8)
    stripes[:, [1, 2, 5, 6]] = 200  # those nearest to the centres of the pixels to come
    for split in "train", "test":
        WRITE[kind](tmp_path, range(3), split=split, encode=lambda _: png(stripes))
    images = flat(data.load(kind, str(tmp_path), (2, 2)).test.eval_batches(3))[0][0]
    assert images.shape == (3, 2, 2, 3) and np.abs(images.astype(int) - 100).max() <= 12


# Damage


def damaged(content):
    return content[:40] + bytes(40) + content[80:]


def damage(top, kind, number):
    """Damage an image that has been written. Return how messages name it."""
    good = png(image(number))
    for path in (path for path in top.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if good in content:
            path.write_bytes(content.replace(good, damaged(good)))
            place = [n for n in range(1000) if png(image(n)) in content].index
            return str(path) if kind == "folder" else f"{path}: record {place(number)} "
    raise AssertionError


@pytest.mark.parametrize(
    ("split", "number", "batch_size"), [("train", 3, 5), ("test", 500, 1), ("test", 509, 5)]
)
def test_a_damaged_image_is_named(kind, tmp_path, split, number, batch_size):
    WRITE[kind](tmp_path, range(TRAIN))
    WRITE[kind](tmp_path, range(500, 500 + TEST), split="test")
    loaded = data.load(kind, str(tmp_path))
    name = damage(tmp_path, kind, number)
    batches = (
        loaded.train.train_batches(batch_size, seed=1).take(TRAIN)
        if split == "train"
        else loaded.test.eval_batches(batch_size)
    )
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        list(batches)
    assert name in str(error.value) and "is damaged, or no PNG" in str(error.value)


def test_all_images_go_away(kind, tmp_path):
    """As on a disk that is gone: no endless search for one that can be read."""
    WRITE[kind](tmp_path, range(TRAIN))
    WRITE[kind](tmp_path, range(500, 500 + TEST), split="test")
    loaded = data.load(kind, str(tmp_path))
    tmp_path.rename(tmp_path.with_suffix(".gone"))
    for batches in (
        loaded.train.train_batches(5, seed=1),
        loaded.test.eval_batches(5),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be read: No such file"):
            next(batches.as_numpy_iterator())


@pytest.mark.parametrize("number", [0, 509])
def test_few_images_are_all_tried_before_a_run(kind, tmp_path, number):
    def encode(pixels):
        return damaged(png(pixels)) if numbers_of(pixels[None])[0] == number else png(pixels)

    WRITE[kind](tmp_path, range(TRAIN), encode=encode)
    WRITE[kind](tmp_path, range(500, 500 + TEST), split="test", encode=encode)
    with pytest.raises(InputError) as error:
        data.load(kind, str(tmp_path))
    name = f"{number:05d}.png" if kind == "folder" else "record "
    assert name in str(error.value) and str(error.value).endswith(
        "is damaged, or no PNG, JPEG, BMP or GIF; mend or remove it"
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [0, 4])  # the first is one of those that are tried
def test_an_image_of_too_many_pixels_is_named_and_not_decoded(kind, tmp_path, number):
    large = np.zeros((9, 9, 3), np.uint8)

    def encode(pixels):
        return png(large if numbers_of(pixels[None])[0] == number else pixels)

    WRITE[kind](tmp_path, range(60), encode=encode)
    WRITE[kind](tmp_path, range(500, 500 + TEST), split="test")
    name = f"{number:05d}.png" if kind == "folder" else f": record {number} (counted from 0)"
    line = "has 81 pixels, 9x9 (height x width), and --max_image_pixels=80 are allowed: make"
    with pytest.raises((InputError, tf.errors.InvalidArgumentError)) as error:
        list(data.load(kind, str(tmp_path), (6, 5), max_image_pixels=80).train.eval_batches(7))
    assert f"{name} {line}" in str(error.value)
    list(data.load(kind, str(tmp_path), (6, 5), max_image_pixels=81).train.eval_batches(7))
    with pytest.raises(InputError, match="--image_size=10x9 are 90 pixels, and --max_image_pixels"):
        data.load(kind, str(tmp_path), (10, 9), max_image_pixels=81)


# Runs


@pytest.mark.parametrize("kind", ["tfrecord"], indirect=True)
def test_the_verbs_take_it(kind, folder, tmp_path, capsys):
    where = f"--train_dir={tmp_path}"
    given = f"--dataset={kind} --data_dir={folder} --model=tests.tiny:dense --augment=none"
    given += " --batch_size=5 --max_steps=2 --num_towers=2 --json"
    assert cli.main(["train", where, *given.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert cli.main(["evaluate", where, "--batch_size=3", "--num_towers=1", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["accuracy"] == result["test_accuracy"] and again["examples"] == TEST


@pytest.mark.parametrize("kind", ["tfrecord"], indirect=True)
def test_a_run_that_meets_a_damaged_image_says_so_in_one_line(kind, tmp_path, capsys):
    def encode(pixels):  # number 4 is not one of those that are tried
        return damaged(png(pixels)) if numbers_of(pixels[None])[0] == 4 else png(pixels)

    WRITE[kind](tmp_path, range(60), encode=encode)
    WRITE[kind](tmp_path, range(500, 500 + TEST), split="test")
    name = "-00000-of-00003.tfrecord: record 4 "
    given = f"--dataset={kind} --data_dir={tmp_path} --train_dir={tmp_path}/run --max_steps=30"
    given += " --model=tests.tiny:dense --augment=none --batch_size=7"
    assert cli.main(["train", *given.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"towers: --dataset={kind} cannot be read at step ") and name in error
    assert error.endswith("mend or remove it\n") and error.count("\n") == 1


# Memory


def test_of_an_image_only_its_place_is_kept(loaded):
    def kept_bytes(split):
        return sum(len(pickle.dumps(value)) for value in vars(split.source).values())

    of_each = (kept_bytes(loaded.train) - kept_bytes(loaded.test)) / (TRAIN - TEST)
    assert 0 < of_each < 40 < len(png(image(0)))
