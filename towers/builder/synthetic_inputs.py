"""Synthetic examples of the types that a tower function is called with.

They include values that the function may treat specially: the constants that its graph compares its
arguments with, and tokens from the whole table that they index.
"""

import contextlib
import dataclasses
import functools
import operator
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

UNKNOWN_DIM = 4  # stands for an unknown length that is not the batch
_LONGER = 16, 64  # tried next, for functions that need longer ones
_COMPARISONS = "Equal NotEqual Less LessEqual Greater GreaterEqual".split()
_TESTS_OF_NAN = ("IsNan", "IsInf", "IsFinite")
_MOST_SPECIAL = 8


@dataclasses.dataclass
class Values:
    """The values to try for an argument."""

    tokens: int = 2  # whole numbers below this
    special: list[float] = dataclasses.field(default_factory=list)  # may be treated specially


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
    dims = [UNKNOWN_DIM if dim is None else dim for dim in shape[1:]]
    kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return kind([size, *dims], leaf.dtype)


def sample(spec: tf.TypeSpec, random: np.random.Generator, tokens: int) -> Any:
    """Return a random tensor of a spec: normal floats, uniform whole numbers, numbers as text.

    Args:
        spec: dense, sparse or ragged.
        random: the generator.
        tokens: whole numbers are below this, as labels must be valid; those of uint8 below 256.
    """
    shape = [UNKNOWN_DIM if dim is None else dim for dim in spec.shape]
    if spec.dtype.is_floating:
        value = random.normal(size=shape)
    else:
        value = random.integers(0, 256 if spec.dtype == tf.uint8 else tokens, shape)
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


def values_in(graph: tf.Graph, specs: Sequence[tf.TypeSpec]) -> list[Values]:
    """Return for each argument the values that a traced function may treat specially.

    Args:
        graph: of the function.
        specs: of its first arguments.
    """
    values = [Values() for _ in specs]
    components = [tf.nest.flatten(spec, expand_composites=True) for spec in specs]
    places = [i for i, tensors in enumerate(components) for _ in tensors]
    # Which arguments each op depends on: ops come after what they use.
    of_ops = {x.op.name: {i} for i, x in zip(places, graph.inputs, strict=False)}
    for op in graph.get_operations():
        of_inputs = [of_ops.get(x.op.name, set()) for x in op.inputs]
        sources = of_ops.get(op.name) or functools.reduce(operator.or_, of_inputs, set())
        of_ops[op.name] = sources
        special, rows = [], 0
        if op.type in _TESTS_OF_NAN or (op.type in _COMPARISONS and op.inputs[0] is op.inputs[1]):
            special = [np.nan]
        elif op.type in _COMPARISONS:
            special = [x for operand in op.inputs for x in _around(tf.get_static_value(operand))]
        elif op.type == "GatherV2" and of_inputs[1] and not of_inputs[0]:
            axis, shape = tf.get_static_value(op.inputs[2]), op.inputs[0].shape
            rows = (shape[int(axis)] or 0) if axis is not None and shape.rank else 0
        for i in sources:
            values[i].special += special
            if rows:  # of the smallest table
                values[i].tokens = rows if values[i].tokens == 2 else min(values[i].tokens, rows)
    inner = list(_special_in_functions(graph))
    for to_try, spec in zip(values, specs, strict=True):
        to_try.special = _representable([*to_try.special, *inner], spec.dtype)
    return values


def _around(value: np.ndarray | None) -> list[float]:
    # A constant of a comparison, numbers beside it, and common padding values.
    if value is None or value.size != 1 or value.dtype.kind not in "fiu":
        return []
    number = float(value.item())
    return [number, number + 1, number - 1, 0.0, -1.0]


def _special_in_functions(graph: tf.Graph) -> Iterator[float]:
    # Constants of comparisons in branches, loops and other inner functions.
    for function in graph.as_graph_def().library.function:
        nodes = {node.name: node for node in function.node_def}
        for node in function.node_def:
            for name in node.input if node.op in _COMPARISONS else ():
                producer = nodes.get(name.split(":")[0])
                if producer is not None and producer.op == "Const":
                    yield from _around(tf.make_ndarray(producer.attr["value"].tensor))


def _representable(values: Sequence[float], dtype: tf.DType) -> list[float]:
    # The first few, each once.
    fit = list(values) if dtype.is_floating else []
    if dtype.is_integer:
        low, high = dtype.min, dtype.max
        fit = [v for v in values if np.isfinite(v) and v == int(v) and low <= v <= high]
    once = {str(v): v for v in fit}  # NaN is not NaN
    return list(once.values())[:_MOST_SPECIAL]
