"""Checksums: another one for other data, the same one for the same data elsewhere."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.data.image_files import WRITE, image, png
from tests.data.splits import run
from towers import data
from towers.data import ArraySplit, DatasetSplit
from towers.data.pipeline import digest

pytestmark = pytest.mark.unit


def test_arrays_are_told_apart_by_any_bit_and_by_shapes_and_types_not_by_layout():
    images, labels = tiny.arrays(20)
    first = ArraySplit(images, labels).checksum()
    assert (first["kind"], first["shape"], first["dtype"]) == ("arrays", [20, 8, 8, 3], "uint8")
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


@pytest.mark.graph
@pytest.mark.parametrize("kind", ["folder", *run(["tfrecord"])])
def test_files_that_are_moved_stay_the_same(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for split, numbers in {"train": range(9), "test": range(9, 15)}.items():
        WRITE[kind](tmp_path / "here", numbers, split=split)
    first = data.load(kind, str(tmp_path / "here"))
    before = first.train.checksum(), first.test.checksum()
    assert before[0]["kind"] == "names, sizes and labels" and before[0]["examples"] == 9
    assert before[0]["sha256"] != before[1]["sha256"]
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = data.load(kind, str(tmp_path / "there"))
    assert (moved.train.checksum(), moved.test.checksum()) == before


def test_a_file_of_another_name_or_size_or_class_is_seen(tmp_path):
    WRITE["folder"](tmp_path, range(9))
    WRITE["folder"](tmp_path, range(9, 15), split="test")

    def found():
        return data.load("folder", str(tmp_path)).train.checksum()["sha256"]

    seen = [found()]
    files = sorted((tmp_path / "train").rglob("*.png"))
    files[0].write_bytes(png(image(0)) + b"0")
    seen.append(found())
    files[1].rename(files[1].with_name("other.png"))
    seen.append(found())
    (tmp_path / "train" / "dog").rename(tmp_path / "train" / "ant")
    shutil.rmtree(tmp_path / "test" / "dog")
    seen.append(found())
    assert len(set(seen)) == 4


@pytest.mark.graph
def test_a_pipeline_of_the_users_is_not_read():
    dataset = tf.data.Dataset.from_tensor_slices(tiny.arrays(5))
    found = DatasetSplit(dataset, 5).checksum()
    assert found == {"kind": "pipeline", "sha256": None, "examples": 5}
