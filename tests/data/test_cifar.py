"""CIFAR-10: binary files in a folder, or what keras.datasets gives."""

import keras
import numpy as np
import pytest

from tests.data.splits import all_of, assert_same, refusal
from towers import data
from towers.data import cifar

pytestmark = pytest.mark.unit
NUM = 20  # records of each file; the real ones have 10,000


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(cifar, "NUM_RECORDS", NUM)


def write(folder):
    """Write the files of a data set; return images and labels of each."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, file in enumerate(cifar.FILES):
        random = np.random.default_rng(number)
        images = random.integers(0, 256, (NUM, 32, 32, 3), np.uint8)
        labels = random.permutation(NUM).astype(np.uint8)[:, None] % 10
        planes = images.transpose(0, 3, 1, 2).reshape(NUM, -1)
        np.concatenate([labels, planes], axis=1).tofile(folder / file)
        parts.append((images, labels[:, 0].astype(np.int32)))
    return parts


def assert_is(loaded, parts):
    """Compare a data set with the images and labels of its files, the last of them for testing."""
    assert (loaded.name, loaded.image_shape) == ("cifar10", (32, 32, 3))
    assert loaded.num_classes == len(set(loaded.class_names)) == 10
    images, labels = map(np.concatenate, zip(*parts[:-1], strict=True))
    assert_same(all_of(loaded.train), (images, labels))
    assert_same(all_of(loaded.test), parts[-1])


def test_binary_files_are_found_in_the_folder_and_in_that_of_the_archive(tmp_path):
    for below in cifar.FOLDER, "":
        top = tmp_path / f"data{len(below)}"
        parts = write(top / below)
        assert_is(data.load("cifar10", str(top)), parts)


def test_missing_and_damaged_files_are_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    for call in data.load, data.locate:
        message = refusal("cifar10", str(tmp_path / "none"), call=call)
        assert "none has no data_batch_1.bin" in message and "leave --data_dir out" in message
    (tmp_path / "cifar-10-python.tar.gz").touch()
    assert "is not read: get cifar-10-binary.tar.gz, or" in refusal("cifar10", str(tmp_path))
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.touch()
    assert f"type tar -xzf {archive} -C {tmp_path}, or" in refusal("cifar10", str(tmp_path))
    write(folder)
    path = folder / "data_batch_3.bin"
    whole = path.read_bytes()
    for content in whole[:-1000], whole[:-3073], whole[:6146] + b"\x0a" + whole[6147:]:
        path.write_bytes(content)
        message = refusal("cifar10", str(tmp_path))
        assert message.startswith(f"{path} is damaged; expected 20 records of 3073 bytes")
    path.unlink()
    assert f": {folder} has no data_batch_3.bin; " in refusal("cifar10", str(tmp_path))


def test_without_a_folder_keras_gives_it(monkeypatch, tmp_path, capsys):
    parts = write(tmp_path)[-2:]

    def load_data():
        print("Downloading data")
        return [(images, labels[:, None].astype(np.uint8)) for images, labels in parts]

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", load_data)
    assert_is(data.load("cifar10"), parts)
    assert capsys.readouterr() == ("", "Downloading data\n")  # the JSON of --json is alone
