"""The data sets by name: which there are, where they are looked for, and what is refused."""

import numpy as np
import pytest

from tests.data.mat_files import write_svhn
from tests.data.tiny_cifar10 import assert_is_cifar10, write_binaries, write_pickles
from towers import data
from towers.data.registry import DATA_SETS
from towers.errors import InputError


def refusal(call, *args):
    with pytest.raises(InputError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("call", [data.load, data.locate])
@pytest.mark.parametrize(
    ("dataset", "close"), [("", ""), ("imagenet", ""), ("CIFAR-10", ", did you mean cifar10?")]
)
def test_an_unknown_name_lists_those_that_there_are(call, dataset, close):
    assert refusal(call, dataset) == (
        f"--dataset={dataset} is unknown{close}; allowed are {', '.join(DATA_SETS)}, "
        "FILE.npz, FILE.csv and module:function"
    )


@pytest.mark.parametrize("call", [data.load, data.locate])
@pytest.mark.parametrize("dataset", DATA_SETS)
def test_the_folder_must_be_one_and_files_of_your_own_need_it(call, dataset, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(call, dataset, str(tmp_path / "file"))
    assert message.startswith(f"--data_dir={tmp_path}/file is not a folder; ")
    if layout := DATA_SETS[dataset].layout:
        message = refusal(call, dataset, str(tmp_path / "nowhere"))
        assert message == f"--data_dir={tmp_path}/nowhere is not a folder; expected {layout}"
        message = refusal(call, dataset, "")
        assert message == f"--dataset={dataset} needs your files; type --data_dir=DIR with {layout}"
        assert data.locate(dataset, str(tmp_path)).startswith(f"{tmp_path} is there")


def test_a_size_is_for_files_of_images():
    for dataset in "shapes", "cifar10", "mine:load":
        message = refusal(data.load, dataset, None, (8, 8))
        assert message.startswith("--image_size is for ") and f"not {dataset}: leave" in message


def test_a_target_is_for_tables(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros(3))
    for dataset in "shapes", "mine:load", str(tmp_path / "mine.npz"):
        message = refusal(data.load, dataset, None, None, 0.0, "price")
        assert message.startswith("--target is for ") and f"not {dataset}: leave" in message


@pytest.mark.parametrize("call", [data.load, data.locate])
def test_a_file_that_is_not_there(call, tmp_path):
    for name in "mine.npz", "mine.CSV", "train.csv,test.csv":
        path = tmp_path / name.split(",")[0]
        message = refusal(call, name, str(tmp_path))
        first = name.split(",")[0]
        assert message.startswith(f"--dataset={name}: there is no file {first} or {path}; name one")
    assert "names 3 files" in refusal(call, "a.csv,b.csv,c.csv")


def test_files_are_found_as_typed_or_below_the_folder(tmp_path, monkeypatch):
    for name in "one.csv", "two.csv":
        (tmp_path / name).write_text("a,b\n1,2\n3,4\n")
    both = f"{tmp_path}/one.csv and {tmp_path}/two.csv: there; a run looks at what is inside"
    assert data.locate(f"{tmp_path}/one.csv,{tmp_path}/two.csv") == both
    assert data.locate("one.csv,two.csv", str(tmp_path)) == both
    monkeypatch.chdir(tmp_path)
    assert data.locate("one.csv").startswith("one.csv: there")
    assert data.load("one.csv,two.csv").train.size == 2


def test_a_part_of_the_training_examples_is_for_validation(mine):
    mine.load = lambda: ((np.arange(20.0),), (np.arange(5.0),))
    loaded = data.load("mine:load", validation_fraction=0.2)
    splits = loaded.train, loaded.validation, loaded.test
    assert [split.size for split in splits] == [16, 4, 5]
    rows = [next(iter(split.eval_batches(split.size)))[0][0].numpy() for split in splits[:2]]
    assert sorted(np.concatenate(rows)) == list(range(20))
    three = (np.arange(20.0),), (np.arange(3.0),), (np.arange(5.0),)
    mine.load = lambda: three
    assert refusal(data.load, "mine:load", None, None, 0.2) == (
        "--validation_fraction=0.2: mine:load has a validation set of its own, of 3 examples; "
        "leave the flag out"
    )


def test_what_needs_no_files():
    assert data.locate("shapes") == "shapes is drawn in code"
    assert data.locate("mine:load") == "mine:load is your own: not looked at"


def test_published_sets_are_located_whole_or_would_be_downloaded(tmp_path):
    assert data.locate("cifar10", str(tmp_path)) is None
    write_pickles(tmp_path / "there")
    assert data.locate("cifar10", str(tmp_path)) == f"cifar10 is in {tmp_path}/there"
    (tmp_path / "there/test_batch").unlink()
    assert "lacks test_batch; add" in refusal(data.locate, "cifar10", str(tmp_path))
    write_svhn(tmp_path / "svhn", ("train", "test"))
    assert data.locate("svhn", str(tmp_path)) == f"svhn is in {tmp_path}/svhn"
    assert "lacks extra_32x32.mat" in refusal(data.locate, "svhn_extra", str(tmp_path))
    assert data.locate("cifar100_coarse", str(tmp_path)) is None


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("given", "environment", "folder"),
    [
        (None, {"XDG_CACHE_HOME": "{}/cache"}, "cache/towers"),
        ("", {"XDG_CACHE_HOME": "", "HOME": "{}/home"}, "home/.cache/towers"),
        ("~/here", {"HOME": "{}"}, "here"),
    ],
)
def test_the_folder_that_is_looked_in(tmp_path, monkeypatch, given, environment, folder):
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    write_binaries(tmp_path / folder)
    assert_is_cifar10(data.load("cifar10", given))
