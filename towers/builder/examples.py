"""Made-up examples: values of the types that a tower function is called with."""

from typing import Any

import numpy as np
import tensorflow as tf

UNKNOWN_DIM = 4  # stands for an unknown length that is not the batch


def spec_of(leaf: Any, size: int) -> tf.TypeSpec:
    """Return the type of a leaf of the batch for `size` examples."""
    if isinstance(leaf, tf.RaggedTensor):
        shape = [size, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    dims = [UNKNOWN_DIM if dim is None else dim for dim in leaf.shape[1:]]
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
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(value, ragged_rank=spec.ragged_rank)
    return tf.sparse.from_dense(value) if isinstance(spec, tf.SparseTensorSpec) else value


def stand_in(captured: tf.Tensor) -> tf.Tensor:
    """Return a value for what the function takes from the graph around it, where there is none."""
    if not tf.is_symbolic_tensor(captured):
        return captured
    shape = [UNKNOWN_DIM if dim is None else dim for dim in captured.shape]
    return tf.ones(shape, captured.dtype)
