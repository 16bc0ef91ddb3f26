"""Reads image files in folders: `--dataset=folder --data_dir=DIR`.

    DIR/train/CLASS/*.png    also .jpg, .jpeg, .bmp, .gif, and in folders below
    DIR/test/CLASS/*.png     or DIR/validation or DIR/val, which beside test is a third split

or DIR/CLASS/*.png alone. Without a folder for testing a tenth of the images is held out.

Labels are 0, 1, ... in the order of the class names. Only the files' names are in memory (some 100
bytes each); see `towers.data.encoded_images`.
"""

import dataclasses
import os

import numpy as np

from towers.data import encoded_images
from towers.data.pipeline import Data
from towers.errors import InputError
from towers.formatting import count, first_of

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
_EXPECTED = "expected DIR/train/CLASS/*.png and DIR/test/CLASS/*.png, or DIR/CLASS/*.png"


def load(folder: str, size: encoded_images.Size | None) -> Data:
    """Find the images in DIR, to be read as uint8 `[H, W, 3]`; decode a few of them.

    Args:
        folder: DIR.
        size: (height, width) to which images are resized; None: all must have the same size.

    Raises:
        InputError: a folder is missing, empty or cannot be read, test has a class that train has
            not, sizes differ and `size` is None, or a decoded image is damaged.
    """
    train, above = os.path.join(folder, "train"), os.path.dirname(folder.rstrip(os.sep)) or ".."
    names = [n for n in ("test", "validation", "val") if os.path.isdir(os.path.join(folder, n))]
    part = os.path.basename(os.path.abspath(folder)) in ("train", "test", "validation", "val")
    if not names and part and os.path.isdir(os.path.join(above, "train")):
        raise InputError(f"--data_dir={folder}: name the folder above, --data_dir={above}")
    if alone := not (names or os.path.isdir(train)):
        train = folder
    paths = {"train": train} | ({"test": os.path.join(folder, names[0])} if names else {})
    if len(names) > 1 and names[0] == "test":
        paths["validation"] = os.path.join(folder, names[1])
    class_names, sources, others, notes = _class_names(train), {}, [], []
    for split, path in paths.items():
        names, labels = [], []
        for name in _class_names(path):
            of_class = os.path.join(path, name)
            if name not in class_names:
                has = first_of(class_names)
                raise InputError(f"{of_class} is a class that {train} has not; it has {has}")
            images = images_below(of_class, others)
            if alone and any(os.path.dirname(image) != of_class for image in images):
                raise InputError(  # of another layout?
                    f"--data_dir={folder} has no folder train, and {name} in it has folders of "
                    f"images; {_EXPECTED}"
                )
            if not images:
                raise InputError(
                    f"{of_class} has no images ({', '.join(ENDINGS)}); put some there, or remove it"
                )
            names += [image[len(path) + 1 :] for image in images]
            labels += [class_names.index(name)] * len(images)
        sources[split] = _ImageFiles(path, names, labels)
        if absent := [n for i, n in enumerate(class_names) if i not in labels]:
            notes.append(f"note        {path} has no images of {first_of(absent)}")
    if others:
        notes.append(
            f"note        {count(len(others), 'file')} not read, of other endings than "
            f"{', '.join(ENDINGS)}: {first_of(sorted(others), 3)}"
        )
    data = encoded_images.data_set("folder", sources, class_names, size)
    give = os.path.join(folder, "test") + (f", and those to train on in {folder}/train," * alone)
    held_out = [f"{note}; images in {give} give it one" for note in data.notes]
    return dataclasses.replace(data, notes=(*held_out, *notes))


class _ImageFiles(encoded_images.Source):
    def __init__(self, folder: str, names: list[str], labels: list[int]):
        self._folder = folder
        self._names = np.array([os.fsencode(name) for name in names])  # compact: no object each
        self.labels = np.array(labels, np.int32)

    def read(self, row: int) -> bytes:
        with open(self.name(row), "rb") as file:
            return file.read()

    def name(self, row: int) -> str:
        return os.path.join(self._folder, os.fsdecode(bytes(self._names[row])))

    def files(self) -> tuple[str, list[str]]:
        return self._folder, [os.fsdecode(bytes(name)) for name in self._names]


def _class_names(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; {_EXPECTED}") from None
    if not names:
        raise InputError(f"{folder} has no folders of classes; {_EXPECTED}")
    return sorted(names)


def images_below(folder: str, others: list[str] | None = None) -> list[str]:
    """Return the paths of the images in a folder and those below, sorted.

    Args:
        folder: the folder.
        others: if given, the paths of files that are no images, but for hidden ones, are added.

    Raises:
        InputError: a folder cannot be read.
    """
    paths, waiting = [], [folder]
    try:
        for parent in waiting:  # the list grows
            with os.scandir(parent) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.name.startswith("."):  # ._a.png is what macOS puts beside a.png
                        continue
                    elif entry.name.lower().endswith(ENDINGS):
                        paths.append(entry.path)
                    elif others is not None:
                        others.append(entry.path)
    except OSError as error:
        raise InputError(
            f"{error.filename} cannot be read: {error.strerror}; mend or remove it"
        ) from None
    return sorted(paths)
