"""CIFAR-10's binary format: what is whole is read back, what is damaged is named."""

import os

import numpy as np
import pytest

from towers.data import records
from towers.errors import InputError


def make(num):
    rng = np.random.default_rng(num)
    images = rng.integers(0, 256, (num, 32, 32, 3), np.uint8)
    return images, rng.integers(0, 10, num, np.int32)


def test_reads_back_what_was_written(tmp_path):
    path = str(tmp_path / "a.bin")
    images, labels = make(7)
    records.write(path, images, labels)
    read_images, read_labels = records.read(path, num_records=7)
    np.testing.assert_array_equal(read_images, images)
    np.testing.assert_array_equal(read_labels, labels)
    assert read_images.dtype == np.uint8 and read_labels.dtype == np.int32
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_record_is_the_label_then_the_red_green_and_blue_planes(tmp_path):
    path = tmp_path / "one.bin"
    red, green, blue = bytes(1024), bytes([7]) * 1024, bytes([0, 1, 2, 3] * 256)
    path.write_bytes(bytes([4]) + red + green + blue)
    images, labels = records.read(str(path))
    assert labels.tolist() == [4]
    assert images[0, 0, :3].tolist() == [[0, 7, 0], [0, 7, 1], [0, 7, 2]]
    assert images[0, 31, 31].tolist() == [0, 7, 3]


WHOLE = b"".join(bytes([label]) + bytes(3072) for label in (0, 9, 3))
DAMAGE = {
    "empty": (b"", "{} is empty; expected 3 records of 3073 bytes"),
    "last byte lost": (
        WHOLE[:-1],
        "{}: record 2 (counted from 0) is cut off after 3072 of 3073 bytes; expected 3 records of "
        "3073 bytes",
    ),
    "one byte more": (
        WHOLE + b"\0",
        "{}: record 3 (counted from 0) is cut off after 1 of 3073 bytes; expected 3 records of "
        "3073 bytes",
    ),
    "byte lost within": (
        WHOLE[:100] + WHOLE[101:],
        "{}: record 2 (counted from 0) is cut off after 3072 of 3073 bytes; expected 3 records of "
        "3073 bytes",
    ),
    "record lost": (WHOLE[:-3073], "{} holds 2 records; expected 3 records of 3073 bytes"),
    "record more": (WHOLE + WHOLE[:3073], "{} holds 4 records; expected 3 records of 3073 bytes"),
    "label 10": (
        WHOLE[:6146] + b"\x0a" + WHOLE[6147:],
        "{}: record 2 (counted from 0) has label 10; allowed are 0..9",
    ),
    "label 255": (
        WHOLE[:3073] + b"\xff" + WHOLE[3074:],
        "{}: record 1 (counted from 0) has label 255; allowed are 0..9",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    content, message = DAMAGE[damage]
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        records.read(str(path), num_records=3)
    assert str(error.value) == message.format(path)


def test_without_an_expected_number_any_but_none_will_do(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(WHOLE)
    assert len(records.read(str(path))[1]) == 3
    path.write_bytes(b"")
    with pytest.raises(InputError, match="a.bin is empty; expected records of 3073 bytes$"):
        records.read(str(path))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    expected = "; expected a file of records of 3073 bytes (CIFAR-10's binary format)"
    with pytest.raises(InputError) as error:
        records.read(str(tmp_path / "no.bin"))
    assert str(error.value) == f"cannot read {tmp_path}/no.bin: No such file or directory{expected}"
    with pytest.raises(InputError) as error:
        records.read(str(tmp_path))
    assert str(error.value) == f"cannot read {tmp_path}: Is a directory{expected}"


def test_a_file_without_permission_is_named(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(WHOLE)
    path.chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may read every file
    try:
        with pytest.raises(InputError, match="^cannot read .*a.bin: Permission denied; expected"):
            records.read(str(path))
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 32, 32, 3), np.float32), [0, 1], "images are float32"),
        (np.zeros((2, 28, 28, 1), np.uint8), [0, 1], r"images are uint8 \[2, 28, 28, 1\]"),
        (np.zeros((2, 32, 32, 3), np.uint8), [0], r"2 images but labels of shape \[1\]"),
        (np.zeros((2, 32, 32, 3), np.uint8), [0, 10], r"record 1 .* has label 10; allowed"),
        (np.zeros((2, 32, 32, 3), np.uint8), [-1, 0], r"record 0 .* has label -1; allowed"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(tmp_path, images, labels, message):
    with pytest.raises(ValueError, match=message):
        records.write(str(tmp_path / "a.bin"), images, np.array(labels))
    assert os.listdir(tmp_path) == []


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
    np.testing.assert_array_equal(records.read(path)[0], old[0])
    assert os.listdir(tmp_path) == ["a.bin"]
