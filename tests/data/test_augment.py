"""Augmentation and its parts: what TensorFlow's own functions give, in any slice of a batch."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.data.splits import refusal, run
from towers.builder import device_types
from towers.data import Data, augment, augment_ops
from towers.data.user_data import data_set
from towers.options.augmentation import PARTS, parse

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


of_all_kinds = pytest.mark.parametrize("kind", augment.names)
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
    elif kind not in ("off", "shift"):
        expected = tf.image.per_image_standardization(expected)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert result.dtype == tf.float32


def test_shapes_after_augmentation():
    assert augment.output_shape((28, 29, 1), "tutorial") == (21, 21, 1)
    assert augment.output_shape((1, 1, 1), "tutorial") == (1, 1, 1)
    for kind in ("resnet", "shift", "none", "resnet,cutout"):
        assert augment.output_shape((32, 30, 3), kind) == (32, 30, 3)
    with pytest.raises(ValueError, match="allowed are auto, tutorial, resnet, shift, none, off"):
        augment.output_shape((32, 32, 3), "tutorail")


@pytest.mark.graph
@pytest.mark.parametrize(
    ("kind", "shape", "stored"),
    [
        ("resnet", (32, 32, 3), np.uint8),
        *run(("resnet", (2040, 2047, 1), np.float32)),
        *run(("tutorial", (3, 300, 2), np.uint8), ("tutorial", (5, 7, 4), np.float32)),
        *run(("shift", (1, 1, 1), np.uint8), ("shift", (5, 7, 4), np.float32)),
    ],
)
def test_a_gpu_s_way_gives_the_same_bits(kind, shape, stored):
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
    with device_types.cpus_for_gpus():
        result, of_gpu = traced()
        with tf.device("/cpu:1"):
            np.testing.assert_array_equal(augment.train_images(images, draws, kind), expected)
    np.testing.assert_array_equal(result, expected)
    assert "GatherV2" in of_cpu and "ImageProjectiveTransformV2" not in of_cpu
    assert "GatherV2" not in of_gpu and "ImageProjectiveTransformV2" in of_gpu


def test_an_image_of_one_colour_does_not_become_noise():
    images = np.repeat(np.uint8([0, 77, 255]), 32 * 32 * 3).reshape(3, 32, 32, 3)
    _, draws = make(3)
    for kind in "tutorial", "none":
        np.testing.assert_allclose(augment.train_images(images, draws, kind), 0, atol=1e-3)
        np.testing.assert_allclose(augment.eval_images(images, kind), 0, atol=1e-3)


# Parts

MIXING = ("mixup", "cutmix", "mixup,cutmix")


def with_partners(images, draws):
    """Return the draws of a paired split, whose labels nobody asks for."""
    further = [np.roll(part, 1, axis=0) for part in (images, draws)]
    return draws, ((further[0], np.zeros(len(images))), further[1])


def with_draw(draws, **columns):
    """Return draws with a number in some columns, by the names in `parts`."""
    draws = draws.copy()
    for name, value in columns.items():
        draws[:, getattr(augment_ops, f"_{name}")] = value
    return draws


def only(op, images, plus=True, magnitude=10):
    """Return what one op of RandAugment makes of images."""
    place = (list(augment_ops.OPS).index(op) + 0.5) / len(augment_ops.OPS)
    same = (list(augment_ops.OPS).index("identity") + 0.5) / len(augment_ops.OPS)
    given = dict(OP_0=place, SIGN_0=float(plus), OP_1=same)
    draws = with_draw(np.zeros((len(images), augment.NUM_DRAWS), np.float32), **given)
    plan = parse(f"none,randaugment={magnitude}")
    return augment_ops.on_values(tf.cast(images, tf.float32), draws, plan, tf.uint8).numpy()


@pytest.mark.parametrize(
    ("shape", "stored"),
    [((28, 28, 1), np.float32), ((9, 14, 4), np.uint8), ((2, 2, 3), np.uint8)],
)
@pytest.mark.parametrize("part", [*PARTS, "mixup,cutmix"])
def test_images_of_all_kinds_stay_images(part, shape, stored):
    images, draws = make(10, shape, stored=stored)
    part = "cutout=2" if part == "cutout" else part
    given = with_partners(images, draws) if part in MIXING else draws
    for base in "resnet", "none":
        found = augment.train_images(images, given, f"{base},{part}").numpy()
        plain = augment.train_images(images, draws, base).numpy()
        assert found.shape == plain.shape and found.dtype == np.float32
        assert np.isfinite(found).all()
        assert (found != plain).any()
        if shape != (2, 2, 3):  # that is mostly what "resnet" puts around it
            assert abs(found.mean()) < 0.2 and 0.5 < found.std() < 1.5


ALL = "resnet,cutout=5,color,randaugment"


@pytest.mark.graph
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, tf.float32) for kind in augment.names),
        *run(("shift", tf.float64), (ALL, tf.float32), ("resnet,mixup,cutmix", tf.float64)),
    ],
)
def test_an_example_is_the_same_in_any_slice(kind, dtype):
    images, draws = make(37)
    mixing = "mix" in kind
    given = with_partners(images, draws) if mixing else draws
    given = tf.nest.map_structure(tf.constant, (images, given))
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), given)

    @tf.function(input_signature=specs)
    def both(images, draws):
        trained = augment.train_images(images, draws, kind, dtype)
        return trained, augment.eval_images(images, kind, dtype)

    whole = both(*given)
    assert {part.dtype for part in whole} == {dtype}
    shape = [None, *augment.output_shape((32, 32, 3), kind)]
    assert [one.as_list() for one in both.get_concrete_function().output_shapes] == [shape, shape]
    for start, stop in [(0, 1), (0, 18), (18, 37), (5, 8), (36, 37), (7, 7)]:
        some = both(*tf.nest.map_structure(lambda t: t[start:stop], given))  # noqa: B023
        # In float64, the last bit of a share may go by an example's place.
        last_bits = 1e-12 if dtype == tf.float64 and mixing else 0
        np.testing.assert_allclose(some[0], whole[0][start:stop], rtol=last_bits, atol=last_bits)
        np.testing.assert_array_equal(some[1], whole[1][start:stop])


def test_cutout_is_a_square_of_the_mean():
    images, draws = make(3, (6, 8, 3))
    draws = with_draw(draws, CUT_ROW=[0, 0.5, 0.99], CUT_COLUMN=[0.5, 0.5, 0])
    found = augment.train_images(images, draws, "none,cutout=4").numpy()
    expected = augment.train_images(images, draws, "none").numpy()
    for i, (rows, columns) in enumerate(
        [(slice(0, 2), slice(2, 6)), (slice(1, 5), slice(2, 6)), (slice(3, 6), slice(0, 2))]
    ):
        expected[i, rows, columns] = 0
    np.testing.assert_array_equal(found, expected)


def test_color_is_a_factor_of_each_quality():
    images = np.full((3, 4, 4, 3), [100.0, 150.0, 50.0], np.float32)
    images[:, :2] = 20
    half = with_draw(np.zeros((3, augment.NUM_DRAWS), np.float32),
                     BRIGHTNESS=0.5, CONTRAST=0.5, SATURATION=0.5)  # fmt: skip
    plan, draws = parse("none,color=0.5"), half.copy()
    for i, name in enumerate(("BRIGHTNESS", "CONTRAST", "SATURATION")):
        draws[i] = with_draw(half[i : i + 1], **{name: 0})[0]  # a factor of a half
    dark, flat, grey = augment_ops.on_values(tf.constant(images), draws, plan, tf.uint8).numpy()
    of_colour = 0.299 * 100 + 0.587 * 150 + 0.114 * 50
    np.testing.assert_allclose(dark, images[0] / 2)
    np.testing.assert_allclose(flat, (images[1] + (of_colour + 20) / 2) / 2, rtol=1e-6)
    np.testing.assert_allclose(grey[2:], (images[2, 2:] + of_colour) / 2, rtol=1e-6)
    np.testing.assert_allclose(grey[:2], 20, rtol=1e-6)


RAMP = np.arange(48, dtype=np.float32).reshape(1, 4, 4, 3) * 2 + 50


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("identity", RAMP),
        ("autocontrast", (RAMP - RAMP.min((1, 2))) / 90 * 255),
        ("solarize", 255 - RAMP),
        ("posterize", RAMP // 16 * 16),
        ("brightness", np.minimum(RAMP * 1.9, 255)),
        ("equalize", RAMP),  # 16 pixels of 16 values are too few for a step
        ("translate_x", np.concatenate([RAMP[:, :, 1:], np.full((1, 4, 1, 3), 128)], 2)),
        ("translate_y", np.concatenate([RAMP[:, 1:], np.full((1, 1, 4, 3), 128)], 1)),
    ],
)
def test_an_op_of_randaugment(op, expected):
    np.testing.assert_allclose(only(op, RAMP), expected, rtol=1e-6)


def test_ops_of_randaugment_against_what_they_are_for():
    images, _ = make(4, (32, 32, 3))
    dim = 40 + images.astype(np.float32) / 8
    spread = only("equalize", np.round(dim))
    assert dim.max() < 75 and spread.min() < 5 and spread.max() > 245
    level = np.full((1, 9, 9, 3), [[[10, 90, 200]]], np.float32)
    np.testing.assert_allclose(only("sharpness", level), level, rtol=1e-5)
    np.testing.assert_allclose(only("contrast", dim, plus=False).std(), dim.std() / 10, rtol=0.1)
    np.testing.assert_allclose(
        np.ptp(only("color", dim, plus=False), axis=3), np.ptp(dim, axis=3) / 10, atol=1e-3
    )
    # A white cross through the middle: what is turned or sheared keeps its middle.
    cross = np.zeros((1, 9, 9, 1), np.float32)
    cross[:, 4], cross[:, :, 4] = 255, 255
    for op in "rotate", "shear_x", "shear_y":
        moved = only(op, cross, magnitude=9)
        assert moved[0, 4, 4, 0] == 255 and (moved != cross).any()
        np.testing.assert_array_equal(moved, moved[:, ::-1, ::-1])
        np.testing.assert_array_equal(only(op, cross, False, 9), moved[:, :, ::-1])


# Mixed with another of the batch


@pytest.mark.parametrize("alpha", [0.1, 1.0, 4.0])
def test_shares_are_of_a_beta_distribution(alpha):
    _, draws = make(40_000, (1, 1, 1))
    shares = augment_ops.share(32, 32, draws, parse(f"none,mixup={alpha}"), tf.float64).numpy()
    assert shares.min() >= 0 and shares.max() <= 1
    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.02)
    expected = np.random.default_rng(1).beta(alpha, alpha, 40_000)
    for limit in 0.001, 0.01, 0.1, 0.3, 0.5, 0.9:
        assert (shares < limit).mean() == pytest.approx((expected < limit).mean(), abs=0.01)


@pytest.mark.parametrize("part", MIXING)
def test_an_image_is_mixed_as_its_loss_is(part):
    # Each image is its own number, so that a mean tells how much of which there is.
    images = np.arange(200, dtype=np.float32)[:, None, None, None] * np.ones([200, 24, 40, 3], "f")
    _, draws = make(200)
    plan = parse(f"none,{part}")
    found = augment_ops.mixed(tf.constant(images), np.roll(images, 1, 0), draws, plan).numpy()
    share = augment_ops.share(24, 40, draws, plan, tf.float32).numpy()
    numbers = np.arange(200)
    expected = share * numbers + (1 - share) * np.roll(numbers, 1)
    np.testing.assert_allclose(found.mean((1, 2, 3)), expected, rtol=1e-5)
    whole = np.isin(found[..., 0], numbers).all((1, 2))
    few = {"mixup": 0, "cutmix": 1, "mixup,cutmix": 0.5}[part]
    assert whole.mean() == pytest.approx(few, abs=0.12)


def test_extreme_draws_are_shares():
    draws = np.zeros((2, augment.NUM_DRAWS), np.float32)
    draws[1] = ALMOST_ONE
    for part in ("mixup=0.01", "mixup=100", "cutmix=0.01", "cutmix=100"):
        share = augment_ops.share(8, 8, draws, parse(f"none,{part}"), tf.float32).numpy()
        assert ((share >= 0) & (share <= 1)).all()


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


def test_the_data_sets_that_come_with_towers_are_augmented_and_no_others_unasked():
    for kind, of_plain in {"images": "none", "masks": "none", "numbers": "off"}.items():
        assert augment.resolve("auto", own(kind)) == of_plain
        assert augment.resolve("auto", own(kind), compiled=True) == "off"
        assert augment.resolve("off", own(kind)) == "off"
    for name in "shapes", "cifar10", "cifar100", "cifar100_coarse":
        for compiled in True, False:
            assert augment.resolve("auto", own("images", name), compiled) == "tutorial"
        assert augment.resolve("none", own("images", name)) == "none"


@pytest.mark.parametrize("kind", ["tutorial", "resnet", "none"])
def test_what_is_asked_for_holds_for_images(kind):
    for name in "images", "several labels":
        assert augment.resolve(kind, own(name)) == kind
    for name in "numbers", "grey", "two":
        line = refusal(kind, own(name), call=augment.resolve)
        assert line.startswith(f"--augment={kind} is for images, and mine:load has")
    for name, target in {"masks": "y [40, 48]", "boxes": "y['boxes'] [5, 4]"}.items():
        if kind == "none":
            assert augment.resolve(kind, own(name)) == kind
            continue
        assert refusal(kind, own(name), call=augment.resolve) == (
            f"--augment={kind} cuts and mirrors images, and {target} of mine:load would not "
            "follow; type --augment=none"
        )


def test_parts_that_a_data_set_cannot_have():
    assert augment.resolve("auto,mixup", own("images", "shapes")) == "tutorial,mixup=0.2"
    assert augment.resolve("auto,mixup", own("images")) == "none,mixup=0.2"
    for kind, name, compiled, line in [
        ("none,cutout=60", "images", False, "a square of 60 pixels is more than an image, which "),
        ("auto,cutout", "numbers", False, "--augment=auto,cutout is for images, and mine:load has"),
        ("none,cutout", "masks", False, "--augment=none,cutout cuts and mirrors images, and y"),
        ("auto,cutout", "images", True, "type --augment=none,cutout=16, which"),
    ]:
        assert line in refusal(kind, own(name), compiled, call=augment.resolve)


DESCRIBED = {
    "images": """\
images      40x48x3 uint8 -> 30x36x3 float32: crop, flip, brightness, contrast, standardised
targets     3 classes: 0, 1, 2""",
    "masks": """\
images      40x48x3 uint8 -> 40x48x3 float32: standardised
targets     [40, 48] bool""",
    "several labels": """\
images      40x48x3 float32 -> 40x48x3 float32: as they are
targets     [3] float32""",
    "numbers": """\
inputs      price [] float32, tokens [80] int64
targets     [] float32""",
    "grey": """\
inputs      [40, 48] uint8; as images they would need an axis of channels, x[..., None]
targets     3 classes: 0, 1, 2
weights     [] float32""",
    "two": "inputs      [40, 48, 3] uint8, a.b [2] float32",
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_what_happens_to_an_example_is_said(name):
    kind = {"images": "tutorial", "masks": "none"}.get(name, "off")
    assert augment.describe(own(name), kind) == DESCRIBED[name].splitlines()


def test_what_is_said_of_many_classes_and_of_other_types():
    found = own("images")
    many = Data("mine", found.train, found.test, 12, ("a, A", *"bcdefghijkl"))
    assert augment.describe(many, "off", None) == [
        "images      40x48x3 uint8 -> 40x48x3 uint8: as they are",
        "targets     12 classes: 'a, A', b, c, d, e, f, g, h, i, j, ...",
    ]
    table = dataclasses.replace(own("numbers"), columns=("city=Oslo", "city=Rome", "rooms"))
    line = augment.describe(table, "off")[0]
    assert ": city (2 texts), rooms; not scaled" in line and "BatchNormalization()" in line
    assert "-> 40x48x3 float64: standardised" in augment.describe(many, "none", "float64")[0]
