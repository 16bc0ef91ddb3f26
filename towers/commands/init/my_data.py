"""The data: a function that returns (train, test), each (images, labels).

Put your own arrays in the place of these: images uint8 or float `[N, H, W, C]`, labels integers
`[N]`. A `tf.data.Dataset` of single (image, label) examples will do as well.
"""

import numpy as np


def load():
    """Return a training and a test set."""
    return _stripes(2000, seed=0), _stripes(500, seed=1)


def _stripes(size, seed):
    """Draw images `[size, 16, 16, 1]` of stripes that lie, stand or cross, under much noise."""
    random = np.random.default_rng(seed)
    lying, standing = np.indices([16, 16]) // 2 % 2
    patterns = np.stack([lying, standing, lying ^ standing])
    labels = random.integers(3, size=size)
    images = 96 + 64 * patterns[labels] + random.normal(0, 64, [size, 16, 16])
    return images.clip(0, 255).astype(np.uint8)[..., None], labels
