"""The table of data sets by name.

A name with a colon is a function of the user, one that ends in .npz a file.

To add one, write its module `towers/data/NAME.py` with `load(path) -> Data`, where `path` is the
folder of its files, and add a line in DATA_SETS and a call in `load`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
from typing import TYPE_CHECKING

from towers.errors import InputError
from towers.options.parts import DataOptions

if TYPE_CHECKING:
    from towers.data.pipeline import Data


@dataclasses.dataclass(frozen=True)
class DataSet:
    """The properties of a data set that are needed before its module is imported."""

    module: str
    layout: str = ""  # of the user's files, which need --data_dir
    published: bool = False  # its files are downloaded if they are missing


DATA_SETS = {
    "shapes": DataSet("shapes"),
    "cifar10": DataSet("cifar", published=True),
    "cifar100": DataSet("cifar", published=True),
    "cifar100_coarse": DataSet("cifar", published=True),
    "folder": DataSet(
        "folder",
        "DIR/train/CLASS/*.png (or .jpg, .jpeg, .bmp, .gif), DIR/test/CLASS/*.png, or "
        "DIR/CLASS/*.png",
    ),
}


def load(
    dataset: str = "shapes",
    data_dir: str | None = None,
    image_size: tuple[int, int] | None = None,
    validation_fraction: float = 0.0,
    max_image_pixels: int | None = None,
) -> Data:
    """Load a data set.

    Args:
        dataset: a name in DATA_SETS, "module:function", see `towers.data.user_data`, or the path of
            a file FILE.npz, see `towers.data.npz`.
        data_dir: the folder of the user's files, or of published ones; None or "" for these is
            `$XDG_CACHE_HOME/towers` or `~/.cache/towers`.
        image_size: (height, width) to which the images of the user's files are resized; None: all
            must have the same size.
        validation_fraction: the part of the training examples, 0..1, that becomes the validation
            split; 0: the data set's own, if it has one.
        max_image_pixels: of an image in the user's files; None: `DataOptions.max_image_pixels`.

    Raises:
        InputError: the data set is unknown, damaged or not available.
    """
    kind, paths = _look_up(dataset, data_dir)
    if image_size and kind != "folder":
        raise InputError(
            f"--image_size is for --dataset=folder, not {dataset}: leave it out, or name such data"
        )
    module = importlib.import_module(f"towers.data.{kind}")
    if kind == "cifar":
        module = module.SETS[dataset]
    most = max_image_pixels or DataOptions.max_image_pixels
    arguments = {
        "npz": (dataset, *paths),
        "user_data": (dataset,),
        "folder": (*paths, image_size, most),
    }
    data = module.load(*arguments.get(kind, paths))
    if not validation_fraction:
        return data
    if data.validation:
        raise InputError(
            f"--validation_fraction={validation_fraction}: {data.name} has a validation set of its "
            f"own, of {data.validation.size} examples; leave the flag out"
        )
    train, validation = data.train.held_out(validation_fraction)
    return dataclasses.replace(data, train=train, validation=validation)


def locate(dataset: str, data_dir: str | None = None) -> str | None:
    """Return a line on where a data set is, None if it would be downloaded.

    Args:
        dataset: as for `load`.
        data_dir: as for `load`.

    Raises:
        InputError: there is no such data set, or some of its files are missing.
    """
    kind, paths = _look_up(dataset, data_dir)
    if kind == "npz":
        return f"{paths[0]}: there; a run looks at what is inside"
    if kind == "user_data":
        return f"{dataset} is your own: not looked at"
    if kind == "shapes":
        return f"{dataset} is drawn in code"
    if kind == "cifar":
        from towers.data import cifar

        files = cifar.SETS[dataset].find(*paths)
        return f"{dataset} is in {os.path.dirname(files[0])}" if files else None
    return f"{paths[0]} is there; a run looks at your own files in it"


def stand_in(dataset: str) -> Data:
    """Return synthetic images with the shape and classes of a published data set."""
    from towers.data import cifar

    names = cifar.SETS[dataset].class_names
    return dataclasses.replace(load("shapes"), num_classes=len(names), class_names=names)


def cache_dir() -> str:
    """Return the folder of cached files."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "towers")


def _look_up(dataset: str, data_dir: str | None) -> tuple[str, list[str]]:
    # The module that loads a data set, and its files or its folder.
    if dataset.lower().endswith(".npz"):
        return "npz", [_file(dataset, data_dir)]
    if ":" in dataset:
        return "user_data", []
    if os.path.isdir(dataset) and dataset not in DATA_SETS:
        raise InputError(
            f"--dataset={dataset} is a folder: for its images type --dataset=folder "
            f"--data_dir={dataset}"
        )
    if dataset not in DATA_SETS:
        close = difflib.get_close_matches(dataset.lower(), DATA_SETS, n=1)
        module = dataset.removesuffix(".py")
        close = [f"{module}:load"] if os.path.isfile(f"{module}.py") else close
        meant = f", did you mean {close[0]}?" if close else ""
        allowed = f"{', '.join(DATA_SETS)}, FILE.npz and module:function"
        raise InputError(f"--dataset={dataset} is unknown{meant}; allowed are {allowed}")
    path, layout = os.path.expanduser(data_dir or cache_dir()), DATA_SETS[dataset].layout
    if layout and not data_dir:
        raise InputError(f"--dataset={dataset} needs your files; type --data_dir=DIR with {layout}")
    if not os.path.isdir(path) and (layout or os.path.lexists(path)):
        expected = f"expected {layout}" if layout else "name a folder"
        raise InputError(f"--data_dir={path} is not a folder; {expected}")
    return DATA_SETS[dataset].module, [path]


def _file(dataset: str, data_dir: str | None) -> str:
    # The name is relative to the current folder or to `data_dir`.
    folders = ["", *([os.path.expanduser(data_dir)] if data_dir else [])]
    paths = [os.path.join(folder, os.path.expanduser(dataset)) for folder in folders]
    for path in paths:
        if os.path.isfile(path):
            return path
    raise InputError(f"--dataset={dataset}: there is no file {' or '.join(paths)}")
