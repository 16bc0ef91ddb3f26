"""Augmentation as pure batched functions, run inside each tower on its own slice.

Every random number comes from `draws`, one row for each example, so what an example looks like
depends on (seed, step, its place in the global batch) and not on the tower that it falls to:

    draws = tf.random.stateless_uniform([128, augment.NUM_DRAWS], seed=[seed, step])
    images = augment.train_images(images_uint8, draws, "tutorial")  # float32 [128, 24, 24, 3]

The kinds:

* "tutorial", as TensorFlow's CIFAR-10 tutorial: random crop to three quarters of each side, random
  flip, random brightness, random contrast, standardised. Evaluation: the centre crop.
* "resnet": four zero pixels around, random crop back to full size, flip, standardised. Evaluation:
  the whole image.
* "none": standardised.
* "off": nothing, for images that are already as the model takes them.

The tutorial's brightness adds one number (up to 63 of 255) to the whole image. Nothing is clipped
after it, contrast is about the mean, and standardisation takes the mean away: it cancels. So it is
not computed, and the result is the tutorial's for images of any range; a test compares the two.
"""

from __future__ import annotations

import tensorflow as tf

names = ("tutorial", "resnet", "none", "off")

NUM_DRAWS = 4
_ROW, _COLUMN, _FLIP, _CONTRAST = range(NUM_DRAWS)

_CONTRAST_RANGE = (0.2, 1.8)
_PADDING = 4  # pixels on each side, "resnet"


def train_images(
    images: tf.Tensor, draws: tf.Tensor, kind: str, dtype: tf.DType | str = tf.float32
) -> tf.Tensor:
    """Augment a batch for training: `[b, H, W, C]` to `[b, h, w, C]` of `output_shape`.

    Args:
        images: uint8 or float; H, W and C are static, b may be 0.
        draws: float32 `[b, NUM_DRAWS]`, uniform in [0, 1).
        kind: one of `names`.
        dtype: of the result and of all arithmetic: float32 or float64.

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind in ("none", "off"):
        return eval_images(images, kind, dtype)
    height, width, _ = output_shape(images.shape[1:], kind)
    if kind == "resnet":
        margin = [_PADDING, _PADDING]
        images = tf.pad(images, [[0, 0], margin, margin, [0, 0]])
    images = tf.cast(_random_crop_and_flip(images, draws, height, width), dtype)
    if kind == "resnet":
        return _standardise(images)
    low, high = _CONTRAST_RANGE
    contrast = low + (high - low) * tf.cast(draws[:, _CONTRAST], dtype)
    return _standardise(images, contrast[:, None, None, None])


def eval_images(images: tf.Tensor, kind: str, dtype: tf.DType | str = tf.float32) -> tf.Tensor:
    """Prepare a batch for evaluation, as `train_images`, but nothing is random."""
    height, width, _ = output_shape(images.shape[1:], kind)
    top, left = (images.shape[1] - height) // 2, (images.shape[2] - width) // 2
    images = images[:, top : top + height, left : left + width]
    images = tf.cast(images, dtype)
    return images if kind == "off" else _standardise(images)


def output_shape(image_shape: tuple[int, int, int], kind: str) -> tuple[int, int, int]:
    """Return the shape (h, w, C) that `train_images` and `eval_images` give to (H, W, C).

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind not in names:
        raise ValueError(f"unknown augmentation {kind!r}; allowed are {', '.join(names)}")
    height, width, channels = image_shape
    if kind == "tutorial":
        height, width = max(1, height * 3 // 4), max(1, width * 3 // 4)
    return height, width, channels


def _random_crop_and_flip(
    images: tf.Tensor, draws: tf.Tensor, height: int, width: int
) -> tf.Tensor:
    """Cut a window out of each image, half of them mirrored."""
    num, (_, rows, columns, channels) = tf.shape(images)[0], images.shape
    # A float32 below 1 times a whole number never rounds up to that number.
    top = tf.cast(draws[:, _ROW] * (rows - height + 1), tf.int32)
    left = tf.cast(draws[:, _COLUMN] * (columns - width + 1), tf.int32)
    across = tf.range(width)
    mirrored = draws[:, _FLIP, None] < 0.5
    x = left[:, None] + tf.where(mirrored, width - 1 - across, across)
    y = top[:, None] + tf.range(height) + rows * tf.range(num)[:, None]
    # One gather of whole pixels, while they are still bytes: half the time of a pad, a gather of
    # float rows and columns, and a where for the flip.
    pixels = tf.reshape(images, [-1, channels])
    return tf.gather(pixels, y[:, :, None] * columns + x[:, None, :])


def _standardise(images: tf.Tensor, contrast: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Stretch each channel about its mean by `contrast`, then give each image mean 0, deviation 1.

    `tf.image.adjust_contrast`, then `tf.image.per_image_standardization`, in one pass less: the
    stretched image's mean and variance follow from those of its channels.
    """
    height, width, channels = images.shape[1:]
    num = height * width * channels
    channel_mean = tf.reduce_mean(images, [1, 2], keepdims=True)
    centred = images - channel_mean
    offset = channel_mean - tf.reduce_mean(channel_mean, 3, keepdims=True)
    within = tf.reduce_sum(tf.square(centred), [1, 2, 3], keepdims=True)
    between = height * width * tf.reduce_sum(tf.square(offset), 3, keepdims=True)
    # 1 / deviation, at most sqrt(num) as in TensorFlow: an image of one colour must not become
    # noise. Written as 1.0 / x it would become TensorFlow's Reciprocal, whose last bit depends on
    # the example's place in the batch.
    scale = num**0.5 / tf.maximum(tf.sqrt(contrast * contrast * within + between), 1.0)
    return centred * (contrast * scale) + offset * scale
