"""CIFAR-100: `cifar100` has a hundred classes, `cifar100_coarse` the twenty that these belong to.

Images: 50,000 for training and 10,000 for testing, uint8 `[32, 32, 3]`; 180 MB.
Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

import functools
import os

import numpy as np

from towers.data import cifar
from towers.data.published import Published

FINE_NAMES = tuple(
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse "
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy "
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television "
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm".split()
)
COARSE_NAMES = tuple(
    "aquatic_mammals fish flowers food_containers fruit_and_vegetables "
    "household_electrical_devices household_furniture insects large_carnivores "
    "large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores "
    "medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1 "
    "vehicles_2".split()
)
RECORDS = {"train": 50_000, "test": 10_000}

_LABELS = {"coarse_labels": len(COARSE_NAMES), "fine_labels": len(FINE_NAMES)}


def _read(path: str, content: bytes, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, and the labels of a key in `_LABELS`."""
    num_records = RECORDS[os.path.basename(path).removesuffix(".bin")]
    images, labels = cifar.read(path, content, "CIFAR-100", num_records, _LABELS)
    return images, labels[:, list(_LABELS).index(key)]


def _set(name: str, class_names: tuple[str, ...], key: str) -> Published:
    return Published(
        name=name,
        title="CIFAR-100",
        class_names=class_names,
        forms=(("train.bin", "test.bin"), ("train", "test")),
        # That of the binary files is vouched for by one source alone; that of their archive is not.
        md5_of={
            "train": "16019d7e3df5f24257cddd939b257f8d",
            "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        },
        max_bytes=cifar.MAX_PICKLE * RECORDS["train"] * cifar.PICTURE_BYTES,
        folder="cifar-100-binary",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        read=functools.partial(_read, key=key),
        sign="cifar",
    )


SETS = {
    "cifar100": _set("cifar100", FINE_NAMES, "fine_labels"),
    "cifar100_coarse": _set("cifar100_coarse", COARSE_NAMES, "coarse_labels"),
}
