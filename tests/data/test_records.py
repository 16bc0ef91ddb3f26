"""CIFAR-10's binary format: what is whole is read back, what is damaged is named."""

import os

import numpy as np
import pytest

from towers.data import records
from towers.errors import InputError

WHOLE = b"".join(bytes([label]) + bytes(3072) for label in (0, 9, 3))


def make(num):
    rng = np.random.default_rng(num)
    images = rng.integers(0, 256, (num, 32, 32, 3), np.uint8)
    return images, rng.integers(0, 10, num, np.int32)


def test_reads_back_what_was_written(tmp_path):
    images, labels = make(7)
    records.write(str(tmp_path / "a.bin"), images, labels)
    read_images, read_labels = records.read(str(tmp_path / "a.bin"), 7)
    np.testing.assert_array_equal(read_images, images)
    np.testing.assert_array_equal(read_labels, labels)
    assert read_images.dtype == np.uint8 and read_labels.dtype == np.int32
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_record_is_the_label_then_the_red_green_and_blue_planes(tmp_path):
    path = tmp_path / "one.bin"
    red, green, blue = bytes(1024), bytes([7]) * 1024, bytes([0, 1, 2, 3] * 256)
    path.write_bytes(bytes([4]) + red + green + blue)
    images, labels = records.read(str(path), 1)
    assert labels.tolist() == [4]
    assert images[0, 0, :3].tolist() == [[0, 7, 0], [0, 7, 1], [0, 7, 2]]
    assert images[0, 31, 31].tolist() == [0, 7, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{} has 0 bytes; expected 3 records of 3073 bytes"),
        (WHOLE[:-1], "{} has 9,218 bytes; expected 3 records of 3073 bytes"),
        (WHOLE[:-3073], "{} has 6,146 bytes; expected 3 records of 3073 bytes"),
        (WHOLE + b"\0", "{} has 9,220 bytes; expected 3 records of 3073 bytes"),
        (
            WHOLE[:6146] + b"\x0a" + WHOLE[6147:],
            "{}: record 2 (counted from 0) has label 10; allowed are 0..9",
        ),
    ],
)
def test_damage_is_named(tmp_path, content, message):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        records.read(str(path), 3)
    assert str(error.value) == message.format(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path, reason in (tmp_path / "no.bin", "No such file"), (tmp_path, "Is a directory"):
        with pytest.raises(InputError, match=f"^cannot read {path}: {reason}.*; expected 3 record"):
            records.read(str(path), 3)


@pytest.mark.parametrize(
    "interruption", [OSError(28, "No space left on device"), KeyboardInterrupt()]
)
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, interruption):
    path = str(tmp_path / "a.bin")
    old, new = make(3), make(4)
    records.write(path, *old)

    def fail(*_):
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(type(interruption)):
            records.write(path, *new)
    np.testing.assert_array_equal(records.read(path, 3)[0], old[0])
    assert os.listdir(tmp_path) == ["a.bin"]
