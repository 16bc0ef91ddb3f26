"""The data sets by name. A name with a colon is a function of the user, FILE.npz a file.

To add one, write its module `towers/data/NAME.py`, and add it to NAMES, `load` and `locate`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import TYPE_CHECKING

from towers.errors import InputError

if TYPE_CHECKING:
    from towers.data.pipeline import Data

NAMES = "shapes", "cifar10", "folder"
FOLDER_LAYOUT = (
    "DIR/train/CLASS/*.png (or .jpg, .jpeg, .bmp, .gif), DIR/test/CLASS/*.png, or DIR/CLASS/*.png"
)


def load(
    dataset: str = "shapes",
    data_dir: str | None = None,
    image_size: tuple[int, int] | None = None,
    validation_fraction: float = 0.0,
) -> Data:
    """Load a data set.

    Args:
        dataset: a name in DATA_SETS, "module:function", see `towers.data.user_data`, or the path of
            a file FILE.npz, see `towers.data.npz`.
        data_dir: the folder of the user's files, or of published ones; None or "": CIFAR-10 is
            that of `keras.datasets`.
        image_size: (height, width) to which the images of the user's files are resized; None: all
            must have the same size.
        validation_fraction: the part of the training examples, 0..1, that becomes the validation
            split; 0: the data set's own, if it has one.

    Raises:
        InputError: the data set is unknown, damaged or not available.
    """
    locate(dataset, data_dir)
    if image_size and dataset != "folder":
        raise InputError(
            f"--image_size is for --dataset=folder, not {dataset}; leave it out, or use a folder"
        )
    folder = os.path.expanduser(data_dir or "")
    if dataset.lower().endswith(".npz"):
        from towers.data import npz

        data = npz.load(dataset, _file(dataset, folder))
    elif ":" in dataset:
        from towers.data import user_data

        data = user_data.load(dataset)
    elif dataset == "folder":
        from towers.data import folder as images

        data = images.load(folder, image_size)
    elif dataset == "cifar10":
        from towers.data import cifar

        data = cifar.load(folder)
    else:
        from towers.data import shapes

        data = shapes.load()
    if not validation_fraction:
        return data
    if data.validation:
        raise InputError(
            f"--validation_fraction={validation_fraction}: {data.name} has its own validation set "
            f"of {data.validation.size} examples; leave the flag out"
        )
    train, validation = data.train.held_out(validation_fraction)
    return dataclasses.replace(data, train=train, validation=validation)


def locate(dataset: str, data_dir: str | None = None) -> None:
    """Look whether a data set is there, without loading it, see `load`.

    Raises:
        InputError: there is no such data set, or some of its files are missing.
    """
    folder = os.path.expanduser(data_dir or "")
    if dataset.lower().endswith(".npz"):
        _file(dataset, folder)
    elif ":" in dataset or dataset == "shapes":
        pass  # that of the user is not looked at
    elif dataset == "folder":
        if not folder:
            raise InputError(
                f"--dataset=folder needs your files; type --data_dir=DIR with {FOLDER_LAYOUT}"
            )
        if not os.path.isdir(folder):
            raise InputError(f"--data_dir={folder} is not a folder; expected {FOLDER_LAYOUT}")
    elif dataset == "cifar10":
        from towers.data import cifar

        if folder:  # else keras.datasets downloads it
            cifar.find(folder)
    else:
        close = difflib.get_close_matches(dataset.lower(), NAMES, 1)
        meant = f", did you mean {close[0]}?" if close else ""
        allowed = f"{', '.join(NAMES)}, FILE.npz and module:function"
        raise InputError(f"--dataset={dataset} is unknown{meant}; allowed are {allowed}")


def _file(dataset: str, folder: str) -> str:
    # The name is relative to the current folder or to `folder`.
    name = os.path.expanduser(dataset)
    paths = [name, *([os.path.join(folder, name)] if folder else [])]
    for path in paths:
        if os.path.isfile(path):
            return path
    raise InputError(f"--dataset={dataset}: no file {' or '.join(paths)}")
