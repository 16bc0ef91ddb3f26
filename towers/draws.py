"""Random draws by example: a tower draws its rows of what one device draws for the whole batch.

Dropout masks, noise and augmentation then depend on an example's place in the global batch, and not
on the number of towers. Nothing is drawn in vain: TensorFlow's generators count (Philox of Salmon
et al. 2011), so a draw can begin anywhere.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.framework import tensor_util
from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_ops

from towers import philox

SCOPE = "draw_by_example"  # of all that differs between towers in a graph
_PHILOX = 1
# The ops that count: each count gives them 16 bytes.
_OPS = (
    "stateless_random_uniform_v2",
    "stateless_random_normal_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_full_int_v2",
    "stateless_truncated_normal_v2",
)
# A truncated normal draws again until it lies inside: so many counts are set aside for each number.
_COUNTS_OF_TRUNCATED = 64

# Ops whose numbers are not by example: those with state in TensorFlow, in Python, or that take
# parameters for each example.
OTHERS = frozenset(
    "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal RandomShuffle Multinomial "
    "RandomGamma RandomPoisson RandomPoissonV2 ParameterizedTruncatedNormal StatefulUniform "
    "StatefulUniformInt StatefulUniformFullInt StatefulStandardNormal StatefulStandardNormalV2 "
    "StatefulTruncatedNormal StatefulRandomBinomial StatelessMultinomial StatelessRandomGammaV2 "
    "StatelessRandomGammaV3 StatelessRandomBinomial StatelessRandomPoisson "
    "StatelessParameterizedTruncatedNormal PyFunc EagerPyFunc PyFuncStateless".split()
)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A slice of the global batch; each is an int or a scalar tensor.

    Attributes:
        start: of the slice in the global batch.
        size: number of its examples.
    """

    start: Any
    size: Any


@contextlib.contextmanager
def of_rows(rows: Rows | None, by_xla: bool = False) -> Iterator[None]:
    """Let draws in the block that are by example be those of `rows` of the global batch.

    A draw is by example if its first dimension is the slice's size, or, with three dimensions and
    more, a multiple of it (windows, heads); any other is the same in every tower. What Keras draws
    from a `SeedGenerator` comes through here, and all of `tf.random.stateless_*` but gamma,
    binomial, poisson and categorical.

    Args:
        rows: of the slice; None: nothing was split.
        by_xla: the draws are compiled, and are to be those of TensorFlow's kernels.
    """
    if rows is None and not by_xla:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in _OPS:
            op = getattr(random_ops, name)
            op = getattr(philox, name, op) if by_xla else op
            draw = functools.partial(_draw, op, rows)
            stack.enter_context(mock.patch.object(random_ops, name, draw))
        yield


def _draw(
    op: Callable, rows: Rows | None, shape: Any, *, counter: Any, alg: Any, **arguments: Any
) -> tf.Tensor:
    """Draw a tower's rows by one of TensorFlow's ops, which counts up from `counter`."""
    if rows is None or not _is_by_example(shape, rows):
        return op(shape, counter=counter, alg=alg, **arguments)
    with tf.name_scope(SCOPE):
        number = tf.reduce_prod(tf.cast(shape, tf.int64))
        of_each = number // tf.maximum(tf.cast(rows.size, tf.int64), 1)
        first = tf.cast(rows.start, tf.int64) * of_each
        dtype = tf.as_dtype(arguments.get("dtype") or arguments["minval"].dtype)
        in_a_count = 2 if dtype.size == 8 else 4
        skipped = first % in_a_count
        count = (first - skipped) // in_a_count
        if op.__name__ == "stateless_truncated_normal_v2":
            count *= _COUNTS_OF_TRUNCATED * in_a_count
        counter += tf.cast(tf.stack([count, 0]), tf.uint64)
        drawn = op([skipped + number], counter=counter, alg=_PHILOX, **arguments)
        return tf.reshape(drawn[skipped:], shape)


def _is_by_example(shape: Any, rows: Rows) -> bool:
    """Tell whether a draw of this shape has something for each example of the slice."""
    known = tensor_util.constant_value_as_shape(tf.convert_to_tensor(shape, tf.int32))
    if not known.rank:
        return False
    first = known[0]
    if first is None or tf.is_tensor(rows.size):
        return first is None  # what is unknown of a shape is its batch
    return first == rows.size or (known.rank > 2 and rows.size > 1 and first % rows.size == 0)
