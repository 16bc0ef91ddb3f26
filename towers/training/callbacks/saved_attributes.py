"""Saves what callbacks and other objects hold, and sets it again when training goes on.

Saved are public attributes that are numbers, strings, None, arrays, and lists, tuples, sets, deques
and dictionaries of these; arguments of the constructor are not, since the same call passes them
again.
"""

import collections
import inspect
import io
import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from towers.formatting import first_of

_OF_KERAS = vars(keras.callbacks.Callback()).keys()  # `params` are of the fit or run at hand
_SCALARS = bool, int, float, str, type(None)
_CONTAINERS = {c.__name__: c for c in (list, tuple, set, dict, collections.deque)}


def pack(items: Sequence[Any]) -> np.ndarray:
    """Return the attributes of objects as bytes, uint8 [n]; no code is in them."""
    arrays: list[np.ndarray] = []
    packed: list[list[Any]] = []  # [[class, {attribute: value}, [attributes that are not saved]]]
    for item in items:
        values, unsaved = {}, []
        for name, value in dict(getattr(item, "__dict__", {})).items():
            if name.startswith("_") or name in _OF_KERAS or name in _arguments(type(item)):
                continue
            try:
                values[name] = _encode(value, arrays)
            except (TypeError, RecursionError):
                if isinstance(value, tuple(_CONTAINERS.values())):  # else it is no data
                    unsaved.append(f"{type(item).__name__}.{name}")
        packed.append([type(item).__name__, values, unsaved])
    np.savez(file := io.BytesIO(), *arrays, attributes=json.dumps(packed))
    return np.frombuffer(file.getvalue(), np.uint8)


def unpack(packed: np.ndarray, items: Sequence[Any]) -> list[str]:
    """Set the attributes of objects; an object of another class than was packed is left alone.

    Args:
        packed: from `pack`.
        items: objects in the order in which they were packed.

    Returns:
        Containers that could not be saved, as "MyCallback.seen".
    """
    found = []
    with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as saved:
        attributes = json.loads(str(saved["attributes"])) if "attributes" in saved else []
        for item, (kind, values, unsaved) in zip(items, attributes, strict=False):
            if type(item).__name__ == kind:
                found += unsaved
                for name, value in values.items():
                    setattr(item, name, _decode(value, saved))
    return found


def unsaved_note(names: Sequence[str]) -> str:
    """Return a sentence on what `unpack` returns."""
    return (
        f"not saved, so as at the start: {first_of(names)}; saved are public attributes that are "
        "numbers, texts, arrays, and lists, tuples, sets, deques and dictionaries of these"
    )


def _arguments(kind: type) -> Sequence[str]:
    try:
        return list(inspect.signature(kind).parameters)
    except ValueError:  # a class written in C
        return []


def _encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a value for JSON: a scalar, or [type, ...] of a container or an array.

    Args:
        value: any; TypeError says that it is not saved.
        arrays: to which those in it are appended.
    """
    if isinstance(value, np.number | np.bool_):
        value = value.item()
    if type(value) in _SCALARS:
        return value
    if type(value) is np.ndarray and not value.dtype.hasobject:
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if type(value) not in _CONTAINERS.values():
        raise TypeError(f"{type(value).__name__} is not saved")
    parts = value.items() if type(value) is dict else value
    return [type(value).__name__, [_encode(part, arrays) for part in parts],
            getattr(value, "maxlen", None)]  # fmt: skip


def _decode(value: Any, arrays: Any) -> Any:
    """Return the value that `_encode` was given."""
    if not isinstance(value, list):
        return value
    kind, parts, *more = value
    if kind == "array":
        return arrays[f"arr_{parts}"]
    parts = [_decode(part, arrays) for part in parts]
    return collections.deque(parts, *more) if kind == "deque" else _CONTAINERS[kind](parts)
