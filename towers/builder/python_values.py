"""Python values among what towers return: a width, a name, a flag, an array beside the rows.

A value is handed through if every tower returns it, and the analysis of the function does, too,
which has another number of examples: of two slices of four examples a value may be 4.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from towers.builder.function_analysis import FunctionAnalysis
from towers.errors import InputError

_TENSOR = object()  # stands for one


class PythonValues:
    """Takes the Python values out of what copies of a function return, and puts them back."""

    def __init__(self, analysis: FunctionAnalysis) -> None:
        """Begin with the values of the analysis, if there are any."""
        trace = analysis.trace
        self._leaves = [_TENSOR if _is_tensor(x) else x for x in trace.leaves] if trace else None
        self._reason = analysis.reason

    def taken_from(self, fn: Callable) -> Callable:
        """Return a function that returns what `fn` does, with None in place of Python values.

        It raises InputError if another call has returned other ones.
        """

        def tensors_of(*batch: Any) -> Any:
            result = fn(*batch)
            leaves = tf.nest.flatten(result)
            own = [_TENSOR if _is_tensor(x) else x for x in leaves]
            self._leaves = self._leaves or own
            for i, (value, other) in enumerate(zip(self._leaves, own, strict=False)):
                unknown = self._reason and not (other is None or other is _TENSOR)
                if unknown or not _are_alike(value, other):
                    raise InputError(
                        "what the towers' function returns cannot be joined along the batch: its "
                        f"output {i} is {_shown(value)} for one part and {_shown(other)} for "
                        "another; return a tensor with a row for each example, or compute it from "
                        "the joined outputs"
                    )
            tensors = [x if _is_tensor(x) else None for x in leaves]
            return tf.nest.pack_sequence_as(result, tensors)

        return tensors_of

    def put_into(self, joined: Any) -> Any:
        """Return joined results of the function that `taken_from` returned, with Python values."""
        values = self._leaves or []
        if all(value is None or value is _TENSOR for value in values):
            return joined
        pairs = zip(values, tf.nest.flatten(joined), strict=True)
        return tf.nest.pack_sequence_as(joined, [x if v is _TENSOR else v for v, x in pairs])


def _is_tensor(value: Any) -> bool:
    # An array that is made eagerly is of the values of a slice, and has its rows.
    of_values = tf.executing_eagerly() and isinstance(value, np.ndarray) and value.ndim > 0
    return of_values or tf.is_tensor(value)


def _are_alike(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # of any kind: of tensors, of arrays, of the user's own code
        return False


def _shown(value: Any) -> str:
    return "a tensor" if value is _TENSOR else " ".join(repr(value).split())[:60]
