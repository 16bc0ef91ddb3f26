"""Random numbers by example: a tower draws its rows of what one device draws for the whole batch.

Dropout masks, noise and augmentation then depend on an example's place in the global batch, and not
on the number of towers. `function_analysis` finds which axis of a draw is the batch. TensorFlow's
generators are counter-based (Philox, Salmon et al. 2011), so a draw can begin at any row.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import device_types, philox

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
    # Number of neighbours along the axis that belong to one example: 1 if the examples alternate
    # (time * batch), None if all of an example are neighbours (batch * time).
    inner: int | None = None


WHOLE = BatchAxis(None)


@dataclasses.dataclass(frozen=True)
class DrawInfo:
    """The analysis of one draw; None: unknown."""

    op: str  # one of `tf_internals.DRAWS`
    dims: tuple[tuple[int, int] | None, ...] | None  # (constant, factor of the number of examples)
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
        # A dimension that is known although the number of examples is not does not grow with it.
        return all(
            actual is None or dim is None
            or (not dim[1] and actual == dim[0])
            or (not tf.is_tensor(size) and actual == dim[0] + dim[1] * size)
            for actual, dim in zip(shape, self.dims, strict=True)
        )  # fmt: skip

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
        self._on_gpu = device_types.is_gpu(device) and not by_xla
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
            op = getattr(philox, op_name, op)
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
        with tf.device(device_types.HOST) if self._on_gpu else contextlib.nullcontext():
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
        values = op(num, counter=counter, alg=philox.PHILOX, **arguments)
        return tf.reshape(tf.slice(tf.reshape(values, drawn), begin, taken), shape)


def _key_and_counter(seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.name_scope(SEEN):
        return philox.key_and_counter(seed)


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
