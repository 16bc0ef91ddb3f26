"""SVHN: the digits of its files, and those of the extra file where they are asked for."""

import hashlib
import os

import numpy as np
import pytest

from tests.data.mat_files import NUM, arrays_of, digits, mat, write_svhn
from tests.data.tiny_cifar10 import everything
from towers import data
from towers.data import augment, svhn
from towers.errors import InputError

pytestmark = pytest.mark.usefixtures("tiny")


def fails(folder, name="svhn"):
    with pytest.raises(InputError) as error:
        data.load(name, str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_is(split, *parts):
    images, labels = everything(split)
    np.testing.assert_array_equal(images, np.concatenate([digits(part)[0] for part in parts]))
    np.testing.assert_array_equal(labels, np.concatenate([digits(part)[1] for part in parts]))


@pytest.mark.parametrize("how", [{}, {"compress": False}, {"order": ">"}])
def test_digits_are_upright_and_ten_is_zero(tmp_path, how):
    write_svhn(tmp_path / "some/where", **how)
    loaded = data.load("svhn", str(tmp_path))
    assert (loaded.name, loaded.image_shape) == ("svhn", (32, 32, 3))
    assert loaded.class_names == tuple("0123456789")
    assert_is(loaded.train, "train")  # extra_32x32.mat is there, and left alone
    assert_is(loaded.test, "test")


def test_the_extra_digits_are_for_training_where_they_are_asked_for(tmp_path):
    write_svhn(tmp_path)
    loaded = data.load("svhn_extra", str(tmp_path))
    assert loaded.name == "svhn_extra"
    assert_is(loaded.train, "train", "extra")
    assert_is(loaded.test, "test")
    (tmp_path / "extra_32x32.mat").unlink()
    assert "lacks extra_32x32.mat; add" in fails(tmp_path, "svhn_extra")
    assert data.load("svhn", str(tmp_path)).train.size == NUM["train"]


def test_files_that_are_not_the_published_ones_are_named(tmp_path, capsys, publish):
    write_svhn(tmp_path)
    files = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    publish(svhn, md5_of=files)
    data.load("svhn", str(tmp_path))
    assert capsys.readouterr().err == ""
    publish(svhn, md5_of={**files, "test_32x32.mat": "0" * 32})
    data.load("svhn", str(tmp_path))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: test_32x32.mat in {tmp_path} differ from the published files")


def test_a_download_of_several_files_is_one_folder(tmp_path, publish):
    write_svhn(tmp_path / "server")
    sources = {
        path.as_uri(): hashlib.md5(path.read_bytes()).hexdigest()
        for path in sorted((tmp_path / "server").iterdir())
    }
    publish(svhn, sources=sources)
    assert_is(data.load("svhn_extra", str(tmp_path / "here")).train, "train", "extra")
    assert os.listdir(tmp_path / "here") == ["svhn"]
    publish(svhn, sources={**sources, next(iter(sources)): "0" * 32})
    message = fails(tmp_path / "there")
    assert "train_32x32.mat" in message and "hash does not match" in message
    assert os.listdir(tmp_path / "there") == []


def test_a_folder_with_other_things_is_not_replaced(tmp_path, publish):
    write_svhn(tmp_path / "server")
    (tmp_path / "here/svhn").mkdir(parents=True)
    (tmp_path / "here/svhn/notes.txt").write_text("mine")
    path = tmp_path / "server/train_32x32.mat"
    publish(svhn, sources={path.as_uri(): hashlib.md5(path.read_bytes()).hexdigest()})
    message = fails(tmp_path / "here")
    assert "not empty" in message and message.endswith("or use --dataset=shapes")
    assert (tmp_path / "here/svhn/notes.txt").read_text() == "mine"


TRAIN = arrays_of("train")
X, Y = TRAIN["X"], TRAIN["y"]
FORM = "expected X, uint8 [32, 32, 3, N], and y [N, 1]"
BAD = {
    "not of MATLAB": (b"x" * 1000, "does not begin as a MATLAB 5 file"),
    "no y": (mat({"X": X}), FORM),
    "no X": (mat({"y": Y}), FORM),
    "more labels": (mat({"X": X[..., 1:], "y": Y}), FORM),
    "labels in a row": (mat({"X": X, "y": Y.T}), FORM),
    "images of another shape": (mat({"X": X[1:], "y": Y}), FORM),
    "images first": (mat({"X": np.moveaxis(X, 3, 0), "y": Y}), FORM),
    "signed": (mat({"X": X.view(np.int8), "y": Y}), FORM),
    "no images": (mat({"X": X[..., :0], "y": Y[:0]}), FORM),
    "truncated": (mat({"X": X, "y": Y})[:-9], "ends too early"),
    "large": (mat({"X": X, "y": Y}) + bytes(300_000), "has more than 245,760 bytes"),
}


@pytest.mark.parametrize("damage", BAD)
def test_a_damaged_file_is_named(tmp_path, damage):
    content, expected = BAD[damage]
    write_svhn(tmp_path)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(content)
    message = fails(tmp_path)
    assert message.startswith(str(path)) and expected in message
    assert message.endswith("; put an intact copy in its place")


@pytest.mark.parametrize("label", [0, 11, 255, 2.5, np.nan, -1])
def test_labels_are_1_to_10(tmp_path, label):
    write_svhn(tmp_path)
    y = Y.astype(np.float64)
    (tmp_path / "train_32x32.mat").write_bytes(mat({"X": X, "y": y}))
    assert_is(data.load("svhn", str(tmp_path)).train, "train")
    y[3] = label
    (tmp_path / "train_32x32.mat").write_bytes(mat({"X": X, "y": y}))
    assert f"y 3 (counted from 0) is {float(label)}; allowed are 1..10" in fails(tmp_path)


def test_more_images_than_were_published_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(svhn, "MAX_IMAGES", NUM["train"] - 1)
    write_svhn(tmp_path)
    assert "train_32x32.mat is no MATLAB file of SVHN: an array in it has" in fails(tmp_path)


@pytest.mark.parametrize("name", ["svhn", "svhn_extra"])
def test_digits_are_not_mirrored_unasked_and_a_line_says_so_if_they_are(tmp_path, name):
    write_svhn(tmp_path)
    loaded = data.load(name, str(tmp_path))
    assert augment.resolve("auto", loaded) == "none"
    assert len(augment.describe(loaded, "none")) == 2
    _, line, _ = augment.describe(loaded, augment.resolve("resnet", loaded))
    assert line.startswith(f"warning     --augment=resnet mirrors the digits of {name}")
    _, line, _ = augment.describe(loaded, "none", test_time_flip=True)
    assert line.startswith(f"warning     --test_time_flip mirrors the digits of {name}")
