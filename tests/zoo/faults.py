"""Models whose draws, code, precision or weights no number of towers can follow, or are refused."""

import zlib

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import REFUSED, SAME, entry
from tests.zoo.parts import Seeded, kept, on_features, on_maps, own

layers, ops, random = keras.layers, keras.ops, keras.random


def in_training(cause, why, on=on_features, **keywords):
    """Return a decorator that puts in a layer: `change(layer, x)` in training, else x."""

    def decorate(change):
        class Guilty(Seeded):
            calls = 0

            def call(self, x, training=False):
                return change(self, x) if training else x

        return on(cause, why, lambda: Guilty(name="guilty"), **keywords)

    return decorate


@in_training("random op", "a generator with state of its own")
def tensorflow_normal(_, x):
    return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


@in_training("random op", "how many numbers it takes is not known before", quick=True)
def gamma_draw(self, x):
    return x * random.gamma(ops.shape(x), 2.0, dtype=x.dtype, seed=self.seed)


@in_training("python code", "draws while it runs", quick=True)
def noise_by_numpy_function(_, x):
    noise = tf.numpy_function(lambda x: np.random.normal(size=x.shape), [x], tf.float64)
    return x + tf.cast(tf.ensure_shape(noise, x.shape), x.dtype)


@in_training("random numbers", "[B, B]", quick=True)
def square_draw(self, x):
    num = ops.shape(x)[0]
    return x + ops.mean(random.normal((num, num), dtype=x.dtype, seed=self.seed), 1, keepdims=True)


@in_training("state in Python", "towers are calls", quick=True)
def counts_its_calls(self, x):
    self.__class__.calls += 1
    return x + 0.01 * self.__class__.calls


@in_training("unknown", "CPU:1", quick=True)
def reads_its_device(_, x):
    return tf.sin(x) if x.device.endswith(":1") else x


@in_training("inexact", "a seed made of the scope's name", quick=True)
def seed_by_its_name(_, x):
    seed = zlib.crc32(tf.get_current_name_scope().encode()) % 1000
    return x + random.normal(ops.shape(x), dtype=x.dtype, seed=seed)


def _limit(value):
    return {"shape": (), "initializer": keras.initializers.Constant(value)}


@own(on_maps, "rounding", "an op that exists in float32 alone", quick=True,
     low=_limit(-0.5), high=_limit(0.5))  # fmt: skip
def quantized(self, x):
    """Learned limits of a quantization."""
    given = [tf.cast(ops.convert_to_tensor(v), tf.float32) for v in (x, self.low, self.high)]
    return tf.cast(tf.quantization.fake_quant_with_min_max_vars(*given), x.dtype)


@own(on_features, "inexact", "the spread of a batch is not that of its slices", quick=True)
def added_spread(self, x):
    self.add_loss(-0.1 * ops.mean(ops.std(x, axis=0)))
    return x


def _by_new_generator():
    def start(shape, dtype=None):
        return ops.cast(np.random.default_rng().normal(size=shape), dtype)

    return layers.Conv2D(4, 3, kernel_initializer=start)


def _projection():
    start = keras.initializers.Constant(np.random.default_rng().normal(size=(6, 5)))
    return layers.Dense(5, kernel_initializer=start, trainable=False)


# Under `fit` each lane begins with the weights that the model has.
weights_by_numpys_new_generator = on_maps(
    "initial weights", "default_rng() without a seed", _by_new_generator, under_fit=SAME
)
projection_that_stays = on_features(
    "initial weights", "fixed weights, too", _projection, quick=True, under_fit=SAME
)


def _norm():
    return layers.BatchNormalization()


@own(on_features, REFUSED, "a tf.Variable is assigned in each tower", quick=True,
     calls=lambda: tf.Variable(0, trainable=False))  # fmt: skip
def tensorflow_variable(self, x, training):
    if training:
        self.calls.assign_add(1)
    return x


@own(on_features, SAME, "a layer without weights is new in each call", quick=True)
def layer_in_call(_, x):
    return layers.Activation("tanh")(x)


@own(on_maps, REFUSED, "towers cannot meet in a branch", quick=True, norm=_norm, threshold=kept())
def batch_norm_in_cond(self, x, training):
    normalized = lambda: self.norm(x, training=training)  # noqa: E731
    return ops.cond(self.threshold < 1, normalized, lambda: ops.tanh(x))


@entry(REFUSED, "one batch of images is all there is")
def two_inputs(num_classes, image_shape):
    images, others = keras.Input(image_shape), keras.Input((4,))
    x = layers.Concatenate()([layers.Flatten()(images), others])
    return keras.Model([images, others], layers.Dense(num_classes)(x))


@entry(REFUSED, "logits alone are needed")
def two_outputs(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = layers.Flatten()(images)
    return keras.Model(images, [layers.Dense(num_classes)(x), layers.Dense(1)(x)])


@entry(REFUSED, "no trainable weights")
def nothing_to_train(num_classes, image_shape):
    model = keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), layers.Dense(num_classes)]
    )
    model.trainable = False
    return model
