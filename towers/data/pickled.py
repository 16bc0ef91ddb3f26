"""A pickled dict with arrays of bytes, read without giving what else a pickle may hold a chance.

A pickle is a program. Its reader knows the three names that an array is made with, puts harmless
functions of its own in their place, and refuses any other name. Nine bytes can ask for gigabytes,
by a memo of so many places, and three million for tuples nested so deep that freeing them overruns
the stack; so its steps are looked through before any is made: few containers are allowed, and no
place in the memo beyond the number of steps.
"""

import pickle
import pickletools
from io import BytesIO

import numpy as np

_CONTAINERS = 1000  # with MARK; a writer makes one for each 1000 items of a list
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_CODES = {code.name: ord(code.code) for code in pickletools.opcodes}
_ARGUMENT_BYTES = {ord(c.code): c.arg.n if c.arg else 0 for c in pickletools.opcodes}
_OF_TWO_LINES = {_CODES[name] for name in ("GLOBAL", "INST")}
_MAKING = {
    code
    for name, code in _CODES.items()
    if name.rstrip("123") in (
        "MARK EMPTY_LIST LIST EMPTY_TUPLE TUPLE EMPTY_DICT DICT EMPTY_SET FROZENSET REDUCE BUILD "
        "INST OBJ NEWOBJ NEWOBJ_EX"
    ).split()
}  # fmt: skip
_PUT, _LONG_BINPUT, _STOP = (_CODES[name] for name in ("PUT", "LONG_BINPUT", "STOP"))


def loads(content: bytes) -> object:
    """Return what a pickle holds; it takes some times the memory that its bytes do.

    Raises:
        Exception: of many kinds: it is damaged, or holds what it should not.
    """
    _check(content)
    return _Unpickler(BytesIO(content), encoding="bytes").load()


def _check(content: bytes) -> None:
    """Refuse what could take more memory or stack than its bytes account for."""
    place = steps = containers = 0
    while place < len(content):  # beyond the end, and at a code that is none, the reader refuses
        code = content[place]
        place, steps = place + 1, steps + 1
        size = _ARGUMENT_BYTES.get(code)
        if code == _STOP or size is None:
            return
        if code in _MAKING:
            containers += 1
            if containers > _CONTAINERS:
                raise ValueError(f"it has more than {_CONTAINERS} lists, tuples and dicts")
        if size >= 0:
            if code == _LONG_BINPUT:
                _check_memo(int.from_bytes(content[place : place + size], "little"), steps)
            place += size
        elif size == pickletools.UP_TO_NEWLINE:
            for _ in range(1 + (code in _OF_TWO_LINES)):
                start, place = place, content.find(b"\n", place) + 1
                if not place:
                    return
            if code == _PUT:
                _check_memo(int(content[start:place]), steps)
        else:
            start, place = place, place + _LENGTH_BYTES[size]
            place += int.from_bytes(content[start:place], "little")
    if place > len(content):
        raise EOFError("it ends too early")


def _check_memo(index: int, steps: int) -> None:
    if index > steps:
        raise ValueError(f"it asks for {index} places to remember things in")


def _dtype(name: bytes | str, *_: object) -> np.dtype:
    # numpy's own unchangeable object: a state in the file cannot alter it; and no array of objects,
    # which is made of pointers, can be built.
    if name not in (b"u1", "u1"):
        raise ValueError(f"the dtype {name!r} is not allowed in it")
    return np.dtype(np.uint8)


# What stands for each name. Arrays get their shape, dtype and bytes in a later step (numpy's
# __setstate__, which checks that they agree).
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
