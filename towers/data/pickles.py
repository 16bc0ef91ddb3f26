"""Read CIFAR-10's Python pickles without running what a pickle may contain.

A pickle is a program. This reader knows the few names that numpy arrays, byte strings and lists
are made with, and puts harmless functions of its own in their place; any other name is an error.
Protocol 2 files written by Python 2 (the official ones) and protocols up to 5 can be read, written
under numpy 1 or 2.

    images, labels = pickles.read("data_batch_1", num_records=10_000)
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
    """Read one batch: a dict with `data`, uint8 `[N, 3072]`, and `labels`, N ints.

    Args:
        path: the file.
        num_records: N.

    Returns:
        Images, uint8 `[N, 32, 32, 3]`, and labels, int32 `[N]`, each 0..9.

    Raises:
        InputError: the file cannot be read, is cut off, needs a name that is not allowed, or holds
            anything else than such a dict.
    """
    try:
        with open(path, "rb") as file:
            batch = _Unpickler(file, encoding="bytes").load()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} is not a whole CIFAR-10 pickle: {reason}") from None
    if not isinstance(batch, dict):
        raise InputError(
            f"{path} holds a {type(batch).__name__}; expected a dict with data and labels"
        )
    data, labels = (_entry(path, batch, name) for name in ("data", "labels"))
    shape = (num_records, records.RECORD_BYTES - 1)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != shape:
        raise InputError(f"{path}: data is {_kind(data)}; expected a uint8 array {list(shape)}")
    labels = _labels(path, labels, num_records)
    planes = data.reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


def _entry(path: str, batch: dict, name: str) -> object:
    for key in (name.encode(), name):
        if key in batch:
            return batch[key]
    raise InputError(f"{path}: the dict has no {name!r}; expected a dict with data and labels")


def _labels(path: str, labels: object, num_records: int) -> np.ndarray:
    array = labels
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        array = np.array(labels, object)  # as object, for an int of any size fits
    elif not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu":
        array = np.empty(0)
    if array.shape != (num_records,):
        raise InputError(
            f"{path}: labels is {_kind(labels)}; expected a list of {num_records} ints"
        )
    records.check_labels(path, array)
    return array.astype(np.int32)


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"a {value.dtype} array {list(value.shape)}"
    if isinstance(value, list):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a list of {len(value)} ({', '.join(kinds)})"
    return f"a {type(value).__name__}"


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
    "dtype": _dtype,
    "ndarray": None,
    "_reconstruct": lambda *_: np.empty(0, np.uint8),
    "_frombuffer": _frombuffer,
    "encode": _encode,
    "bytes": lambda *_: b"",
}
_ALLOWED = {
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("_reconstruct",),
    "numpy._core.multiarray": ("_reconstruct",),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
    "_codecs": ("encode",),
    "__builtin__": ("bytes",),
    "builtins": ("bytes",),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name not in _ALLOWED.get(module, ()):
            raise ValueError(f"{module}.{name} is not allowed in it")
        return _STAND_INS[name]

    def persistent_load(self, pid: object) -> object:
        raise ValueError("a persistent id is not allowed in it")
