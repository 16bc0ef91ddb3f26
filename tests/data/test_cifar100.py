"""CIFAR-100: both forms, fine and coarse labels."""

import pickle

import numpy as np
import pytest

from tests.data.tiny_cifar10 import everything
from tests.data.tiny_cifar100 import NUM, batch, write_binaries, write_pickles
from towers import data
from towers.data import cifar100
from towers.errors import InputError

pytestmark = pytest.mark.usefixtures("tiny")


def fails(folder, name="cifar100"):
    with pytest.raises(InputError) as error:
        data.load(name, str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("write", [write_binaries, write_pickles])
@pytest.mark.parametrize(("name", "column"), [("cifar100", 2), ("cifar100_coarse", 1)])
def test_fine_and_coarse_labels_in_both_forms(tmp_path, write, name, column):
    write(tmp_path / "some/where")
    loaded = data.load(name, str(tmp_path))
    assert loaded.name == name
    for half in NUM:
        images, labels = everything(getattr(loaded, half))
        np.testing.assert_array_equal(images, batch(half)[0])
        np.testing.assert_array_equal(labels, batch(half)[column])


def test_the_names_of_the_classes(tmp_path):
    write_binaries(tmp_path)
    fine, coarse = (data.load(name, str(tmp_path)) for name in ("cifar100", "cifar100_coarse"))
    assert (fine.num_classes, coarse.num_classes) == (100, 20)
    assert list(fine.class_names) == sorted(set(fine.class_names)) and len(fine.class_names) == 100
    assert len(set(coarse.class_names)) == 20
    assert [fine.class_names[i] for i in (0, 42, 99)] == ["apple", "leopard", "worm"]
    assert [coarse.class_names[i] for i in (0, 8, 19)] == [
        "aquatic_mammals", "large_carnivores", "vehicles_2"
    ]  # fmt: skip


def test_folders_of_the_same_names_are_no_files(tmp_path):
    for half in NUM:
        (tmp_path / half / "class").mkdir(parents=True)
    assert fails(tmp_path).startswith("cannot download ")
    write_pickles(tmp_path / "train")
    assert data.load("cifar100", str(tmp_path)).train.size == NUM["train"]


def test_an_incomplete_set_is_named(tmp_path):
    folder = tmp_path / "some/CIFAR-100"
    write_binaries(folder, ["train"])
    assert f"CIFAR-100 in {folder} lacks test.bin; add what is missing" in fails(tmp_path)


def test_a_single_file_of_so_common_a_name_may_be_somebody_else_s(tmp_path):
    (tmp_path / "cifar/scripts").mkdir(parents=True)
    (tmp_path / "cifar/scripts/test").write_text("#!/bin/sh")
    assert data.locate("cifar100", str(tmp_path)) is None
    write_pickles(tmp_path / "data")
    assert data.load("cifar100", str(tmp_path)).train.size == NUM["train"]


def test_pickles_that_are_not_the_published_ones_are_named(tmp_path, capsys):
    write_pickles(tmp_path)
    data.load("cifar100", str(tmp_path))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: train, test in {tmp_path} differ from the published files")


def test_a_damaged_binary_is_named(tmp_path):
    write_binaries(tmp_path)
    path = tmp_path / "train.bin"
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-1000])
    assert fails(tmp_path) == (
        f"{path} has 60,480 bytes; expected 20 records of 3074 bytes; put an intact copy in its "
        "place"
    )
    for column, label, name in (0, 20, "coarse label 20; allowed are 0..19"), (1, 100, "fine"):
        damaged = bytearray(content)
        damaged[2 * 3074 + column] = label
        path.write_bytes(damaged)
        for data_set in "cifar100", "cifar100_coarse":
            message = fails(tmp_path, data_set)
            assert message.startswith(f"{path}: record 2 (counted from 0) has {name}")


@pytest.mark.parametrize("key", [b"coarse_labels", b"fine_labels", b"data"])
def test_a_pickle_without_what_it_needs_is_named(tmp_path, key):
    write_pickles(tmp_path)
    path = tmp_path / "test"
    content = pickle.loads(path.read_bytes(), encoding="bytes")
    for wrong in [1] * 9, None:
        path.write_bytes(pickle.dumps({**content, key: wrong}, 4))
        assert fails(tmp_path).startswith(f"{path} is no pickle of CIFAR-100: ")


def test_the_limits_of_a_pickle_leave_room_for_the_published_ones(tmp_path, monkeypatch, publish):
    """50,000 labels, coarse and fine, and names."""
    monkeypatch.setitem(NUM, "train", 50_000)
    monkeypatch.setitem(cifar100.RECORDS, "train", 50_000)
    publish(cifar100, max_bytes=4 * 50_000 * 3072)
    monkeypatch.setattr(
        "tests.data.tiny_cifar100.rows", lambda images: np.zeros((len(images), 3072), np.uint8)
    )
    write_pickles(tmp_path)
    assert data.load("cifar100", str(tmp_path)).train.size == 50_000
