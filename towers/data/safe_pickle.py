"""A pickled dict with arrays of bytes, read so that nothing else in the pickle can run.

A pickle is a program. Its reader knows the names that an array is made with, puts harmless
functions of its own in their place, and refuses any other name. Nine bytes can ask for gigabytes,
by a memo of so many places, and three million for tuples nested so deep that freeing them overruns
the stack; so its steps are looked through before any is made.
"""

import pickle
import pickletools
from io import BytesIO

import numpy as np

_MAX_CONTAINERS = 1000  # with MARK; a writer makes one for each 1000 items of a list
_CONTAINERS = {
    "MARK", "EMPTY_LIST", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_DICT", "DICT", "EMPTY_SET", "FROZENSET", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ",
    "NEWOBJ_EX",
}  # fmt: skip


def loads(content: bytes) -> object:
    """Return the content of a pickle; it takes a few times the memory of its bytes.

    Raises:
        Exception: of many kinds: it is damaged, or has other objects than arrays of bytes.
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
    # numpy's own unchangeable object: a state in the file cannot alter it; and no array of objects,
    # which is made of pointers, can be built.
    if name not in (b"u1", "u1"):
        raise ValueError(f"the dtype {name!r} is not allowed in it")
    return np.dtype(np.uint8)


# Arrays get their shape, dtype and bytes in a later step (numpy's __setstate__, which checks that
# they agree).
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
