"""Checksums: another one for other data, the same one for the same data elsewhere."""

import shutil

import pytest

from tests.data.image_files import image, png, write_folder
from towers import data

pytestmark = pytest.mark.unit


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
