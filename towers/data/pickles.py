"""Read CIFAR-10's Python pickles without running what a pickle may contain.

A pickle is a program. This reader knows the few names that numpy arrays, byte strings and lists
are made with, and puts harmless functions of its own in their place; any other name is an error.
Protocol 2 files written by Python 2 (the official ones) and protocols up to 5 can be read, written
under numpy 1 or 2.
"""

from __future__ import annotations

import pickle

import numpy as np

from towers.data import records
from towers.errors import InputError

# dtype(...) gives back numpy's own unchangeable objects: a state in the file cannot alter them,
# and no object array, which is made of pointers, can be built.
_DTYPES = {name: np.dtype(name) for name in "u1 i1 u2 i2 u4 i4 u8 i8 f4 f8 b1".split()}


def read(path: str, num_records: int) -> tuple[np.ndarray, np.ndarray]:
    """Read a batch of N = `num_records`: a dict with data, uint8 `[N, 3072]`, and N labels.

    Returns:
        Images, uint8 `[N, 32, 32, 3]`, and labels, int32 `[N]`, each 0..9.

    Raises:
        InputError: the file cannot be read, is cut off, needs a name that is not allowed, or holds
            anything else than such a dict.
    """
    size = records.RECORD_BYTES - 1
    expected = f"expected a dict with data, uint8 [{num_records}, {size}], and as many labels"
    try:
        with open(path, "rb") as file:
            batch = _Unpickler(file, encoding="bytes").load()
        images, labels = (batch.get(name.encode(), batch.get(name)) for name in ("data", "labels"))
        labels = np.asarray(labels)
        found = images.dtype, images.shape, labels.dtype.kind, labels.shape
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} is no pickle of CIFAR-10: {reason}; {expected}") from None
    if found not in [("uint8", (num_records, size), kind, (num_records,)) for kind in "iu"]:
        raise InputError(f"{path} is no pickle of CIFAR-10; {expected}")
    return records.images_of(images), records.checked_labels(path, labels)


def _dtype(name: str | bytes, *_: object) -> np.dtype:
    name = name.decode("ascii") if isinstance(name, bytes) else name
    if name not in _DTYPES:
        raise ValueError(f"the dtype {name!r} is not allowed")
    return _DTYPES[name]


def _frombuffer(buffer: bytes, dtype: np.dtype, shape: tuple, order: str) -> np.ndarray:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin-1") if encoding in ("latin1", b"latin1") else b""


# What stands for each name that an array, list or byte string is pickled with. Arrays get their
# shape, dtype and bytes in a later step (numpy's __setstate__, which checks that they agree).
_STAND_INS = {
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): None,
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: np.empty(0, np.uint8),
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): lambda *_: b"",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        known = module.replace("numpy.core", "numpy._core").replace("__builtin__", "builtins")
        if (known, name) not in _STAND_INS:
            raise ValueError(f"{module}.{name} is not allowed in it")
        return _STAND_INS[known, name]

    def persistent_load(self, pid: object) -> object:
        raise ValueError("a persistent id is not allowed in it")
