"""Checks and converts the user's arrays: examples of any structure.

    x, y = as_arrays("train", ({"tokens": [[1, 2], [3, 4]], "price": [0.5, 1.5]}, [0, 1]))

Each part is an array, anything that numpy converts to one, or several of these in a dict, a tuple,
or a list of arrays as in Keras.
"""

from collections.abc import Iterator, Sequence

import keras
import numpy as np

from towers.data.pipeline import Structure, is_label, spec_of, stored
from towers.errors import InputError

EXAMPLE_PARTS = ("x", "y", "sample_weight")
MAX_LABEL = np.iinfo(np.int32).max - 1
CLASSES_ARE = "classes are 0, 1, 2, ...; return floats if targets are not classes"


def as_arrays(name: str, parts: Sequence[object]) -> Structure:
    """Return (x,), (x, y) or (x, y, sample_weight) as arrays, in the types of `stored_spec`.

    Args:
        name: for messages.
        parts: the user's x, y and sample_weight; the last ones may be None.

    Raises:
        InputError: a part is no array of numbers, booleans or texts, has a NaN or an infinity, is
            empty, or has another number of rows.
    """
    parts = list(parts)
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    named = [(f"{name} {part}", value) for part, value in zip(EXAMPLE_PARTS, parts, strict=False)]
    example = tuple(_to_arrays(*pair) for pair in named)
    (first, of_first), *others = leaves(example)
    for other, array in others:
        if len(array) != len(of_first):
            raise InputError(
                f"{name} {first} has {len(of_first)} rows, but {other} has {len(array)}; return "
                "one row for each example (numpy.stack makes an array of rows)"
            )
    with np.errstate(over="ignore"):  # of float64: becomes an infinity
        result = stored(_check_targets(name, example))
    for path, array in leaves(result):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
            raise InputError(
                f"{name} {path}: row {row} (counted from 0) has a NaN, an infinity, or a number "
                f"too large for {array.dtype.name}"
            )
    return result


def leaves(example: Structure) -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each leaf, as ("x['tokens']", array).

    Args:
        example: x, y and sample_weight, or the first of these: arrays, specs or structures of them.
    """
    for (part, *keys), leaf in keras.tree.flatten_with_path(example):
        yield EXAMPLE_PARTS[part] + "".join(f"[{key!r}]" for key in keys), leaf


def format_spec(spec: Structure) -> str:
    """Return the shapes and types of an example as text: "x [28, 28] uint8, y [] int32"."""
    return ", ".join(f"{path} {list(leaf.shape)} {leaf.dtype.name}" for path, leaf in leaves(spec))


def describe(value: object) -> str:
    """Return the types and shapes of any value, on one line."""
    if isinstance(value, tuple | list):
        items = ", ".join(map(describe, value[:4]))
        return f"({items}{', ...' * (len(value) > 4)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {getattr(value.dtype, 'name', '')} {value.shape}"
    return type(value).__name__


def _to_arrays(name: str, value: object) -> Structure:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise InputError(f"{name} has the keys {list(value)}; return a dict with str keys")
        arrays = {key: _to_arrays(f"{name}[{key!r}]", v) for key, v in value.items()}
    elif _is_several(value):
        arrays = tuple(_to_arrays(f"{name}[{i}]", v) for i, v in enumerate(value))
    else:
        return _array(name, value)
    if not arrays:
        raise InputError(f"{name} is an empty {type(value).__name__}; add arrays to it")
    return arrays


def _is_several(value: object) -> bool:
    # Whether a value is several arrays, not the rows of one.
    if not isinstance(value, tuple | list):
        return False
    kinds = dict | tuple | (list if isinstance(value, tuple) else tuple)
    return not value or any(
        isinstance(item, kinds) or getattr(item, "ndim", 0) or len(getattr(item, "shape", ()))
        for item in value
    )


def _array(name: str, value: object) -> np.ndarray:
    try:
        # Else numpy would cut zero bytes off the ends of texts.
        text = isinstance(value, tuple | list) and value and isinstance(value[0], str | bytes)
        array = np.array(value, object) if text else np.asarray(value)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{name} is {describe(value)}, not an array: {reason}; pad rows of different lengths"
        ) from None
    objects = array.flat if array.dtype == object else ()
    others = {type(item).__name__ for item in objects if not isinstance(item, str | bytes)}
    if array.dtype.kind not in "iufbSUO" or others:
        has = f" of {', '.join(sorted(others))}" if others else ""
        raise InputError(
            f"{name} is {describe(array)}{has}; return numbers, booleans or texts of one shape, "
            "padded if lengths differ"
        )
    if not array.ndim or 0 in array.shape:
        raise InputError(f"{name} is {describe(value)}; return an array with at least one row")
    if array.dtype.kind == "f" and array.itemsize > 8:  # np.longdouble, which TensorFlow lacks
        with np.errstate(over="ignore"):
            return array.astype(np.float64)
    if array.dtype.kind not in "SUO":
        return array
    texts = [item.encode() if isinstance(item, str) else bytes(item) for item in array.flat]
    return np.array(texts, object).reshape(array.shape)


def _check_targets(name: str, example: Structure) -> Structure:
    # Integer images of a classification become uint8.
    for path, array in leaves(example):
        if array.dtype.kind in "SUO" and not path.startswith("x"):
            raise InputError(
                f"{name} {path}: labels are text; convert them to integers: names, y = "
                "np.unique(y, return_inverse=True)"
            )
    x, y, *_ = (*example, None)
    if not (isinstance(y, np.ndarray) and is_label(spec_of(y))):
        return example
    if isinstance(x, np.ndarray) and x.ndim == 4 and x.dtype.kind in "iu":
        if x.min() < 0 or x.max() > 255:
            raise InputError(
                f"{name} x is {x.dtype} from {x.min()} to {x.max()}; return images as uint8, or "
                "float32 for other ranges"
            )
        example = x.astype(np.uint8, copy=False), *example[1:]
    wrong = np.flatnonzero((y < 0) | (y > MAX_LABEL))
    if wrong.size:
        raise InputError(
            f"{name} y: row {wrong[0]} (counted from 0) is {y.flat[wrong[0]]}; {CLASSES_ARE}"
        )
    return example
