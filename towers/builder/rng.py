"""Random numbers by example: a tower draws its rows of what one device draws for the whole batch.

Dropout masks, noise and augmentation then depend on an example's place in the global batch, and not
on the number of towers. `function_analysis` finds which axis of a draw is the batch. TensorFlow's
generators are counter-based (Philox, Salmon et al. 2011), so a draw can begin at any row.

XLA converts the bits of Philox to other numbers than TensorFlow's kernels do: in compiled towers
they are converted here. Uniform numbers are equal to the last bit, normal ones up to the rounding
of log, sin and cos.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import device_names

PHILOX = 1  # TensorFlow's number of the algorithm
_KEY_OF_SEEDS = 0x02461E293EC8F720  # TensorFlow's, of the draw that makes a key of each seed
_LEAST = 1e-7  # of the uniform number whose logarithm is taken
# Bits of a number between 1 and 2 of each type: those of its fraction, and all others.
_NARROW = {
    tf.float32: (tf.uint32, 23, 127),
    tf.float16: (tf.uint16, 10, 15),
    tf.bfloat16: (tf.uint16, 7, 127),
}
SEEN = "seen_draw"  # name scope of the draws that `ReplicaRng` makes
SEEN_OPS = frozenset(
    "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessRandomUniformIntV2 "
    "StatelessRandomUniformFullIntV2 StatelessTruncatedNormalV2".split()
)
# A truncated normal draws until a number is in range: TensorFlow reserves these counts for each.
_COUNTS_OF_TRUNCATED = 64


@dataclasses.dataclass(frozen=True)
class BatchSlice:
    """A slice of the global batch, in numbers of examples: ints or scalar tensors."""

    start: Any
    size: Any
    total: Any  # of the global batch


@dataclasses.dataclass(frozen=True)
class BatchAxis:
    """The axis of a draw that holds the examples."""

    axis: int | None  # None: the draw is for the whole batch
    # Number of neighbors along the axis that belong to one example: 1 if the examples alternate
    # (time * batch), None if all of an example are neighbors (batch * time).
    inner: int | None = None


WHOLE = BatchAxis(None)


@dataclasses.dataclass(frozen=True)
class DrawInfo:
    """The analysis of one draw; None: unknown."""

    op: str  # one of `tf_internals.DRAWS`
    dims: tuple[tuple[int, int], ...] | None  # (constant, factor of the number of examples)
    layout: BatchAxis | None
    layer: str = ""
    shape: list[int] | None = None  # where it was analyzed

    @property
    def is_folded(self) -> bool:
        """Whether an example has several numbers along the batch axis."""
        axis = self.layout and self.layout.axis
        return axis is not None and self.dims[axis][1] > 1

    def time_major(self) -> "DrawInfo":
        """Return the same with the examples alternating along the batch axis."""
        return dataclasses.replace(self, layout=BatchAxis(self.layout.axis, 1))

    def _fits(self, op: str, shape: tf.TensorShape, size: Any) -> bool:
        # Whether a draw for `size` examples has this op and a matching shape.
        if op != self.op or self.dims is None or shape.rank != len(self.dims):
            return False
        if tf.is_tensor(size):  # a dimension that is known does not grow with it
            expected = [None if factor else constant for constant, factor in self.dims]
        else:
            expected = [constant + factor * size for constant, factor in self.dims]
        return all(n in (None, known) for n, known in zip(shape, expected, strict=True))

    def _is_fixed(self, op: str, shape: tf.TensorShape) -> bool:
        # Whether a draw for another number of examples has the shape that was analyzed.
        return op == self.op and shape.rank is not None and shape.as_list() == self.shape


class ReplicaRng:
    """Draws a tower's rows, draw by draw in the order of the analysis.

    It replaces the draws of Keras' `SeedGenerator`, and all of `tf.random.stateless_*` but gamma,
    binomial, poisson and categorical.
    """

    def __init__(
        self,
        rows: BatchSlice | None,
        known: Sequence[DrawInfo] | None = None,
        by_xla: bool = False,
        device: str = "",
    ):
        """Set the rows to draw.

        Args:
            rows: of the batch; None if it is not split.
            known: the analysis of the draws, in order; None if there is none.
            by_xla: whether XLA compiles the draws, which must equal those of TensorFlow's kernels.
            device: of the tower.
        """
        self.rows, self.known, self.by_xla = rows, known or (), by_xla
        self._on_gpu = device_names.is_gpu(device) and not by_xla
        self._places = itertools.count()
        self.num_guessed = 0  # draws that the analysis does not know

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Replace the draws in the block; it may be entered again."""
        with contextlib.ExitStack() as stack:
            if self._on_gpu:
                stack.enter_context(tf_internals.patch_keys(_key_and_counter))
            if self.rows is not None or self.by_xla:
                stack.enter_context(tf_internals.patch_draws(self))
            yield

    def __call__(
        self, op_name: str, /, shape: Any, *, counter: Any, alg: Any, **arguments: Any
    ) -> tf.Tensor:
        """Draw by one of TensorFlow's ops, which counts up from `counter`."""
        arguments.pop("name", None)  # an absolute name, which would ignore the scope below
        op = tf_internals.draw_op(op_name)
        if self.by_xla:
            op = _FOR_XLA.get(op_name, op)
        layout = WHOLE if self.rows is None else self._layout(op_name, shape)
        with tf.name_scope(SEEN):
            if layout.axis is None:
                return op(shape, counter=counter, alg=alg, **arguments)
            return self._draw_rows(op, op_name, shape, layout, counter, arguments)

    def _layout(self, name: str, shape: Any) -> BatchAxis:
        static, size, place = tf_internals.static_shape(shape), self.rows.size, next(self._places)
        # Recomputation in a backward pass draws again: any of them.
        expected = self.known[place : place + 1] or self.known
        layouts = {drawn.layout for drawn in expected if drawn._fits(name, static, size)}
        if len(layouts) == 1 and None not in layouts:
            return layouts.pop()
        if any(drawn._is_fixed(name, static) for drawn in expected):
            return WHOLE
        if None not in {drawn.layout for drawn in expected}:
            self.num_guessed += 1
        return _guess(static, size)

    def _draw_rows(
        self, op: Any, op_name: str, shape: Any, layout: BatchAxis, counter: Any, arguments: dict
    ) -> tf.Tensor:
        """Draw the slice's rows of what `op` draws for the whole batch."""
        # Sizes that are known are ints here, the others are made on the host: shapes are needed
        # there, and TensorFlow would have numbers of int64, constants too, on a GPU.
        with tf.device(device_names.HOST) if self._on_gpu else contextlib.nullcontext():
            dims = tf_internals.static_shape(shape).as_list()
            if None in dims:
                sizes = tf.unstack(tf.cast(shape, tf.int64), len(dims))
                dims = [n if dim is None else dim for n, dim in zip(sizes, dims, strict=True)]
            start, size, total = (
                tf.cast(number, tf.int64) if tf.is_tensor(number) else number
                for number in (self.rows.start, self.rows.size, self.rows.total)
            )
            number, after = math.prod(dims), math.prod(dims[layout.axis + 1 :])
            of_axis = dims[layout.axis] // _at_least_1(size)  # of each example
            inner = after * (of_axis if layout.inner is None else layout.inner)
            if layout.axis or layout.inner is not None:  # not contiguous: draw all, take a slice
                outer, count = number // _at_least_1(size * inner), 0
                drawn, begin, taken = [outer, total, inner], [0, start, 0], [outer, size, inner]
            else:
                dtype = tf.as_dtype(arguments.get("dtype") or arguments["minval"].dtype)
                in_a_count = 2 if dtype.size == 8 else 4
                first = start * inner
                skipped = first % in_a_count
                count = (first - skipped) // in_a_count
                if op_name == "stateless_truncated_normal_v2":
                    count *= _COUNTS_OF_TRUNCATED * in_a_count
                # `number` may differ from size * inner if the layout is guessed.
                drawn, begin, taken = [skipped + number], [skipped], [number]
            (counts,) = _as_tensors([count, 0])
            (num, drawn, begin, taken) = _as_tensors([math.prod(drawn)], drawn, begin, taken)
        if tf.is_tensor(count) or count:
            counter += tf.cast(counts, tf.uint64)
        values = op(num, counter=counter, alg=PHILOX, **arguments)
        return tf.reshape(tf.slice(tf.reshape(values, drawn), begin, taken), shape)


def _key_and_counter(seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.name_scope(SEEN):
        return key_and_counter(seed)


def _guess(shape: tf.TensorShape, size: Any) -> BatchAxis:
    if not shape.rank:
        return WHOLE
    first = shape[0]
    if first is None or tf.is_tensor(size):
        return BatchAxis(0) if first is None else WHOLE  # an unknown size is that of the batch
    folded = shape.rank > 2 and size > 1 and first % size == 0
    return BatchAxis(0) if first == size or folded else WHOLE


def _at_least_1(number: Any) -> Any:
    return tf.maximum(number, 1) if tf.is_tensor(number) else max(number, 1)


def _as_tensors(*lists: list[Any]) -> Sequence[Any]:
    # Lists of ints stay as they are.
    if not any(map(tf.is_tensor, itertools.chain(*lists))):
        return lists
    return [tf.stack([tf.cast(number, tf.int64) for number in numbers]) for numbers in lists]


# TensorFlow's stateless random ops with the same numbers, for XLA and for GPUs.


def key_and_counter(seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the key, uint64 `[1]`, and the counter, uint64 `[2]`, of a seed of integers `[2]`.

    They equal those of TensorFlow's StatelessRandomGetKeyCounter. A GPU's kernel of that op has its
    arguments in the host's memory, while seed and draws are on the GPU: the host would wait.
    """
    words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[2, 2], key=[_KEY_OF_SEEDS], counter=tf.cast(seed, tf.uint64), alg=PHILOX,
        dtype=tf.uint32,
    )  # fmt: skip
    mixed = tf.bitcast(words, tf.uint64)
    return mixed[:1], mixed * tf.constant([0, 1], tf.uint64)


def random_uniform(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """Draw as `tf.raw_ops.StatelessRandomUniformV2` does: numbers in [0, 1).

    Args:
        shape: of the result.
        key: of Philox.
        counter: of Philox.
        alg: TensorFlow's number of the algorithm.
        dtype: of the result.
    """
    dtype = tf.as_dtype(dtype)
    number = tf.reduce_prod(tf.cast(shape, tf.int32))
    words = _words(number * (2 if dtype == tf.float64 else 1), key, counter, alg)
    return tf.reshape(_uniform(words, dtype), shape)


def random_normal(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """Draw as `tf.raw_ops.StatelessRandomNormalV2` does, as Box and Muller (1958).

    For the arguments see `random_uniform`.
    """
    dtype = tf.as_dtype(dtype)
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    number = tf.reduce_prod(tf.cast(shape, tf.int32))
    num_pairs = (number + 1) // 2
    words = _words(num_pairs * (4 if wide == tf.float64 else 2), key, counter, alg)
    pairs = tf.reshape(_uniform(words, wide), [num_pairs, 2])
    length = tf.sqrt(-2.0 * tf.math.log(tf.maximum(pairs[:, 0], _LEAST)))
    angle = 2.0 * math.pi * pairs[:, 1]
    normal = tf.stack([tf.sin(angle) * length, tf.cos(angle) * length], axis=1)
    return tf.cast(tf.reshape(tf.reshape(normal, [-1])[:number], shape), dtype)


def _truncated_normal(*_: Any, **__: Any) -> tf.Tensor:
    # TensorFlow's kernel draws until a number fits, and XLA does not.
    raise ValueError(
        "towers cannot generate truncated normal numbers with jit_compile; use normal ones, or "
        "leave jit_compile out"
    )


def _words(number: tf.Tensor, key: Any, counter: Any, alg: Any) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[number], key=key, counter=counter, alg=alg, dtype=tf.uint32
    )


def _uniform(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.float64:
        words = tf.cast(tf.reshape(words, [-1, 2]), tf.uint64)
        high = tf.bitwise.bitwise_and(words[:, 0], tf.constant(0xFFFFF, tf.uint64))
        fraction = tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, 32), words[:, 1])
        return tf.bitcast(tf.bitwise.bitwise_or(fraction, 1023 << 52), dtype) - 1.0
    bits, length, exponent = _NARROW[dtype]
    fraction = tf.bitwise.bitwise_and(words, tf.constant(2**length - 1, tf.uint32))
    one = tf.constant(exponent << length, bits)
    return tf.bitcast(tf.bitwise.bitwise_or(tf.cast(fraction, bits), one), dtype) - 1.0


_FOR_XLA = {
    "stateless_random_uniform_v2": random_uniform,
    "stateless_random_normal_v2": random_normal,
    "stateless_truncated_normal_v2": _truncated_normal,
}


# Functions: a single trace would give all towers the first one's draws.

_loops = itertools.count()


@contextlib.contextmanager
def functions_inlined(
    around: Callable[[], tf_internals.Block] = contextlib.nullcontext,
) -> Iterator[None]:
    """Inline each `tf.function` into its caller, converted by AutoGraph, in this thread.

    Functions that XLA compiles or that are called eagerly stay functions, traced for each block,
    and called within `around()`.
    """
    twins: dict[int, tuple[Any, Any]] = {}

    def make(before: Callable) -> Callable:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if tf_internals.is_to_be_compiled(function) or tf.executing_eagerly():
                key = id(function)
                twin = twins.setdefault(key, (tf_internals.clone_of(function), function))[0]
                with around():
                    return before(twin, *args, **kwargs)
            signature = function.input_signature
            if signature is not None and not kwargs:
                specs = [*signature, *[None] * (len(args) - len(signature))]
                args = [
                    tf.convert_to_tensor(x, spec.dtype) if isinstance(spec, tf.TensorSpec) else x
                    for x, spec in zip(args, specs, strict=False)
                ]
            # A function would return tensors for numbers.
            return tf.nest.map_structure(
                lambda x: tf.convert_to_tensor(x) if isinstance(x, bool | int | float) else x,
                tf_internals.converted_function_of(function)(*args, **kwargs),
            )

        return call

    def make_defun(defun: Callable) -> Callable:
        # Bodies of TensorFlow's oldest loops, as of ctc_loss, are named by their ops, without
        # shapes: those of towers with other numbers of examples would be taken for one.
        return lambda *types, **keywords: defun(
            *types, **{"func_name": f"loop_{next(_loops)}"} | keywords
        )

    with tf_internals.patched(("Function.__call__", make), ("function.Defun", make_defun)):
        yield
