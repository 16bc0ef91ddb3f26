"""The data sets by name: which there are, where they are looked for, and what is refused."""

import numpy as np
import pytest

from tests.data.splits import refusal
from towers import data
from towers.data.registry import FOLDER_LAYOUT, NAMES

pytestmark = pytest.mark.unit
both = pytest.mark.parametrize("call", [data.load, data.locate])


@both
def test_an_unknown_name_lists_those_that_there_are(call):
    for name, close in {"": "", "imagenet": "", "CIFAR-10": ", did you mean cifar10?"}.items():
        assert refusal(name, call=call) == (
            f"--dataset={name} is unknown{close}; allowed are {', '.join(NAMES)}, "
            "FILE.npz and module:function"
        )


def test_a_file_or_a_folder_of_the_users_is_named_as_it_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data.py").touch()
    for name in "my_data", "my_data.py":
        assert "did you mean my_data:load?" in refusal(name, call=data.locate)
    (tmp_path / "pics").mkdir()
    assert "type --dataset=folder --data_dir=pics" in refusal("pics", call=data.locate)


@both
def test_the_folder_must_be_one_and_images_of_your_own_need_it(call, tmp_path):
    layout = FOLDER_LAYOUT
    message = refusal("folder", str(tmp_path / "nowhere"), call=call)
    assert message == f"--data_dir={tmp_path}/nowhere is not a folder; expected {layout}"
    needed = f"--dataset=folder needs your files; type --data_dir=DIR with {layout}"
    assert refusal("folder", "", call=call) == needed
    assert data.locate("folder", str(tmp_path)).startswith(f"{tmp_path} is there")


def test_a_size_is_for_files_of_images():
    for name in "shapes", "cifar10", "mine:load":
        message = refusal(name, image_size=(8, 8))
        assert message.startswith("--image_size is for ") and f"not {name}: leave" in message


@both
def test_a_file_that_is_not_there(call, tmp_path):
    for name in "mine.npz", "mine.NPZ":
        message = refusal(name, str(tmp_path), call=call)
        assert message == f"--dataset={name}: there is no file {name} or {tmp_path / name}"


def test_files_are_found_as_typed_or_below_the_folder(tmp_path, monkeypatch):
    np.savez(tmp_path / "one.npz", x=np.zeros(20))
    for name in f"{tmp_path}/one.npz", "one.npz":
        assert data.locate(name, str(tmp_path)).startswith(f"{tmp_path}/one.npz is there")
    monkeypatch.chdir(tmp_path)
    assert data.locate("one.npz").startswith("one.npz is there")
    assert data.load("one.npz").train.size == 18


def test_no_part_is_for_validation_of_a_set_that_has_one(load):
    three = (np.arange(20.0),), (np.arange(3.0),), (np.arange(5.0),)
    assert refusal(three, call=load, validation_fraction=0.2) == (
        "--validation_fraction=0.2: mine:load has a validation set of its own, of 3 examples; "
        "leave the flag out"
    )


def test_what_is_located(tmp_path):
    assert data.locate("shapes") == "shapes is drawn in code"
    assert data.locate("mine:load") == "mine:load is your own: not looked at"
    for name in "cifar10", "cifar100", "cifar100_coarse":
        assert data.locate(name).startswith(f"{name} is that of keras.datasets")
