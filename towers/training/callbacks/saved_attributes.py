"""Saves what callbacks and other objects hold, and sets it again when training goes on.

Saved are public attributes that are numbers, strings, None, lists and dictionaries of these, arrays
or lists of arrays; arguments of the constructor are not, since the same call passes them again.
"""

import inspect
import io
import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

_OF_KERAS = vars(keras.callbacks.Callback()).keys()  # `params` are of the fit or run at hand
_SCALARS = bool | int | float | str | None


def pack(items: Sequence[Any]) -> np.ndarray:
    """Return the attributes of objects as bytes, uint8 [n]; no code is in them.

    Args:
        items: the objects.
    """
    plain: list[list[Any]] = []  # [[class, {attribute: value}, {attribute: number of arrays}]]
    arrays: dict[str, np.ndarray] = {}
    for i, item in enumerate(items):
        values, lists = {}, {}
        arguments = inspect.signature(type(item)).parameters
        for name, value in dict(vars(item)).items():
            if name.startswith("_") or name in arguments or name in _OF_KERAS:
                continue
            value = value.item() if isinstance(value, np.generic) else value
            parts = value if isinstance(value, list) else [value]
            if _is_plain(value):
                values[name] = value
            elif all(isinstance(part, np.ndarray) and not part.dtype.hasobject for part in parts):
                lists[name] = len(parts) if parts is value else None
                arrays |= {f"{i}/{name}/{j}": part for j, part in enumerate(parts)}
        plain.append([type(item).__name__, values, lists])
    np.savez(file := io.BytesIO(), plain=json.dumps(plain), **arrays)
    return np.frombuffer(file.getvalue(), np.uint8)


def unpack(packed: np.ndarray, items: Sequence[Any]) -> None:
    """Set the attributes of objects; an object of another class than was packed is left alone.

    Args:
        packed: from `pack`.
        items: objects in the order in which they were packed.
    """
    with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as saved:
        plain = json.loads(str(saved["plain"]))
        for i, (item, (kind, values, lists)) in enumerate(zip(items, plain, strict=False)):
            if type(item).__name__ != kind:
                continue
            for name, number in lists.items():
                parts = [saved[f"{i}/{name}/{j}"] for j in range(number or 1)]
                values[name] = parts[0] if number is None else parts
            for name, value in values.items():
                setattr(item, name, value)


def _is_plain(value: Any) -> bool:
    """Return whether JSON gives the same value back."""
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return all(map(_is_plain, value)) if type(value) is list else isinstance(value, _SCALARS)
