"""Reads arrays in a file of numpy's: `--dataset=FILE.npz`.

    np.savez("mine.npz", x_train=..., y_train=..., x_test=..., y_test=...)

x_val and y_val are for validation, and w_train holds sample weights. Without a test set, x and y
are enough. Pickled objects are not read.
"""

import numpy as np

from towers.data import user_data
from towers.data.pipeline import Data
from towers.errors import InputError, reason

_REMEDY = "write it with np.savez, from arrays of numbers, booleans or texts"
_EXPECTED = (
    "expected are x_train, y_train, x_test, y_test, or only x and y; optionally x_val, w_train "
    "(sample weights) and the like"
)
_SPLITS = ("train", "_train"), ("train", ""), ("validation", "_val"), ("test", "_test")


def load(dataset: str, path: str) -> Data:
    """Read a file, see `registry.load`; `towers.data.user_data` checks its arrays.

    Raises:
        InputError: the file cannot be read, or has other keys or invalid arrays.
    """
    named = f"--dataset={dataset}"
    arrays = read(path, named)
    refused = InputError(f"{named} has the arrays {', '.join(arrays) or 'none'}; {_EXPECTED}")
    examples: dict[str, list[np.ndarray | None]] = {}
    for split, ending in _SPLITS:
        if f"x{ending}" in arrays:
            if split in examples:  # x and x_train
                raise refused
            examples[split] = [arrays.pop(f"{part}{ending}", None) for part in "xyw"]
    if arrays or "train" not in examples:
        raise refused
    return user_data.data_set(dataset, examples)


def read(path: str, named: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file.

    Args:
        path: of the file.
        named: its name in messages, such as --dataset=mine.npz.

    Raises:
        InputError: it cannot be read, with NumPy's own words.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # zipfile, zlib and numpy raise many kinds
        raise InputError(f"{named} cannot be read: {reason(error)}; {_REMEDY}") from None
