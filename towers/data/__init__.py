"""Data sets: found, checked, and given out in batches.

In use:

    data = towers.data.load("cifar10", data_dir="~/data")
    for images, labels, draws in data.train.train_batches(128, seed=1): ...
"""

from __future__ import annotations

import difflib
import os

from towers.data import augment, cifar10, custom, shapes
from towers.data.pipeline import ArraySplit, Data, DatasetSplit, Split
from towers.errors import InputError

__all__ = ["ArraySplit", "Data", "DatasetSplit", "Split", "augment", "is_there", "load"]

_LOADERS = {"shapes": shapes.load, "cifar10": cifar10.load}


def load(dataset: str = "shapes", data_dir: str | None = None) -> Data:
    """Load a data set.

    Args:
        dataset: "shapes" (built in, drawn at the first use), "cifar10" (downloaded at the first
            use) or "module:function", the user's own, see `towers.data.custom`.
        data_dir: the folder where the first two are looked for and kept. None or "" means
            `$XDG_CACHE_HOME/towers`, or `~/.cache/towers`.

    Returns:
        The data set.

    Raises:
        InputError: there is no such data set, or it is damaged or cannot be had.
    """
    if ":" in dataset:
        return custom.load(dataset)
    if dataset not in _LOADERS:
        close = difflib.get_close_matches(dataset.lower(), _LOADERS, n=1)
        raise InputError(
            f"--dataset={dataset} is unknown; allowed are shapes, cifar10 and module:function"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    folder = os.path.expanduser(data_dir) if data_dir else _default_dir()
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise InputError(f"--data_dir={folder} is not a folder; name a folder")
    return _LOADERS[dataset](folder)


def is_there(dataset: str, data_dir: str | None = None) -> bool:
    """Tell whether a data set's files are at hand, so that nothing would be downloaded.

    Raises:
        InputError: some of the files are missing.
    """
    return dataset != "cifar10" or bool(
        cifar10.find(os.path.expanduser(data_dir) if data_dir else _default_dir())
    )


def _default_dir() -> str:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the standard says to ignore a relative one
        cache = os.path.expanduser("~/.cache")
    return os.path.join(cache, "towers")
