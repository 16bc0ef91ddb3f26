"""`--dataset=FILE.npz`: arrays by their keys."""

import io
import zipfile

import numpy as np
import pytest

from tests.data.test_custom import batch_of
from towers import data
from towers.devices import memory
from towers.errors import InputError

X, Y = np.arange(80.0).reshape(20, 4), np.arange(20) % 3


@pytest.fixture
def save(tmp_path):
    def write(**arrays):
        np.savez(tmp_path / "mine.npz", **arrays)
        return str(tmp_path / "mine.npz")

    return write


def halves_of(number):
    """20, 19, 18 rows."""
    rows = slice(number, None)
    return X[rows], Y[rows], np.ones(20)[rows]


@pytest.mark.parametrize("val", ["val", "validation"])
@pytest.mark.parametrize("w", ["w", "sample_weight"])
def test_keys_say_which_half_and_part_an_array_is(save, val, w):
    arrays = {}
    for number, half in enumerate(("train", val, "test")):
        parts = zip(("x", "y", w), halves_of(number), strict=True)
        arrays |= {f"{part}_{half}": array for part, array in parts}
    loaded = data.load(save(**arrays))
    assert (loaded.num_classes, loaded.notes) == (3, ())
    for number, split in enumerate((loaded.train, loaded.validation, loaded.test)):
        for found, expected in zip(batch_of(split), halves_of(number), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("separator", "./")
def test_names_make_several_inputs_and_outputs(save, separator):
    arrays = {
        f"x_train{separator}tokens": X.astype(int), f"x_train{separator}price": X[:, 0],
        f"y_train{separator}a": Y, f"y_train{separator}b": X,
    }  # fmt: skip
    tests = {key.replace("train", "test"): array for key, array in arrays.items()}
    loaded = data.load(save(**arrays, **tests))
    x, y = batch_of(loaded.test)
    np.testing.assert_array_equal(x["tokens"], X)
    np.testing.assert_array_equal(y["a"], Y)
    assert loaded.num_classes == 0 and sorted(x) == ["price", "tokens"] and sorted(y) == ["a", "b"]


@pytest.mark.parametrize("keys", [("x", "y"), ("x_train", "y_train")])
def test_without_a_test_set_a_tenth_is_held_out_and_a_note_says_so(save, keys):
    path = save(**dict(zip(keys, (X, Y), strict=True)))
    loaded = data.load(path, validation_fraction=0.5)
    splits = loaded.train, loaded.validation, loaded.test
    assert [split.size for split in splits] == [9, 9, 2]
    rows = np.concatenate([batch_of(split)[0][:, 0] for split in splits])
    assert sorted(rows) == X[:, 0].tolist()
    [note] = loaded.notes
    assert note == f"test set    2 of 20 examples, held out by chance: {path} has none of its own"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (dict(images=X, labels=Y), "has the keys images, labels; expected are x_train, y_train, "),
        (dict(x_train=X, y_train=Y, x_tset=X), "has the keys x_train, y_train, x_tset; expected"),
        (dict(x_test=X, y_test=Y), "has the keys x_test, y_test; expected are x_train"),
        (dict(y_train=Y), "has the keys y_train; expected are x_train"),
        (dict(x_train=X, w_train=Y), "has the keys x_train, w_train; expected are x_train"),
        (dict(x=X, x_train=X), "has the keys x, x_train; expected are x_train"),
        ({"x": X, "x.a": X}, "has the keys x, x.a; expected are x_train"),
        (dict(x=np.array([None, X], object)), "has arrays of objects; write it by np.savez"),
        (dict(x=X, y=Y[1:]), "train x has 20 rows but y has 19; return as many of each"),
        (dict(x=X, y=Y, x_test=X), "test has no y; make them alike"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_said_in_one_line(save, arrays, message):
    path = save(**arrays)
    with pytest.raises(InputError) as error:
        data.load(path)
    assert path in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\3\4 and no more"])
def test_a_damaged_file(tmp_path, content):
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(InputError, match="mine.npz is damaged, or no .npz file; write it by np.sa"):
        data.load(str(tmp_path / "mine.npz"))


def test_an_archive_larger_than_memory_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "mine.npz", x=np.zeros([1000, 1000]), y=np.zeros(1000, int))
    monkeypatch.setattr(memory, "of_host", lambda: 2**22)
    with pytest.raises(
        InputError, match="mine.npz unpacks to 7.6 MiB, and there are 4.0 M"
    ):
        data.load(str(tmp_path / "mine.npz"))


@pytest.mark.parametrize("shape", ["(2**42,)", "(1000, 1000, 1000, 1000)", "(19, 3)"])
def test_a_header_that_lies_takes_no_memory(tmp_path, shape):
    with zipfile.ZipFile(tmp_path / "mine.npz", "w") as archive:
        for key in ("x", "y"):
            buffer = io.BytesIO()
            about = {"descr": "<f8", "fortran_order": False, "shape": eval(shape)}
            np.lib.format.write_array_header_1_0(buffer, about)
            archive.writestr(f"{key}.npy", buffer.getvalue() + bytes(20 * 8))
    with pytest.raises(InputError, match="mine.npz is damaged"):
        data.load(str(tmp_path / "mine.npz"))


def test_one_array_in_place_of_several(tmp_path):
    with open(tmp_path / "mine.npz", "wb") as file:
        np.save(file, X)
    with pytest.raises(InputError, match="mine.npz is damaged, or no .npz file"):
        data.load(str(tmp_path / "mine.npz"))
