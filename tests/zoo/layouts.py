"""Draws whose examples do not lie along the first axis, or that belong to no example at all."""

import keras
import tensorflow as tf

from tests.zoo.entry import SAME
from tests.zoo.parts import on_features, on_rows, own, seed

layers, ops, random = keras.layers, keras.ops, keras.random


def dropped(on, why, **keywords):
    """Put in what a function of `(x, dropout)` returns, which lays x out and back again."""

    def decorate(call):
        @own(on, SAME, why, dropout=lambda: layers.Dropout(0.4, seed=1), **keywords)
        def laid_out(self, x, training):
            return call(x, lambda y: self.dropout(y, training=training))

        return laid_out

    return decorate


@dropped(on_rows, "[heads * B, T, T]")
def heads_first(x, dropout):
    """Attention whose heads are joined along the batch."""
    heads = tf.concat(tf.split(x, 2, axis=2), axis=0)
    weights = tf.nn.softmax(tf.matmul(heads, heads, transpose_b=True))
    return tf.concat(tf.split(tf.matmul(dropout(weights), heads), 2, axis=0), axis=2)


times_in_rows = dropped(on_rows, "[B * T, C]")(
    lambda x, dropout: tf.reshape(dropout(tf.reshape(x, [-1, x.shape[2]])), tf.shape(x))
)
time_major = dropped(on_rows, "[T, B, C]")(
    lambda x, dropout: tf.transpose(dropout(tf.transpose(x, [1, 0, 2])), [1, 0, 2])
)
# ---------------------------------------------------- Of the whole batch, as long as a slice or not


def _kernel(num_rows):
    """Return an entry that draws a kernel for all examples at once, with so many rows."""
    as_long_as = "the batch" if num_rows == 7 else "a slice"

    @own(on_features, SAME, f"[{num_rows}, 5] for all, as long as {as_long_as}", seed=seed,
         inner=(None, num_rows), scale={"shape": (num_rows, 5), "initializer": "ones"})  # fmt: skip
    def sampled(self, x, training):
        kernel = ops.convert_to_tensor(self.scale)
        if training:
            kernel *= random.normal(kernel.shape, dtype=x.dtype, seed=self.seed)
        return ops.matmul(ops.matmul(x, self.inner), kernel)

    return sampled


kernel_of_three_rows = _kernel(3)
kernel_of_seven_rows = _kernel(7)
