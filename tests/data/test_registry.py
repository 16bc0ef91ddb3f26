"""The data sets by name: which there are, where they are looked for, and what is refused."""

import numpy as np
import pytest

from tests.data.splits import refusal
from towers import data
from towers.data.registry import FOLDER_LAYOUT, NAMES

pytestmark = pytest.mark.unit


def test_a_name_that_is_none_is_refused_with_what_to_type(tmp_path):
    for name, given, says in (
        ("imagenet", {}, f"=imagenet is unknown; allowed are {', '.join(NAMES)}, FILE.npz and"),
        ("CIFAR-10", {}, "did you mean cifar10?"),
        ("mine.NPZ", {"data_dir": str(tmp_path)}, f"no file mine.NPZ or {tmp_path / 'mine.NPZ'}"),
        (
            "folder",
            {"data_dir": f"{tmp_path}/a"},
            f"{tmp_path}/a is not a folder; expected {FOLDER_LAYOUT}",
        ),
        (
            "folder",
            {},
            f"--dataset=folder needs your files; type --data_dir=DIR with {FOLDER_LAYOUT}",
        ),
    ):
        assert says in refusal(name, call=data.locate, **given)


def test_a_size_is_for_files_of_images():
    for name in "shapes", "cifar10", "mine:load":
        message = refusal(name, image_size=(8, 8))
        assert message.startswith("--image_size is for ") and f"not {name}; leave" in message


def test_files_are_found_as_typed_or_below_the_folder(tmp_path, monkeypatch):
    np.savez(tmp_path / "one.npz", x=np.zeros(20))
    for name in f"{tmp_path}/one.npz", "one.npz":
        assert data.load(name, str(tmp_path)).train.size == 18
    monkeypatch.chdir(tmp_path)
    assert data.load("one.npz").train.size == 18


def test_no_part_is_for_validation_of_a_set_that_has_one(load):
    three = (np.arange(20.0),), (np.arange(3.0),), (np.arange(5.0),)
    said = refusal(three, call=load, validation_fraction=0.2)
    assert said.startswith("--validation_fraction=0.2: ") and said.endswith("leave the flag out")
