"""The parts of --augment, such as mixup: batched functions of images and draws.

    images = augment_ops.on_values(images, draws, plan, tf.uint8)   # before standardisation
    images = augment_ops.on_standardised(images, draws, plan)       # after it
    images = augment_ops.mixed(images, partners, draws, plan)       # with others of the batch

Each example has its own numbers. The last bit of a power or a sine may depend on an example's place
in the batch, since TensorFlow's kernels are vectorized: they are computed in float64 and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from towers.data.pipeline import NUM_DRAWS
from towers.options.augmentation import Augmentation

_FIRST = 4  # column of `draws`; the columns before and the last one are for the bases
(
    _CUT_ROW, _CUT_COLUMN, _BRIGHTNESS, _CONTRAST, _SATURATION, _OP_0, _SIGN_0, _OP_1, _SIGN_1,
    _SHARE, _ANGLE, _BOX_ROW, _BOX_COLUMN, _WHICH,
) = range(_FIRST, NUM_DRAWS - 1)  # fmt: skip

_GREY = (0.299, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601
_FILL = 128.0  # outside of an image

# RandAugment at magnitude 10: degrees, part of a side, blending factor, bits.
_TURN, _SHEAR, _SHIFT, _BLEND, _BITS = 30, 0.3, 0.3, 0.9, 4


def on_values(
    images: tf.Tensor, draws: tf.Tensor, plan: Augmentation, stored: tf.DType
) -> tf.Tensor:
    """Apply color and randaugment.

    Args:
        images: `[b, h, w, C]`, float.
        draws: float32 `[b, NUM_DRAWS]`, uniform in [0, 1).
        plan: has the strengths.
        stored: dtype of the images in the data set; unless it is uint8, they are scaled to 0..255
            and back.
    """
    if not plan.color and not plan.randaugment:
        return images
    low, scale = tf.zeros([], images.dtype), tf.ones([], images.dtype)
    if stored != tf.uint8:
        low = tf.reduce_min(images, [1, 2, 3], keepdims=True)
        range_ = tf.reduce_max(images, [1, 2, 3], keepdims=True) - low
        scale = tf.where(range_ > 0, range_ / 255, 1)
        images = (images - low) / scale
    qualities = (_BRIGHTNESS, _black), (_CONTRAST, _mean_grey), (_SATURATION, _grey)
    for column, without in qualities if plan.color else ():
        images = _enhance(images, without, plan.color * (2 * draws[:, column] - 1))
    for op, sign in ((_OP_0, _SIGN_0), (_OP_1, _SIGN_1)) if plan.randaugment else ():
        images = _randaugment_op(images, draws[:, op], draws[:, sign] < 0.5, plan.randaugment / 10)
    return images if stored == tf.uint8 else images * scale + low


def on_standardised(images: tf.Tensor, draws: tf.Tensor, plan: Augmentation) -> tf.Tensor:
    """Apply cutout: a square of zeros, the mean, around any pixel (DeVries and Taylor 2017).

    Args:
        images: `[b, h, w, C]`, float.
        draws: float32 `[b, NUM_DRAWS]`, uniform in [0, 1).
        plan: has the square's side in pixels.
    """
    if not plan.cutout:
        return images
    rows = _span(draws[:, _CUT_ROW], plan.cutout, images.shape[1])
    columns = _span(draws[:, _CUT_COLUMN], plan.cutout, images.shape[2])
    return images * tf.cast(~_box(rows, columns), images.dtype)  # a where takes twice as long


def mixed(
    images: tf.Tensor, partners: tf.Tensor, draws: tf.Tensor, plan: Augmentation
) -> tf.Tensor:
    """Mix images with their partners: mixup (Zhang et al. 2018), CutMix (Yun et al. 2019).

    With both, each example has one of the two with probability 1/2.

    Args:
        images: `[b, h, w, C]`, float, after all other parts.
        partners: another image for each, likewise.
        draws: float32 `[b, NUM_DRAWS]`, uniform in [0, 1): those of `images`.
        plan: has mixup, cutmix or both.
    """
    own_share, inside = _mixing(images.shape[1], images.shape[2], draws, plan)
    cut = tf.where(_box(*inside), partners, images) if plan.cutmix else None
    if not plan.mixup:
        return cut
    blended = _blend(partners, images, _by_example(own_share, images.dtype))
    if cut is None:
        return blended
    return tf.where(_has_cutmix(draws, plan)[:, None, None, None], cut, blended)


def share(
    height: int, width: int, draws: tf.Tensor, plan: Augmentation, dtype: tf.DType | str
) -> tf.Tensor:
    """Return the weight of each example's own target in its loss, `[b]`; the rest is its partner's.

    Args:
        height: of the mixed images, in pixels.
        width: likewise.
        draws: as for `mixed`.
        plan: as for `mixed`.
        dtype: of the result.
    """
    own_share, inside = _mixing(height, width, draws, plan)
    if plan.cutmix:
        rows, columns = (tf.reduce_sum(tf.cast(side, tf.float64), axis=1) for side in inside)
        outside = 1 - rows * columns / (height * width)
        own_share = tf.where(_has_cutmix(draws, plan), outside, own_share)
    return tf.cast(own_share, dtype)


def _mixing(
    height: int, width: int, draws: tf.Tensor, plan: Augmentation
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    # Mixup's weight of each example, `[b]`, and CutMix's rows and columns of the partner.
    own_share = _beta(draws, plan.mixup or plan.cutmix)
    if not plan.cutmix:
        return own_share, []
    length = tf.sqrt(1 - _beta(draws, plan.cutmix))
    sides = (_BOX_ROW, height), (_BOX_COLUMN, width)
    inside = [_span(draws[:, column], length * size, size) for column, size in sides]
    return own_share, inside


def _has_cutmix(draws: tf.Tensor, plan: Augmentation) -> tf.Tensor:
    return draws[:, _WHICH] < (0.5 if plan.mixup else 2.0)


def _beta(draws: tf.Tensor, alpha: float) -> tf.Tensor:
    """Return samples of Beta(alpha, alpha), float64 `[b]`.

    Bailey (1994) computes Student's t, with 2 alpha degrees of freedom, from two uniform numbers;
    (1 + t / sqrt(t^2 + 2 alpha)) / 2 has that distribution.
    """
    uniform = tf.cast(draws[:, _SHARE], tf.float64)
    angle = tf.cos(2 * math.pi * tf.cast(draws[:, _ANGLE], tf.float64))
    power, square = uniform ** (1 / alpha), angle * angle
    part = tf.math.divide_no_nan(square * (1 - power), power + square * (1 - power))
    return 0.5 + 0.5 * tf.sign(angle) * tf.sqrt(part)


def _randaugment_op(
    images: tf.Tensor, which: tf.Tensor, minus: tf.Tensor, strength: float
) -> tf.Tensor:
    """Apply one of OPS to each image, by `which`, uniform in [0, 1); `strength` is in 0..1.

    Each op gets its own images only: all ops for all images took 6 times as long.
    """
    number, num_ops = tf.cast(which * len(OPS), tf.int32), len(OPS)
    amounts = tf.where(minus, -strength, strength)
    rows = tf.range(tf.shape(images)[0])
    of_ops = zip(
        *(tf.dynamic_partition(t, number, num_ops) for t in (images, amounts)), strict=True
    )
    done = [op(*inputs) for op, inputs in zip(OPS.values(), of_ops, strict=True)]
    augmented = tf.dynamic_stitch(tf.dynamic_partition(rows, number, num_ops), done)
    return tf.ensure_shape(augmented, images.shape)


def _enhance(images: tf.Tensor, without: Callable, amounts: tf.Tensor) -> tf.Tensor:
    # Blends with an image without the quality, such as a grey one for colour.
    factor = _by_example(1 + amounts, images.dtype)
    return tf.clip_by_value(_blend(without(images), images, factor), 0, 255)


def _black(images: tf.Tensor) -> tf.Tensor:
    return tf.zeros([], images.dtype)


def _mean_grey(images: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(_grey(images), [1, 2], keepdims=True)


def _grey(images: tf.Tensor) -> tf.Tensor:
    # [b, h, w, 1]: the luminance of RGB, else the mean of the channels.
    channels = images.shape[3]
    weights = _GREY if channels == 3 else [1 / channels] * channels
    return tf.reduce_sum(images * tf.constant(weights, images.dtype), axis=3, keepdims=True)


def _blur(images: tf.Tensor) -> tf.Tensor:
    # As Pillow: a pixel has weight 5, its neighbours 1, the border stays.
    height, width = images.shape[1:3]
    if min(height, width) < 3:
        return images
    means = tf.nn.avg_pool2d(images, 3, 1, "SAME")
    border = np.ones([height, width, 1], bool)
    border[1:-1, 1:-1] = False
    return tf.where(border, images, (9 * means + 4 * images) / 13)


def _autocontrast(images: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    low = tf.reduce_min(images, [1, 2], keepdims=True)
    range_ = tf.reduce_max(images, [1, 2], keepdims=True) - low
    return tf.where(range_ > 0, (images - low) * (255 / tf.maximum(range_, 1)), images)


def _equalize(images: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    height, width, channels = images.shape[1:]
    num = tf.shape(images)[0] * channels
    # Each channel of each image has 256 bins, one channel after the other.
    flat = tf.reshape(tf.transpose(images, [0, 3, 1, 2]), [num, height * width])
    bins = tf.cast(tf.round(flat), tf.int32) + 256 * tf.range(num)[:, None]
    ones = tf.ones_like(flat)
    counts = tf.reshape(tf.math.unsorted_segment_sum(ones, bins, 256 * num), [num, 256])
    below = tf.cumsum(counts, axis=1, exclusive=True)
    # As Pillow, which divides whole numbers and leaves out the brightest pixels.
    others = tf.reduce_max(tf.where(counts > 0, below, 0), axis=1, keepdims=True)
    step = tf.floor(others / 255)
    becomes = tf.minimum(tf.floor((below + tf.floor(step / 2)) / tf.maximum(step, 1)), 255)
    values = tf.gather(tf.reshape(becomes, [-1]), bins)
    values = tf.where(step > 0, values, flat)
    return tf.transpose(tf.reshape(values, [-1, channels, height, width]), [0, 2, 3, 1])


def _solarize(images: tf.Tensor, amounts: tf.Tensor) -> tf.Tensor:
    from_ = 256 * (1 - _by_example(tf.abs(amounts), images.dtype))
    return tf.where(images >= from_, 255 - images, images)


def _posterize(images: tf.Tensor, amounts: tf.Tensor) -> tf.Tensor:
    steps = tf.constant([2.0**bits for bits in range(_BITS + 1)])  # a power may be less exact
    step = tf.gather(steps, tf.cast(tf.round(_BITS * tf.abs(amounts)), tf.int32))
    step = _by_example(step, images.dtype)
    return tf.floor(images / step) * step


def _affine(
    images: tf.Tensor, turn: Any = 0.0, shear_x: Any = 0.0, shear_y: Any = 0.0, shift_x: Any = 0.0,
    shift_y: Any = 0.0,
) -> tf.Tensor:  # fmt: skip
    """Turn, shear or shift images about their middle, by amounts `[b]`; take nearest pixels."""
    height, width = images.shape[1:3]
    x, y = (width - 1) / 2, (height - 1) / 2
    turn, shear_x, shear_y, shift_x, shift_y = (
        tf.cast(amount, tf.float64) for amount in (turn, shear_x, shear_y, shift_x, shift_y)
    )
    none = tf.zeros([tf.shape(images)[0]], tf.float64)
    angle = none + math.radians(_TURN) * turn
    sine, cosine = tf.sin(angle), tf.cos(angle)
    across, down = _SHEAR * shear_x - sine, _SHEAR * shear_y + sine
    left = x - cosine * x - across * y + _SHIFT * width * shift_x
    top = y - down * x - cosine * y + _SHIFT * height * shift_y
    # Source coordinates in float64: the last bit must not decide which pixel is the nearest.
    columns, rows = np.meshgrid(np.arange(width, dtype=float), np.arange(height, dtype=float))
    cosine, across, down, left, top = (t[:, None, None] for t in (cosine, across, down, left, top))
    column = tf.round(cosine * columns + across * rows + left)
    row = tf.round(down * columns + cosine * rows + top)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    place = tf.where(inside, row * width + column, 0)
    pixels = tf.reshape(images, [-1, height * width, images.shape[3]])
    nearest = tf.gather(pixels, tf.cast(place, tf.int64), batch_dims=1)
    return tf.where(inside[..., None], nearest, tf.constant(_FILL, images.dtype))


# RandAugment's list (Cubuk et al. 2019): functions of images and amounts, `[b]` in -1..1.
OPS = {
    "identity": lambda images, _: images,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "rotate": lambda images, amounts: _affine(images, turn=amounts),
    "solarize": _solarize,
    "posterize": _posterize,
    "brightness": lambda images, amounts: _enhance(images, _black, _BLEND * amounts),
    "contrast": lambda images, amounts: _enhance(images, _mean_grey, _BLEND * amounts),
    "color": lambda images, amounts: _enhance(images, _grey, _BLEND * amounts),
    "sharpness": lambda images, amounts: _enhance(images, _blur, _BLEND * amounts),
    "shear_x": lambda images, amounts: _affine(images, shear_x=amounts),
    "shear_y": lambda images, amounts: _affine(images, shear_y=amounts),
    "translate_x": lambda images, amounts: _affine(images, shift_x=amounts),
    "translate_y": lambda images, amounts: _affine(images, shift_y=amounts),
}


def _span(place: tf.Tensor, length: tf.Tensor | float, size: int) -> tf.Tensor:
    # Which of `size` pixels are in a span around the one at `place`, 0..1; bool [b, size].
    middle = tf.cast(tf.floor(place * size), tf.float64) + 0.5
    pixels = np.arange(size) + 0.5
    low, high = middle - length / 2, middle + length / 2
    return (pixels >= low[:, None]) & (pixels < high[:, None])


def _box(rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    return rows[:, :, None, None] & columns[:, None, :, None]


def _blend(first: tf.Tensor, second: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    return first + part * (second - first)


def _by_example(numbers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(numbers, dtype)[:, None, None, None]
