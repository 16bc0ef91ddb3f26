"""Random numbers of an example, whatever axis it lies along: dropout, noise, augmentation."""

import dataclasses

import keras
import tensorflow as tf

from tests.zoo.entry import SAME, entry
from tests.zoo.parts import layer, of_images, on_features, on_images, on_maps, on_rows, own, seed

layers, ops, random = keras.layers, keras.ops, keras.random

dropouts = on_maps(
    SAME,
    "each of Keras' noise layers",
    lambda: [
        layers.SpatialDropout2D(0.3),
        layers.Conv2D(4, 3, padding="same"),
        layers.Dropout(0.3, noise_shape=(None, 1, None, 1)),
        layers.AlphaDropout(0.2),
        layers.GaussianDropout(0.3),
        layers.GaussianNoise(0.2),
    ],
)
entry(SAME, "a part has its own place", "--accumulate_steps=2")(dropouts)
dropout_of_rows = on_rows(
    SAME,
    "one mask for all times of an example",
    lambda: [
        layers.SpatialDropout1D(0.3, seed=1),
        layers.Dense(4, activation="selu"),
        layers.AlphaDropout(0.3, noise_shape=(None, 1, None)),
    ],
)
entry(SAME, "a loss scale", "--dtype=mixed_float16")(dropout_of_rows)


@of_images(SAME, "two draws of one generator in a step")
def dropout_used_twice(images):
    dropout, dense = layers.Dropout(0.4), layers.Dense(5, activation="tanh")
    return dropout(layers.Dense(4)(dropout(dense(layers.Flatten()(images)))))


flips_and_turns = on_images(
    SAME,
    "Keras' geometric augmentation",
    lambda: [
        layers.RandomFlip("horizontal"),
        layers.RandomTranslation(0.2, 0.2),
        layers.RandomRotation(0.1, fill_mode="nearest"),
        layers.RandomZoom(0.2),
        layers.Conv2D(4, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
    ],
)
rand_augment = on_images(
    SAME,
    "which operations is drawn for the batch, how much by example",
    lambda: [
        layers.Rescaling(40.0, offset=128.0),
        # This seed does not draw the equalization, whose histogram is of the whole batch.
        layers.RandAugment(num_ops=2, factor=0.4, seed=3),
        layers.Rescaling(1 / 128, offset=-1.0),
    ],
)


def adding(why, draw, **keywords):
    """Put in a layer that adds what `draw(x, seed)` returns while the model is trained."""

    @own(on_features, SAME, why, seed=seed, **keywords)
    def adds(self, x, training):
        return x + draw(x, self.seed) if training else x

    return adds


without_seed = adding(
    "Keras' global generator, which is no layer's",
    lambda x, _: random.uniform(ops.shape(x), dtype=x.dtype),
)
without_seed.entries = [  # of two fits each goes on with it
    dataclasses.replace(own, under_fit="state in Python") for own in without_seed.entries
]


def _whole_numbers(x, seed):
    factor = random.randint((ops.shape(x)[0], 1), 0, 3, seed=seed)
    noise = random.truncated_normal(ops.shape(x), 0, 0.2, x.dtype, seed)
    return ops.cast(factor, x.dtype) * noise


whole_numbers = adding("integers and a truncated normal from one generator", _whole_numbers)


@own(on_maps, SAME, "stateless draws by a counter of calls",
     calls=dict(shape=(), initializer="zeros", dtype="int32", trainable=False))  # fmt: skip
def by_tensorflow(self, x, training):
    if not training:
        return x
    seed = tf.stack([5, self.calls * 1])
    self.calls.assign_add(1)
    x = tf.image.stateless_random_flip_left_right(x, seed)
    x = tf.image.stateless_random_brightness(x, 0.2, seed + 1)
    return tf.nn.experimental.stateless_dropout(x, 0.3, seed + 2)


@layer(dense=lambda: layers.Dense(6, activation="tanh"), seed=seed)
def random_layer_drop(self, x, training):
    """Leaves a whole layer out for all examples at once (Fan et al. 2019)."""
    if not training:
        return self.dense(x)
    kept = random.uniform((), seed=self.seed) < 0.7
    return ops.where(kept, self.dense(x), x)


layer_drop = on_features(
    SAME,
    "one number for the batch leaves a layer out",
    lambda: [random_layer_drop(), random_layer_drop()],
)


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
