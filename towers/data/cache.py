"""Caches arrays in a file."""

import contextlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from towers import files


def cached_arrays(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays in a file; if it is missing or damaged, make them and write it.

    Args:
        path: of the .npz file; if it cannot be written, a warning is printed.
        make: returns {name: array}.
    """
    with contextlib.suppress(OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile):
        with open(path, "rb") as file, np.load(file) as arrays:
            return dict(arrays)
    arrays = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        print(f"warning: {path} cannot be kept: {error.strerror}", file=sys.stderr)
    return arrays
