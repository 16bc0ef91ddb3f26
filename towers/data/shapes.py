"""The built-in data set: four shapes, drawn from a fixed seed, so that every demo works offline.

20,000 training and 4,000 test pictures, uint8 `[32, 32, 3]`, equally many of each class. Place,
size, angle, colors and noise vary. All shapes have the same area and are brighter or darker than
the background equally often, so that a linear classifier does little better than chance.

    images, labels = shapes.draw(100, seed=(1, 0))
"""

from __future__ import annotations

import numpy as np

from towers.data.pipeline import ArraySplit, Data

NUM_TRAIN, NUM_TEST = 20_000, 4_000
_SEED = 2016
_SIZE = 32
_CHUNK = 100  # pictures drawn at once: their planes stay in the processor's cache
_MIN_CONTRAST = 0.15  # of grays, 0..1
_NOISE = 0.1  # standard deviation, colors 0..1
_MAX_TILT = 0.8  # radians, either way
_MAX_SHIFT = 3.0  # pixels from the center, across and down
_RADIUS = (4.5, 6.5)  # pixels, of a disc with the shape's area


def _rectangle(x, y, half_width, half_height):
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


# Each outline maps x, y (float32 arrays, in radii of the disc of equal area) to the signed
# distance from the shape's edge, negative inside. All have area pi and their centroid at 0.
_OUTLINES = {
    "disc": lambda x, y: np.hypot(x, y) - 1,
    "triangle": lambda x, y: np.maximum(-y, np.abs(x) * 0.866025 + 0.5 * y) - 0.77756,
    "square": lambda x, y: _rectangle(x, y, 0.88623, 0.88623),
    "cross": lambda x, y: np.minimum(
        _rectangle(x, y, 1.18903, 0.39634), _rectangle(x, y, 0.39634, 1.18903)
    ),
}
CLASS_NAMES = tuple(_OUTLINES)


def load() -> Data:
    """Draw the data set."""
    train, test = (draw(num, (_SEED, i)) for i, num in enumerate((NUM_TRAIN, NUM_TEST)))
    return Data("shapes", ArraySplit(*train), ArraySplit(*test), len(CLASS_NAMES), CLASS_NAMES)


def draw(num: int, seed: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Draw pictures, equally many of each class; equal arguments give equal pictures.

    Args:
        num: how many; unless 4 divides it, some classes have one more.
        seed: of numpy's generator.

    Returns:
        Images, uint8 `[num, 32, 32, 3]`, and labels, int32 `[num]`.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num, dtype=np.int32) % len(CLASS_NAMES))
    images = np.empty((num, _SIZE, _SIZE, 3), np.uint8)
    for start in range(0, num, _CHUNK):
        part = slice(start, start + _CHUNK)
        images[part] = _draw_chunk(labels[part], rng)
    return images, labels


def _draw_chunk(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    num = len(labels)
    shape, ground = _colors(num, rng)
    picture = ground + (shape - ground) * _coverage(labels, rng)[..., None]
    picture += np.float32(_NOISE) * rng.standard_normal(picture.shape, np.float32)
    return np.clip(picture * 255 + 0.5, 0, 255).astype(np.uint8)


def _colors(num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    # Two colors of some contrast for each picture, [n, 1, 1, 3].
    pairs = rng.random((8, 2, num, 1, 1, 3), np.float32)
    gray = pairs @ np.array([0.3, 0.6, 0.1], np.float32)
    contrast = np.abs(gray[:, 0] - gray[:, 1])
    # The first pair of enough contrast, or the best one.
    chosen = np.argmax(np.minimum(contrast, _MIN_CONTRAST), axis=0).ravel()
    pairs = pairs[chosen, :, np.arange(num)]
    return pairs[:, 0], pairs[:, 1]


def _coverage(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # The part of each pixel that the shape covers, [n, 32, 32].
    def uniform(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (len(labels), 1, 1)).astype(np.float32)

    axis = np.arange(_SIZE, dtype=np.float32) - (_SIZE - 1) / 2  # pixels from the center
    radius, angle = uniform(*_RADIUS), uniform(-_MAX_TILT, _MAX_TILT)
    x = (axis[None, None, :] - uniform(-_MAX_SHIFT, _MAX_SHIFT)) / radius
    y = (axis[None, :, None] - uniform(-_MAX_SHIFT, _MAX_SHIFT)) / radius
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = x * cos + y * sin, y * cos - x * sin
    distance = np.empty_like(x)
    for label, outline in enumerate(_OUTLINES.values()):
        mask = labels == label
        distance[mask] = outline(x[mask], y[mask])
    return np.clip(0.5 - distance * radius, 0, 1)  # an edge one pixel wide
