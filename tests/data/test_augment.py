"""Augmentation: what TensorFlow's own image functions give, whatever slice an example is in."""

import numpy as np
import pytest
import tensorflow as tf

from towers.builder import kinds
from towers.data import Data, augment
from towers.data.halves import data_set
from towers.errors import InputError

SHAPES = [(32, 32, 3), (28, 28, 1), (5, 7, 4), (1, 1, 1), (48, 64, 3)]
ALMOST_ONE = np.float32(1) - np.float32(2) ** -24  # the largest float32 below 1


def make(num, shape=(32, 32, 3), seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, *shape), np.uint8)
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
    if kind == "off":
        return image
    if kind != "none":
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
    return standardised(image)


def standardised(image):
    # tf.image.per_image_standardization, which has no float64.
    deviation = max(np.std(image), 1 / np.sqrt(np.size(image)))
    return (image - np.mean(image)) / deviation


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", augment.names)
@pytest.mark.parametrize("stored", ["uint8", "float with an offset"])
def test_train_images_are_tensorflows(shape, kind, stored):
    images, draws = make(12, shape)
    if stored != "uint8":
        images = images.astype(np.float32) - 1000
    result = augment.train_images(images, draws, kind)
    assert result.dtype == tf.float32
    assert result.shape == (12, *augment.output_shape(shape, kind))
    expected = [reference(*example, kind) for example in zip(images, draws, strict=True)]
    np.testing.assert_allclose(result, expected, atol=3e-4 if "offset" in stored else 2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", augment.names)
@pytest.mark.parametrize("stored", [np.uint8, np.float32])
def test_eval_images_are_tensorflows(shape, kind, stored):
    images = make(5, shape)[0].astype(stored)
    height, width, _ = augment.output_shape(shape, kind)
    result = augment.eval_images(images, kind)
    expected = tf.image.resize_with_crop_or_pad(images, height, width)
    if kind == "shift" and stored == np.uint8:
        expected = expected / 64 - 2
    elif kind not in ("off", "shift"):
        expected = tf.image.per_image_standardization(expected)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert result.dtype == tf.float32


def test_shapes_after_augmentation():
    assert augment.output_shape((32, 32, 3), "tutorial") == (24, 24, 3)
    assert augment.output_shape((28, 29, 1), "tutorial") == (21, 21, 1)
    assert augment.output_shape((1, 1, 1), "tutorial") == (1, 1, 1)
    for kind in ("resnet", "shift", "none", "resnet,cutout"):
        assert augment.output_shape((32, 30, 3), kind) == (32, 30, 3)


@pytest.mark.parametrize("kind", augment.names)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_a_slice_of_any_size_gives_the_same_bits_in_one_function(kind, dtype):
    images, draws = map(tf.constant, make(37))
    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in (images, draws)]
    train = tf.function(
        lambda *batch: augment.train_images(*batch, kind, dtype=dtype), input_signature=specs
    )
    evaluate = tf.function(
        lambda images: augment.eval_images(images, kind, dtype=dtype), input_signature=specs[:1]
    )
    all_train, all_eval = train(images, draws), evaluate(images)
    assert all_train.dtype == all_eval.dtype == dtype
    shape = augment.output_shape((32, 32, 3), kind)
    assert train.get_concrete_function().output_shapes.as_list() == [None, *shape]
    for start, stop in [(0, 1), (0, 18), (18, 37), (5, 8), (36, 37), (7, 7)]:
        part = slice(start, stop)
        assert np.array_equal(train(images[part], draws[part]), all_train[part])
        assert np.array_equal(evaluate(images[part]), all_eval[part])


@pytest.mark.parametrize("shape", [*SHAPES, (3, 300, 2), (2040, 2047, 1)])
@pytest.mark.parametrize("kind", ["tutorial", "resnet", "shift"])
@pytest.mark.parametrize("stored", [np.uint8, np.float32])
def test_a_gpu_s_way_gives_the_same_bits(shape, kind, stored):
    images, draws = make(4 if shape[0] > 1000 else 60, shape)
    images = images.astype(stored)
    if stored == np.float32:
        images += np.random.default_rng(1).random(images.shape, np.float32) - 128
    draws[:4, :3] = [[0, 0, 0], [ALMOST_ONE] * 3, [0, ALMOST_ONE, 0.5], [ALMOST_ONE, 0, 0]]

    def traced():
        """Return what a function that is traced now returns, and the ops in it."""

        @tf.function
        def train(images, draws):
            with tf.device("/cpu:1"):
                return augment.train_images(images, draws, kind)

        graph = train.get_concrete_function(images, draws).graph
        return train(images, draws), {op.type for op in graph.get_operations()}

    expected, of_cpu = traced()
    with kinds.cpus_for_gpus():
        result, of_gpu = traced()
        with tf.device("/cpu:1"):
            np.testing.assert_array_equal(augment.train_images(images, draws, kind), expected)
    np.testing.assert_array_equal(result, expected)
    assert "GatherV2" in of_cpu and "ImageProjectiveTransformV2" not in of_cpu
    assert "GatherV2" not in of_gpu and "ImageProjectiveTransformV2" in of_gpu


@pytest.mark.parametrize("kind", ["tutorial", "resnet"])
def test_every_place_is_as_likely(kind):
    # One bright pixel in a dark image shows where the crop lies.
    images = np.zeros((9000, 32, 32, 1), np.uint8)
    images[:, 15, 16] = 255
    draws = np.random.default_rng(1).random((9000, augment.NUM_DRAWS), np.float32)
    draws[:, 2] = 0.75  # not mirrored
    result = augment.train_images(images, draws, kind).numpy()[..., 0]
    rows, columns = result.max(2).argmax(1), result.max(1).argmax(1)
    for places in (rows, columns):
        _, counts = np.unique(places, return_counts=True)
        assert len(counts) == 9
        assert counts.min() > 850 and counts.max() < 1150


@pytest.mark.parametrize(("kind", "draw"), [("tutorial", 2), ("resnet", 2), ("shift", -1)])
def test_half_of_the_images_are_mirrored(kind, draw):
    images, _ = make(1)
    draws = np.full((1000, augment.NUM_DRAWS), 0.5, np.float32)
    draws[:, draw] = np.random.default_rng(2).random(1000)
    result = augment.train_images(np.repeat(images, 1000, 0), draws, kind).numpy()
    same = (result == result[0]).all((1, 2, 3))
    mirrored = np.isclose(result[:, :, ::-1], result[0], atol=1e-5).all((1, 2, 3))
    assert (same ^ mirrored).all()
    assert 450 < same.sum() < 550


@pytest.mark.parametrize("kind", augment.names)
@pytest.mark.parametrize("draw", [0, ALMOST_ONE])
@pytest.mark.parametrize("side", [9, 32])
def test_extreme_draws_stay_within_the_image(kind, draw, side):
    images, _ = make(2, (side, side, 2))
    draws = np.full((2, augment.NUM_DRAWS), draw, np.float32)
    result = augment.train_images(images, draws, kind)
    expected = [reference(image, draws[0], kind) for image in images]
    np.testing.assert_allclose(result, expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["tutorial", "none"])
@pytest.mark.parametrize("value", [0, 77, 255])
def test_an_image_of_one_colour_does_not_become_noise(kind, value):
    images = np.full((2, 32, 32, 3), value, np.uint8)
    _, draws = make(2)
    np.testing.assert_allclose(augment.train_images(images, draws, kind), 0, atol=1e-3)
    np.testing.assert_allclose(augment.eval_images(images, kind), 0, atol=1e-3)


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="allowed are auto, tutorial, resnet, shift, none, off"):
        augment.output_shape((32, 32, 3), "tutorail")


# What --augment means, and what is said of it


NUM = 20
IMAGES, LABELS = np.zeros((NUM, 40, 48, 3), np.uint8), np.arange(NUM) % 3
OWN = {
    "images": (IMAGES, LABELS),
    "masks": (IMAGES, IMAGES[..., 0] > 0),
    "boxes": (IMAGES, {"kind": LABELS, "boxes": np.zeros((NUM, 5, 4))}),
    "several labels": (IMAGES / 255, np.eye(3)[LABELS]),
    "numbers": ({"tokens": np.zeros((NUM, 80), int), "price": np.zeros(NUM)}, np.zeros(NUM)),
    "grey": (IMAGES[..., 0], LABELS, np.ones(NUM)),
    "two": ((IMAGES, {"a": {"b": np.zeros((NUM, 2))}}),),
}


def own(kind, name="mine:load"):
    return data_set(name, {"train": OWN[kind], "test": OWN[kind]})


@pytest.mark.parametrize(
    ("kind", "of_plain", "of_compiled"),
    [("images", "none", "off"), ("masks", "none", "off"), ("numbers", "off", "off")],
)
def test_the_user_s_own_examples_are_not_changed_unasked(kind, of_plain, of_compiled):
    assert augment.resolve("auto", own(kind)) == of_plain
    assert augment.resolve("auto", own(kind), compiled=True) == of_compiled
    assert augment.resolve("off", own(kind)) == "off"


@pytest.mark.parametrize("name", ["shapes", "cifar10", "cifar100", "cifar100_coarse"])
def test_the_data_sets_that_come_with_towers_are_augmented(name):
    for compiled in True, False:
        assert augment.resolve("auto", own("images", name), compiled) == "tutorial"
    assert augment.resolve("none", own("images", name)) == "none"


@pytest.mark.parametrize("kind", ["tutorial", "resnet", "none"])
def test_what_is_asked_for_holds_for_images(kind):
    for name in "images", "several labels":
        assert augment.resolve(kind, own(name)) == kind
    for name in "numbers", "grey", "two":
        with pytest.raises(InputError, match=f"^--augment={kind} is for images, and mine:load has"):
            augment.resolve(kind, own(name))
    for name, target in {"masks": "y [40, 48]", "boxes": "y['boxes'] [5, 4]"}.items():
        if kind == "none":
            assert augment.resolve(kind, own(name)) == kind
            continue
        with pytest.raises(InputError) as error:
            augment.resolve(kind, own(name))
        assert str(error.value) == (
            f"--augment={kind} cuts and mirrors images, and {target} of mine:load would not "
            "follow; type --augment=none"
        )


@pytest.mark.parametrize(
    ("name", "kind", "lines"),
    [
        (
            "images",
            "tutorial",
            "images      40x48x3 uint8 -> 30x36x3 float32: crop, flip, brightness, contrast, "
            "standardised\ntargets     3 classes: 0, 1, 2",
        ),
        (
            "masks",
            "none",
            "images      40x48x3 uint8 -> 40x48x3 float32: standardised\ntargets     [40, 48] bool",
        ),
        (
            "several labels",
            "off",
            "images      40x48x3 float32 -> 40x48x3 float32: as they are\ntargets     [3] float32",
        ),
        (
            "numbers",
            "off",
            "inputs      price [] float32, tokens [80] int64\ntargets     [] float32",
        ),
        (
            "grey",
            "off",
            "inputs      [40, 48] uint8; as images they would need an axis of channels, "
            "x[..., None]\ntargets     3 classes: 0, 1, 2\nweights     [] float32",
        ),
        ("two", "off", "inputs      [40, 48, 3] uint8, a.b [2] float32"),
    ],
)
def test_what_happens_to_an_example_is_said(name, kind, lines):
    assert augment.describe(own(name), kind) == lines.splitlines()


def test_what_is_said_of_many_classes_and_of_other_types():
    found = own("images")
    many = Data("mine", found.train, found.test, 12, tuple("abcdefghijkl"))
    assert augment.describe(many, "off", None) == [
        "images      40x48x3 uint8 -> 40x48x3 uint8: as they are",
        "targets     12 classes: a, b, c, d, e, f, g, h, i, j, ...",
    ]
    assert "-> 40x48x3 float64: standardised" in augment.describe(many, "none", "float64")[0]
