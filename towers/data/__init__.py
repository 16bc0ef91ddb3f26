"""Data sets: found, checked, and given out in batches.

In use:

    data = towers.data.load("cifar10", data_dir="~/data")
    for images, labels, draws in data.train.train_batches(128, seed=1): ...
"""

from __future__ import annotations

import difflib
import os

from towers.data import augment, cifar10, custom, folder, shapes, tfrecord
from towers.data.pipeline import ArraySplit, Data, DatasetSplit, Split
from towers.errors import InputError

__all__ = ["ArraySplit", "Data", "DatasetSplit", "Split", "augment", "is_there", "load"]

_LOADERS = {"shapes": shapes.load, "cifar10": cifar10.load}
_OWN_FILES = {"folder": folder.LAYOUT, "tfrecord": tfrecord.LAYOUT}
_NAMES = (*_LOADERS, *_OWN_FILES)


def load(
    dataset: str = "shapes",
    data_dir: str | None = None,
    image_size: tuple[int, int] | None = None,
) -> Data:
    """Load a data set.

    Args:
        dataset: "shapes" (built in, drawn at the first use), "cifar10" (downloaded at the first
            use), "folder" or "tfrecord" (the user's own files, which need not fit in memory, see
            the modules of these names) or "module:function", see `towers.data.custom`.
        data_dir: the folder where the first two are looked for and kept; None or "" means
            `$XDG_CACHE_HOME/towers`, or `~/.cache/towers`. The folder of the user's own files.
        image_size: (height, width) to which the images of "folder" and "tfrecord" are resized;
            None: they are all of one size.

    Returns:
        The data set.

    Raises:
        InputError: there is no such data set, or it is damaged or cannot be had.
    """
    if image_size and dataset not in _OWN_FILES:
        raise InputError(
            f"--image_size is for --dataset=folder and tfrecord, not {dataset}: leave it out"
        )
    if ":" in dataset:
        return custom.load(dataset)
    if dataset not in _NAMES:
        close = difflib.get_close_matches(dataset.lower(), _NAMES, n=1)
        raise InputError(
            f"--dataset={dataset} is unknown; allowed are {', '.join(_NAMES)} and module:function"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    if dataset in _OWN_FILES and not data_dir:
        layout = _OWN_FILES[dataset]
        raise InputError(f"--dataset={dataset} needs --data_dir=DIR; expected {layout}")
    path = os.path.expanduser(data_dir) if data_dir else _default_dir()
    if os.path.lexists(path) and not os.path.isdir(path):
        raise InputError(f"--data_dir={path} is not a folder; name a folder")
    if dataset == "folder":
        return folder.load(path, image_size)
    if dataset == "tfrecord":
        return tfrecord.load(path, image_size, cache_dir=_default_dir())
    return _LOADERS[dataset](path)


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
