"""The parts of --augment, such as mixup: batched functions of images and draws.

    images = augment_ops.cut_out(images, draws, plan)
    images = augment_ops.mixed(images, partners, draws, plan)  # with others of the batch

Each example has its own numbers. The last bit of a power or a cosine may depend on an example's
place in the batch, since TensorFlow's kernels are vectorized: they are computed in float64, and
rounded.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from towers.data.pipeline import NUM_DRAWS
from towers.options.augmentation import Augmentation

_FIRST = 4  # column of `draws`; the columns before and the last one are for the bases
(
    _CUT_ROW, _CUT_COLUMN, _SHARE, _ANGLE, _BOX_ROW, _BOX_COLUMN, _WHICH,
) = range(_FIRST, NUM_DRAWS - 1)  # fmt: skip


def cut_out(images: tf.Tensor, draws: tf.Tensor, plan: Augmentation) -> tf.Tensor:
    """Apply cutout: a square of zeros, the mean, around any pixel (DeVries and Taylor 2017).

    Args:
        images: `[b, h, w, C]`, float, standardised.
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
    own_share = tf.cast(own_share, images.dtype)[:, None, None, None]
    blended = partners + own_share * (images - partners)
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


def _span(place: tf.Tensor, length: tf.Tensor | float, size: int) -> tf.Tensor:
    # Which of `size` pixels are in a span around the one at `place`, 0..1; bool [b, size].
    middle = tf.cast(tf.floor(place * size), tf.float64) + 0.5
    pixels = np.arange(size) + 0.5
    low, high = middle - length / 2, middle + length / 2
    return (pixels >= low[:, None]) & (pixels < high[:, None])


def _box(rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    return rows[:, :, None, None] & columns[:, None, :, None]
