"""Sound models by what is special in their code: loops, functions, gradients, shared parts."""

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import SAME, entry
from tests.zoo.parts import layer, of_images, on_features, on_images, own, seed

layers, ops, random = keras.layers, keras.ops, keras.random


HELD = {
    "dense": lambda: layers.Dense(6, activation="tanh"),
    "dropout": lambda: layers.Dropout(0.4, seed=1),
}


class Compiled(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense, self.dropout = (make() for make in HELD.values())

    def build(self, shape):
        self.dense.build(shape)

    @tf.function
    def masked(self, x):
        return self.dropout(self.dense(x), training=True)

    def call(self, x, training=False):
        return self.masked(x) if training else self.dense(x)


dropout_in_function = on_features(SAME, "a tf.function that is traced for one tower", Compiled)


@own(on_features, SAME, "a seed is assigned in a branch", **HELD)
def dropout_in_cond(self, x, training):
    if not training:
        return x
    positive = tf.reduce_sum(ops.convert_to_tensor(self.dense.kernel)) > -100
    return tf.cond(positive, lambda: self.dropout(x, training=True), lambda: self.dense(x))


@own(on_features, SAME, "a seed is assigned in a loop", **HELD)
def dropout_in_while(self, x, training):
    def body(i, y):
        return i + 1, self.dropout(self.dense(y), training=training)

    return tf.while_loop(lambda i, y: i < 3, body, (0, x))[1]


# Plain Keras does it twice in a step: the loss is of one mask and the gradient of the next, and the
# moments are moved twice. On towers it is as without recomputation, to the last digit.
@own(on_features, "recomputation", "the mask must be the same the second time", quick=True, **HELD)
def dropout_recomputed(self, x, training):
    return keras.remat(lambda x: self.dropout(self.dense(x), training=training))(x)


@of_images(SAME, "layers that are computed again for the gradient")
def remat(images):
    with keras.RematScope(mode="full"):  # Keras' takes no layers that know of training
        x = layers.ReLU()(layers.Conv2D(4, 3)(images))
    x = layers.Dropout(0.3)(layers.BatchNormalization()(x))
    with keras.RematScope(mode="activations"):
        x = layers.Dense(4, activation="gelu")(x)
    return layers.GlobalAveragePooling2D()(x)


@layer()
def bins(_, x):
    return ops.cast(ops.clip(ops.floor((x[:, ::2, :, 0] + 2) * 2), 0, 7), "int32")


@layer(table=(8, 3))
def tied(self, bins):
    """Looks rows up in a table and compares with all of it: sparse and dense gradients."""
    found = tf.gather(ops.convert_to_tensor(self.table), bins)
    return tf.matmul(tf.reduce_mean(found, [1, 2]), self.table, transpose_b=True)


@entry(SAME, "sparse gradients of copies", "--variables=replicated")
@of_images(SAME, "sparse gradients of two look-ups")
def embedding_twice(images):
    rows, table = bins()(images), layers.Embedding(8, 3)
    return layers.Add()([table(rows), table(7 - rows)])


@entry(SAME, "a copy on each tower", "--variables=replicated")
@of_images(SAME, "a sparse and a dense gradient of one table")
def tied_embedding(images):
    return tied()(bins()(images))


@of_images(SAME, "an encoder with BatchNorm that is used twice")
def shared_layers(images):
    encoder = keras.Sequential(
        [layers.Conv2D(3, 3, activation="relu"), layers.BatchNormalization(), layers.Flatten()]
    )
    left, right = encoder(images[:, :, :4]), encoder(images[:, :, 4:])
    x = layers.Dot(axes=1, normalize=True)([left, right])
    return layers.Concatenate()([x, layers.Subtract()([left, right])])


@own(on_features, SAME, "a sum over examples", quick=True,
     both=lambda: layers.Dense(8), seed=seed)  # fmt: skip
def added_divergence(self, x, training):
    """Adds the divergence of a variational autoencoder, over all examples."""
    mean, log_variance = ops.split(self.both(x), 2, axis=1)
    terms = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
    self.add_loss(0.5 * ops.sum(terms))
    if not training:
        return mean
    noise = random.normal(ops.shape(mean), dtype=x.dtype, seed=self.seed)
    return mean + ops.exp(log_variance / 2) * noise


penalized_weights = on_features(
    SAME,
    "regularizers act once, on the masters",
    lambda: [
        layers.Dense(5, kernel_regularizer="l2", bias_regularizer=keras.regularizers.L1(0.1)),
        layers.Dense(4, kernel_regularizer=keras.regularizers.L1L2(0.1, 0.2)),
    ],
)
entry(SAME, "decay, too", "--optimizer=adamw --weight_decay=0.1")(penalized_weights)


@own(on_features, SAME, "None for a weight", unused=(2, 2), scores=(None, 3))
def no_gradient(self, x):
    best = tf.argmax(tf.matmul(x, self.scores), axis=-1)
    return x + 0.1 * tf.cast(best[:, None], x.dtype)


@own(on_images, SAME, "Python code, but nothing that towers change", under_fit="same, warned",
     then=lambda: [layers.Conv2D(3, 3)])  # fmt: skip
def numpy_by_example(_, images):
    """Finds edges by NumPy, an example at a time: TensorFlow does not see how."""
    edges = tf.numpy_function(
        lambda x: np.abs(np.diff(x, axis=2, append=0)), [images], images.dtype
    )
    return tf.ensure_shape(edges, images.shape)
