"""A tower as one program of XLA's, for `TowerBuilder(..., jit_compile=True)`.

XLA reads no variable that lies on another device, as masters do. So each variable that a compiled
tower reads is read outside, once, on the tower's device, and comes in as a tensor.

XLA and TensorFlow's kernels both count with Philox and get the same bits, but make other numbers of
them. `DRAWS` makes them as the kernels do: uniform ones are the same to the last bit, normal ones
up to the rounding of log, sin and cos.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder.assignments import TowerScope
from towers.builder.exchange import Member
from towers.errors import InputError

_LEAST = 1e-7  # of the uniform number whose logarithm is taken
# Bits of a number between 1 and 2 of each type: those of its fraction, and all others.
_NARROW = {
    tf.float32: (tf.uint32, 23, 127),
    tf.float16: (tf.uint16, 10, 15),
    tf.bfloat16: (tf.uint16, 7, 127),
}


def compiled(fn: Callable) -> tuple[TowerScope, Any]:
    """Return what `fn()` returns, a scope and a structure of tensors, computed by XLA.

    Raises:
        ValueError: `fn` uses a variable otherwise than by reading it.
    """
    outside = tf.init_scope if tf.executing_eagerly() else _current_graph().as_default
    scopes: list[TowerScope] = []

    def program() -> tuple[Any, list[tf.Tensor]]:
        with _reads(outside):
            scope, results = fn()
        scopes.append(scope)
        return results, [value for _, value in scope.updates.values()]

    function = tf.function(program, jit_compile=True, autograph=False).get_concrete_function()
    _check_inputs(function)
    results, assigned = function()
    (scope,) = scopes
    scope.updates = {
        key: (variable, value)
        for (key, (variable, _)), value in zip(scope.updates.items(), assigned, strict=True)
    }
    return scope, results


@contextlib.contextmanager
def _reads(outside: Callable) -> Iterator[None]:
    """Let variables that are read in the block be read outside, each once.

    Args:
        outside: returns a context of the graph that calls the program.
    """
    program = _current_graph()
    values: dict[int, tf.Tensor] = {}

    def read(variable: tf.Variable, own: Callable) -> tf.Tensor:
        if id(variable) not in values:
            with outside():
                value = tf.identity(own(variable))  # moves it to the tower's device
            with program.as_default():
                values[id(variable)] = tf.identity(value)
        return values[id(variable)]

    with tf_private.reads_replaced(read):
        yield


def _current_graph() -> tf.Graph:
    return tf.compat.v1.get_default_graph()


def _check_inputs(function: Any) -> None:
    """Refuse what XLA cannot take from another device."""
    for tensor, _ in function.graph.captures:
        if tensor.dtype == tf.resource:
            names = [v.name for v in function.graph.variables if v.handle is tensor]
            raise ValueError(
                f"jit_compile: a compiled tower reads variables, and can do nothing else with "
                f"{names[0] if names else tensor.name!r}: read it by tf.convert_to_tensor or "
                "tf.gather"
            )


class NoExchange(Member):
    """Refuses to meet other towers."""

    def meet(self, *_: Any) -> tf.Tensor:
        """Say why a compiled tower cannot."""
        raise InputError(
            "jit_compile: each tower is compiled as a whole, and BatchNorm over all towers meets "
            "in its middle: set batch_norm='local' (--batch_norm=local), and no layer's "
            "synchronized=True"
        )


def draw_uniform(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """Draw as `stateless_random_uniform_v2` does: numbers in [0, 1)."""
    dtype = tf.as_dtype(dtype)
    number = tf.reduce_prod(tf.cast(shape, tf.int32))
    words = _words(number * (2 if dtype == tf.float64 else 1), key, counter, alg)
    return tf.reshape(_uniform(words, dtype), shape)


def draw_normal(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """Draw as `stateless_random_normal_v2` does, by the method of Box and Muller (1958)."""
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


def _refuse_truncated(*_: Any, **__: Any) -> tf.Tensor:
    raise ValueError(  # TensorFlow's kernel draws until a number fits, and XLA does not
        "a compiled tower cannot draw a truncated normal by example: draw a normal, or leave "
        "jit_compile out"
    )


DRAWS = {
    "stateless_random_uniform_v2": draw_uniform,
    "stateless_random_normal_v2": draw_normal,
    "stateless_truncated_normal_v2": _refuse_truncated,
}


def _words(number: tf.Tensor, key: Any, counter: Any, alg: Any) -> tf.Tensor:
    """Return `number` words of 32 random bits."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[number], key=key, counter=counter, alg=alg, dtype=tf.uint32
    )


def _uniform(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Make numbers in [0, 1) of words, of two each in float64."""
    if dtype == tf.float64:
        words = tf.cast(tf.reshape(words, [-1, 2]), tf.uint64)
        high = tf.bitwise.bitwise_and(words[:, 0], tf.constant(0xFFFFF, tf.uint64))
        fraction = tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, 32), words[:, 1])
        return tf.bitcast(tf.bitwise.bitwise_or(fraction, 1023 << 52), dtype) - 1.0
    bits, length, exponent = _NARROW[dtype]
    fraction = tf.bitwise.bitwise_and(words, tf.constant(2**length - 1, tf.uint32))
    one = tf.constant(exponent << length, bits)
    return tf.bitcast(tf.bitwise.bitwise_or(tf.cast(fraction, bits), one), dtype) - 1.0
