"""Made-up rows of a batch, for a function whose real rows are not known while it is traced."""

import contextlib
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

UNKNOWN_DIM = 4  # stands for an unknown length that is not the batch
_LONGER = 16, 64  # tried next, for functions that need longer ones


def possible_shapes(leaves: Sequence[Any], layers: Sequence[keras.Layer]) -> Iterator[list]:
    """Yield lists of the leaves' shapes, with the unknown dimensions filled in.

    First come the shapes of the layers' own inputs, then some lengths.

    Args:
        leaves: tensors of a batch.
        layers: that the function can reach, the outermost first.
    """
    shapes = [leaf.shape for leaf in leaves]
    if all(is_known(leaf) for leaf in leaves):
        yield shapes
        return
    tried = []
    for shapes_taken in map(_input_shapes, layers):
        unused, filled = list(map(tf.TensorShape, shapes_taken)), []
        for shape in shapes:
            suits = (t for t in unused if t.rank and shape[1:].is_compatible_with(t[1:]))
            if taken := next(suits, None):
                unused.remove(taken)
                shape = shape[:1].concatenate(shape[1:].merge_with(taken[1:]))
            filled.append(shape)
        if filled != shapes and filled not in tried:
            tried.append(filled)
            yield filled
    for length in (UNKNOWN_DIM, *_LONGER):
        yield [
            shape
            if shape.rank is None
            else tf.TensorShape([*shape[:1], *(length if d is None else d for d in shape[1:])])
            for shape in shapes
        ]


def _input_shapes(layer: keras.Layer) -> list[tuple]:
    """Return the shapes that a layer was built for."""
    if getattr(layer, "inputs", None):
        return [x.shape for x in layer.inputs]
    config, found = layer.get_build_config() or {}, []
    keras.tree.map_shape_structure(found.append, list(config.get("shapes_dict", config).values()))
    return [tuple(shape) for shape in found if isinstance(shape, tuple | list)]


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
    dims = [UNKNOWN_DIM if dim is None else dim for dim in shape[1:]]
    kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return kind([size, *dims], leaf.dtype)


def sample(spec: tf.TypeSpec, random: np.random.Generator, kind: int = 0) -> Any:
    """Return a random tensor of a spec.

    Args:
        spec: dense, sparse or ragged.
        random: the generator.
        kind: 0: normal floats, and 0 and 1; 1: floats between 0 and 1; 2: these, and 1 and 2.
            Numbers of uint8 are below 256; text is made of numbers.
    """
    shape = [UNKNOWN_DIM if dim is None else dim for dim in spec.shape]
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
    """Return the values of tensors; None unless all are eager or follow from `given` ones."""
    if not all(isinstance(x, tf.Tensor) for x in tensors):
        return None
    if not any(map(tf.is_symbolic_tensor, tensors)):
        return list(tensors) if len(tensors[0]) else None
    known = _GIVEN.get(tf.compat.v1.get_default_graph())
    if not known or not all(map(tf.is_symbolic_tensor, tensors)):
        return None
    needed, waiting = {}, [x.op for x in tensors]
    while waiting:
        op = waiting.pop()
        if op.name in needed or f"{op.name}:0" in known:
            continue
        if op.op_def.is_stateful or op.type == "Placeholder":
            return None
        needed[op.name] = op
        waiting += [x.op for x in op.inputs]
    graph = tf.compat.v1.GraphDef(node=[op.node_def for op in needed.values()])
    graph.library.CopyFrom(tensors[0].graph.as_graph_def().library)
    for node in graph.node:
        node.input[:] = [name for name in node.input if not name.startswith("^")]

    computed = [x.name for x in tensors if x.name not in known]
    used = {x.name for op in needed.values() for x in op.inputs}

    def compute() -> list[tf.Tensor]:
        inputs = {name: tf.identity(value) for name, value in known.items() if name in used}
        return tf.graph_util.import_graph_def(graph, input_map=inputs, return_elements=computed)

    try:
        with tf.init_scope(), tf.device("/cpu:0"):
            values = iter(tf.function(compute, autograph=False)() if computed else ())
            return [known[x.name] if x.name in known else next(values) for x in tensors]
    except Exception:  # of many kinds: the values are only to be tried
        return None


def stand_in(captured: tf.Tensor) -> tf.Tensor:
    """Return a captured tensor if it is eager, else one of its shape: of ones, or of fractions."""
    if not tf.is_symbolic_tensor(captured):
        return captured
    shape = [UNKNOWN_DIM if dim is None else dim for dim in captured.shape]
    if not captured.dtype.is_floating:
        return tf.ones(shape, captured.dtype)
    # A weight of 1, or of 0, would hide what it is the weight of.
    waves = np.sin(1 + 12.9898 * np.arange(np.prod(shape, dtype=int)))
    return tf.cast(0.4 + 0.2 * waves.reshape(shape), captured.dtype)
