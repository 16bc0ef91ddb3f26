"""Pictures: bounded, readable, and of whatever images there are."""

import io

import numpy as np
import pytest
from PIL import Image

from towers.monitoring import drawing


def pixels(summary, tag=None):
    """Return the picture of a summary, uint8 [h, w, 3], having checked what it says of itself."""
    (value,) = [v for v in summary.value if tag in (None, v.tag)]
    width, height, png = value.tensor.string_val
    picture = Image.open(io.BytesIO(png))
    assert picture.size == (int(width), int(height))
    assert value.metadata.plugin_data.plugin_name == "images"
    return np.asarray(picture.convert("RGB"))


def test_floats_are_stretched_unless_they_are_from_0_to_1():
    image = np.array([[[0.2], [0.6]]], np.float32)
    assert drawing.to_bytes(image)[0, :, 0].tolist() == [51, 153]
    assert drawing.to_bytes(image, stretch=True)[0, :, 0].tolist() == [0, 255]
    image = np.random.default_rng(0).integers(0, 256, (6, 6, 3))
    image.flat[:2] = 0, 255
    standardised = (image - image.mean()) / image.std()
    np.testing.assert_array_equal(drawing.to_bytes(standardised), image)


def test_one_colour_is_gray_and_what_is_not_finite_is_dark():
    assert np.all(drawing.to_bytes(np.full((2, 2, 3), -3.0)) == 128)
    image = np.array([[[-1.0], [np.nan], [np.inf], [3.0]]], np.float32)
    assert drawing.to_bytes(image)[0, :, 0].tolist() == [0, 0, 0, 255]
    assert np.all(drawing.to_bytes(np.full((2, 2, 1), np.nan)) == 0)


@pytest.mark.parametrize(
    ("channels", "shown"),
    [(1, [0, 0, 0]), (2, [0, 0, 0]), (3, [0, 1, 2]), (4, [0, 1, 2]), (5, [0, 0, 0])],
)
def test_three_or_four_channels_are_colours_and_of_others_the_first_is_gray(channels, shown):
    image = np.random.default_rng(0).integers(0, 256, (3, 4, channels)).astype(np.uint8)
    np.testing.assert_array_equal(drawing.to_bytes(image), image[..., shown])


def test_small_images_are_enlarged_pixel_by_pixel_with_their_captions_below():
    images = [np.full((8, 8, 3), value, np.uint8) for value in (10, 20, 30)]
    images[0][0, 0] = 200
    bare = np.asarray(drawing.grid(images, [[""]] * 3, columns=2))
    captioned = np.asarray(drawing.grid(images, [["cat"], ["dog"], ["bird"]], columns=2))
    assert bare.shape == captioned.shape
    for value in 10, 20, 30:
        assert np.sum(np.all(captioned == value, axis=-1)) >= 128 * 128 - 16 * 16
    assert np.sum(np.all(captioned == 200, axis=-1)) == 16 * 16
    rows, columns = np.nonzero(np.any(bare != captioned, axis=-1))
    under = (134 <= rows) & (rows < 148) | (282 <= rows) & (rows < 296)
    assert np.all(under) and {6, 140} <= set(columns // 134 * 134 + 6)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 300, 3), (500, 2, 3), (700, 900, 3), (129, 1, 5)])
@pytest.mark.parametrize("num", [1, 7])
def test_a_picture_is_bounded_whatever_the_images(shape, num):
    images = np.zeros((num, *shape), np.float32)
    picture = drawing.grid(images, [["a name " * 50, "日本語\nnew line", ""]] * num)
    width, height = picture.size
    assert 128 <= width <= 4 * 262 + 6 and 40 <= height <= 2 * 304 + 6


def test_a_matrix_shows_shares_of_rows():
    counts = np.array([[9, 1, 0, 0], [0, 4, 0, 0], [5, 0, 0, 5], [0, 0, 0, 0]])
    names = ["cat", "dog", "a name that is much too long to be shown beside any matrix", "鳥"]
    picture = np.asarray(drawing.matrix(counts, names)).astype(int)
    corner = len(picture) - 6 - 4 * 48
    cells = picture[corner + 2 : corner + 4 * 48 : 48, corner + 2 : corner + 4 * 48 : 48]
    assert cells[1, 1].tolist() == [8, 81, 156]
    bluer = (cells[..., 2] > cells[..., 0]).tolist()
    redder = (cells[..., 0] > cells[..., 2]).tolist()
    assert bluer == (np.diag([1, 1, 0, 0]) > 0).tolist()
    assert redder == (counts * (1 - np.eye(4)) > 0).tolist()
    assert cells[2, 0].sum() < cells[0, 1].sum() < 3 * 255
    assert np.all(cells[counts == 0] == 255)


def test_numbers_and_names_are_there_as_far_as_they_fit():
    small, large = np.diag([3, 4]), np.diag([3_000_000_000, 4_000_000_000])
    names = ["cat", "dog"]
    with_numbers, without = (np.asarray(drawing.matrix(c, names)) for c in (small, large))
    corner = len(without) - 6 - 2 * 48
    cells = np.unique(without[corner : corner + 96, corner : corner + 96].reshape(-1, 3), axis=0)
    assert len(cells) == 2
    assert len(np.unique(with_numbers[corner : corner + 96, corner : corner + 96])) > 6
    assert not np.array_equal(without, np.asarray(drawing.matrix(large, ["cow", "dog"])))


@pytest.mark.parametrize("num", [1, 30, 100, 500, 900])
def test_a_matrix_is_bounded_at_any_number_of_classes(num):
    counts = np.random.default_rng(0).integers(0, 9, (num, num))
    picture = drawing.matrix(counts, [f"class {i}" for i in range(num)])
    assert 48 < picture.width == picture.height <= 900 + 160
    names = np.asarray(picture)[:, : picture.width - max(1, min(48, 900 // num)) * num - 6]
    assert np.any(names < 128)
