"""The data sets by name: which there are, where they are looked for, and what is refused."""

import pytest

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
        f"--dataset={dataset} is unknown{close}; allowed are {', '.join(DATA_SETS)} and "
        "module:function"
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


def test_what_needs_no_files():
    assert data.locate("shapes") == "shapes is drawn in code"
    assert data.locate("mine:load") == "mine:load is your own: not looked at"


def test_cifar10_is_located_whole_or_would_be_downloaded(tmp_path):
    assert data.locate("cifar10", str(tmp_path)) is None
    write_pickles(tmp_path / "there")
    assert data.locate("cifar10", str(tmp_path)) == f"cifar10 is in {tmp_path}/there"
    (tmp_path / "there/test_batch").unlink()
    assert "lacks test_batch; add" in refusal(data.locate, "cifar10", str(tmp_path))


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
