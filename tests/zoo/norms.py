"""Normalization: BatchNorm of every shape, and those that know one example alone."""

import keras

from tests.zoo.entry import SAME, entry
from tests.zoo.parts import of_images, on_features, on_maps, own

layers = keras.layers
BatchNorm = layers.BatchNormalization
LOCAL, IN_PARTS = "--batch_norm=local", "--accumulate_steps=2"


@of_images(SAME, "BatchNorm of 2, 3, 4 and 5 axes")
def batch_norm_ranks(images):
    x = BatchNorm()(layers.Conv2D(4, 3, activation="tanh")(images))
    volumes = BatchNorm()(layers.Reshape((3, 2, 6, 4))(x))
    rows = BatchNorm()(layers.Reshape((9, 16))(volumes))
    return BatchNorm()(layers.Dense(6)(layers.Flatten()(rows)))


@own(on_maps, SAME, "called with training=False in training", norm=BatchNorm,
     then=lambda: [layers.Conv2D(3, 3)])  # fmt: skip
def batch_norm_in_inference(self, x):
    return self.norm(x, training=False)


entry(SAME, "no moments are taken", IN_PARTS)(batch_norm_in_inference)


batch_norm_frozen = on_maps(
    SAME,
    "statistics stay, nothing is averaged",
    lambda: [
        layers.Conv2D(3, 2, trainable=False),
        BatchNorm(trainable=False, moving_mean_initializer=keras.initializers.Constant(0.25)),
        layers.Conv2D(3, 3, activation="tanh"),
    ],
)
entry(SAME, "no moments are taken", LOCAL)(batch_norm_frozen)


@entry("local BatchNorm", "moments of a half", IN_PARTS)
@of_images(SAME, "two assignments of one statistic in a step")
def batch_norm_twice(images):
    norm, conv = BatchNorm(), layers.Conv2D(3, 3, padding="same")
    return layers.GlobalMaxPooling2D()(norm(conv(norm(conv(images)))))


batch_norm_synchronized = on_maps(
    SAME, "asks for all towers", lambda: [BatchNorm(synchronized=True), layers.ReLU()], LOCAL
)
batch_norm_renorm = on_maps(
    SAME, "moments of the batch beside moving ones", lambda: [BatchNorm(renorm=True), layers.ReLU()]
)
batch_norm_after_dropout = on_features(
    SAME,
    "draws by example, then moments of all",
    lambda: [layers.Dropout(0.3), BatchNorm(), layers.ReLU()],
)
entry("local BatchNorm", "moments of a slice", LOCAL, quick=True)(batch_norm_after_dropout)
by_example = on_maps(
    SAME,
    "LayerNorm, GroupNorm, UnitNorm, RMSNorm: one example alone",
    lambda: [
        layers.LayerNormalization(axis=[1, 2, 3]),
        layers.GroupNormalization(2),
        layers.Conv2D(4, 3, padding="same"),
        layers.UnitNormalization(),
        layers.RMSNormalization(),
        layers.GroupNormalization(-1),
    ],
)
spectral = on_maps(
    SAME,
    "assigns its kernel and a vector, from weights alone",
    lambda: [
        layers.SpectralNormalization(layers.Conv2D(4, 3, activation="relu")),
        layers.SpectralNormalization(layers.Conv2D(4, 1), power_iterations=2),
    ],
)
