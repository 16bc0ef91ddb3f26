"""`--dataset=FILE.npz`: arrays by their keys."""

import numpy as np
import pytest

from tests.data.splits import all_of, assert_same, refusal
from towers import data

pytestmark = pytest.mark.unit

X, Y = np.arange(80.0).reshape(20, 4), np.arange(20) % 3


@pytest.fixture
def save(tmp_path):
    def write(**arrays):
        np.savez(tmp_path / "mine.npz", **arrays)
        return str(tmp_path / "mine.npz")

    return write


def test_keys_say_which_half_and_part_an_array_is(save):
    halves = {"train": 20, "val": 19, "test": 18}  # rows
    parts = {"x": X, "y": Y, "w": np.ones(20)}
    loaded = data.load(save(**{f"{p}_{h}": parts[p][:n] for h, n in halves.items() for p in parts}))
    assert (loaded.num_classes, loaded.notes) == (3, ())
    splits = loaded.train, loaded.validation, loaded.test
    for split, num in zip(splits, halves.values(), strict=True):
        assert_same(all_of(split), tuple(array[:num] for array in parts.values()))


def test_numbers_of_all_sizes_and_byte_orders_are_read(save):
    for kind in "f2", ">f4", ">f8", np.longdouble, np.dtype(np.longdouble).newbyteorder():
        read, _ = all_of(
            data.load(save(x_train=X.astype(kind), y_train=Y, x_test=X, y_test=Y)).train
        )
        np.testing.assert_array_equal(read, X.astype(np.float32), strict=True)
    for kind in "<u2", ">i4", "<i8":
        read, labels = all_of(data.load(save(x=X.astype(kind), y=Y.astype(kind))).train)
        assert read.dtype.kind == np.dtype(kind).kind and set(labels) == {0, 1, 2}


@pytest.mark.parametrize("keys", [("x", "y"), ("x_train", "y_train")])
def test_without_a_test_set_a_tenth_is_held_out_and_a_note_says_so(save, keys):
    path = save(**dict(zip(keys, (X, Y), strict=True)))
    loaded = data.load(path, validation_fraction=0.5)
    splits = loaded.train, loaded.validation, loaded.test
    assert [split.size for split in splits] == [9, 9, 2]
    rows = np.concatenate([all_of(split)[0][:, 0] for split in splits])
    assert sorted(rows) == X[:, 0].tolist()
    [note] = loaded.notes
    assert (
        note == f"test set    2 of 20 examples, held out at random, because {path} has no test set"
    )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            dict(images=X, labels=Y),
            "has the arrays images, labels; expected are x_train",
        ),
        (dict(x_train=X, y_train=Y, x_tset=X), "has the arrays x_train, y_train, x_tset; expected"),
        (dict(y_train=Y), "has the arrays y_train; expected are x_train"),
        ({"x": X, "x_train": X}, "has the arrays x, x_train; expected are x_train"),
        (dict(x=np.array([None, X], object)), "cannot be read: Object arrays cannot be loaded"),
        (dict(x=X.astype(np.clongdouble)), "train x is ndarray complex256 (20, 4); return numbers"),
        (dict(x=np.zeros(20, "M8[s]")), "train x is ndarray datetime64[s] (20,); return numbers"),
        (dict(x=np.zeros(20, "f4,i4")), "train x is ndarray void64 (20,); return numbers"),
        (dict(x=X + np.longdouble("1e4000")), "train x: row 0 (counted from 0) has a NaN, an inf"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_said_in_one_line(save, arrays, message):
    path = save(**arrays)
    line = refusal(path)
    assert path in line and message in line
