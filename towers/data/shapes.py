"""The built-in data set: ten shapes, drawn from a fixed seed, so that every demo works offline.

20,000 training and 4,000 test pictures, uint8 `[32, 32, 3]`, equally many of each class. Place,
size, angle, colours, background, clutter and noise vary. All shapes have the same area and are
brighter or darker than the background equally often, so that colour and brightness do not show the
class: a linear classifier stays near chance, a small CNN passes 97 % within a few epochs.

    images, labels = shapes.draw(100, seed=(1, 0))
"""

from __future__ import annotations

import contextlib
import sys
import zipfile
from pathlib import Path

import numpy as np

from towers import files
from towers.data.pipeline import ArraySplit, Data

# A change of the pictures needs a new name: old files may be in caches.
FILE = "shapes-v1.npz"
_PARTS = ("train_images", "train_labels", "test_images", "test_labels")
NUM_TRAIN, NUM_TEST = 20_000, 4_000
_SEED = 2016
_SIZE = 32
_CHUNK = 100  # pictures drawn at once: their planes stay in the processor's cache
# How hard it is. Six epochs of the tutorial's CNN reach 99 %; with any angle, 98 %.
_MIN_CONTRAST = 0.3  # of greys, 0..1
_MAX_NOISE = 0.05  # standard deviation, colours 0..1
_NUM_SPECKS = 3
_MAX_TILT = 0.8  # radians, either way
_MAX_SHIFT = 2.0  # pixels from the centre, across and down
_RADIUS = (5.2, 6.6)  # pixels, of a disc with the shape's area; larger ones a 24x24 crop would cut

# Each outline maps x, y (float32 arrays, in radii of the disc of equal area) to the signed
# distance from the shape's edge, negative inside. All ten have area pi and their centroid at 0.


def _rectangle(x, y, half_width, half_height):
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def _crescent(x, y):
    x = x - 0.4789
    return np.maximum(np.hypot(x, y) - 1.3735, 1.0301 - np.hypot(x - 0.68674, y))


def _cross(x, y):
    return np.minimum(_rectangle(x, y, 1.18903, 0.39634), _rectangle(x, y, 0.39634, 1.18903))


def _star(x, y):
    # Fold the five arms onto one half arm, whose edge runs from the tip (R, 0) to the notch.
    tip, notch, sector = 1.54107, 0.69348, np.pi / 5
    angle = sector - np.abs(np.mod(np.arctan2(y, x), 2 * sector) - sector)
    radius = np.hypot(x, y)
    nx, ny = notch * np.sin(sector), tip - notch * np.cos(sector)
    norm = np.hypot(nx, ny)
    return ((radius * np.cos(angle) - tip) * nx + radius * np.sin(angle) * ny) / norm


def _heart(x, y):
    half = 0.66325
    x, y = x + 0.20779, y + 0.20779
    discs = np.minimum(np.hypot(x - half, y), np.hypot(x, y - half)) - half
    return np.minimum(_rectangle(x, y, half, half), discs)


_OUTLINES = {
    "disc": lambda x, y: np.hypot(x, y) - 1,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 1) - 0.25,
    "half-disc": lambda x, y: np.maximum(np.hypot(x, y + 0.6002) - 1.41421, -y - 0.6002),
    "crescent": _crescent,
    "triangle": lambda x, y: np.maximum(-y, np.abs(x) * 0.866025 + 0.5 * y) - 0.77756,
    "square": lambda x, y: _rectangle(x, y, 0.88623, 0.88623),
    "bar": lambda x, y: _rectangle(x, y, 1.65799, 0.47371),
    "cross": _cross,
    "star": _star,
    "heart": _heart,
}
CLASS_NAMES = tuple(_OUTLINES)


def load(data_dir: str) -> Data:
    """Return the data set from `data_dir`; draw and store it there the first time."""
    arrays = _cached_arrays(Path(data_dir, FILE))
    images, labels, test_images, test_labels = (arrays[name] for name in _PARTS)
    train, test = ArraySplit(images, labels), ArraySplit(test_images, test_labels)
    return Data("shapes", train, test, len(CLASS_NAMES), CLASS_NAMES)


def _cached_arrays(path: Path) -> dict[str, np.ndarray]:
    # If the file is missing or damaged, it is written.
    with contextlib.suppress(OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile):
        with open(path, "rb") as file, np.load(file) as arrays:
            return dict(arrays)
    train, test = (draw(num, (_SEED, i)) for i, num in enumerate((NUM_TRAIN, NUM_TEST)))
    arrays = dict(zip(_PARTS, (*train, *test), strict=True))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        print(f"warning: {path} cannot be kept: {error.strerror}", file=sys.stderr)
    return arrays


def draw(num: int, seed: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Draw pictures, equally many of each class; equal arguments give equal pictures.

    Args:
        num: how many; unless 10 divides it, some classes have one more.
        seed: of numpy's generator.

    Returns:
        Images, uint8 `[num, 32, 32, 3]`, and labels, int32 `[num]`.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num, dtype=np.int32) % len(CLASS_NAMES))
    images = np.empty((num, _SIZE, _SIZE, 3), np.uint8)
    for start in range(0, num, _CHUNK):
        part = slice(start, start + _CHUNK)
        images[part] = _draw_chunk(labels[part], rng).transpose(0, 2, 3, 1)
    return images, labels


def _draw_chunk(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    num = len(labels)
    axis = np.arange(_SIZE, dtype=np.float32) - (_SIZE - 1) / 2
    x, y = axis[None, None, :], axis[None, :, None]  # pixels from the picture's centre
    shape, ground = _colours(num, rng)
    picture = _mix(ground, rng.random((num, 3, 1, 1), np.float32), 0.4 * _pattern(x, y, num, rng))
    for _ in range(_NUM_SPECKS):
        picture = _mix(picture, rng.random((num, 3, 1, 1), np.float32), _speck(x, y, num, rng))
    shape = _mix(shape, rng.random((num, 3, 1, 1), np.float32), 0.3 * _ramp(x, y, num, rng))
    picture = _mix(picture, shape, _coverage(labels, x, y, rng))
    noise = rng.standard_normal(picture.shape, np.float32)
    picture += noise * _uniform(rng, num, 0, _MAX_NOISE)[:, None]
    return np.clip(picture * 255 + 0.5, 0, 255).astype(np.uint8)


def _colours(num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    # Two colours of some contrast for each picture, [n, 3, 1, 1].
    pairs = rng.random((8, 2, num, 3, 1, 1), np.float32)
    grey = pairs[:, :, :, 0] * 0.3 + pairs[:, :, :, 1] * 0.6 + pairs[:, :, :, 2] * 0.1
    contrast = np.abs(grey[:, 0] - grey[:, 1])
    # The first pair of enough contrast, or the best one.
    chosen = np.argmax(np.minimum(contrast, _MIN_CONTRAST), axis=0).ravel()
    pairs = pairs[chosen, :, np.arange(num)]
    return pairs[:, 0], pairs[:, 1]


def _uniform(rng: np.random.Generator, num: int, low: float, high: float) -> np.ndarray:
    return np.float32(low) + np.float32(high - low) * rng.random((num, 1, 1), np.float32)


def _mix(below: np.ndarray, above: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return below + (above - below) * weight[:, None]


def _turn(x, y, num: int, rng: np.random.Generator, limit: float = np.pi):
    angle = _uniform(rng, num, -limit, limit)
    cos, sin = np.cos(angle), np.sin(angle)
    return x * cos + y * sin, y * cos - x * sin


def _pattern(x, y, num: int, rng: np.random.Generator) -> np.ndarray:
    x, y = _turn(x, y, num, rng)
    kind = rng.integers(0, 4, (num, 1, 1))  # plain, stripes, checks, clouds
    frequency = np.where(kind == 3, _uniform(rng, num, 0.1, 0.25), _uniform(rng, num, 0.4, 1.2))
    along = np.sin(x * frequency + _uniform(rng, num, 0, 2 * np.pi))
    across = np.sin(y * frequency + _uniform(rng, num, 0, 2 * np.pi))
    wave = np.where(kind == 1, along, along * across)
    return np.where(kind == 0, 0, 0.5 + 0.5 * wave)


def _ramp(x, y, num: int, rng: np.random.Generator) -> np.ndarray:
    x, _ = _turn(x, y, num, rng)
    return np.clip(x / (0.6 * _SIZE) + 0.5, 0, 1)


def _speck(x, y, num: int, rng: np.random.Generator) -> np.ndarray:
    x = x - _uniform(rng, num, -_SIZE / 2, _SIZE / 2)
    y = y - _uniform(rng, num, -_SIZE / 2, _SIZE / 2)
    x, y = _turn(x, y, num, rng)
    length, radius = _uniform(rng, num, 0, 3), _uniform(rng, num, -1, 1.5)
    return np.clip(radius + 0.5 - np.hypot(np.maximum(np.abs(x) - length, 0), y), 0, 1)


def _coverage(labels: np.ndarray, x, y, rng: np.random.Generator) -> np.ndarray:
    # The part of each pixel that the shape covers, [n, 32, 32].
    num = len(labels)
    radius = _uniform(rng, num, *_RADIUS)
    x = (x - _uniform(rng, num, -_MAX_SHIFT, _MAX_SHIFT)) / radius
    y = (y - _uniform(rng, num, -_MAX_SHIFT, _MAX_SHIFT)) / radius
    x, y = _turn(x, y, num, rng, _MAX_TILT)
    distance = np.empty_like(x)
    for label, outline in enumerate(_OUTLINES.values()):
        mask = labels == label
        distance[mask] = outline(x[mask], y[mask])
    return np.clip(0.5 - distance * radius, 0, 1)  # an edge one pixel wide
