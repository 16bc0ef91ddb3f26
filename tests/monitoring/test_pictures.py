"""The pictures of a run: of each tower's images, of filters, and of what evaluation gets wrong."""

import dataclasses

import keras
import numpy as np
import pytest

from tests import tiny
from tests.monitoring.test_drawing import pixels
from towers.monitoring import drawing, pictures, samples
from towers.training.evaluate import Evaluation, Mistake, Predictions, make_evaluator
from towers.training.run import prepare


def tags(summaries):
    return [value.tag for summary in summaries for value in summary.value]


def test_each_tower_shows_its_images_with_their_names():
    run = prepare(tiny.options("unused", num_towers=3, batch_size=22, model="tests.tiny:cnn"))
    data = dataclasses.replace(run.data, class_names=("cat", "dog", "bird"))
    run = dataclasses.replace(run, data=data)
    batch = samples.Sampler(run).batch(2, 44)
    summaries = pictures.of_training(run, batch)
    assert tags(summaries) == [
        *(f"images/tower_{i}" for i in range(3)),
        "filters/sequential/conv2d",
    ]
    for i, (images, labels) in enumerate(samples.seen_by_towers(run, batch, 8)):
        names = [data.class_names[label] for label in labels]
        assert ", ".join(names) in summaries[i].value[0].metadata.summary_description
        shown = [drawing.to_bytes(image, stretch=True) for image in images]
        expected = drawing.grid(shown, [[name] for name in names])
        np.testing.assert_array_equal(pixels(summaries[i]), np.asarray(expected))


def test_a_tower_without_examples_has_no_picture():
    run = prepare(tiny.options("unused", num_towers=3, batch_size=2))
    summaries = pictures.of_training(run, samples.Sampler(run).batch(0, 0))
    assert tags(summaries) == ["images/tower_0", "images/tower_1"]


@pytest.mark.parametrize("kind", ["off", "none", "resnet", "tutorial"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 2), (3, 4, 5)])
def test_images_of_any_shape_are_shown(kind, shape):
    run = prepare(tiny.options("unused", augment=kind))
    images = np.random.default_rng(0).random((7, *shape), np.float32)
    batch = samples.Sampler(run).batch(0, 0)
    (summary,) = pictures.images(run, dataclasses.replace(batch, images=images))
    assert pixels(summary).shape[1] > 4 * 128


def test_a_batch_that_is_not_the_steps_is_said_to_be_another():
    run = prepare(tiny.options("unused"))
    batch = samples.Sampler(run).batch(0, 0)
    (exact,) = pictures.images(run, batch)
    (other,) = pictures.images(run, dataclasses.replace(batch, step=None))
    assert "in step 0:" in exact.value[0].metadata.summary_description
    assert "not of this step" in other.value[0].metadata.summary_description


def test_without_a_batch_there_are_filters_alone():
    assert pictures.of_training(prepare(tiny.options("unused")), None) == []
    run = prepare(tiny.options("unused", model="tests.tiny:cnn"))
    assert tags(pictures.of_training(run, None)) == ["filters/sequential/conv2d"]


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
    summary = pictures.filters(model)
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
    picture = pixels(pictures.filters(model))
    tiles = [picture[6:38, 6 + 38 * i : 38 + 38 * i, 0] for i in range(3)]
    for tile in tiles[:2]:
        assert np.all(tile[:16, :16] == 255) and np.all(tile[16:] == 0)
    assert np.all(tiles[2] == 128)
    kernel[0, 0, 0, :2] = np.nan, np.inf
    layer.set_weights([kernel, np.zeros(3)])
    assert pixels(pictures.filters(model)).shape == picture.shape


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.rescale = keras.layers.Rescaling(2.0)
        self.inner = keras.Sequential(
            [keras.layers.Conv2D(2, 3, name="a"), keras.layers.Conv2D(4, 3, name="b")]
        )

    def call(self, inputs):
        return self.inner(self.rescale(inputs))


def test_the_first_convolution_is_found_in_nested_models():
    model = Nested()
    model(np.zeros((1, 8, 8, 3)))
    summary = pictures.filters(model)
    assert tags([summary]) == [f"filters/{model.inner.layers[0].path}"]
    assert "2 of the 2 3x3 filters" in summary.value[0].metadata.summary_description


def test_a_model_without_convolution_has_no_filters():
    assert pictures.filters(model_with(keras.layers.Flatten(), keras.layers.Dense(3))) is None


def test_many_filters_make_a_bounded_picture():
    picture = pixels(pictures.filters(model_with(keras.layers.Conv2D(1000, 3))))
    assert max(picture.shape) < 16 * 40 + 20


def predictions(labels, predicted, mistakes=(), averaged=False):
    return Predictions(np.array(labels), np.array(predicted), list(mistakes), averaged)


def test_the_confusion_matrix_counts_what_was_taken_for_what():
    found = predictions([0, 0, 1, 2, 2, 2], [0, 1, 1, 0, 0, 2])
    summary = pictures.confusion_matrix(found, ["cat", "dog", "bird"])
    counts = np.array([[1, 1, 0], [0, 1, 0], [2, 0, 1]])
    expected = drawing.matrix(counts, ["cat", "dog", "bird"])
    np.testing.assert_array_equal(pixels(summary), np.asarray(expected))
    assert tags([summary]) == ["confusion_matrix"]


@pytest.mark.parametrize("num", [100, 1000, 1501, 21_841])
def test_a_confusion_matrix_of_many_classes_is_bounded_and_still_tells(num):
    labels = np.arange(num, dtype=np.int32)
    names = [str(i) for i in range(num)]
    right = pixels(pictures.confusion_matrix(predictions(labels, labels), names))
    assert max(right.shape) <= 1100
    colours = distinct(right)
    assert [8, 81, 156] in colours.tolist() and not np.any(colours[:, 0] > colours[:, 2])
    wrong = pixels(pictures.confusion_matrix(predictions(labels, labels[::-1]), names))
    assert [165, 15, 21] in distinct(wrong).tolist()


def test_mistakes_say_what_it_is_and_what_was_said():
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    found = predictions([0, 1], [1, 2], [Mistake(image, 0, 1, 0.984), Mistake(image, 1, 2, 0.5)])
    summary = pictures.mistakes(found, ["cat", "dog", "bird"])
    about = summary.value[0].metadata.summary_description
    assert "1. true cat, said dog 0.98\n2. true dog, said bird 0.50" in about
    assert "weights as they are" in about and "average" not in about
    averaged = pictures.mistakes(dataclasses.replace(found, averaged=True), ["cat", "dog", "bird"])
    assert "moving average" in averaged.value[0].metadata.summary_description
    expected = drawing.grid(
        [image, image], [["true cat,", "said dog 0.98"], ["true dog,", "said bird 0.50"]]
    )
    np.testing.assert_array_equal(pixels(summary), np.asarray(expected))


def test_an_evaluation_has_its_pictures_and_a_perfect_one_no_mistakes():
    run = prepare(tiny.options("unused", ema_decay=0.5))
    evaluation = make_evaluator(run)()
    found = pictures.of_evaluation(run, evaluation)
    assert tags(found) == ["confusion_matrix", "mistakes"]
    assert "moving average" in found[0].value[0].metadata.summary_description
    labels = evaluation.predictions.labels
    perfect = dataclasses.replace(evaluation, predictions=predictions(labels, labels))
    assert tags(pictures.of_evaluation(run, perfect)) == ["confusion_matrix"]
    alone = Evaluation(1.0, 0.0, {}, None, None, None, 4)
    assert pictures.of_evaluation(run, alone) == []
