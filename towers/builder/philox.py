"""Reimplements TensorFlow's stateless random ops, with the same numbers.

* For XLA, which converts the bits of Philox to other numbers than TensorFlow's kernels do. Uniform
  numbers are equal to the last bit, normal ones up to the rounding of log, sin and cos.
* For GPUs: key and counter are computed on the GPU, not on the host.
"""

import math
from typing import Any

import tensorflow as tf

PHILOX = 1  # TensorFlow's number of the algorithm
_KEY_OF_SEEDS = 0x02461E293EC8F720  # TensorFlow's, of the draw that makes a key of each seed
_LEAST = 1e-7  # of the uniform number whose logarithm is taken
# Bits of a number between 1 and 2 of each type: those of its fraction, and all others.
_NARROW = {
    tf.float32: (tf.uint32, 23, 127),
    tf.float16: (tf.uint16, 10, 15),
    tf.bfloat16: (tf.uint16, 7, 127),
}


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


def stateless_random_uniform_v2(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """Draw as TensorFlow's op of this name does: numbers in [0, 1).

    Args:
        shape: of the result.
        key: `[1]`, uint64; see the op.
        counter: `[2]`, uint64; see the op.
        alg: number of the algorithm.
        dtype: of the result.
    """
    dtype = tf.as_dtype(dtype)
    number = tf.reduce_prod(tf.cast(shape, tf.int32))
    words = _words(number * (2 if dtype == tf.float64 else 1), key, counter, alg)
    return tf.reshape(_uniform(words, dtype), shape)


def stateless_random_normal_v2(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """Draw as TensorFlow's op does, by the method of Box and Muller (1958).

    For the arguments see `stateless_random_uniform_v2`.
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


def stateless_truncated_normal_v2(*_: Any, **__: Any) -> tf.Tensor:
    """Raise ValueError: TensorFlow's kernel draws until a number fits, and XLA does not."""
    raise ValueError(
        "a compiled tower cannot draw a truncated normal by example: draw a normal, or leave "
        "jit_compile out"
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
