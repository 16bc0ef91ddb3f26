"""Sound models by what is special in their code: loops, functions, gradients, shared parts."""

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.parts import on_features, on_maps, on_rows

layers, ops = keras.layers, keras.ops


class Holder(layers.Layer):
    """Has a dense layer and a dropout layer, to be called in some unusual place."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6, activation="tanh")
        self.dropout = layers.Dropout(0.4, seed=1)

    def build(self, shape):
        self.dense.build(shape)


class Compiled(Holder):
    @tf.function
    def masked(self, x):
        return self.dropout(self.dense(x), training=True)

    def call(self, x, training=False):
        return self.masked(x) if training else self.dense(x)


def dropout_in_function(num_classes, image_shape):
    return on_features(num_classes, image_shape, Compiled())


class InBranch(Holder):
    def call(self, x, training=False):
        if not training:
            return x
        positive = tf.reduce_sum(ops.convert_to_tensor(self.dense.kernel)) > -100
        return tf.cond(positive, lambda: self.dropout(x, training=True), lambda: self.dense(x))


def dropout_in_cond(num_classes, image_shape):
    return on_features(num_classes, image_shape, InBranch())


class InLoop(Holder):
    def call(self, x, training=False):
        def body(i, y):
            return i + 1, self.dropout(self.dense(y), training=training)

        return tf.while_loop(lambda i, y: i < 3, body, (0, x))[1]


def dropout_in_while(num_classes, image_shape):
    return on_features(num_classes, image_shape, InLoop())


class InScan(Holder):
    def call(self, x, training=False):
        def step(state, at_time):
            return self.dropout(self.dense(state + at_time), training=training)

        states = tf.scan(step, tf.transpose(x, [1, 0, 2]), tf.zeros_like(x[:, 0]))
        return states[-1]


def dropout_in_scan(num_classes, image_shape):
    return on_rows(num_classes, image_shape, layers.Dense(6), InScan())


class Loops(Holder):
    """keras.ops' loop and branch, with nothing random in them."""

    def call(self, x):
        x = ops.fori_loop(0, 3, lambda _, y: self.dense(y), x)
        large = ops.sum(self.dense.kernel) > 0
        return ops.cond(large, lambda: ops.sin(x), lambda: ops.cos(x) * 2)


def loop_and_branch(num_classes, image_shape):
    return on_features(num_classes, image_shape, Loops())


class EachUntilItIsDone(layers.Layer):
    """Repeats a map of each example until that example has converged; the others wait."""

    def call(self, x):
        def body(i, y):
            return i + 1, tf.where(tf.norm(y, axis=1, keepdims=True) > 0.5, y * 0.8, y)

        return tf.while_loop(lambda i, _: i < 20, body, (0, x))[1]


def loop_by_example(num_classes, image_shape):
    return on_features(num_classes, image_shape, EachUntilItIsDone())


def remat(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    with keras.RematScope(mode="full"):  # Keras' takes no layers that know of training
        x = layers.ReLU()(layers.Conv2D(4, 3)(inputs))
    x = layers.Dropout(0.3)(layers.BatchNormalization()(x))
    with keras.RematScope(mode="activations"):
        x = layers.Dense(4, activation="gelu")(x)
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(x)))


class Recomputed(Holder):
    def call(self, x, training=False):
        def block(x):
            return self.dropout(self.dense(x), training=training)

        return keras.remat(block)(x)


def dropout_recomputed(num_classes, image_shape):
    return on_features(num_classes, image_shape, Recomputed())


class RecomputedNorm(layers.Layer):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = layers.Conv2D(4, 3), layers.BatchNormalization()

    def build(self, shape):
        self.conv.build(shape)
        self.norm.build((*shape[:3], 4))

    def call(self, x, training=False):
        return tf.recompute_grad(lambda x: self.norm(self.conv(x), training=training))(x)


def batch_norm_recomputed(num_classes, image_shape):
    return on_maps(num_classes, image_shape, RecomputedNorm(), layers.ReLU())


class PerExample(layers.Layer):
    """Functions of one example, mapped over the batch in two ways."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        def gram(row):
            return ops.tanh(ops.matmul(row, ops.convert_to_tensor(self.kernel)))

        return ops.vectorized_map(gram, x) + ops.map(lambda row: ops.sort(row), x)


def mapped_over_examples(num_classes, image_shape):
    return on_features(num_classes, image_shape, PerExample())


class Bins(layers.Layer):
    def call(self, x):
        return ops.cast(ops.clip(ops.floor((x[:, ::2, :, 0] + 2) * 2), 0, 7), "int32")


def embedding_twice(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    bins, table = Bins()(inputs), layers.Embedding(8, 3)
    x = layers.Add()([table(bins), table(7 - bins)])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.Flatten()(x)))


class Tied(layers.Layer):
    """Looks rows up in a table and compares with all of it: sparse and dense gradients."""

    def build(self, shape):
        self.table = self.add_weight(shape=(8, 3), name="table")

    def call(self, bins):
        found = tf.gather(ops.convert_to_tensor(self.table), bins)
        return tf.matmul(tf.reduce_mean(found, [1, 2]), self.table, transpose_b=True)


def tied_embedding(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    return keras.Model(inputs, layers.Dense(num_classes)(Tied()(Bins()(inputs))))


def shared_layers(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    encoder = keras.Sequential(
        [layers.Conv2D(3, 3, activation="relu"), layers.BatchNormalization(), layers.Flatten()]
    )
    left, right = encoder(inputs[:, :, :4]), encoder(inputs[:, :, 4:])
    x = layers.Dot(axes=1, normalize=True)([left, right])
    x = layers.Concatenate()([x, layers.Subtract()([left, right])])
    return keras.Model(inputs, layers.Dense(num_classes)(x))


def nested_models(num_classes, image_shape):
    small = keras.Input((6,))
    inner = keras.Model(small, small + layers.Dense(6)(layers.Dropout(0.3)(small)), name="inner")
    outer = keras.Sequential([layers.Dense(6, activation="tanh"), inner, inner])
    return on_features(num_classes, image_shape, outer, layers.Lambda(lambda x: ops.abs(x) + x))


class Subclassed(keras.Model):
    def __init__(self, num_classes):
        super().__init__()
        self.blocks = [layers.Dense(5, activation="relu") for _ in range(3)]
        self.norm, self.dropout = layers.BatchNormalization(), layers.Dropout(0.2)
        self.flatten, self.head = layers.Flatten(), layers.Dense(num_classes)

    def call(self, images, training=False):
        x = self.flatten(images)
        for block in self.blocks:
            x = self.dropout(block(x), training=training)
        return self.head(self.norm(x, training=training))


def subclassed(num_classes):
    return Subclassed(num_classes)


def penalised_weights(num_classes, image_shape):
    return on_features(
        num_classes,
        image_shape,
        layers.Dense(5, kernel_regularizer="l2", bias_regularizer=keras.regularizers.L1(0.1)),
        layers.Dense(4, kernel_regularizer=keras.regularizers.L1L2(0.1, 0.2)),
    )


def activity_regularizer(num_classes, image_shape):
    layer = layers.Dense(5, activation="relu", activity_regularizer=keras.regularizers.L2(0.1))
    return on_features(num_classes, image_shape, layer, layers.ActivityRegularization(l1=0.01))


class MeanSquare(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def added_mean(num_classes, image_shape):
    return on_features(num_classes, image_shape, MeanSquare())


class PenaltyOfItsWeights(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(self.kernel)))
        return ops.matmul(x, self.kernel)


def added_penalty(num_classes, image_shape):
    return on_features(num_classes, image_shape, PenaltyOfItsWeights())


def float32_head(num_classes, image_shape):
    middle = (layers.Dropout(0.2), layers.Dense(5, activation="tanh", dtype="float32"))
    return on_features(num_classes, image_shape, *middle, layers.Dense(4, dtype="float32"))


def fixed_features(num_classes, image_shape):
    """Random features that NumPy's seed determines, and a tf.Variable that stays."""
    kernel = np.random.normal(size=(6, 9)) / 3
    factor = tf.Variable(0.5, trainable=False, dtype=keras.config.dtype_policy().variable_dtype)
    layer = layers.Lambda(lambda x: tf.cos(tf.matmul(x, tf.cast(kernel, x.dtype)) * factor))
    return on_features(num_classes, image_shape, layer)


def weights_by_tensorflows_seed(num_classes, image_shape):
    start = keras.initializers.Constant(tf.random.normal([6, 5]).numpy())
    return on_features(num_classes, image_shape, layers.Dense(5, kernel_initializer=start))
