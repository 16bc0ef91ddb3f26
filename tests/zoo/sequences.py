"""Recurrent networks, attention and mixers, most with dropout in some place of their own."""

import keras
import tensorflow as tf

from tests.zoo.parts import on_rows

layers, ops = keras.layers, keras.ops


def lstm(num_classes, image_shape):
    layer = layers.LSTM(4, dropout=0.3, recurrent_dropout=0.3, return_sequences=True)
    return on_rows(num_classes, image_shape, layer)


def gru(num_classes, image_shape):
    return on_rows(
        num_classes,
        image_shape,
        layers.GRU(4, dropout=0.2, return_sequences=True),
        layers.GRU(3, recurrent_dropout=0.4, reset_after=False),
    )


def simple_rnn_unrolled(num_classes, image_shape):
    layer = layers.SimpleRNN(4, dropout=0.3, recurrent_dropout=0.2, unroll=True)
    return on_rows(num_classes, image_shape, layer)


def bidirectional(num_classes, image_shape):
    lstm = layers.LSTM(3, dropout=0.3, return_sequences=True)
    backward = layers.GRU(3, go_backwards=True, return_sequences=True)
    return on_rows(num_classes, image_shape, layers.Bidirectional(lstm, backward_layer=backward))


def stacked_cells(num_classes, image_shape):
    cells = [layers.LSTMCell(4, dropout=0.3), layers.GRUCell(3, recurrent_dropout=0.3)]
    return on_rows(num_classes, image_shape, layers.RNN(layers.StackedRNNCells(cells)))


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


def own_cell(num_classes, image_shape):
    return on_rows(num_classes, image_shape, layers.RNN(CellWithDropout()))


def time_distributed(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Reshape((4, 2, 8, image_shape[-1])),
            layers.TimeDistributed(layers.Conv2D(3, (1, 3), activation="relu")),
            layers.TimeDistributed(layers.Dropout(0.4)),
            layers.TimeDistributed(layers.Flatten()),
            layers.TimeDistributed(layers.Dense(4)),
            layers.GRU(3),
            layers.Dense(num_classes),
        ]
    )


def conv_lstm(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Reshape((4, 2, 8, image_shape[-1])),
            layers.ConvLSTM2D(3, 2, dropout=0.2, recurrent_dropout=0.2),
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )


def masked_lstm(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Reshape((-1, image_shape[-1])),
            layers.Lambda(lambda x: x[:, :9] * ops.cast(x[:, :9, :1] > 0, x.dtype)),
            layers.Masking(0.0),
            layers.LSTM(4, dropout=0.2),
            layers.Dense(num_classes),
        ]
    )


def multi_head_attention(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Dense(4)(layers.Reshape((image_shape[0], -1))(inputs))
    x = x + layers.MultiHeadAttention(2, 3, dropout=0.3)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling1D()(x)))


def grouped_query_attention(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Dense(4)(layers.Reshape((image_shape[0], -1))(inputs))
    x = layers.GroupQueryAttention(3, 4, 2, dropout=0.3)(x, x)
    return keras.Model(inputs, layers.Dense(num_classes)(layers.Flatten()(x)))


def additive_attention(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Dense(4)(layers.Reshape((image_shape[0], -1))(inputs))
    y = layers.AdditiveAttention(dropout=0.3)([x, layers.Dense(4, "tanh")(x)])
    y = layers.Attention(use_scale=True, dropout=0.2)([y, x])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.Flatten()(y)))


class DropPath(layers.Layer):
    """Drops a residual branch of whole examples (Huang et al. 2016)."""

    def __init__(self, rate):
        super().__init__()
        self.rate, self.seed = rate, keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        if not training:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        kept = ops.floor(keras.random.uniform(shape, seed=self.seed, dtype=x.dtype) + 1 - self.rate)
        return x * kept / (1 - self.rate)


class Tokens(layers.Layer):
    """Puts a class token before the patches and adds a table of positions, with dropout on it."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.2)

    def build(self, shape):
        self.first = self.add_weight(shape=(1, 1, shape[-1]), name="class_token")
        self.table = self.add_weight(shape=(1, shape[1] + 1, shape[-1]), name="positions")

    def call(self, x, training=False):
        first = tf.repeat(self.first, tf.shape(x)[0], axis=0)
        return tf.concat([first, x], 1) + self.dropout(self.table, training=training)


def vision_transformer(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Reshape((-1, 4))(layers.Conv2D(4, 4, strides=4)(inputs))
    x = Tokens()(x)
    for rate in (0.2, 0.4):
        y = layers.LayerNormalization()(x)
        x = x + DropPath(rate)(layers.MultiHeadAttention(2, 2, dropout=0.1)(y, y))
        y = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(x))
        x = x + DropPath(rate)(layers.Dense(4)(layers.Dropout(0.1)(y)))
    return keras.Model(inputs, layers.Dense(num_classes)(x[:, 0]))


def mlp_mixer(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Reshape((-1, 4))(layers.Conv2D(4, 4, strides=4)(inputs))
    y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
    y = layers.Dense(4)(layers.Dropout(0.2)(layers.Dense(6, activation="gelu")(y)))
    x = layers.Add()([x, layers.Permute((2, 1))(y)])
    x = layers.Add()([x, layers.Dense(4)(layers.Dense(8, "gelu")(layers.LayerNormalization()(x)))])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling1D()(x)))


class Latents(layers.Layer):
    """Learned queries that look at the rows (Jaegle et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(1, 4, dropout=0.2)

    def build(self, shape):
        self.queries = self.add_weight(shape=(3, 4), name="queries")
        self.attention.build((None, 3, 4), shape)

    def call(self, x, training=False):
        queries = ops.broadcast_to(self.queries, (ops.shape(x)[0], 3, 4))
        return self.attention(queries, x, training=training)


def perceiver(num_classes, image_shape):
    return on_rows(num_classes, image_shape, Latents())


class Fourier(layers.Layer):
    def call(self, x):
        return tf.math.real(tf.signal.fft2d(tf.complex(x, tf.zeros_like(x)))) / 8


def fnet(num_classes, image_shape):
    return on_rows(num_classes, image_shape, Fourier(), layers.LayerNormalization())


class Rotary(layers.Layer):
    """Attention with rotary positions, made of einsums."""

    def __init__(self):
        super().__init__()
        self.project = layers.EinsumDense("btc,cnd->btnd", output_shape=(None, 2, 4))
        self.dropout = layers.Dropout(0.3)

    def call(self, x, training=False):
        y = self.project(x)
        angles = ops.cast(ops.arange(y.shape[1]), y.dtype)[:, None, None]
        left, right = ops.split(y, 2, axis=-1)
        y = ops.concatenate([left * ops.cos(angles) - right * ops.sin(angles), right], -1)
        weights = ops.softmax(ops.einsum("bqnd,bknd->bnqk", y, y))
        return ops.einsum("bnqk,bknd->bqnd", self.dropout(weights, training=training), y)


def rotary(num_classes, image_shape):
    return on_rows(num_classes, image_shape, Rotary())
