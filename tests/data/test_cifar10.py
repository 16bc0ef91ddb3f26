"""CIFAR-10: found under a folder, wherever it lies and in either form."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.data.tiny_cifar10 import (
    NAMES,
    NUM,
    assert_is_cifar10,
    everything,
    fails,
    write_binaries,
    write_pickles,
)
from towers import data
from towers.data import cifar10

pytestmark = pytest.mark.usefixtures("tiny")


def test_describes_itself(tmp_path):
    write_binaries(tmp_path)
    loaded = data.load("cifar10", str(tmp_path))
    assert (loaded.name, loaded.num_classes, loaded.image_shape) == ("cifar10", 10, (32, 32, 3))
    assert (loaded.train.size, loaded.test.size) == (5 * NUM, NUM)
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    assert loaded.class_names == tuple(names.split())


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin", "some/where/below"])
def test_finds_binaries_anywhere(tmp_path, folder):
    write_binaries(tmp_path / folder)
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


def test_prefers_binaries_to_pickles_and_the_nearest_folder(tmp_path):
    write_binaries(tmp_path / "a/deep/folder")
    write_binaries(tmp_path / "z")
    (tmp_path / "a/deep/folder/test_batch.bin").write_bytes(b"never read")
    write_pickles(tmp_path)
    (tmp_path / "test_batch").write_bytes(b"never read")
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


def test_follows_links_and_is_not_caught_in_a_loop(tmp_path):
    write_binaries(tmp_path / "disk/cifar")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    (tmp_path / "data/linked").symlink_to(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert_is_cifar10(data.load("cifar10", str(tmp_path / "link")))


def test_links_that_lead_back_end_the_search(tmp_path):
    for name in "abc":
        (tmp_path / name).symlink_to(tmp_path)
    assert fails(tmp_path).startswith("cannot download ")


def test_skips_hidden_folders(tmp_path):
    write_binaries(tmp_path / ".towers-x1")
    assert fails(tmp_path).startswith("cannot download ")


def test_an_incomplete_set_is_named_and_not_downloaded(tmp_path):
    write_binaries(tmp_path / "a", NAMES[:5])
    message = fails(tmp_path)
    assert message.startswith(f"CIFAR-10 in {tmp_path}/a lacks test_batch.bin; add what is missing")
    (tmp_path / "a/data_batch_2.bin").unlink()
    assert "lacks data_batch_2.bin, test_batch.bin; add" in fails(tmp_path)
    write_pickles(tmp_path / "b", NAMES[1:])
    assert f"CIFAR-10 in {tmp_path}/a lacks" in fails(tmp_path)
    write_pickles(tmp_path / "b")
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


def test_a_damaged_binary_is_named(tmp_path):
    write_binaries(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1000])
    assert fails(tmp_path) == (
        f"{path} has 60,460 bytes; expected 20 records of 3073 bytes; put an intact copy in its "
        "place"
    )


# The real one

REAL = os.environ.get("TOWERS_CIFAR10_DIR", "")


@pytest.mark.skipif(not REAL, reason="TOWERS_CIFAR10_DIR does not name a folder with CIFAR-10")
def test_the_real_images(monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", 10_000)
    assert Path(REAL).is_dir()
    loaded = data.load("cifar10", REAL)
    assert (loaded.train.size, loaded.test.size) == (50_000, 10_000)
    for split in (loaded.train, loaded.test):
        images, labels = everything(split)
        assert np.bincount(labels).tolist() == [split.size // 10] * 10
        # Published channel means, of the training images: 125.3, 123.0, 113.9.
        means = images.mean(axis=(0, 1, 2), dtype=np.float64)
        np.testing.assert_allclose(means, [125.3, 123.0, 113.9], atol=1.5)
