"""The pictures of a run: bounded, readable, and of whatever images there are."""

import io

import keras
import numpy as np
import pytest
from PIL import Image

from towers.monitoring import pictures
from towers.monitoring.pictures import Mistake, Predictions

pytestmark = pytest.mark.unit

NAMES = ("cat", "dog", "bird")


def pixels(summary):
    """Return the picture of a summary, uint8 [h, w, 3], having checked what it says of itself."""
    (value,) = summary.value
    width, height, png = value.tensor.string_val
    picture = Image.open(io.BytesIO(png))
    assert picture.size == (int(width), int(height))
    assert value.metadata.plugin_data.plugin_name == "images"
    return np.asarray(picture.convert("RGB"))


def tags(summaries):
    return [value.tag for summary in summaries for value in summary.value]


def about(summary):
    return summary.value[0].metadata.summary_description


def test_floats_are_stretched_unless_they_are_from_0_to_1():
    for image, stretch, shown in (
        ([0.2, 0.6], False, [51, 153]),  # floats from 0 to 1 are shown as they are
        ([0.2, 0.6], True, [0, 255]),
        ([-1.0, 3.0], False, [0, 255]),
        ([0.0, np.nan, np.inf, 3.0], False, [0, 0, 0, 255]),
        ([np.nan, np.nan], False, [0, 0]),
    ):
        image = np.array(image, np.float32).reshape(1, -1, 1)
        assert pictures.to_bytes(image, stretch)[0, :, 0].tolist() == shown


def test_three_or_four_channels_are_colours_and_of_others_the_first_is_gray():
    for channels in 1, 2, 3, 4, 5:
        shown = [0, 1, 2] if channels in (3, 4) else [0, 0, 0]
        image = np.random.default_rng(0).integers(0, 256, (3, 4, channels)).astype(np.uint8)
        np.testing.assert_array_equal(pictures.to_bytes(image), image[..., shown])


@pytest.mark.parametrize(
    ("shape", "num"), [((1, 1, 1), 7), ((20, 90, 3), 1), ((500, 40, 3), 7), ((700, 900, 3), 1)]
)
def test_each_tower_with_examples_shows_its_images_with_their_names(shape, num):
    random = np.random.default_rng(0)
    seen = [(random.random((n, *shape), np.float32), random.integers(0, 3, n)) for n in (num, 2, 0)]
    names = ["a name " * 50, "日本語\nnew line", ""]
    found = pictures.tower_images(seen, names)
    assert tags(found) == ["images/tower_0", "images/tower_1"]
    for summary, (_, labels) in zip(found, seen, strict=False):
        assert about(summary).endswith(f": {', '.join(names[label] for label in labels)}.")
        height, width, _ = pixels(summary).shape
        assert 128 <= width <= 4 * 262 + 6 and 40 <= height <= 2 * 304 + 6


def model_with(*layers, channels=3):
    return keras.Sequential([keras.Input((8, 8, channels)), *layers])


def distinct(picture):
    """Return the distinct colours of a picture, without its white ground."""
    colours = np.unique(picture.reshape(-1, 3), axis=0)
    return colours[np.any(colours < 255, axis=1)]


@pytest.mark.parametrize(("channels", "gray"), [(1, True), (2, True), (3, False), (5, True)])
def test_filters_of_three_channels_are_in_colour_and_others_gray(channels, gray):
    layer = keras.layers.Conv2D(6, 3, name="first")
    model = model_with(layer, keras.layers.Conv2D(2, 3, name="second"), channels=channels)
    (summary,) = pictures.filter_images(model)
    assert tags([summary]) == [f"filters/{layer.path}"]
    colours = distinct(pixels(summary))
    assert len(colours) > 6 * 3
    assert np.all(colours[:, :1] == colours) == gray


def test_the_first_convolution_is_found_in_nested_models_and_may_be_missing():
    inner = keras.Sequential([keras.layers.Conv2D(1000, 3), keras.layers.Conv2D(4, 3)])
    (summary,) = pictures.filter_images(model_with(keras.layers.Rescaling(2.0), inner))
    assert tags([summary]) == [f"filters/{inner.layers[0].path}"]
    assert "256 of the 1000 3x3 filters" in about(summary)
    assert max(pixels(summary).shape) < 16 * 40 + 20
    assert pictures.filter_images(model_with(keras.layers.Flatten(), keras.layers.Dense(3))) == []


def test_a_matrix_shows_shares_of_rows():
    counts = np.array([[9, 1, 0, 0], [0, 4, 0, 0], [5, 0, 0, 5], [0, 0, 0, 0]])
    names = ["cat", "dog", "a name that is much too long to be shown beside any matrix", "鳥"]
    picture = np.asarray(pictures.draw_matrix(counts, names)).astype(int)
    corner = len(picture) - 6 - 4 * 48
    cells = picture[corner + 2 : corner + 4 * 48 : 48, corner + 2 : corner + 4 * 48 : 48]
    assert cells[1, 1].tolist() == [8, 81, 156]
    bluer = (cells[..., 2] > cells[..., 0]).tolist()
    redder = (cells[..., 0] > cells[..., 2]).tolist()
    assert bluer == (np.diag([1, 1, 0, 0]) > 0).tolist()
    assert redder == (counts * (1 - np.eye(4)) > 0).tolist()
    assert cells[2, 0].sum() < cells[0, 1].sum() < 3 * 255
    assert np.all(cells[counts == 0] == 255)


@pytest.mark.parametrize("num", [1, 30, pytest.param(1000, marks=pytest.mark.run), 1001])
def test_a_confusion_matrix_is_bounded_and_still_tells(num):
    labels = np.arange(num, dtype=np.int32)
    said = np.roll(labels, 1)
    found = pictures.evaluation_images(Predictions(labels, said, [], False), list(map(str, labels)))
    if num > 1000:
        assert found == []
        return
    picture = pixels(*found)
    assert 48 < picture.shape[0] == picture.shape[1] <= 1200
    cells = distinct(picture[145:, 145:])  # without names
    assert ([8, 81, 156] in cells.tolist()) == (num == 1)
    assert ([165, 15, 21] in cells.tolist()) == (num > 1)
    assert np.any(picture[:, :135] < 128)  # names


@pytest.mark.parametrize("averaged", [False, True])
def test_an_evaluation_counts_what_was_taken_for_what_and_shows_mistakes(averaged):
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    wrong = [Mistake(image, 0, 1, 0.984), Mistake(image, 1, 2, 0.5)]
    labels, said = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, 0, 0, 2])
    found = pictures.evaluation_images(Predictions(labels, said, wrong, averaged), NAMES)
    assert tags(found) == ["confusion_matrix", "mistakes"]
    counts = np.array([[1, 1, 0], [0, 1, 0], [2, 0, 1]])
    np.testing.assert_array_equal(pixels(found[0]), np.asarray(pictures.draw_matrix(counts, NAMES)))
    assert all(("moving average" in about(summary)) == averaged for summary in found)
    captions = [["true cat,", "said dog 0.98"], ["true dog,", "said bird 0.50"]]
    expected = np.asarray(pictures.draw_grid([image, image], captions))
    np.testing.assert_array_equal(pixels(found[1]), expected)
    perfect = Predictions(labels, labels, [], averaged)
    assert tags(pictures.evaluation_images(perfect, NAMES)) == ["confusion_matrix"]
