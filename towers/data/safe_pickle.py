"""Reads a pickled dict with arrays of bytes, without running anything else in the pickle.

A pickle is a program. The reader replaces the names by which arrays are built with harmless
functions, and rejects all others. A large memo index can allocate gigabytes, and deeply nested
tuples overflow the stack when they are freed, so all opcodes are checked before any is executed.
"""

import pickle
import pickletools
from io import BytesIO

import numpy as np

_MAX_CONTAINERS = 1000  # with MARK, which is written for each 1000 items of a list
_CONTAINERS = {
    "MARK", "EMPTY_LIST", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_DICT", "DICT", "EMPTY_SET", "FROZENSET", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ",
    "NEWOBJ_EX",
}  # fmt: skip


def loads(content: bytes) -> object:
    """Return the content of a pickle; it uses a few times the memory of its bytes.

    Raises:
        Exception: of any type: it is damaged, or has other objects than arrays of bytes.
    """
    containers = 0
    for step, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        containers += opcode.name in _CONTAINERS
        if containers > _MAX_CONTAINERS:
            raise ValueError(f"it has more than {_MAX_CONTAINERS} lists, tuples and dicts")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > step:
            raise ValueError(f"it asks for {argument} places to remember things in")
    return _Unpickler(BytesIO(content), encoding="bytes").load()


def _dtype(name: bytes | str, *_: object) -> np.dtype:
    # numpy's immutable object, which a state in the file cannot change. An array of objects, which
    # holds pointers, cannot be built.
    if name not in (b"u1", "u1"):
        raise ValueError(f"the dtype {name!r} is not allowed in it")
    return np.dtype(np.uint8)


# Arrays get their shape, dtype and bytes later, by numpy's __setstate__, which checks them.
_STAND_INS = {
    "numpy.dtype": _dtype,
    "numpy.ndarray": None,
    "numpy.core.multiarray._reconstruct": lambda *_: np.empty(0, np.uint8),
    "numpy._core.multiarray._reconstruct": lambda *_: np.empty(0, np.uint8),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if f"{module}.{name}" not in _STAND_INS:
            raise ValueError(f"{module}.{name} is not allowed in it")
        return _STAND_INS[f"{module}.{name}"]
