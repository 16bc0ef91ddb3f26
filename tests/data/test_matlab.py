"""MATLAB 5 files: the arrays of numbers in them, and nothing else."""

import io
import struct
import tracemalloc

import numpy as np
import pytest

from tests.data.mat_files import compressed, element, header, mat, matrix
from towers.data import matlab

pytestmark = pytest.mark.unit

X = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
Y = np.array([[1.0], [2.5], [-3.0]])


def loads(content, max_bytes=1000):
    return matlab.loads(content, ("X", "y"), max_bytes)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("order", "<>")
def test_arrays_are_read_in_either_order_of_bytes(order, compress):
    found = loads(mat({"X": X, "y": Y}, order, compress))
    assert list(found) == ["X", "y"]
    for name, expected in ("X", X), ("y", Y):
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize("code", ["u1", "i2", "u4", "i4", "f4", "u8"])
def test_numbers_are_read_of_any_type_also_stored_as_smaller_ones(code):
    numbers = np.array([[0, 1, 100]])
    np.testing.assert_array_equal(loads(mat({"y": numbers.astype(code)}))["y"], numbers)
    doubles = header() + matrix("y", numbers.astype("f8"), stored="u1")  # as MATLAB saves them
    np.testing.assert_array_equal(loads(doubles)["y"], numbers)


def test_what_scipy_writes_is_read():
    savemat = pytest.importorskip("scipy.io").savemat
    for compress in True, False:
        file = io.BytesIO()
        savemat(file, {"X": X, "y": Y}, do_compression=compress)
        found = loads(file.getvalue())
        np.testing.assert_array_equal(found["X"], X)
        np.testing.assert_array_equal(found["y"], Y)


GOOD = mat({"y": Y})
# An array of 2**40 bytes, as its dimensions and the size of its element say.
HUGE = element(6, struct.pack("<II", 9, 0)) + element(5, struct.pack("<2i", 2**20, 2**20))
HUGE += element(1, b"y") + struct.pack("<II", 2, 2**32 - 8)

BAD = {
    "empty": (b"", "does not begin as a MATLAB 5 file"),
    "text": (b"x" * 300, "does not begin as a MATLAB 5 file"),
    "version 7.3": (b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM", "save -v7 writes"),
    "cut in a tag": (GOOD[:132], "ends too early"),
    "cut in an element": (GOOD[:-3], "ends too early"),
    "cut in what is compressed": (
        header() + struct.pack("<II", 15, len(GOOD) - 138) + GOOD[136:-2],  # of its sum
        "ends too early",
    ),
    "compressed wrongly": (header() + element(15, b"no zlib at all"), "incorrect header"),
    "a changed byte": (GOOD[:-6] + bytes([GOOD[-6] ^ 1]) + GOOD[-5:], "incorrect data check"),
    "compressed twice": (header() + compressed(compressed(matrix("y", Y))), "type 15"),
    "no array": (header() + element(2, b"12345678"), "type 2, which is no array"),
    "an empty array": (header() + element(14, b""), "without class, dimensions and name"),
    "a bomb": (mat({"y": np.zeros((10**6, 1), np.uint8)}), "more than 2,024 bytes"),
    "sizes of nothing": (header() + element(14, HUGE), "ends too early"),
    "dimensions of nothing": (
        header() + matrix("y", Y, shape=(2**30, 2**30)),
        "has 24 bytes for dimensions",
    ),
    "dimensions below 0": (header() + matrix("y", Y, shape=(-3, -1)), "dimensions [-3, -1]"),
    "many dimensions": (header() + matrix("y", Y.reshape((3,) + (1,) * 30)), "dimensions [3, 1"),
    "a text": (header() + matrix("y", Y, flags=4), "no array of real numbers"),
    "cells": (header() + matrix("y", Y, flags=1), "no array of real numbers"),
    "complex": (header() + matrix("y", Y, flags=6 | 0x800), "no array of real numbers"),
    "another name": (mat({"z": Y}), "an array 'z' that is not expected"),
    "a name twice": (GOOD + GOOD[128:], "an array 'y' that is not expected"),
    "a small element that is none": (header() + struct.pack("<II", 9 << 16 | 14, 0), "room for 4"),
}


@pytest.mark.parametrize("damage", BAD)
def test_what_is_damaged_or_something_else_is_refused(damage):
    content, expected = BAD[damage]
    with pytest.raises(Exception) as error:
        loads(content)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_bomb_takes_no_memory():
    content = mat({"y": np.zeros((2 * 10**7, 1), np.uint8)})
    assert len(content) < 10**6 / 5
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than"):
        loads(content)
    assert tracemalloc.get_traced_memory()[1] < 4 * 10**6
    tracemalloc.stop()


def test_any_byte_may_be_changed():
    for compress in True, False:
        content = mat({"X": X, "y": Y}, compress=compress)
        for place in range(len(content)):
            for value in 0, 1, 0x0E, 0x80, 0xFF:
                damaged = bytearray(content)
                damaged[place] = value
                try:
                    found = loads(bytes(damaged))
                except Exception as error:
                    assert type(error).__name__ in ("ValueError", "error"), error  # noqa: PT017
                else:
                    assert set(found) <= {"X", "y"}
                    assert sum(array.nbytes for array in found.values()) <= len(content)
