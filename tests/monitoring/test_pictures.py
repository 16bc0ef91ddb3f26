"""The pictures of a run: of each tower's images, of filters, and of what evaluation gets wrong."""

import keras
import numpy as np
import pytest

from tests.monitoring.test_drawing import pixels
from towers.monitoring import drawing, pictures
from towers.monitoring.pictures import Mistake, Predictions

NAMES = ("cat", "dog", "bird")


def tags(summaries):
    return [value.tag for summary in summaries for value in summary.value]


def examples(*numbers, shape=(8, 8, 3)):
    """Return (images, labels) of towers with so many examples."""
    random = np.random.default_rng(0)
    return [
        (random.random((num, *shape), np.float32), random.integers(0, 3, num)) for num in numbers
    ]


def test_each_tower_with_examples_shows_its_images_with_their_names():
    seen = examples(8, 2, 0)
    summaries = pictures.of_towers(seen, NAMES, step=2)
    assert tags(summaries) == ["images/tower_0", "images/tower_1"]
    for i, summary in enumerate(summaries):
        images, labels = seen[i]
        names = [NAMES[label] for label in labels]
        about = summary.value[0].metadata.summary_description
        assert f"tower {i} sees them in step 2: {', '.join(names)}" in about
        shown = [drawing.to_bytes(image, stretch=True) for image in images]
        expected = drawing.grid(shown, [[name] for name in names])
        np.testing.assert_array_equal(pixels(summary), np.asarray(expected))


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 2), (3, 4, 5)])
def test_images_of_any_shape_are_shown(shape):
    (summary,) = pictures.of_towers(examples(7, shape=shape), NAMES, step=None)
    assert pixels(summary).shape[1] > 4 * 128
    assert "not of this step" in summary.value[0].metadata.summary_description


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
    (summary,) = pictures.filters(model)
    assert tags([summary]) == [f"filters/{layer.path}"]
    colours = distinct(pixels(summary))
    assert len(colours) > 6 * 3
    assert np.all(colours[:, :1] == colours) == gray


def test_each_filter_is_stretched_by_itself_and_one_that_is_constant_is_gray():
    layer = keras.layers.Conv2D(3, 2)
    model = model_with(layer, channels=1)
    kernel = np.zeros((2, 2, 1, 3), np.float32)
    kernel[0, 0, 0, 0], kernel[0, 0, 0, 1] = 0.01, 10.0
    kernel[..., 2] = 0.3
    layer.set_weights([kernel, np.zeros(3)])
    picture = pixels(*pictures.filters(model))
    tiles = [picture[6:38, 6 + 38 * i : 38 + 38 * i, 0] for i in range(3)]
    for tile in tiles[:2]:
        assert np.all(tile[:16, :16] == 255) and np.all(tile[16:] == 0)
    assert np.all(tiles[2] == 128)
    kernel[0, 0, 0, :2] = np.nan, np.inf
    layer.set_weights([kernel, np.zeros(3)])
    assert pixels(*pictures.filters(model)).shape == picture.shape


def test_the_first_convolution_is_found_in_nested_models_and_may_be_missing():
    inner = keras.Sequential([keras.layers.Conv2D(2, 3, name="a"), keras.layers.Conv2D(4, 3)])
    (summary,) = pictures.filters(model_with(keras.layers.Rescaling(2.0), inner))
    assert tags([summary]) == [f"filters/{inner.layers[0].path}"]
    assert "2 of the 2 3x3 filters" in summary.value[0].metadata.summary_description
    assert pictures.filters(model_with(keras.layers.Flatten(), keras.layers.Dense(3))) == []


def test_many_filters_make_a_bounded_picture():
    picture = pixels(*pictures.filters(model_with(keras.layers.Conv2D(1000, 3))))
    assert max(picture.shape) < 16 * 40 + 20


def predictions(labels, predicted, mistakes=(), averaged=False):
    return Predictions(np.array(labels), np.array(predicted), list(mistakes), averaged)


@pytest.mark.parametrize("num", [100, 1501])
def test_a_confusion_matrix_of_many_classes_is_bounded_and_still_tells(num):
    labels = np.arange(num, dtype=np.int32)
    names = [str(i) for i in range(num)]
    right, wrong = (
        pixels(*pictures.of_evaluation(predictions(labels, said), names))
        for said in (labels, labels[::-1])
    )
    assert max(right.shape) <= 1100
    colours = distinct(right)
    assert [8, 81, 156] in colours.tolist() and not np.any(colours[:, 0] > colours[:, 2])
    assert [165, 15, 21] in distinct(wrong).tolist()


@pytest.mark.parametrize("averaged", [False, True])
def test_an_evaluation_counts_what_was_taken_for_what_and_shows_mistakes(averaged):
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    wrong = [Mistake(image, 0, 1, 0.984), Mistake(image, 1, 2, 0.5)]
    said = predictions([0, 0, 1, 2, 2, 2], [0, 1, 1, 0, 0, 2], wrong, averaged)
    found = pictures.of_evaluation(said, NAMES)
    assert tags(found) == ["confusion_matrix", "mistakes"]
    counts = np.array([[1, 1, 0], [0, 1, 0], [2, 0, 1]])
    captions = [["true cat,", "said dog 0.98"], ["true dog,", "said bird 0.50"]]
    expected = drawing.matrix(counts, NAMES), drawing.grid([image, image], captions)
    for summary, picture in zip(found, expected, strict=True):
        np.testing.assert_array_equal(pixels(summary), np.asarray(picture))
        about = summary.value[0].metadata.summary_description
        assert ("moving average" in about) == averaged
    assert "1. true cat, said dog 0.98\n2. true dog, said bird 0.50" in about


def test_a_perfect_evaluation_has_no_mistakes_and_an_empty_one_no_pictures():
    perfect = predictions([0, 1], [0, 1])
    assert tags(pictures.of_evaluation(perfect, NAMES)) == ["confusion_matrix"]
    assert pictures.of_evaluation(predictions([], []), NAMES) == []
