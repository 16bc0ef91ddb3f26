"""Checksums: another one for other data, the same one for the same data elsewhere."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.data.image_files import image, png, write_folder
from towers import data
from towers.data import ArraySplit, DatasetSplit
from towers.data.pipeline import digest

pytestmark = pytest.mark.unit


@pytest.mark.graph
def test_arrays_are_told_apart_by_any_bit_and_by_shapes_and_types_not_by_layout():
    images, labels = tiny.arrays(20)
    first = ArraySplit(images, labels).checksum()
    assert (first["kind"], first["examples"]) == ("arrays", 20)
    assert first["sha256"] == digest(images, labels.astype(np.int32))
    images[3, 0, 0, 0] ^= 1
    second = ArraySplit(images, labels).checksum()["sha256"]
    labels[4] = (labels[4] + 1) % 3
    third = ArraySplit(images, labels).checksum()["sha256"]
    assert len({first["sha256"], second, third}) == 3
    zeros = np.zeros([2, 6], np.float32)
    same_bytes = [zeros, zeros.reshape(6, 2), zeros.view(np.int32)]
    assert len({digest(array) for array in same_bytes}) == 3
    assert digest(zeros, zeros) != digest(np.zeros([4, 6], np.float32))
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert digest(array.T) == digest(np.ascontiguousarray(array.T))
    assert digest(tf.zeros([2, 3], tf.bfloat16).numpy()) != digest(tf.zeros([]).numpy())
    of_users = DatasetSplit(tf.data.Dataset.from_tensor_slices(tiny.arrays(5)), 5)
    assert of_users.checksum() == {"kind": "pipeline", "sha256": None, "examples": 5}  # not read


@pytest.mark.graph
def test_files_may_be_moved_but_another_name_size_or_class_is_seen(tmp_path):
    for split, numbers in {"train": range(9), "test": range(9, 15)}.items():
        write_folder(tmp_path / "here", numbers, split=split)
    first = data.load("folder", str(tmp_path / "here"))
    before = first.train.checksum(), first.test.checksum()
    assert before[0]["kind"] == "names, sizes and labels" and before[0]["examples"] == 9
    top, seen = tmp_path / "there", [before[0]["sha256"], before[1]["sha256"]]
    shutil.move(tmp_path / "here", top)
    moved = data.load("folder", str(top))
    assert (moved.train.checksum(), moved.test.checksum()) == before
    files = sorted((top / "train").rglob("*.png"))
    for change in (
        lambda: files[0].write_bytes(png(image(0)) + b"0"),
        lambda: files[1].rename(files[1].with_name("other.png")),
        lambda: (top / "train/dog").rename(top / "train/ant"),
    ):
        change()
        shutil.rmtree(top / "test/dog", ignore_errors=True)
        seen.append(data.load("folder", str(top)).train.checksum()["sha256"])
    assert len(set(seen)) == 5
