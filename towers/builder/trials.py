"""The trials of the check: what rows and variables both sides begin from.

Rows are the user's own, in several orders and changed, or made up if they are not known while a
function is traced.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.builder.replica_scope import SEED_STATE

# From a variable and its value to what its copy begins from.
Values = Callable[[tf.Variable, np.ndarray], Any]
_PERIOD = 4093  # of noise: a prime, so that rows of a weight get different numbers
_LENGTHS = 4, 16, 64  # stand for unknown ones; the longer ones for functions that need them


def possible_shapes(leaves: Sequence[Any]) -> Iterator[list[tf.TensorShape]]:
    """Yield lists of the leaves' shapes, with the unknown dimensions filled in."""
    shapes = [leaf.shape for leaf in leaves]
    if all(map(is_known, leaves)):
        yield shapes
        return
    for length in _LENGTHS:
        yield [
            x if x.rank is None
            else tf.TensorShape([*x[:1], *(length if n is None else n for n in x[1:])])
            for x in shapes
        ]  # fmt: skip


def is_known(leaf: Any) -> bool:
    """Return whether a leaf's shape is known but for axis 0 and ragged dimensions."""
    if isinstance(leaf, tf.RaggedTensor):
        return True
    return leaf.shape.rank is not None and leaf.shape[1:].is_fully_defined()


def spec_of(leaf: Any, size: int, shape: tf.TensorShape) -> tf.TypeSpec:
    """Return the TypeSpec of a tensor of the batch for another number of examples.

    The shape is used in place of its own, but for a ragged one.

    Args:
        leaf: a tensor of the batch.
        size: number of examples.
        shape: in place of the leaf's own, unless that is ragged.
    """
    if isinstance(leaf, tf.RaggedTensor):
        shape = [size, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    if shape.rank is None:
        raise ValueError("the shape of an argument is unknown; set it with tf.ensure_shape")
    kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return kind([size, *shape[1:]], leaf.dtype)


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


_GIVEN: dict[int, tf.Tensor] = {}  # values of arguments, by id


@contextlib.contextmanager
def feed_values(arguments: Any, values: Any) -> Iterator[None]:
    """Let `known_values` find the values of a graph's arguments, any structure, in the block.

    Args:
        arguments: of a graph, any structure.
        values: of these, in the same order.
    """
    tensors, real = (
        list(filter(tf.is_tensor, tf.nest.flatten(each, expand_composites=True)))
        for each in (arguments, values)
    )
    pairs = zip(tensors, real, strict=False)
    known = {id(x): v for x, v in pairs if tf.is_symbolic_tensor(x) and x.dtype == v.dtype}
    _GIVEN.update(known)
    try:
        yield
    finally:
        for key in known:
            _GIVEN.pop(key, None)


def known_values(tensors: Sequence[Any]) -> list[Any] | None:
    """Return the values of tensors; None unless all are eager or arguments with `feed_values`."""
    if not tensors or not all(isinstance(x, tf.Tensor) for x in tensors):
        return None
    values = [_GIVEN.get(id(x)) if tf.is_symbolic_tensor(x) else x for x in tensors]
    return None if any(x is None for x in values) else values


def stand_in(captured: tf.Tensor) -> tf.Tensor:
    """Return a captured tensor if it is eager, otherwise one of its shape."""
    if not tf.is_symbolic_tensor(captured):
        return captured
    spec = tf.TensorSpec(captured.shape, captured.dtype)
    return sample(spec, np.random.default_rng(0), kind=2)  # a weight of 0 would hide what it is of


@dataclasses.dataclass(frozen=True)
class Trial:
    """What both sides begin from."""

    how: str
    inputs: Sequence[Any]
    values: Values
    scale: float  # of what goes back
    loose: float = 1.0  # times the tolerance: one large example costs the others digits


def trials(one: Any, rows: Callable[[int], list[Any]]) -> Iterator[Trial]:
    """Yield the trials, those first that find most.

    Args:
        one: the trace on one device.
        rows: returns arguments of the function, for 0 unchanged, otherwise in another order.
    """

    def changed(seed: int, change: Callable, *amounts: float) -> list[Any]:
        return [_changed(x, change, *amounts) if is_dense_float(x) else x for x in rows(seed)]

    small, big = small_scale(one), 1e3 if one.float_bytes >= 4 else 1.0
    far = 100.0 if one.float_bytes == 8 else 10.0
    loose = 1.0 if one.float_bytes == 8 else 10.0
    yield Trial("on these examples", rows(0), as_it_is, small)
    yield Trial("with noise on the variables", rows(1), noisy, small)
    yield Trial("after many steps", rows(0), _late, small)
    yield Trial("with one outlier", changed(2, _far, 100.0), noisy, small, far)
    yield Trial("with one outlier", changed(1, _far, -100.0, 0.0), noisy, big, far)
    yield Trial("with noise on the variables", rows(2), noisy, big)
    for share in (1e-3, 1e-2):
        yield Trial("with small gradients", rows(1), noisy, share * small)
    for values in (_a_step_before, _in_mode(1, 0.5), _in_mode(2, -0.5)):
        yield Trial("in a later step", rows(0), values, small)
    for part in range(2):  # a large counter hides what is added to it
        yield Trial("after many steps", rows(0), _partly_late(one, part), small)
    yield Trial("on these examples", rows(3), as_it_is, small)
    yield Trial("with missing values (NaN)", changed(0, _with_nan), noisy, small)
    for seed, factor in enumerate((30.0, 3.0, -3.0, 10.0, -10.0, -30.0), 3):
        yield Trial("with large inputs", changed(seed, np.multiply, factor), noisy, small, loose)
    for shift in (10.0, 100.0):
        yield Trial("with large inputs", changed(0, _apart, shift), noisy, small, loose)


def small_scale(one: Any) -> float:
    """Return that of a mean over examples; 16 bits overflow soon."""
    return (1.0 if one.float_bytes >= 4 else 0.05) / one.size


def jittered(trial: Trial, step: float, has_weights: bool) -> Trial:
    """Return a trial with other last digits of the weights; without weights, of the inputs.

    A function may ask whether inputs are equal to something. `step` is the relative change.

    Args:
        trial: any.
        step: the relative change.
        has_weights: whether weights are changed; otherwise inputs are.
    """

    def values(variable: tf.Variable, value: np.ndarray) -> Any:
        value = trial.values(variable, value)
        return _jitter(value, step) if variable.dtype.is_floating else value

    inputs = [_jitter(x, step) if is_dense_float(x) else x for x in trial.inputs]
    inputs = trial.inputs if has_weights else inputs
    return dataclasses.replace(trial, inputs=inputs, values=values)


# What a copy of a variable begins from, by the variable and its value.


def as_it_is(_: tf.Variable, value: np.ndarray) -> Any:
    """Return the variable's value.

    Args:
        _: a variable.
        value: its value.
    """
    return value


def noisy(variable: tf.Variable, value: np.ndarray) -> Any:
    """Return a float's value with noise: a weight of zero would hide what it is the weight of.

    Args:
        variable: of a float or another type.
        value: its value.
    """
    if not variable.dtype.is_floating:
        return value
    waves = _waves(1.0, 12.9898, value.shape)
    # Others than weights stay positive, as a variance must be.
    return _plus(value, 0.1 * waves if variable.trainable else 0.05 + 0.05 * np.abs(waves))


def _late(variable: tf.Variable, value: np.ndarray) -> Any:
    """Return what a counter, an average or a flag may be after many steps."""
    value, is_float = noisy(variable, value), variable.dtype.is_floating
    if (variable.trainable and is_float) or SEED_STATE in variable.name:
        return value
    if value.dtype == bool:
        return ~value
    if value.shape:
        return _plus(value, 100.0) if is_float else value
    return _plus(value, 1000 if is_float or variable.dtype.size >= 4 else 50)


def _partly_late(one: Any, part: int) -> Values:
    """Return values with every other state as after many steps."""
    late = {id(v.handle) for v in [v for v in one.variables if not v.trainable][part::2]}
    return lambda v, value: _late(v, value) if id(v.handle) in late else value


def _in_mode(number: int, amount: float) -> Values:
    """Return values with each single number a little more: a stage, or how far a gate is open."""

    def values(variable: tf.Variable, value: np.ndarray) -> Any:
        if not _is_number(variable, value):
            return noisy(variable, value)
        return _plus(value, amount if variable.dtype.is_floating else number)

    return values


def _a_step_before(variable: tf.Variable, value: np.ndarray) -> Any:
    """Return a counter's value from which the next step is a round number."""
    if not _is_number(variable, value) or (variable.trainable and variable.dtype.is_floating):
        return noisy(variable, value)
    return np.asarray(999 if variable.dtype.size >= 4 else 99, value.dtype)


def _is_number(variable: tf.Variable, value: np.ndarray) -> bool:
    return not (value.shape or value.dtype == bool or SEED_STATE in variable.name)


def _plus(value: np.ndarray, more: Any) -> np.ndarray:
    return (np.asarray(value, np.float64) + more).astype(value.dtype)


# Rows that are changed. Whole numbers stay: they may be classes, indices or marks.


def is_dense_float(x: Any) -> bool:
    """Return whether x is a dense tensor of floats."""
    return isinstance(x, tf.Tensor) and x.dtype.is_floating


def _changed(x: tf.Tensor, change: Callable, *amounts: float) -> tf.Tensor:
    return tf.constant(change(x.numpy(), *amounts).astype(x.dtype.as_numpy_dtype))


def _with_nan(x: np.ndarray) -> np.ndarray:
    """Make one number of the first example and one of the last NaN."""
    x = x.copy()
    x.reshape(len(x), -1)[[0, -1], :1] = np.nan
    return x


def _far(x: np.ndarray, factor: float, rest: float = 1.0) -> np.ndarray:
    """Move the first example far away, and multiply the others."""
    return np.concatenate([x[:1] * factor + 1.0, x[1:] * rest])


def _apart(x: np.ndarray, shift: float) -> np.ndarray:
    """Move the last two examples one way, the others the other way.

    So the means of both slices are on both sides of that of all.
    """
    steps = np.full([len(x), *[1] * (x.ndim - 1)], -2 * shift / max(len(x) - 2, 1))
    steps[-2:] = shift
    return x + steps


def _jitter(value: Any, step: float) -> Any:
    """Return a value with other last digits."""
    array = np.asarray(value)
    wide = array if array.dtype.itemsize >= 4 else array.astype(np.float64)
    moved = wide * (1 + step * np.sign(_waves(7.0 + 1e6 * step, 78.233, array.shape)))
    return np.where(np.rint(array) == array, array, moved).astype(array.dtype)


def _waves(phase: float, frequency: float, shape: Sequence[int]) -> np.ndarray:
    """Return numbers from -1 to 1, which repeat: many sines would take longer than a trial."""
    size = int(np.prod(shape))
    waves = np.sin(phase + frequency * np.arange(min(size, _PERIOD)))
    return np.resize(waves, size).reshape(shape)
