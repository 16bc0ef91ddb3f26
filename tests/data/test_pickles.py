"""CIFAR-10's pickles: read whatever wrote them, and never run."""

import os
import pickle

import numpy as np
import pytest

from tests.data.tiny_cifar10 import NAMES, NUM, assert_is_cifar10, batch, fails, rows, write_pickles
from towers import data
from towers.data import pickles
from towers.errors import InputError

pytestmark = pytest.mark.usefixtures("tiny")


def python2_pickle(images, labels):
    """Write protocol 2 as Python 2 did: all strings, the array's bytes too, are byte strings."""

    def string(value):
        return b"T" + len(value).to_bytes(4, "little") + value

    def integer(value):
        return b"J" + value.to_bytes(4, "little", signed=True)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        + (integer(0) + b"\x85" + string(b"b") + b"\x87R")
        + (b"(" + integer(1) + integer(len(labels)) + integer(3072) + b"\x86")
        + (b"cnumpy\ndtype\n" + string(b"u1") + integer(0) + integer(1) + b"\x87R")
        + (b"(" + integer(3) + string(b"|") + b"NNN" + integer(-1) * 2 + integer(0) + b"tb")
        + (b"\x89" + string(rows(images).tobytes()) + b"tb")
    )
    numbers = b"](" + b"".join(map(integer, labels.tolist())) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("key", [str, str.encode])
def test_reads_pickles_of_every_protocol(tmp_path, protocol, key):
    write_pickles(tmp_path / "cifar-10-batches-py", protocol=protocol, key=key)
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


def test_reads_pickles_of_python_2_and_numpy_1(tmp_path):
    for index, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(python2_pickle(*batch(index)))
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


IMAGES, LABELS = batch(5)
GOOD = {b"data": rows(IMAGES), b"labels": LABELS.tolist()}
WRONG = "; expected a dict with data, uint8 [20, 3072], and as many labels"
BAD_PICKLES = {
    "empty": (b"", "Ran out of input"),
    "text": (b"<html>not found</html>", WRONG),
    "truncated": (pickle.dumps(GOOD, 2)[:-100], WRONG),
    "half": (pickle.dumps(GOOD, 5)[:30000], WRONG),
    "runs a command": (pickle.dumps(Evil()), "posix.system is not allowed in it"),
    "runs a command within": (
        pickle.dumps({**GOOD, b"extra": Evil()}, 2),
        "posix.system is not allowed in it",
    ),
    "eval": (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval is not allowed in it"),
    "another of numpy's": (b"cnumpy\nfromfile\n(S'x'\ntR.", "numpy.fromfile is not allowed in it"),
    "a known name elsewhere": (b"cos\nencode\n(S'1'\ntR.", "os.encode is not allowed in it"),
    "dotted name": (
        b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.tofile_\x93.",
        "numpy.ndarray.tofile_ is not allowed in it",
    ),
    "persistent id": (b"Pevil\n.", "a persistent id is not allowed in it"),
    "object array": (
        {**GOOD, b"data": np.full((NUM, 3072), 3, object)},
        "the dtype 'O8' is not allowed",
    ),
    "object labels": ({**GOOD, b"labels": np.array(LABELS, object)}, "'O8' is not allowed"),
    "a list": ([GOOD], WRONG),
    "no data": ({b"labels": LABELS.tolist()}, WRONG),
    "no labels": ({b"data": rows(IMAGES)}, WRONG),
    "data a list": ({**GOOD, b"data": rows(IMAGES).tolist()}, WRONG),
    "data too short": ({**GOOD, b"data": rows(IMAGES)[1:]}, WRONG),
    "data of another shape": ({**GOOD, b"data": IMAGES}, WRONG),
    "data signed": ({**GOOD, b"data": rows(IMAGES).view(np.int8)}, WRONG),
    "labels too few": ({**GOOD, b"labels": [1] * 19}, WRONG),
    "labels float": ({**GOOD, b"labels": [1.0] * 20}, WRONG),
    "labels bool": ({**GOOD, b"labels": [True] * 20}, WRONG),
    "labels text": ({**GOOD, b"labels": "01234567890123456789"}, WRONG),
    "labels ragged": ({**GOOD, b"labels": [[1], [1, 2]] * 10}, WRONG),
    "label beyond 64 bits": ({**GOOD, b"labels": [0] * 19 + [2**80]}, WRONG),
    "label 10": (
        {**GOOD, b"labels": [0, 1, 10] + [0] * 17},
        ": record 2 (counted from 0) has label 10; allowed are 0..9",
    ),
    "label -1": (
        {**GOOD, b"labels": [-1] + [0] * 19},
        ": record 0 (counted from 0) has label -1; allowed are 0..9",
    ),
}


@pytest.mark.parametrize("damage", BAD_PICKLES)
def test_a_bad_pickle_is_named(tmp_path, monkeypatch, damage):
    content, expected = BAD_PICKLES[damage]
    monkeypatch.chdir(tmp_path)
    write_pickles(tmp_path / "data")
    path = tmp_path / "data/data_batch_4"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    message = fails(tmp_path)
    assert message.startswith(str(path))
    assert expected in message
    assert message.endswith("; put an intact copy in its place")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_with_any_byte_changed_is_an_error_or_a_valid_set(tmp_path, protocol):
    content = bytearray(pickle.dumps({**GOOD, b"data": np.zeros((NUM, 3072), np.uint8)}, protocol))
    path = tmp_path / "data_batch_1"
    frame = [i for i, byte in enumerate(content) if byte]  # all but the pixels
    for index in frame:
        for value in (0, 0x2E, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[index] = value
            path.write_bytes(damaged)
            try:
                images, labels = pickles.read(str(path), NUM)
            except InputError as error:
                assert str(path) in str(error) and "\n" not in str(error)  # noqa: PT017
            else:
                assert images.shape == (NUM, 32, 32, 3) and images.dtype == np.uint8
                assert labels.shape == (NUM,) and 0 <= labels.min() <= labels.max() <= 9
