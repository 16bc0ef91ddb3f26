"""Augmentation as pure batched functions, run inside each tower on its own slice.

    draws = tf.random.stateless_uniform([128, augment.NUM_DRAWS], seed=[seed, step])
    images = augment.train_images(images_uint8, draws, "tutorial")  # float32 [128, 24, 24, 3]

All random numbers come from `draws`, one row for each example. A kind is a base, see README.md,
optionally followed by a square to cut out: "resnet,cutout=8". Evaluation uses the base alone.

The tutorial's brightness adds one number to the whole image. It is not computed: contrast is
relative to the mean, and standardization subtracts the mean, so it cancels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.builder import device_names
from towers.data import arrays
from towers.data.pipeline import NUM_DRAWS as NUM_DRAWS
from towers.data.pipeline import Data
from towers.errors import InputError
from towers.formatting import first_of
from towers.options.parts import Augmentation
from towers.options.parts import parse_augment as parse

_ROW, _COLUMN, _FLIP, _CONTRAST, _CUT_ROW, _CUT_COLUMN, _ALTERNATING = range(NUM_DRAWS)

_CONTRAST_RANGE = (0.2, 1.8)
_PADDING = {"resnet": 4, "shift": 2}  # pixels on each side

# Data sets whose classes do not change when images are cropped and mirrored.
_PUBLISHED = ("cifar10", "shapes")
_SHOWN = 10  # names in a line


def resolve(kind: str, data: Data, compiled: bool = False) -> str:
    """Return the kind that --augment means for a data set.

    "auto" is "tutorial" for the data sets of this package, "standardize" for the user's images, and
    "none" for these with a compiled model and for examples that are no images.

    Args:
        kind: "auto" or one of `AUGMENTATIONS`, perhaps with a cutout.
        data: the data set.
        compiled: whether the model is compiled.

    Raises:
        InputError: the kind is for images and the examples are none; it would crop and mirror
            images whose targets are images, such as masks. Or the cutout is larger than the images,
            or has no base and the model is compiled.
    """
    plan = parse(kind)
    if plan.base == "auto" and data.image_shape is not None:
        plain = "none" if compiled else "standardize"
        plan = Augmentation("tutorial" if data.name in _PUBLISHED else plain, plan.cutout)
    if not plan.cutout and plan.base in ("auto", "none"):
        return "none"
    if data.image_shape is None:
        raise InputError(
            f"--augment={kind} is for images, but {data.name} has none: an example is "
            f"{arrays.format_spec(data.spec[:1])}; leave the flag out, or return images "
            "[height, width, channels], such as x[..., None] for gray images"
        )
    if plan.base == "none":
        raise InputError(
            f"--augment={kind}: none, the default for a compiled model, does not change images; "
            f"type --augment=standardize,cutout={plan.cutout}, which also standardizes them"
        )
    height, width, _ = output_shape(data.image_shape, plan.base)
    if plan.cutout > min(height, width):
        raise InputError(
            f"--augment={kind}: a square of {plan.cutout} pixels is larger than an image, which "
            f"is then {height}x{width}; use a smaller one"
        )
    if plan != ("standardize", 0):
        for path, leaf in arrays.leaves(data.spec):
            if path != "x" and leaf.shape.rank >= 2:
                raise InputError(
                    f"--augment={kind} crops and mirrors images, but not {path} "
                    f"{list(leaf.shape)} of {data.name}; type --augment=standardize"
                )
    return str(plan)


def describe(data: Data, kind: str, dtype: tf.DType | str | None = tf.float32) -> list[str]:
    """Return lines on the examples of a data set and their augmentation.

        example     x [32, 32, 3] uint8, y [] int32
        images      [24, 24, 3] float32, with --augment=tutorial
        classes     10: airplane, automobile, bird, ...

    Args:
        data: the data set.
        kind: one of `AUGMENTATIONS`, perhaps with a cutout.
        dtype: of the images for the model; None: as stored.
    """
    lines = [f"example     {arrays.format_spec(data.spec)}"]
    if data.image_shape is not None:
        shape = list(output_shape(data.image_shape, kind))
        dtype = tf.as_dtype(data.spec[0].dtype if dtype is None else dtype)
        lines.append(f"images      {shape} {dtype.name}, with --augment={kind}")
    if data.num_classes:
        lines.append(f"classes     {data.num_classes}: {first_of(data.class_names, _SHOWN)}")
    return lines


def train_images(
    images: tf.Tensor, draws: Any, kind: str, dtype: tf.DType | str = tf.float32
) -> tf.Tensor:
    """Augment a batch for training: `[b, H, W, C]` to `[b, h, w, C]` of `output_shape`.

    Args:
        images: uint8 or float; H, W and C are static, b may be 0.
        draws: float32 `[b, NUM_DRAWS]`, uniform in [0, 1).
        kind: one of `AUGMENTATIONS`, perhaps with a cutout.
        dtype: of the result and of all arithmetic: float32 or float64.
    """
    plan = parse(kind)
    if plan in (("standardize", 0), ("none", 0)):
        return eval_images(images, plan.base, dtype)
    stored, standardize = images.dtype, _standardized
    if plan.base != "standardize":
        images = _random_crop_and_flip(images, draws, plan.base)
    images = tf.cast(images, dtype)
    if plan.base == "tutorial":
        low, high = _CONTRAST_RANGE
        contrast = low + (high - low) * tf.cast(draws[:, _CONTRAST], dtype)[:, None, None, None]
        standardize = functools.partial(_standardized, contrast=contrast)
    images = _scaled(images, plan.base, stored, standardize)
    return _cut_out(images, draws, plan.cutout) if plan.cutout else images


def preparation(kind: str | None, dtype: str) -> Callable[[Sequence, Any], tuple]:
    """Return `prepare(example, draws)`: what a model is given for examples as they are stored.

    Args:
        kind: of augmentation; None if x are no images, or are taken as they are.
        dtype: of all floats.

    Returns:
        A function of an example, (x, y, ...) with a batch axis, and of the draws by which images
        are augmented; None: they are prepared for evaluation.
    """

    def cast(tensor: tf.Tensor) -> tf.Tensor:
        return tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor

    def prepare(example: Sequence, draws: tf.Tensor | None) -> tuple:
        x, *targets = example
        if kind is None:
            x = tf.nest.map_structure(cast, x)
        elif draws is None:
            x = eval_images(x, kind, dtype)
        else:
            x = train_images(x, draws, kind, dtype)
        return x, *tf.nest.map_structure(cast, targets)

    return prepare


def eval_images(
    images: tf.Tensor,
    kind: str,
    dtype: tf.DType | str = tf.float32,
    cast: Callable = tf.cast,
    standardize: Callable | None = None,
) -> tf.Tensor:
    """Prepare a batch for evaluation: `train_images` without randomness.

    Args:
        images: `[b, H, W, C]`, uint8 or float; with the two functions below also symbolic.
        kind: one of `AUGMENTATIONS`; a cutout has no effect.
        dtype: of the result and of all arithmetic.
        cast: `tf.cast` or a function like it.
        standardize: `tf.image.per_image_standardization` of batches of any float, or a function
            like it; None: TensorFlow's ops.
    """
    height, width, _ = output_shape(images.shape[1:], kind)
    top, left = (images.shape[1] - height) // 2, (images.shape[2] - width) // 2
    images = images[:, top : top + height, left : left + width]
    base, stored = parse(kind).base, images.dtype
    return _scaled(cast(images, dtype), base, stored, standardize or _standardized)


def output_shape(image_shape: tuple[int, int, int], kind: str) -> tuple[int, int, int]:
    """Return the shape (h, w, C) of the results of `train_images` and `eval_images`.

    Args:
        image_shape: (H, W, C) of the images that these are given.
        kind: one of `AUGMENTATIONS`, perhaps with a cutout.
    """
    base = parse(kind).base
    height, width, channels = image_shape
    if base == "tutorial":
        height, width = max(1, height * 3 // 4), max(1, width * 3 // 4)
    return height, width, channels


def _random_crop_and_flip(images: tf.Tensor, draws: tf.Tensor, base: str) -> tf.Tensor:
    height, width, _ = output_shape(images.shape[1:], base)
    margin = _PADDING.get(base, 0)
    if base == "shift":
        images, margin = _pad_by_reflection(images, margin), 0
    rows, columns = (size + 2 * margin for size in images.shape[1:3])
    # A float32 below 1 times a whole number never rounds up to the number.
    top = draws[:, _ROW] * (rows - height + 1)
    left = draws[:, _COLUMN] * (columns - width + 1)
    mirrored = draws[:, _ALTERNATING if base == "shift" else _FLIP] < 0.5
    crop = _crop_by_transform if device_names.is_gpu(top.device) else _crop_by_gather
    return crop(images, top, left, mirrored, height, width, margin)


def _pad_by_reflection(images: tf.Tensor, margin: int) -> tf.Tensor:
    # Images of too few pixels get less than `margin`. tf.pad fails for an empty batch, and has no
    # kernel for bytes on a GPU.
    for axis in (1, 2):
        size = images.shape[axis]
        side = min(margin, size - 1)
        whole = [slice(None)] * axis
        first = images[(*whole, slice(1, 1 + side))]
        last = images[(*whole, slice(size - 1 - side, size - 1))]
        around = tf.reverse(first, [axis]), images, tf.reverse(last, [axis])
        images = tf.concat(around, axis)
    return images


def _crop_by_gather(
    images: tf.Tensor, top: tf.Tensor, left: tf.Tensor, mirrored: tf.Tensor, height: int,
    width: int, margin: int,
) -> tf.Tensor:  # fmt: skip
    if margin:
        images = tf.pad(images, [[0, 0], [margin, margin], [margin, margin], [0, 0]])
    num, (_, rows, columns, channels) = tf.shape(images)[0], images.shape
    top, left = tf.cast(top, tf.int32), tf.cast(left, tf.int32)
    across = tf.range(width)
    x = left[:, None] + tf.where(mirrored[:, None], width - 1 - across, across)
    y = top[:, None] + tf.range(height) + rows * tf.range(num)[:, None]
    # One gather of whole pixels, while they are still bytes: half the time of a pad, a gather of
    # float rows and columns, and a where for the flip.
    pixels = tf.reshape(images, [-1, channels])
    return tf.gather(pixels, y[:, :, None] * columns + x[:, None, :])


def _crop_by_transform(
    images: tf.Tensor, top: tf.Tensor, left: tf.Tensor, mirrored: tf.Tensor, height: int,
    width: int, margin: int,
) -> tf.Tensor:  # fmt: skip
    """Crop on a GPU, where a gather has no kernel for bytes, and int32 is on the host.

    The pixel at (x, y) of a window is that at (a x + c, y + f) of the image, 0 outside of it.
    """
    top, left = tf.floor(top) - margin, tf.floor(left) - margin
    flip = tf.cast(mirrored, tf.float32)
    zero = tf.zeros_like(top)
    a, c = 1 - 2 * flip, left + (width - 1) * flip
    return tf.raw_ops.ImageProjectiveTransformV2(
        images=images,
        transforms=tf.stack([a, zero, c, zero, zero + 1, top, zero, zero], axis=1),
        output_shape=[height, width],
        interpolation="NEAREST",
    )


def _cut_out(images: tf.Tensor, draws: tf.Tensor, side: int) -> tf.Tensor:
    """Set a square around any pixel to 0, which is the mean (DeVries and Taylor 2017)."""
    rows, columns = (
        _span(draws[:, column], side, size)
        for column, size in zip((_CUT_ROW, _CUT_COLUMN), images.shape[1:3], strict=True)
    )
    square = rows[:, :, None, None] & columns[:, None, :, None]
    return images * tf.cast(~square, images.dtype)  # a where takes twice as long


def _span(place: tf.Tensor, length: int, size: int) -> tf.Tensor:
    # Which of `size` pixels are in a span around the one at `place`, 0..1; bool [b, size].
    middle = tf.floor(place[:, None] * size)
    distance = np.arange(size, dtype=np.float32) - middle
    return (distance >= -length / 2) & (distance < length / 2)


def _scaled(images: tf.Tensor, base: str, stored: Any, standardize: Callable) -> tf.Tensor:
    # In the range of the model's inputs; `stored` is their dtype in the data set.
    if base == "shift" and stored == "uint8":
        return (images - 128.0) / 64.0  # exact, in any way
    return images if base in ("none", "shift") else standardize(images)


def _standardized(images: tf.Tensor, contrast: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Apply `tf.image.adjust_contrast`, then `tf.image.per_image_standardization`.

    In one pass less: the adjusted image's mean and variance follow from those of its channels.
    """
    height, width, channels = images.shape[1:]
    num = height * width * channels
    channel_mean = tf.reduce_mean(images, [1, 2], keepdims=True)
    centered = images - channel_mean
    offset = channel_mean - tf.reduce_mean(channel_mean, 3, keepdims=True)
    within = tf.reduce_sum(tf.square(centered), [1, 2, 3], keepdims=True)
    between = height * width * tf.reduce_sum(tf.square(offset), 3, keepdims=True)
    # 1 / deviation, at most sqrt(num) as in TensorFlow, for images of one color. As 1.0 / x it
    # would become TensorFlow's Reciprocal, whose last bit depends on the place in the batch.
    scale = num**0.5 / tf.maximum(tf.sqrt(contrast * contrast * within + between), 1.0)
    return centered * (contrast * scale) + offset * scale
