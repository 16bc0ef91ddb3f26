"""Made-up rows of a batch, for a function whose real rows are not known while it is traced."""

import contextlib
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_LENGTHS = 4, 16, 64  # stand for unknown ones; the longer ones for functions that need them


def possible_shapes(leaves: Sequence[Any]) -> Iterator[list[tf.TensorShape]]:
    """Yield lists of the leaves' shapes, with the unknown dimensions filled in."""
    shapes = [leaf.shape for leaf in leaves]
    if all(map(is_known, leaves)):
        yield shapes
        return
    for length in _LENGTHS:
        yield [shape if shape.rank is None else _filled(shape, length) for shape in shapes]


def _filled(shape: tf.TensorShape, length: int = _LENGTHS[0]) -> tf.TensorShape:
    """Return a shape with a length in place of those that are unknown, but for axis 0."""
    return tf.TensorShape([*shape[:1], *(length if dim is None else dim for dim in shape[1:])])


def is_known(leaf: Any) -> bool:
    """Return whether a leaf's shape is known but for axis 0 and ragged dimensions."""
    if isinstance(leaf, tf.RaggedTensor):
        return True
    return leaf.shape.rank is not None and leaf.shape[1:].is_fully_defined()


def spec_of(leaf: Any, size: int, shape: tf.TensorShape) -> tf.TypeSpec:
    """Return the TypeSpec of a leaf for another number of examples.

    Args:
        leaf: a tensor of the batch.
        size: number of examples.
        shape: used in place of the leaf's own; ignored for a ragged leaf.
    """
    if isinstance(leaf, tf.RaggedTensor):
        shape = [size, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    if shape.rank is None:
        raise ValueError("the shape of an argument is unknown; set it by tf.ensure_shape")
    kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return kind([size, *_filled(shape)[1:]], leaf.dtype)


def sample(spec: tf.TypeSpec, random: np.random.Generator, kind: int = 0) -> Any:
    """Return a random tensor of a spec.

    Args:
        spec: dense, sparse or ragged.
        random: the generator.
        kind: 0: normal floats, and 0 and 1; 1: floats between 0 and 1; 2: these, and 1 and 2.
            Numbers of uint8 are below 256; text is made of numbers.
    """
    shape = [_LENGTHS[0] if dim is None else dim for dim in spec.shape]
    if spec.dtype.is_floating or spec.dtype.is_complex:
        value = random.normal(size=shape) if kind == 0 else random.random(shape)
    else:
        value = random.integers(0, 256 if spec.dtype == tf.uint8 else 2, shape) + (kind == 2)
    is_text = spec.dtype == tf.string
    value = tf.strings.as_string(value) if is_text else tf.cast(tf.constant(value), spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 1:
        lengths = random.integers(1, value.shape[1] + 1, value.shape[0])
        return tf.RaggedTensor.from_tensor(value, lengths)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(value, ragged_rank=spec.ragged_rank)
    return tf.sparse.from_dense(value) if isinstance(spec, tf.SparseTensorSpec) else value


# {graph: {name of a placeholder: its value}}
_GIVEN: MutableMapping[tf.Graph, dict[str, tf.Tensor]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def feed_values(arguments: Any, values: Any) -> Iterator[None]:
    """Set the values of the current graph's arguments for `known_values`, in the block.

    Args:
        arguments: a structure of the graph's placeholders, and of anything else.
        values: of the arguments, in the same order.
    """
    tensors, real = (
        list(filter(tf.is_tensor, tf.nest.flatten(each, expand_composites=True)))
        for each in (arguments, values)
    )
    pairs = zip(tensors, real, strict=False)
    known = {x.name: v for x, v in pairs if tf.is_symbolic_tensor(x) and x.dtype == v.dtype}
    graph = tf.compat.v1.get_default_graph()
    _GIVEN[graph] = known
    try:
        yield
    finally:
        _GIVEN.pop(graph, None)


def known_values(tensors: Sequence[Any]) -> list[Any] | None:
    """Return the values of tensors; None unless all are eager or arguments with `feed_values`."""
    if not tensors or not all(isinstance(x, tf.Tensor) for x in tensors):
        return None
    given = _GIVEN.get(tf.compat.v1.get_default_graph(), {})
    values = [given.get(x.name) if tf.is_symbolic_tensor(x) else x for x in tensors]
    return None if any(x is None for x in values) else values


def stand_in(captured: tf.Tensor) -> tf.Tensor:
    """Return a captured tensor if it is eager, else one of its shape."""
    if not tf.is_symbolic_tensor(captured):
        return captured
    spec = tf.TensorSpec(captured.shape, captured.dtype)
    return sample(spec, np.random.default_rng(0), kind=2)  # a weight of 0 would hide what it is of
