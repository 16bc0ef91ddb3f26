"""Random layers: dropout, noise and augmentation, each number of which belongs to an example."""

import keras
import tensorflow as tf

from tests.zoo.parts import Seeded, on_features, on_maps, on_rows

layers, ops, random = keras.layers, keras.ops, keras.random


def dropouts(num_classes, image_shape):
    return on_maps(
        num_classes,
        image_shape,
        layers.SpatialDropout2D(0.3),
        layers.Conv2D(4, 3, padding="same"),
        layers.Dropout(0.3, noise_shape=(None, 1, None, 1)),
        layers.AlphaDropout(0.2),
        layers.GaussianDropout(0.3),
        layers.GaussianNoise(0.2),
    )


def dropout_shared_by_all(num_classes, image_shape):
    return on_maps(num_classes, image_shape, layers.Dropout(0.5, noise_shape=(1, None, None, 4)))


def dropout_of_rows(num_classes, image_shape):
    return on_rows(
        num_classes,
        image_shape,
        layers.SpatialDropout1D(0.3, seed=1),
        layers.Dense(4, activation="selu"),
        layers.AlphaDropout(0.3, noise_shape=(None, 1, None)),
    )


def dropout_used_twice(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    dropout, dense = layers.Dropout(0.4), layers.Dense(5, activation="tanh")
    x = dropout(dense(layers.Flatten()(inputs)))
    return keras.Model(inputs, layers.Dense(num_classes)(dropout(layers.Dense(4)(x))))


def flips_and_turns(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(0.2, 0.2),
            layers.RandomRotation(0.1, fill_mode="nearest"),
            layers.RandomZoom(0.2),
            layers.Conv2D(4, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(num_classes),
        ]
    )


def crop(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.RandomCrop(6, 6),  # of square images, in evaluation, Keras 3.15 crops nothing
            layers.Conv2D(4, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(num_classes),
        ]
    )


def colours(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Rescaling(0.25, offset=0.5),
            layers.RandomBrightness(0.2, value_range=(0, 1)),
            layers.RandomContrast(0.4, value_range=(0, 1)),
            layers.RandomSaturation(0.5, value_range=(0, 1)),
            layers.RandomGrayscale(0.3),
            layers.Conv2D(4, 3, activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(num_classes),
        ]
    )


def erasing(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.RandomErasing(1.0, scale=(0.2, 0.6), value_range=(-2, 2)),
            layers.RandomShear(0.3, 0.3),
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )


def rand_augment(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Rescaling(40.0, offset=128.0),
            # This seed does not draw the equalization, whose histogram is of the whole batch.
            layers.RandAugment(num_ops=2, factor=0.4, seed=3),
            layers.Rescaling(1 / 128, offset=-1.0),
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )


def train_only(draw):
    """Return a layer that adds what `draw(x, seed)` returns while the model is trained."""

    class Adds(Seeded):
        def call(self, x, training=False):
            return x + draw(x, self.seed) if training else x

    return Adds()


def fixed_seed(num_classes, image_shape):
    layer = train_only(lambda x, _: random.normal(ops.shape(x), dtype=x.dtype, seed=7))
    return on_features(num_classes, image_shape, layer)


def without_dtype(num_classes, image_shape):
    layer = train_only(lambda x, seed: random.uniform(ops.shape(x), seed=seed))
    return on_features(num_classes, image_shape, layer)


def without_seed(num_classes, image_shape):
    layer = train_only(lambda x, _: random.uniform(ops.shape(x), dtype=x.dtype))
    return on_features(num_classes, image_shape, layer)


def whole_numbers(num_classes, image_shape):
    def draw(x, seed):
        factor = random.randint((ops.shape(x)[0], 1), 0, 3, seed=seed)
        return ops.cast(factor, x.dtype) * draw_noise(x, seed)

    def draw_noise(x, seed):
        return random.truncated_normal(ops.shape(x), 0, 0.2, x.dtype, seed)

    return on_features(num_classes, image_shape, train_only(draw))


def gumbel(num_classes, image_shape):
    def draw(x, seed):
        uniform = random.uniform(ops.shape(x), 1e-6, 1.0, dtype=x.dtype, seed=seed)
        return -ops.log(-ops.log(uniform)) - x + ops.softmax(x)

    return on_features(num_classes, image_shape, train_only(draw))


class Reparameterised(Seeded):
    """Draws around a mean, as variational autoencoders do, several times an example."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_scale = layers.Dense(4), layers.Dense(4)

    def build(self, shape):
        self.mean.build(shape)
        self.log_scale.build(shape)

    def call(self, x, training=False):
        mean = self.mean(x)
        if not training:
            return mean
        noise = random.normal((ops.shape(x)[0], 5, 4), dtype=x.dtype, seed=self.seed)
        return ops.mean(mean[:, None] + ops.exp(self.log_scale(x))[:, None] * noise, axis=1)


def reparameterised(num_classes, image_shape):
    return on_features(num_classes, image_shape, Reparameterised())


class ByTensorFlow(layers.Layer):
    """Draws by TensorFlow's stateless functions, and a counter of its own."""

    def build(self, shape):
        self.calls = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls"
        )

    def call(self, x, training=False):
        if not training:
            return x
        seed = tf.stack([5, self.calls * 1])
        self.calls.assign_add(1)
        x = tf.image.stateless_random_flip_left_right(x, seed)
        x = tf.image.stateless_random_brightness(x, 0.2, seed + 1)
        return tf.nn.experimental.stateless_dropout(x, 0.3, seed + 2)


def by_tensorflow(num_classes, image_shape):
    return on_maps(num_classes, image_shape, ByTensorFlow())


class RandomLayerDrop(Seeded):
    """Leaves a whole layer out for all examples at once (Fan et al. 2019)."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, training=False):
        if not training:
            return self.dense(x)
        kept = random.uniform((), seed=self.seed) < 0.7
        return ops.where(kept, self.dense(x), x)


def layer_drop(num_classes, image_shape):
    return on_features(num_classes, image_shape, RandomLayerDrop(), RandomLayerDrop())


class NoisyRouter(Seeded):
    """A mixture of experts, two for each example, chosen with noise (Shazeer et al. 2017)."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], 4), name="gate")
        self.experts = self.add_weight(shape=(4, shape[-1], 5), name="experts")

    def call(self, x, training=False):
        scores = ops.matmul(x, self.gate)
        if training:
            scores += 0.5 * random.normal(ops.shape(scores), dtype=x.dtype, seed=self.seed)
        best, places = ops.top_k(scores, 2)
        chosen = ops.take(self.experts, places, axis=0)
        return ops.einsum("be,bi,beio->bo", ops.softmax(best), x, chosen)


def noisy_experts(num_classes, image_shape):
    return on_features(num_classes, image_shape, NoisyRouter())
