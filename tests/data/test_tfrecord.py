"""TFRecord files: what is found in them, what is kept between runs, what is refused."""

import os

import pytest
import tensorflow as tf

from tests.data.image_files import SHAPE, example, image, numbers_of, png, write_tfrecord
from tests.data.image_files import write_records as write
from towers import data
from towers.data import tfrecord
from towers.errors import InputError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder where the places of records are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/towers"


@pytest.fixture
def top(tmp_path):
    """Seven training records in three files, and four test records."""
    write_tfrecord(tmp_path / "data", range(7))
    write_tfrecord(tmp_path / "data", range(7, 11), split="test", num_files=1)
    return tmp_path / "data"


def refusal(top):
    """Return the message with which a folder is refused."""
    with pytest.raises(InputError) as error:
        data.load("tfrecord", str(top))
    assert "\n" not in str(error.value)
    return str(error.value)


def order(split):
    (images, _), _ = next(split.eval_batches(split.size).as_numpy_iterator())
    return numbers_of(images).tolist()


def record(number, **keys):
    return example(png(image(number)), number % 3, **keys)


@pytest.mark.parametrize(
    ("image_key", "label_key"),
    [("image/encoded", "image/class/label"), ("image", "label"), ("image_raw", "label")],
)
def test_the_features_are_found(tmp_path, image_key, label_key):
    for split, numbers in ("train", range(5)), ("test", range(5, 7)):
        write_tfrecord(tmp_path, numbers, split=split, image_key=image_key, label_key=label_key)
    loaded = data.load("tfrecord", str(tmp_path))
    assert order(loaded.train) == [0, 1, 2, 3, 4] and loaded.num_classes == 3
    assert loaded.image_shape == SHAPE


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.tfrecord", "test.tfrecord"),
        ("train-0.tfrecords", "val-0.tfrecords"),
        ("train-00000-of-00001", "validation-00000-of-00001"),
        ("train.tfrec", "test.tfrec"),
    ],
)
def test_the_files_may_be_called_so(tmp_path, train, test):
    write(tmp_path / train, [record(0), record(1)])
    write(tmp_path / test, [record(1)])
    (tmp_path / "train.txt").write_text("no records")
    loaded = data.load("tfrecord", str(tmp_path))
    assert (order(loaded.train), order(loaded.test)) == ([0, 1], [1])


def test_a_file_may_be_empty(top):
    write(top / "train-00001-of-00003.tfrecord", [])
    assert order(data.load("tfrecord", str(top)).train) == [0, 1, 2, 5, 6]


def test_records_are_scanned_once_and_again_when_a_file_has_changed(top, monkeypatch, cache):
    scanned, real = [], tfrecord._scan
    monkeypatch.setattr(
        tfrecord, "_scan", lambda path, key: scanned.append(path) or real(path, key)
    )
    for number_of_scans in 4, 4:
        assert order(data.load("tfrecord", str(top)).train) == list(range(7))
        assert len(scanned) == number_of_scans
    path = top / "train-00002-of-00003.tfrecord"
    write(path, [record(20), record(5)])
    os.utime(path, (1, 1))
    assert order(data.load("tfrecord", str(top)).train) == [0, 1, 2, 3, 4, 20, 5]
    assert len(scanned) == 7 and len(list(cache.iterdir())) == 3


def test_a_long_scan_is_announced(top, monkeypatch, capsys):
    monkeypatch.setattr(tfrecord, "_SLOW_BYTES", 100)
    data.load("tfrecord", str(top))
    assert capsys.readouterr().err.startswith("reading 3 files of 0.0 GiB once")
    data.load("tfrecord", str(top))
    assert capsys.readouterr().err == ""


# Errors


DAMAGED = "cannot be read, or is damaged or compressed; write it again, uncompressed"
ENDLESS = bytes.fromhex("aa3d6be4")


def test_missing_files(top):
    for path in top.glob("test*"):
        path.unlink()
    assert refusal(top).startswith(f"--data_dir={top} has no test*.tfrecord*; expected DIR/train")
    for path in top.glob("train*"):
        path.unlink()
    assert refusal(top).startswith(f"--data_dir={top} has no train*.tfrecord*; expected DIR/train")


def test_no_records(top):
    path = top / "test-00000-of-00001.tfrecord"
    write(path, [])
    assert refusal(top) == f"{path} and the like have no records; expected 1 or more"


def test_unknown_features_are_listed(top):
    path = top / "train-00000-of-00003.tfrecord"
    write(path, [record(0, image_key="png")])
    assert refusal(top) == (
        f"{path} has no encoded image under image/encoded, image, image_raw: its features are "
        "image/class/label, image/height, png; write it under image/encoded"
    )
    write(path, [record(0, label_key="image/height")])
    assert f"{path} has no integer label under image/class/label, label: its" in refusal(top)
    write(path, [b"\xff\xff"])
    assert refusal(top).startswith(f"{path}: record 0 is no tf.train.Example; expected")


def test_records_must_be_alike(top):
    path = top / "train-00002-of-00003.tfrecord"
    write(path, [record(0), record(1, label_key="label")])
    assert refusal(top).startswith(f"{path} has a record that is no tf.train.Example, or lacks")


def test_one_wrong_label_takes_no_memory(top):
    path = top / "train-00000-of-00001.tfrecord"
    write(path, [record(0), example(png(image(0)), 2_000_000_000)])
    assert refusal(top).startswith(
        f"{path}: record 1 (counted from 0) has label 2000000000, where labels are 0..999 at most"
    )


def test_labels_are_checked_before_a_run(top):
    path = top / "train-00002-of-00003.tfrecord"
    for label in -1, 2**31 - 1:
        write(path, [record(0), example(png(image(0)), label)])
        assert refusal(top) == (
            f"{path}: record 1 (counted from 0) has label {label}; labels are 0, 1, 2, ..."
        )
    write(path, [record(0), record(1)])
    path = top / "test-00000-of-00001.tfrecord"
    write(path, [record(0), example(png(image(0)), 3)])
    assert refusal(top) == (
        f"{path}: record 1 (counted from 0) has label 3, but the training labels are 0..2"
    )


@pytest.mark.parametrize("name", ["train-00000-of-00003", "train-00001-of-00003"])
def test_damaged_and_compressed_files(top, name):
    path = top / f"{name}.tfrecord"
    whole = path.read_bytes()
    starts = list(tfrecord._starts(str(path)))
    middle = starts[1] + 50  # in the image of record 1
    changed = whole[:middle] + b"?" + whole[middle + 1 :]
    for content, number in ((whole[:-1], len(starts) - 1), (changed, 1), (b"no records at all", 0)):
        path.write_bytes(content)
        line = refusal(top)
        assert line.startswith(f"{path}: record {number} (counted from 0)")
        assert line.endswith(DAMAGED)
    write(path, [record(0)], compression="GZIP")
    assert refusal(top).endswith(DAMAGED)
    path.unlink()
    path.mkdir()
    assert refusal(top) == f"{path} {DAMAGED}"


def test_a_record_that_says_it_is_endless_ends_no_process(top):
    """TensorFlow takes the room that a record asks for, and a sum vouches for the number."""
    path = top / "train-00000-of-00003.tfrecord"
    whole = path.read_bytes()
    # The length 2**40 and its checksum, as TensorFlow masks it.
    path.write_bytes(whole + (2**40).to_bytes(8, "little") + ENDLESS + b"and so on")
    assert refusal(top) == f"{path}: record 3 (counted from 0), or one before, {DAMAGED}"


def test_a_file_that_goes_away_is_named(top):
    loaded = data.load("tfrecord", str(top))
    (top / "test-00000-of-00001.tfrecord").unlink()
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        list(loaded.test.eval_batches(3))
    assert (
        "test-00000-of-00001.tfrecord: record 0 (counted from 0) cannot be read: No such file"
    ) in str(error.value)


def test_a_link_to_nothing_is_named(top):
    (top / "test-9.tfrecord").symlink_to(top / "nothing")
    with pytest.raises(InputError, match="test-9.tfrecord cannot be read: No such file"):
        data.load("tfrecord", str(top))
