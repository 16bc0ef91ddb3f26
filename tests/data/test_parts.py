"""The parts of --augment, as a user sees them: on small pictures, by example."""

import numpy as np
import pytest
import tensorflow as tf

from towers.data import augment, parts
from towers.errors import InputError
from towers.options.augmentation import PARTS, parse

SHAPES = [(32, 32, 3), (28, 28, 1), (9, 14, 3), (6, 5, 4), (2, 2, 3)]
MIXING = ("mixup", "cutmix", "mixup,cutmix")


def make(num, shape=(32, 32, 3), seed=0, stored=np.uint8):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, *shape), np.uint8)
    if stored != np.uint8:
        images = images.astype(stored) / 255
    return images, rng.random((num, augment.NUM_DRAWS), np.float32)


def with_partners(images, draws):
    """Return the draws of a paired split, whose labels nobody asks for."""
    further = [np.roll(part, 1, axis=0) for part in (images, draws)]
    return draws, ((further[0], np.zeros(len(images))), further[1])


def with_draw(draws, **columns):
    """Return draws with a number in some columns, by the names in `parts`."""
    draws = draws.copy()
    for name, value in columns.items():
        draws[:, getattr(parts, f"_{name}")] = value
    return draws


def only(op, images, plus=True, magnitude=10):
    """Return what one op of RandAugment makes of images."""
    place = (list(parts.OPS).index(op) + 0.5) / len(parts.OPS)
    same = (list(parts.OPS).index("identity") + 0.5) / len(parts.OPS)
    given = dict(OP_0=place, SIGN_0=float(plus), OP_1=same)
    draws = with_draw(np.zeros((len(images), augment.NUM_DRAWS), np.float32), **given)
    plan = parse(f"none,randaugment={magnitude}")
    return parts.on_values(tf.cast(images, tf.float32), draws, plan, tf.uint8).numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", [np.uint8, np.float32])
@pytest.mark.parametrize("part", [*PARTS, "mixup,cutmix"])
def test_images_of_all_kinds_stay_images(part, shape, stored):
    images, draws = make(20, shape, stored=stored)
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


@pytest.mark.parametrize("part", ["cutout=5,color,randaugment", *MIXING])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_an_example_is_the_same_in_any_slice(part, dtype):
    images, draws = make(37)
    given = with_partners(images, draws) if part in MIXING else draws
    given = tf.nest.map_structure(tf.constant, (images, given))
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), given)
    train = tf.function(
        lambda *batch: augment.train_images(*batch, f"resnet,{part}", dtype), input_signature=specs
    )
    whole = train(*given)
    for start, stop in [(0, 1), (0, 18), (18, 37), (5, 8), (7, 7)]:
        some = train(*tf.nest.map_structure(lambda t: t[start:stop], given))  # noqa: B023
        # In float64, the last bit of a share may go by an example's place.
        last_bits = 1e-12 if dtype == tf.float64 and part in MIXING else 0
        np.testing.assert_allclose(some, whole[start:stop], rtol=last_bits, atol=last_bits)


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
    dark, flat, grey = parts.on_values(tf.constant(images), draws, plan, tf.uint8).numpy()
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


def test_ops_of_randaugment_are_equally_likely():
    images = np.tile(RAMP, (4000, 1, 1, 1)) + np.float32(0.25)
    rng = np.random.default_rng(3)
    draws = rng.random((4000, augment.NUM_DRAWS), np.float32)
    same = (list(parts.OPS).index("identity") + 0.5) / len(parts.OPS)
    draws = with_draw(draws, OP_1=same)
    found = parts.on_values(tf.constant(images), draws, parse("none,randaugment"), tf.uint8)
    unchanged = (found.numpy() == images).all((1, 2, 3)).mean()
    # Itself, equalize of few pixels, shears by less than half a pixel, sharpness of what is even.
    assert unchanged == pytest.approx(5 / 14, abs=0.03)


# Mixed with another of the batch


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 4.0])
def test_shares_are_of_a_beta_distribution(alpha):
    _, draws = make(40_000, (1, 1, 1))
    shares = parts.share(32, 32, draws, parse(f"none,mixup={alpha}"), tf.float64).numpy()
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
    found = parts.mixed(tf.constant(images), np.roll(images, 1, 0), draws, plan).numpy()
    share = parts.share(24, 40, draws, plan, tf.float32).numpy()
    numbers = np.arange(200)
    expected = share * numbers + (1 - share) * np.roll(numbers, 1)
    np.testing.assert_allclose(found.mean((1, 2, 3)), expected, rtol=1e-5)
    whole = np.isin(found[..., 0], numbers).all((1, 2))
    few = {"mixup": 0, "cutmix": 1, "mixup,cutmix": 0.5}[part]
    assert whole.mean() == pytest.approx(few, abs=0.12)


def test_extreme_draws_are_shares():
    draws = np.zeros((2, augment.NUM_DRAWS), np.float32)
    draws[1] = np.float32(1) - np.float32(2) ** -24
    for part in ("mixup=0.01", "mixup=100", "cutmix=0.01", "cutmix=100"):
        share = parts.share(8, 8, draws, parse(f"none,{part}"), tf.float32).numpy()
        assert ((share >= 0) & (share <= 1)).all()


# What is said


def test_parts_that_a_data_set_cannot_have():
    from tests.data.test_augment import own

    assert augment.resolve("auto,mixup", own("images", "shapes")) == "tutorial,mixup=0.2"
    assert augment.resolve("auto,mixup", own("images")) == "none,mixup=0.2"
    for kind, name, line in [
        ("none,cutout=60", "images", "a square of 60 pixels is more than an image, which is then "),
        ("auto,cutout", "numbers", "--augment=auto,cutout is for images, and mine:load has none"),
        ("none,cutout", "masks", "--augment=none,cutout cuts and mirrors images, and y"),
    ]:
        with pytest.raises(InputError, match=line):
            augment.resolve(kind, own(name))
    with pytest.raises(InputError, match="type --augment=none,cutout=16, which"):
        augment.resolve("auto,cutout", own("images"), compiled=True)
