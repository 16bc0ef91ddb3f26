"""Recurrent networks, attention and mixers, most with dropout in some place of their own."""

import keras
import tensorflow as tf

from tests.zoo.entry import SAME
from tests.zoo.parts import of_images, on_images, on_rows, own

layers, ops = keras.layers, keras.ops

lstm = on_rows(
    SAME,
    "masks made once for all times",
    lambda: layers.LSTM(4, dropout=0.3, recurrent_dropout=0.3, return_sequences=True),
)


class CellWithDropout(layers.Layer):
    """Draws a mask at each time, in the loop that keras.layers.RNN makes."""

    state_size = output_size = 4

    def __init__(self):
        super().__init__()
        self.inner, self.outer = layers.Dense(4), layers.Dense(4, use_bias=False)
        self.dropout = layers.Dropout(0.3, seed=1)

    def build(self, shape):
        self.inner.build(shape)
        self.outer.build((None, 4))

    def call(self, x, states, training=False):
        state = ops.tanh(self.inner(x) + self.outer(states[0]))
        return self.dropout(state, training=training), [state]


own_cell = on_rows(
    SAME, "dropout within the loop over times", lambda: layers.RNN(CellWithDropout())
)
masked_lstm = on_images(
    SAME,
    "times without input, unlike in number",
    lambda: [
        layers.Reshape((-1, 3)),
        layers.Lambda(lambda x: x[:, :9] * ops.cast(x[:, :9, :1] > 0, x.dtype)),
        layers.Masking(0.0),
        layers.LSTM(4, dropout=0.2),
    ],
)


def _rows(images):
    return layers.Dense(4)(layers.Reshape((8, -1))(images))


@of_images(SAME, "dropout of weights [B, H, T, T], causal")
def multi_head_attention(images):
    x = _rows(images)
    x = x + layers.MultiHeadAttention(2, 3, dropout=0.3)(x, x, use_causal_mask=True)
    return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))


@own(on_rows, SAME, "complex numbers", then=lambda: [layers.LayerNormalization()])
def fnet(_, x):
    return tf.math.real(tf.signal.fft2d(tf.complex(x, tf.zeros_like(x)))) / 8
