"""The data sets by name: the one place that knows which there are.

To add one, write its module `towers/data/NAME.py` with `load(path) -> Data`, where `path` is the
folder to look in and to keep files in, and give it a line in DATA_SETS. The module of files of the
user's own has `load(path, size)`, that of a downloaded set also `find(path)`, which returns the
paths of its files, or none.
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
    from towers.data.pipeline import Data


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What is known of a data set before its module is loaded."""

    layout: str = ""  # of files of the user's own, which need --data_dir
    downloaded: bool = False  # unless its module finds the files


DATA_SETS = {
    "shapes": DataSet(),
    "cifar10": DataSet(downloaded=True),
    "folder": DataSet("DIR/train/CLASS/*.png (or .jpg, .jpeg, .bmp, .gif), DIR/test/CLASS/*.png"),
    "tfrecord": DataSet("DIR/train*.tfrecord* and DIR/test*.tfrecord* (or val*)"),
}


def load(
    dataset: str = "shapes",
    data_dir: str | None = None,
    image_size: tuple[int, int] | None = None,
) -> Data:
    """Load a data set.

    Args:
        dataset: a name in DATA_SETS, or "module:function", see `towers.data.custom`.
        data_dir: the folder of the user's own files; of the other sets the folder where they are
            looked for and kept, None or "" being `$XDG_CACHE_HOME/towers` or `~/.cache/towers`.
        image_size: (height, width) to which the images of the user's own files are resized; None:
            they are all of one size.

    Raises:
        InputError: there is no such data set, or it is damaged or cannot be had.
    """
    path = _check(dataset, data_dir)
    if ":" not in dataset and DATA_SETS[dataset].layout:
        return _module(dataset).load(path, image_size)
    if image_size:
        raise InputError(
            f"--image_size is for --dataset=folder and tfrecord, not {dataset}: leave it out"
        )
    return _module("custom").load(dataset) if ":" in dataset else _module(dataset).load(path)


def locate(dataset: str, data_dir: str | None = None) -> str | None:
    """Say where a data set comes from, None if it would be downloaded; nothing is loaded.

    Raises:
        InputError: there is no such data set, or some of its files are missing.
    """
    path = _check(dataset, data_dir)
    if ":" in dataset:
        return f"{dataset} is your own: not looked at"
    if DATA_SETS[dataset].downloaded:
        paths = _module(dataset).find(path)
        return f"{dataset} is in {os.path.dirname(paths[0])}" if paths else None
    if DATA_SETS[dataset].layout:
        return f"{path} is there; a run looks at your own files in it"
    return f"{dataset} is drawn in code"


def cache_dir() -> str:
    """Return the folder for what is kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "towers")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"towers.data.{name}")


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
            + f"; allowed are {', '.join(DATA_SETS)} and module:function"
        )
    layout = DATA_SETS[dataset].layout
    if layout and not data_dir:
        raise InputError(f"--dataset={dataset} needs your files; type --data_dir=DIR with {layout}")
    if not os.path.isdir(path) and (layout or os.path.lexists(path)):
        expected = f"expected {layout}" if layout else "name a folder"
        raise InputError(f"--data_dir={path} is not a folder; {expected}")
    return path
