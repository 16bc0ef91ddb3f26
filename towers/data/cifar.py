"""Finds or downloads, and reads, CIFAR-10 and CIFAR-100.

`cifar100` has 100 classes, `cifar100_coarse` 20 groups of these. Images: 50,000 for training and
10,000 for testing, uint8 `[32, 32, 3]`; 180 MB.

They were published in two formats: binary files, whose records are a byte for each label, then 3072
bytes of the red, green and blue planes; and pickled dicts. Both readers find a missing byte; the
published md5 sums find a changed one.

Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from towers.data import safe_pickle
from towers.errors import InputError
from towers.files import check_is_file

if TYPE_CHECKING:
    from towers.data.pipeline import Data

_PICTURE_BYTES = 32 * 32 * 3
_MOST_OF_A_PICKLE = 4  # times the bytes of its pictures: a larger file is not read


@dataclasses.dataclass(frozen=True)
class Cifar:
    """A published data set."""

    name: str  # the value of --dataset
    title: str  # the authors' name
    class_names: tuple[str, ...]
    num_records: Mapping[str, int]  # {file name without ending: records}, the test set last
    labels: Mapping[str, int]  # {key in a pickle: number of classes}, in a record's order
    key: str  # of the labels that are the classes
    url: str  # of an archive of the binary files
    md5: str  # of that archive
    folder: str  # in the archive
    md5_of: Mapping[str, str]  # {name of a file: its md5}, where known
    # A folder with this in its name and only some of the files is reported as incomplete: files
    # called train and test may belong to something else.
    sign: str = ""

    def load(self, data_dir: str) -> Data:
        """Read the data set from `data_dir` or a folder below; download it if it is missing.

        Files that differ from the published ones are used, with a warning.

        Raises:
            InputError: a file is damaged or missing from its set, or the download failed.
        """
        from towers.data.pipeline import ArraySplit, Data  # `find` needs no TensorFlow

        paths = self.find(data_dir) or self._download(data_dir)
        try:
            images, labels, differing = map(list, zip(*map(self.read, paths), strict=True))
        except InputError as error:
            raise InputError(f"{error}; put an intact copy in its place") from None
        if any(differing):
            print(
                f"warning: {', '.join(filter(None, differing))} in {os.path.dirname(paths[0])} "
                f"differ from the published files of {self.title}, by their md5: accuracies may "
                "not compare",
                file=sys.stderr,
            )
        test = ArraySplit(images.pop(), labels.pop())
        joined = [np.concatenate(images), np.concatenate(labels)]
        del images  # before they are copied once more
        train = ArraySplit(*joined)
        return Data(self.name, train, test, len(self.class_names), self.class_names)

    def find(self, data_dir: str) -> list[str]:
        """Return the paths of the training files and the test file, [] if they are missing.

        Folders nearest to `data_dir` come first.

        Raises:
            InputError: some of the files are there, but no folder has them all.
        """
        incomplete = ""
        for folder, files in _folders(data_dir):
            for ending in ".bin", "":
                names = [name + ending for name in self.num_records]
                missing = [name for name in names if name not in files]
                if not missing:
                    return [os.path.join(folder, name) for name in names]
                named = self.sign in os.path.basename(os.path.realpath(folder)).lower()
                if named and len(missing) < len(names):
                    incomplete = incomplete or f"{folder} lacks {', '.join(missing)}"
        if incomplete:
            raise InputError(
                f"{self.title} in {incomplete}; add what is missing, or move the rest away to have "
                f"{self.title} downloaded"
            )
        return []

    def read(self, path: str) -> tuple[np.ndarray, np.ndarray, str]:
        """Return images, uint8 `[N, 32, 32, 3]`, labels, int32 `[N]`, and a changed file's name.

        The name is "" unless the file's md5 differs from the published one.

        Raises:
            InputError: the file is damaged; it is named.
        """
        name = os.path.basename(path)
        num, most = self.num_records[name.removesuffix(".bin")], max(self.num_records.values())
        most *= _MOST_OF_A_PICKLE * _PICTURE_BYTES
        try:
            check_is_file(path)
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                content = file.read(min(size, most) + 1)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        if len(content) > most:
            raise InputError(f"{path} has more than {most:,} bytes")
        read = self._binary if path.endswith(".bin") else self._pickle
        planes, columns = read(path, content, num)
        for column, (key, num_classes) in zip(columns, self.labels.items(), strict=True):
            wrong = np.flatnonzero((column < 0) | (column >= num_classes))
            if wrong.size:
                raise InputError(
                    f"{path}: record {wrong[0]} (counted from 0) has "
                    f"{key.removesuffix('s').replace('_', ' ')} {column[wrong[0]]}; "
                    f"allowed are 0..{num_classes - 1}"
                )
        images = np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels = columns[list(self.labels).index(self.key)].astype(np.int32)
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return images, labels, "" if md5 == self.md5_of.get(name, md5) else name

    def _binary(self, path: str, content: bytes, num: int) -> tuple[np.ndarray, np.ndarray]:
        # The pictures' planes, uint8 [N, 3072], and a row of labels for each key.
        size = len(self.labels) + _PICTURE_BYTES
        if len(content) != num * size:
            raise InputError(
                f"{path} has {len(content):,} bytes; expected {num:,} records of {size} bytes"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        return records[:, -_PICTURE_BYTES:], records[:, :-_PICTURE_BYTES].T

    def _pickle(self, path: str, content: bytes, num: int) -> tuple[np.ndarray, np.ndarray]:
        expected = f"data, uint8 [{num}, {_PICTURE_BYTES}], and as many {' and '.join(self.labels)}"
        try:
            batch = safe_pickle.loads(content)
            data, columns = batch[b"data"], [batch[key.encode()] for key in self.labels]
            if (data.dtype, data.shape) != ("uint8", (num, _PICTURE_BYTES)) or not all(
                isinstance(column, list)
                and len(column) == num
                and all(type(label) is int for label in column)
                for column in columns
            ):
                raise ValueError(f"expected a dict with {expected}")
            return data, np.array(columns)
        except Exception as error:  # a damaged pickle can raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise InputError(f"{path} is no pickle of {self.title}: {reason}") from None

    def _download(self, data_dir: str) -> list[str]:
        import keras

        folder = os.path.join(data_dir, self.folder)
        try:
            os.makedirs(data_dir, exist_ok=True)
            with (
                tempfile.TemporaryDirectory(dir=data_dir, prefix=".towers-") as temporary,
                contextlib.redirect_stdout(sys.stderr),  # where the JSON of --json is not
            ):
                path = keras.utils.get_file(
                    "archive", self.url, cache_dir=temporary, cache_subdir="", extract=True,
                    file_hash=self.md5, hash_algorithm="md5",
                )  # fmt: skip
                # In one move, when it is complete; another process may have done it meanwhile.
                if not self.find(data_dir):
                    os.replace(os.path.join(path, self.folder), folder)
                return self.find(data_dir)
        except Exception as error:  # Keras raises many kinds, the plain Exception among them
            reason = " ".join(str(error).split()) or type(error).__name__
            first, *_, last = self.num_records
            raise InputError(
                f"cannot download {self.url} to {folder}: {reason}; put {self.folder} "
                f"({first}.bin ... {last}.bin) under {data_dir}, or use --dataset=shapes"
            ) from None


def _folders(top: str) -> Iterator[tuple[str, list[str]]]:
    # Yields (folder, names of its files), shallowest first, without hidden folders.
    waiting, seen = [top], set()
    for folder in waiting:  # the list grows
        real = os.path.realpath(folder)
        if real in seen:  # a link back up
            continue
        seen.add(real)
        _, folders, files = next(os.walk(folder), ("", [], []))  # empty if it cannot be read
        yield folder, files
        waiting += [os.path.join(folder, name) for name in sorted(folders) if name[0] != "."]


_FILES_OF_10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CLASSES_OF_10 = "airplane automobile bird cat deer dog frog horse ship truck"
_FINE = (  # of the 100, and below their 20 groups
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse "
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy "
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television "
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_COARSE = (
    "aquatic_mammals fish flowers food_containers fruit_and_vegetables "
    "household_electrical_devices household_furniture insects large_carnivores "
    "large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores "
    "medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1 "
    "vehicles_2"
)
_HOME = "https://www.cs.toronto.edu/~kriz"
_SET_OF_100 = Cifar(
    "cifar100",
    "CIFAR-100",
    tuple(_FINE.split()),
    num_records={"train": 50_000, "test": 10_000},
    labels={"coarse_labels": 20, "fine_labels": 100},
    key="fine_labels",
    url=f"{_HOME}/cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    folder="cifar-100-binary",
    # The sums of the binary files have one public source only and are left out.
    md5_of={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
    sign="cifar",
)
SETS = {
    "cifar10": Cifar(
        "cifar10",
        "CIFAR-10",
        tuple(_CLASSES_OF_10.split()),
        num_records=dict.fromkeys(_FILES_OF_10, 10_000),
        labels={"labels": 10},
        key="labels",
        url=f"{_HOME}/cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        md5_of={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
    ),
    "cifar100": _SET_OF_100,
    "cifar100_coarse": dataclasses.replace(
        _SET_OF_100, name="cifar100_coarse", class_names=tuple(_COARSE.split()), key="coarse_labels"
    ),
}
