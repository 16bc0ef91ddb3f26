"""Python values among what towers return: a width, a name, a flag, an array beside the rows.

A value is handed through if every tower returns it, and a call with the whole batch does, too: of
two slices of four examples it may be 4, and of one device's batch 8.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.replica_context import Replicas
from towers.builder.rng import BatchSlice
from towers.builder.sharding import PerTower, Slice, as_leaves, is_split, num_rows
from towers.errors import InputError

_TENSOR = object()  # stands for one


class PythonValues:
    """Takes the Python values out of what copies of a function return, and puts them back."""

    def __init__(self) -> None:
        """Begin without values."""
        self._leaves: list[Any] | None = None  # that all calls return
        self._fn: Callable = lambda: None

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
                if not _are_alike(value, other):
                    raise InputError(
                        f"what the towers' function returns cannot be joined along the batch: its "
                        f"output {i} is {_shown(value)} for one part and {_shown(other)} for "
                        "another; return a tensor with a row for each example, or compute it from "
                        "the joined outputs"
                    )
            tensors = [x if _is_tensor(x) else None for x in leaves]
            return tf.nest.pack_sequence_as(result, tensors)

        self._fn = tensors_of
        return tensors_of

    def put_into(
        self, joined: Any, builder: Any, batch: Sequence[Any], analysis: FunctionAnalysis
    ) -> Any:
        """Return joined results with the Python values that one device has, too.

        Args:
            joined: results of the function that `taken_from` has returned.
            builder: the `TowerBuilder`.
            batch: the global batch.
            analysis: of the function.
        """
        values = self._leaves or []
        if all(value is None or value is _TENSOR for value in values):
            return joined
        if is_split(batch):
            with tf_internals.keep_losses():
                self._call_with_all(builder, batch, analysis)
        pairs = zip(values, tf.nest.flatten(joined), strict=True)
        return tf.nest.pack_sequence_as(joined, [x if v is _TENSOR else v for v, x in pairs])

    def _call_with_all(
        self, builder: Any, batch: Sequence[Any], analysis: FunctionAnalysis
    ) -> None:
        """Call the function with the whole batch, in a graph that is dropped."""
        leaves = [x.values[0] if isinstance(x, PerTower) else x for x in as_leaves(batch)]
        number = next(num_rows(x) for x in leaves if x is not None)
        rows, batch = BatchSlice(0, number, number), tf.nest.pack_sequence_as(batch, leaves)
        one = Replicas(builder, [Slice(batch, rows, number)], analysis)

        def call() -> None:
            builder.run(lambda replica: replica.call(self._fn), one)

        tf.function(call, autograph=False).get_concrete_function()


def _is_tensor(value: Any) -> bool:
    # An array that is made eagerly is of the values of a slice, and has its rows.
    of_values = tf.executing_eagerly() and isinstance(value, np.ndarray) and value.ndim > 0
    return of_values or isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)


def _are_alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    parts = tf.nest.flatten(one, expand_composites=True)
    if type(one) is not type(other) or any(map(tf.is_tensor, parts)):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one) and type(one).__eq__ is not object.__eq__:
        names = [field.name for field in dataclasses.fields(one) if field.compare]
        return all(_are_alike(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


def _shown(value: Any) -> str:
    return "a tensor" if value is _TENSOR else " ".join(repr(value).split())[:60]
