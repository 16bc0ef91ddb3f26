"""Read CIFAR-10's Python pickles without running what a pickle may contain.

A pickle is a program. This reader knows the three names that an array is made with, and puts
harmless functions of its own in their place; any other name is an error.
"""

import pickle

import numpy as np

from towers.errors import InputError

# dtype(...) gives back numpy's own unchangeable objects: a state in the file cannot alter them,
# and no object array, which is made of pointers, can be built.
_DTYPES = {name: np.dtype(name) for name in "u1 i1 u2 i2 u4 i4 u8 i8 f4 f8 b1".split()}


def read(path: str, num_records: int, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read a dict of data, uint8 `[N, num_bytes]`, and N = `num_records` labels.

    Returns:
        The data, and the labels `[N]`.

    Raises:
        InputError: the file cannot be read, is cut off, needs a name that is not allowed, or holds
            anything else than such a dict.
    """
    try:
        with open(path, "rb") as file:
            batch = _Unpickler(file, encoding="bytes").load()
        data, labels = batch[b"data"], np.asarray(batch[b"labels"])
        found = (data.dtype, data.shape, labels.dtype.kind, labels.shape)
        if found != ("uint8", (num_records, num_bytes), "i", (num_records,)):
            expected = f"data, uint8 [{num_records}, {num_bytes}], and as many labels"
            raise ValueError(f"expected a dict with {expected}")
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} is no pickle of CIFAR-10: {reason}") from None
    return data, labels


def _dtype(name: bytes | str, *_: object) -> np.dtype:
    return _DTYPES[name if isinstance(name, str) else name.decode("ascii")]


# What stands for each name. Arrays get their shape, dtype and bytes in a later step (numpy's
# __setstate__, which checks that they agree).
_STAND_INS = {
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): None,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: np.empty(0, np.uint8),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: np.empty(0, np.uint8),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _STAND_INS:
            raise ValueError(f"{module}.{name} is not allowed in it")
        return _STAND_INS[module, name]
