"""Arrays that take long to make, kept in a file from one run to the next."""

import contextlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from towers import files


def kept(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays that a file holds; make them, and the file, where it is not there or whole.

    Where it cannot be written a warning says so, and the next run makes the arrays again.
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
