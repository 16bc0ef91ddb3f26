"""A small network that learns CIFAR-10 in few epochs, in the manner of the airbench records.

    model = fast(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

Six convolutions of 3x3 in three groups of 64, 256 and 256 channels behind a fixed one of 2x2, which
takes neighbouring pixels and colours apart: 1,973,968 weights, of which 1,971,328 are trained.

The network has 118 million multiplications an image of 32x32. As in fast.ai's entries to DAWNBench,
its first steps may see smaller images: `small_size=24, small_steps=100`.

Source: Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv:2404.00498.
"""

import math

import keras
import tensorflow as tf

from . import parts

_GROUPS = (1, 4, 4)  # times `width`: channels
_SHRINKS_BY = 8  # three poolings, and one that takes what is left


def fast(
    num_classes: int = 10,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    width: int = 64,
    small_size: int = 0,
    small_steps: int = 0,
) -> keras.Model:
    """Build the network.

    Args:
        num_classes: number of logits.
        image_shape: `(H, W, C)` of the images, at least 12 x 12.
        width: number of channels of the first group; the others have four times as many.
        small_size: height and width to which images are resized in the first steps; 0: never.
        small_steps: number of these steps.

    Returns:
        A model from images `[B, H, W, C]` to logits `[B, num_classes]`. Under a mixed policy both
        are float32, so that the loss is computed in full precision.

    Raises:
        ValueError: an argument is of another kind, or out of range.
    """
    least = _SHRINKS_BY + 4
    parts.require_whole(num_classes=num_classes, width=width)
    if not isinstance(small_steps, int) or small_steps < 0:
        raise ValueError(f"small_steps={small_steps!r} must be a whole number of at least 0")
    smallest = min(*image_shape[:2], small_size or least)
    if not isinstance(small_size, int) or smallest < least:
        raise ValueError(
            f"image_shape={tuple(image_shape)} and small_size={small_size!r}: images must be at "
            f"least {least} x {least} pixels; small_size=0 is for images of one size"
        )
    full_precision = parts.full_precision()
    layers = keras.layers

    inputs = x = parts.images(image_shape)
    if small_size and small_steps:
        x = SmallAtFirst(small_size, small_steps, dtype=full_precision, name="small")(x)
    # Both signs of each pattern: after the activation nothing of it is lost.
    x = layers.Conv2D(
        filters=8 * image_shape[-1],
        kernel_size=2,
        use_bias=False,
        kernel_initializer=CosinePatterns(),
        trainable=False,
        name="patterns",
    )(x)
    # Without an offset, none of the gradients behind it are asked for: 5 % of a step.
    x = _normalize_and_activate(x, "patterns", epsilon=5e-4, center=False)
    for group, times in enumerate(_GROUPS, start=1):
        x = _conv(f"group{group}_conv1", times * width)(x)
        x = layers.MaxPooling2D(2, name=f"group{group}_pool")(x)
        x = _normalize_and_activate(x, f"group{group}_1")
        x = _conv(f"group{group}_conv2", times * width)(x)
        x = _normalize_and_activate(x, f"group{group}_2")
    x = layers.GlobalMaxPooling2D(name="pool")(x)
    # Smaller values and larger weights than usual: as the logits begin near 0, and move slowly.
    scale = (4 * width) ** -0.5
    x = layers.Rescaling(scale, dtype=full_precision, name="scale")(x)
    logits = layers.Dense(
        num_classes,
        use_bias=False,
        kernel_initializer=keras.initializers.RandomNormal(stddev=scale),
        dtype=full_precision,
        name="logits",
    )(x)
    return keras.Model(inputs, logits, name="fast")


def _conv(name: str, num_channels: int) -> keras.layers.Layer:
    return keras.layers.Conv2D(
        num_channels,
        kernel_size=3,
        padding="same",
        use_bias=False,  # the normalization that follows has one
        kernel_initializer=IdentityFirst(),
        name=name,
    )


def _normalize_and_activate(
    x: keras.KerasTensor, name: str, epsilon: float = 1e-6, center: bool = True
) -> keras.KerasTensor:
    # Without a scale: Muon keeps the kernels' norms, and all channels count alike.
    x = keras.layers.BatchNormalization(
        momentum=0.6, epsilon=epsilon, scale=False, center=center, name=f"{name}_norm"
    )(x)
    return keras.layers.Activation("relu", name=f"{name}_relu")(x)


@keras.saving.register_keras_serializable(package="towers_models")
class CosinePatterns(keras.initializers.Initializer):
    """The patterns of a cosine transform over a patch and its colours, and their negatives.

    The source takes the principal components of patches of training images. Of natural images these
    are nearly the cosine transform's, which needs no images.
    """

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> tf.Tensor:
        """Return a kernel `[h, w, C, 2 h w C]`."""
        dtype = dtype or keras.config.floatx()
        rows, columns, colours = (_cosines(size, dtype) for size in shape[:3])
        patterns = tf.einsum("ai,bj,ck->ijkabc", rows, columns, colours)
        patterns = tf.reshape(patterns, [*shape[:3], shape[-1] // 2])
        return tf.concat([patterns, -patterns], axis=-1)


def _cosines(size: int, dtype: str) -> tf.Tensor:
    """Return the orthonormal discrete cosine transform, `[size, size]`, a row for each pattern."""
    numbers = tf.range(size, dtype=tf.float64)
    rows = tf.cos(numbers[:, None] * (numbers + 0.5) * math.pi / size)
    return tf.cast(tf.math.l2_normalize(rows, axis=1), dtype)


@keras.saving.register_keras_serializable(package="towers_models")
class IdentityFirst(keras.initializers.VarianceScaling):
    """Kernels whose first channels hand on the input as it is; the others are random, uniform.

    Source: arXiv:2404.00498, section 3.1, "dirac initialization".
    """

    def __init__(self, seed: int | None = None):
        """Set the seed of the random channels."""
        super().__init__(1 / 3, "fan_in", "uniform", seed)  # PyTorch's for convolutions

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> tf.Tensor:
        """Return a kernel `[h, w, C_in, C_out]`."""
        height, width, num_inputs, num_outputs = shape
        random = super().__call__(shape, dtype)
        identity = tf.eye(num_inputs, min(num_inputs, num_outputs), dtype=random.dtype)
        top, left = height // 2, width // 2
        around = [[top, height - 1 - top], [left, width - 1 - left], [0, 0], [0, 0]]
        identity = tf.pad(identity[None, None], around)
        return tf.concat([identity, random[..., num_inputs:]], axis=-1)

    def get_config(self) -> dict:
        """Return the arguments of the constructor."""
        return {"seed": super().get_config()["seed"]}


@keras.saving.register_keras_serializable(package="towers_models")
class SmallAtFirst(keras.layers.Layer):
    """Makes images smaller in the first training steps, whose weights are rough anyhow.

    The network behind it must take images of any size. It counts the calls of training.
    """

    def __init__(self, size: int, num_steps: int, **kwargs: object):
        """Set size and length.

        Args:
            size: height and width of the small images, in pixels.
            num_steps: number of training steps with small images.
            **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.
        """
        super().__init__(**kwargs)
        self.size = size
        self.num_steps = num_steps

    def build(self, input_shape: tuple) -> None:
        """Make the counter."""
        self.steps = self.add_weight(
            shape=(), initializer="zeros", dtype="int64", trainable=False, name="steps"
        )

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Map `[B, H, W, C]` to `[B, size, size, C]` at first, then to itself."""
        if not training:
            return images
        before = tf.convert_to_tensor(self.steps.value)
        self.steps.assign(before + 1)
        return tf.cond(
            before < self.num_steps,
            lambda: tf.cast(
                tf.image.resize(images, [self.size, self.size], antialias=True), images.dtype
            ),
            lambda: tf.identity(images),
        )

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """Return the shape, of unknown height and width."""
        return (input_shape[0], None, None, input_shape[-1])

    def get_config(self) -> dict:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "size": self.size, "num_steps": self.num_steps}
