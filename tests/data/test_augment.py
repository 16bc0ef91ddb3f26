"""Augmentation: what TensorFlow's own functions give, in any slice of a batch."""

import numpy as np
import pytest
import tensorflow as tf

from tests.data.splits import refusal, run
from towers.data import augment
from towers.data.user_data import data_set
from towers.options.parts import AUGMENTATIONS

pytestmark = pytest.mark.unit

SHAPES = [(32, 32, 3), (28, 29, 1), (1, 1, 1), (48, 64, 3)]
ALMOST_ONE = np.float32(1) - np.float32(2) ** -24  # the largest float32 below 1


def make(num, shape=(32, 32, 3), stored=np.uint8):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num, *shape), np.uint8)
    if stored != np.uint8:
        images = images.astype(stored) / 255
    return images, rng.random((num, augment.NUM_DRAWS), np.float32)


def reference(image, draws, kind):
    """Augment one image with TensorFlow's functions, in float64."""
    height, width, _ = augment.output_shape(image.shape, kind)
    stored, image = image.dtype, tf.cast(image, tf.float64)
    row, column, flip, contrast, turn = (float(draw) for draw in (*draws[:4], draws[-1]))
    if kind == "resnet":
        image = tf.image.pad_to_bounding_box(image, 4, 4, image.shape[0] + 8, image.shape[1] + 8)
    if kind == "shift":
        sides = [(min(2, size - 1),) * 2 for size in image.shape[:2]]
        image = tf.pad(image, [*sides, (0, 0)], "REFLECT")
    if kind == "none":
        return image
    if kind != "standardize":
        top = int(row * (image.shape[0] - height + 1))
        left = int(column * (image.shape[1] - width + 1))
        image = tf.image.crop_to_bounding_box(image, top, left, height, width)
        if (turn if kind == "shift" else flip) < 0.5:
            image = tf.image.flip_left_right(image)
    if kind == "tutorial":
        image = tf.image.adjust_brightness(image, 63 * (2 * row - 1))  # any: it cancels
        # tf.image.adjust_contrast computes in float32.
        mean = tf.reduce_mean(image, [0, 1], keepdims=True)
        image = (image - mean) * (0.2 + 1.6 * contrast) + mean
    if kind == "shift":
        return image / 64 - 2 if stored == np.uint8 else image
    return standardized(image)


def standardized(image):
    # tf.image.per_image_standardization, which has no float64.
    deviation = max(np.std(image), 1 / np.sqrt(np.size(image)))
    return (image - np.mean(image)) / deviation


of_all_kinds = pytest.mark.parametrize("kind", AUGMENTATIONS)
of_shapes = pytest.mark.parametrize(
    ("shape", "stored"),
    [*((shape, np.uint8) for shape in SHAPES), ((5, 7, 4), np.float32)],
)


@of_all_kinds
@of_shapes
def test_train_images_are_tensorflows(shape, kind, stored):
    images, draws = make(8, shape)
    draws[:2] = [[0], [ALMOST_ONE]]  # they stay within the image
    if stored != np.uint8:
        images = images.astype(np.float32) - 1000
    result = augment.train_images(images, draws, kind)
    assert result.dtype == tf.float32
    assert result.shape == (8, *augment.output_shape(shape, kind))
    expected = [reference(*example, kind) for example in zip(images, draws, strict=True)]
    np.testing.assert_allclose(result, expected, atol=2e-5 if stored == np.uint8 else 3e-4)


@of_all_kinds
@of_shapes
def test_eval_images_are_tensorflows(shape, kind, stored):
    images = make(5, shape)[0].astype(stored)
    height, width, _ = augment.output_shape(shape, kind)
    result = augment.eval_images(images, kind)
    expected = tf.image.resize_with_crop_or_pad(images, height, width)
    if kind == "shift" and stored == np.uint8:
        expected = expected / 64 - 2
    elif kind not in ("none", "shift"):
        expected = tf.image.per_image_standardization(expected)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert result.dtype == tf.float32


@pytest.mark.graph
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, tf.float32) for kind in AUGMENTATIONS),
        *run(("shift", tf.float64), ("resnet,cutout=5", tf.float32)),
    ],
)
def test_an_example_is_the_same_in_any_slice(kind, dtype):
    images, draws = make(37)
    given = tf.constant(images), tf.constant(draws)
    specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in given]

    @tf.function(input_signature=specs)
    def both(images, draws):
        trained = augment.train_images(images, draws, kind, dtype)
        return trained, augment.eval_images(images, kind, dtype)

    whole = both(*given)
    assert {part.dtype for part in whole} == {dtype}
    shape = [None, *augment.output_shape((32, 32, 3), kind)]
    assert [one.as_list() for one in both.get_concrete_function().output_shapes] == [shape, shape]
    for start, stop in [(0, 1), (0, 18), (18, 37), (5, 8), (36, 37), (7, 7)]:
        some = both(*(t[start:stop] for t in given))
        np.testing.assert_array_equal(some[0], whole[0][start:stop])
        np.testing.assert_array_equal(some[1], whole[1][start:stop])


def test_cutout_is_a_square_of_the_mean():
    images, draws = make(3, (6, 8, 3))
    draws[:, augment._CUT_ROW] = 0, 0.5, 0.99
    draws[:, augment._CUT_COLUMN] = 0.5, 0.5, 0
    found = augment.train_images(images, draws, "standardize,cutout=4").numpy()
    expected = augment.train_images(images, draws, "standardize").numpy()
    for i, (rows, columns) in enumerate(
        [(slice(0, 2), slice(2, 6)), (slice(1, 5), slice(2, 6)), (slice(3, 6), slice(0, 2))]
    ):
        expected[i, rows, columns] = 0
    np.testing.assert_array_equal(found, expected)


# What --augment means, and what is said of it


NUM = 20
IMAGES, LABELS = np.zeros((NUM, 40, 48, 3), np.uint8), np.arange(NUM) % 3
OWN = {
    "images": (IMAGES, LABELS),
    "masks": (IMAGES, IMAGES[..., 0] > 0),
    "boxes": (IMAGES, {"kind": LABELS, "boxes": np.zeros((NUM, 5, 4))}),
    "numbers": ({"tokens": np.zeros((NUM, 80), int), "price": np.zeros(NUM)}, np.zeros(NUM)),
    "gray": (IMAGES[..., 0], LABELS, np.ones(NUM)),
    "two": ((IMAGES, {"a": {"b": np.zeros((NUM, 2))}}),),
}


def own(kind, name="mine:load"):
    return data_set(name, {"train": OWN[kind], "test": OWN[kind]})


@pytest.mark.parametrize(
    ("kind", "name", "compiled", "meant"),
    [
        ("auto", "images", False, "standardize"), ("auto", "numbers", False, "none"),
        ("auto", "images", True, "none"), ("none", "gray", False, "none"),
        ("resnet", "images", False, "resnet"),
        ("standardize", "masks", False, "standardize"),
        ("auto,cutout", "images", False, "standardize,cutout=16"),
        ("auto", "shapes", False, "tutorial"), ("auto", "cifar10", True, "tutorial"),
        ("none", "cifar10", False, "none"), ("auto,cutout=9", "shapes", False, "tutorial,cutout=9"),
    ],
)  # fmt: skip
def test_sets_that_come_with_towers_are_augmented_and_others_as_asked(kind, name, compiled, meant):
    found = own(name) if name in OWN else own("images", name)
    assert augment.resolve(kind, found, compiled) == meant


@pytest.mark.parametrize(
    ("kind", "name", "compiled", "named", "remedy"),
    [
        ("tutorial", "numbers", False, "has none", "leave the flag out"),
        ("standardize", "gray", False, "has none", "x[..., None]"),
        ("tutorial", "masks", False, "y [40, 48]", "--augment=standardize"),
        ("resnet", "boxes", False, "y['boxes'] [5, 4]", "--augment=standardize"),
        ("standardize,cutout=41", "images", False, "40x48", "use a smaller one"),
        ("auto,cutout", "images", True, "none", "--augment=standardize,cutout=16"),
    ],
)
def test_what_a_data_set_cannot_have(kind, name, compiled, named, remedy):
    line = refusal(kind, own(name), compiled, call=augment.resolve)
    assert line.startswith(f"--augment={kind}") and named in line and remedy in line
