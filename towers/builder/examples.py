"""Made-up examples: values of the types that a tower function is called with."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_private

UNKNOWN_DIM = 4  # stands for an unknown length that is not the batch
_LONGER = 16, 64  # and these do, where a function takes no such short ones


def possible_shapes(leaves: Sequence[Any], layers: Sequence[keras.Layer]) -> Iterator[list]:
    """Yield shapes of the leaves of a batch, with lengths for what is unknown in them.

    They are what the layers were made for, the outermost first, and then some of all lengths.
    """
    shapes = [leaf.shape for leaf in leaves]
    if all(is_known(leaf) for leaf in leaves):
        yield shapes
        return
    tried = []
    for shapes_taken in map(tf_private.input_shapes, layers):
        unused = list(map(tf.TensorShape, shapes_taken))
        found = [_filled(shape, unused) for shape in shapes]
        if found != shapes and found not in tried:
            tried.append(found)
            yield found
    for length in (UNKNOWN_DIM, *_LONGER):
        yield [_with_length(shape, length) for shape in shapes]


def is_known(leaf: Any) -> bool:
    """Tell whether all but the number of examples is known; ragged rows have any length."""
    if isinstance(leaf, tf.RaggedTensor):
        return True
    return leaf.shape.rank is not None and leaf.shape[1:].is_fully_defined()


def _filled(shape: tf.TensorShape, unused: list[tf.TensorShape]) -> tf.TensorShape:
    """Return a shape with the lengths of the first one that suits it, which is then used."""
    for i, taken in enumerate(unused):
        if taken.rank and shape[1:].is_compatible_with(taken[1:]):
            del unused[i]
            return shape[:1].concatenate(shape[1:].merge_with(taken[1:]))
    return shape


def _with_length(shape: tf.TensorShape, length: int) -> tf.TensorShape:
    """Return a shape in which unknown lengths are this one."""
    if shape.rank is None:
        return shape
    return tf.TensorShape([*shape[:1], *(length if dim is None else dim for dim in shape[1:])])


def spec_of(leaf: Any, size: int, shape: tf.TensorShape | None = None) -> tf.TypeSpec:
    """Return the type of a leaf of the batch, of a shape if it is given, for `size` examples."""
    if isinstance(leaf, tf.RaggedTensor):
        shape = [size, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    shape = leaf.shape if shape is None else shape
    dims = [UNKNOWN_DIM if dim is None else dim for dim in shape[1:]]
    kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return kind([size, *dims], leaf.dtype)


def sample(spec: tf.TypeSpec, random: np.random.Generator) -> Any:
    """Return a value of a type: labels and token numbers must be small to be valid."""
    shape = [UNKNOWN_DIM if dim is None else dim for dim in spec.shape]
    if spec.dtype.is_floating:
        value = random.normal(size=shape)
    else:
        value = random.integers(0, 256 if spec.dtype == tf.uint8 else 2, shape)
    is_text = spec.dtype == tf.string
    value = tf.strings.as_string(value) if is_text else tf.cast(tf.constant(value), spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 1:
        lengths = random.integers(1, value.shape[1] + 1, value.shape[0])
        return tf.RaggedTensor.from_tensor(value, lengths)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(value, ragged_rank=spec.ragged_rank)
    return tf.sparse.from_dense(value) if isinstance(spec, tf.SparseTensorSpec) else value


def stand_in(captured: tf.Tensor) -> tf.Tensor:
    """Return a value for what the function takes from the graph around it, where there is none."""
    if not tf.is_symbolic_tensor(captured):
        return captured
    shape = [UNKNOWN_DIM if dim is None else dim for dim in captured.shape]
    return tf.ones(shape, captured.dtype)
