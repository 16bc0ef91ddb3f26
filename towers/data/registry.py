"""The data sets by name: the one place that knows which there are.

A name with a colon is a function of the user's own, one that ends in .npz or .csv a file.

To add one, write its module `towers/data/NAME.py` with `load(path) -> Data`, where `path` is the
folder to look in and to keep files in, and give it a line in DATA_SETS. The module of files of the
user's own has `load(path, size, max_pixels)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

from towers.errors import InputError

if TYPE_CHECKING:
    from towers.data.cifar import Cifar
    from towers.data.pipeline import Data


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What is known of a data set before its module is loaded."""

    layout: str = ""  # of files of the user's own, which need --data_dir
    published: bool = False  # its files are downloaded if they are nowhere


DATA_SETS = {
    "shapes": DataSet(),
    "cifar10": DataSet(published=True),
    "cifar100": DataSet(published=True),
    "cifar100_coarse": DataSet(published=True),
    "folder": DataSet("DIR/train/CLASS/*.png (or .jpg, .jpeg, .bmp, .gif), DIR/test/CLASS/*.png"),
    "tfrecord": DataSet("DIR/train*.tfrecord* and DIR/test*.tfrecord* (or val*)"),
}


def load(
    dataset: str = "shapes",
    data_dir: str | None = None,
    image_size: tuple[int, int] | None = None,
    validation_fraction: float = 0.0,
    target: str = "",
    max_image_pixels: int | None = None,
    categories: str = "",
) -> Data:
    """Load a data set.

    Args:
        dataset: a name in DATA_SETS, "module:function", see `towers.data.custom`, or the path of a
            file: FILE.npz, see `towers.data.npz`, FILE.csv or TRAIN.csv,TEST.csv, see
            `towers.data.table`.
        data_dir: the folder of the user's own files; of the other sets the folder where they are
            looked for and kept, None or "" being `$XDG_CACHE_HOME/towers` or `~/.cache/towers`.
        image_size: (height, width) to which the images of the user's own files are resized; None:
            they are all of one size.
        validation_fraction: the part of the training examples, 0..1, that becomes the validation
            split; 0: the data set's own, if it has one.
        target: the target columns of a table, with commas between them; "": the last one.
        max_image_pixels: of an image in the user's own files; None: see `encoded.MAX_PIXELS`.
        categories: the columns of a table whose texts are categories, with commas between them.

    Raises:
        InputError: there is no such data set, or it is damaged or cannot be had.
    """
    files, own = _files(dataset, data_dir), ":" in dataset
    path = "" if files else _check(dataset, data_dir)
    images = not files and not own and DATA_SETS[dataset].layout
    table = files and files[0].lower().endswith(".csv")
    if image_size and not images:
        raise InputError(
            f"--image_size is for --dataset=folder and tfrecord, not {dataset}: leave it out"
        )
    for flag, value in ("target", target), ("categories", categories):
        if value and not table:
            raise InputError(f"--{flag} is for --dataset=FILE.csv, not {dataset}: leave it out")
    if files:
        found = (
            _module("table").load(dataset, files, target, categories)
            if table
            else _module("npz").load(dataset, files[0])
        )
    elif own:
        found = _module("custom").load(dataset)
    elif DATA_SETS[dataset].published:
        found = _published(dataset).load(path)
    else:
        of_images = [image_size, *([max_image_pixels] if max_image_pixels else [])]
        found = _module(dataset).load(path, *(of_images if images else []))
    return _with_validation(found, validation_fraction) if validation_fraction else found


def _with_validation(data: Data, fraction: float) -> Data:
    """Hold out a part of the training examples for validation."""
    if data.validation:
        raise InputError(
            f"--validation_fraction={fraction}: {data.name} has a validation set of its own, of "
            f"{data.validation.size} examples; leave the flag out"
        )
    train, validation = data.train.held_out(fraction)
    return dataclasses.replace(data, train=train, validation=validation)


def locate(dataset: str, data_dir: str | None = None) -> str | None:
    """Say where a data set comes from, None if it would be downloaded; nothing is loaded.

    Raises:
        InputError: there is no such data set, or some of its files are missing.
    """
    if files := _files(dataset, data_dir):
        return f"{' and '.join(files)}: there; a run looks at what is inside"
    path = _check(dataset, data_dir)
    if ":" in dataset:
        return f"{dataset} is your own: not looked at"
    if DATA_SETS[dataset].published:
        paths = _published(dataset).find(path)
        return f"{dataset} is in {os.path.dirname(paths[0])}" if paths else None
    if DATA_SETS[dataset].layout:
        return f"{path} is there; a run looks at your own files in it"
    return f"{dataset} is drawn in code"


def stand_in(dataset: str) -> Data:
    """Return images drawn in code, of the form and with the classes of a published data set."""
    names = _published(dataset).class_names
    return dataclasses.replace(load("shapes"), num_classes=len(names), class_names=names)


def cache_dir() -> str:
    """Return the folder for what is kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "towers")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"towers.data.{name}")


def _published(dataset: str) -> Cifar:
    return _module("cifar").SETS[dataset]


def _files(dataset: str, data_dir: str | None) -> list[str]:
    """Return the paths of the files that a data set names, none if it names no files."""
    names = dataset.split(",")
    if not all(name.lower().endswith(".csv") for name in names):
        names = [dataset] if dataset.lower().endswith((".npz", ".csv")) else []
    if len(names) > 2:
        raise InputError(
            f"--dataset={dataset} names {len(names)} files; TRAIN.csv,TEST.csv is meant"
        )
    folders = ["", *([os.path.expanduser(data_dir)] if data_dir else [])]
    found = []
    for name in names:
        paths = [os.path.join(folder, os.path.expanduser(name)) for folder in folders]
        there = [p for p in paths if os.path.exists(p) and not os.path.isdir(p)]
        if not there:
            raise InputError(
                f"--dataset={dataset}: there is no file {' or '.join(paths)}; name one "
                "that is there"
            )
        found.append(there[0])
    return found


def _check(dataset: str, data_dir: str | None) -> str:
    """Refuse what cannot be looked for; return the folder to look in."""
    path = os.path.expanduser(data_dir) if data_dir else cache_dir()
    if ":" in dataset:
        return path
    if dataset not in DATA_SETS:
        close = difflib.get_close_matches(dataset.lower(), DATA_SETS, n=1)
        raise InputError(
            f"--dataset={dataset} is unknown"
            + (f", did you mean {close[0]}?" if close else "")
            + f"; allowed are {', '.join(DATA_SETS)}, FILE.npz, FILE.csv and module:function"
        )
    layout = DATA_SETS[dataset].layout
    if layout and not data_dir:
        raise InputError(f"--dataset={dataset} needs your files; type --data_dir=DIR with {layout}")
    if not os.path.isdir(path) and (layout or os.path.lexists(path)):
        expected = f"expected {layout}" if layout else "name a folder"
        raise InputError(f"--data_dir={path} is not a folder; {expected}")
    return path
