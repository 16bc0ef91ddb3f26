"""Reads CIFAR-10 and CIFAR-100: binary files in a folder, else those of `keras.datasets`.

`cifar100` has 100 classes, `cifar100_coarse` 20 groups of these. Images: 50,000 for training and
10,000 for testing, uint8 `[32, 32, 3]`; 180 MB.

A record of a binary file is a byte for each label, then 3072 bytes of the red, green and blue
planes. `keras.datasets` downloads another form of the files to Keras' cache, and checks its hash.

Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from towers.errors import InputError
from towers.formatting import reason

if TYPE_CHECKING:
    from towers.data.pipeline import Data

_PICTURE_BYTES = 32 * 32 * 3


@dataclasses.dataclass(frozen=True)
class Cifar:
    """A published data set."""

    name: str  # the value of --dataset
    class_names: tuple[str, ...]
    folder: str  # in the authors' archive
    num_records: Mapping[str, int]  # {file: records}, the test set last
    label_bytes: int  # of a record
    column: int  # of them, the classes
    keras: tuple[str, ...]  # name in keras.datasets, and arguments of its load_data

    def load(self, data_dir: str) -> Data:
        """Read the data set from `data_dir` or `folder` in it; "": from `keras.datasets`.

        Raises:
            InputError: a file is missing or damaged, or the download failed.
        """
        from towers.data.pipeline import ArraySplit, Data  # `find` needs no TensorFlow

        train, test = self._read_all(self.find(data_dir)) if data_dir else self._from_keras()
        num_classes = len(self.class_names)
        return Data(self.name, ArraySplit(*train), ArraySplit(*test), num_classes, self.class_names)

    def find(self, data_dir: str) -> list[str]:
        """Return the paths of the training files and the test file.

        Raises:
            InputError: some of them are missing.
        """
        folder = os.path.join(data_dir, self.folder)
        folder = folder if os.path.isdir(folder) else data_dir
        paths = [os.path.join(folder, name) for name in self.num_records]
        if missing := [os.path.basename(path) for path in paths if not os.path.exists(path)]:
            raise InputError(
                f"--data_dir={data_dir}: {folder} has no {', '.join(missing)}; name the folder of "
                f"the binary files, or leave --data_dir out to have Keras download {self.name}"
            )
        return paths

    def _read_all(self, paths: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        # The training examples and the test examples.
        parts = [self._read(path) for path in paths]
        halves = parts[:-1], parts[-1:]
        return [tuple(map(np.concatenate, zip(*half, strict=True))) for half in halves]

    def _read(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        # Images, uint8 [N, 32, 32, 3], and labels, int32 [N].
        try:
            records = np.fromfile(path, np.uint8)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {reason(error)}") from None
        num, size = self.num_records[os.path.basename(path)], self.label_bytes + _PICTURE_BYTES
        labels = records[self.column :: size].astype(np.int32)
        if len(records) != num * size or labels.max() >= len(self.class_names):
            raise InputError(
                f"{path} is damaged; expected {num:,} records of {size} bytes, with labels "
                f"0..{len(self.class_names) - 1}: put an intact copy in its place"
            )
        planes = records.reshape(num, size)[:, self.label_bytes :].reshape(num, 3, 32, 32)
        return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels

    def _from_keras(self) -> list[tuple[np.ndarray, np.ndarray]]:
        import keras

        name, *arguments = self.keras
        try:
            with contextlib.redirect_stdout(sys.stderr):  # where the JSON of --json is not
                halves = getattr(keras.datasets, name).load_data(*arguments)
        except Exception as error:  # Keras raises many kinds, the plain Exception among them
            raise InputError(
                f"keras.datasets cannot give {self.name}: {reason(error)}; name the "
                f"folder of its binary files, --data_dir=DIR with DIR/{self.folder}, or use "
                "--dataset=shapes"
            ) from None
        return [(images, labels[:, 0].astype(np.int32)) for images, labels in halves]


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
_SET_OF_100 = Cifar(
    "cifar100",
    tuple(_FINE.split()),
    folder="cifar-100-binary",
    num_records={"train.bin": 50_000, "test.bin": 10_000},
    label_bytes=2,
    column=1,
    keras=("cifar100", "fine"),
)
_FILES_OF_10 = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
SETS = {
    "cifar10": Cifar(
        "cifar10",
        tuple(_CLASSES_OF_10.split()),
        folder="cifar-10-batches-bin",
        num_records=dict.fromkeys(_FILES_OF_10, 10_000),
        label_bytes=1,
        column=0,
        keras=("cifar10",),
    ),
    "cifar100": _SET_OF_100,
    "cifar100_coarse": dataclasses.replace(
        _SET_OF_100,
        name="cifar100_coarse",
        class_names=tuple(_COARSE.split()),
        column=0,
        keras=("cifar100", "coarse"),
    ),
}
