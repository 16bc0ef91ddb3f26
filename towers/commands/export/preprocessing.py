"""`augment.eval_images` as a part of a Keras model, which needs no towers where it is loaded."""

import keras
from keras import ops

from towers.data import augment


def prepared(images: keras.KerasTensor, kind: str, dtype: str) -> keras.KerasTensor:
    """Return stored images `[B, H, W, C]` as a run with `--augment=KIND` evaluates them.

    `dtype` is float32 or float64, that of `Options.input_dtype`.
    """
    stored = images.shape[1:]
    height, width, channels = augment.output_shape(stored, kind)
    top, left = (stored[0] - height) // 2, (stored[1] - width) // 2
    if (height, width) != stored[:2]:
        images = images[:, top : top + height, left : left + width]
    images = ops.cast(images, dtype)
    if kind == "off":
        return images
    num = height * width * channels
    centred = images - ops.mean(images, [1, 2, 3], keepdims=True)
    deviation = ops.sqrt(ops.sum(ops.square(centred), [1, 2, 3], keepdims=True))
    return centred * (num**0.5 / ops.maximum(deviation, 1.0))
