"""The built-in shapes: the same bytes each time, and no task for a linear model."""

import numpy as np
import pytest

from towers import data
from towers.data import shapes

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def drawn():
    """Half as many training pictures, and the test pictures."""
    return shapes.draw(10_000, (2016, 0)), shapes.draw(4_000, (2016, 1))


@pytest.mark.run
def test_classes_are_balanced_and_look_alike_on_average_and_no_picture_is_there_twice(drawn):
    for images, labels in drawn:
        assert np.bincount(labels).tolist() == [len(labels) // 4] * 4
        # The mean of a class strays by chance alone: deviation of one picture's / sqrt(number).
        means = images.mean((1, 2, 3))
        of_class = [means[labels == label].mean() for label in range(4)]
        assert np.std(of_class) < 2 * means.std() / (len(labels) / 4) ** 0.5
    assert len({image.tobytes() for images, _ in drawn for image in images}) == 14_000


def test_they_are_the_default(monkeypatch):
    monkeypatch.setattr(shapes, "NUM_TRAIN", 50)
    monkeypatch.setattr(shapes, "NUM_TEST", 20)
    loaded = data.load()
    assert (loaded.name, loaded.train.size, loaded.test.size) == ("shapes", 50, 20)
    assert (loaded.num_classes, loaded.image_shape) == (4, (32, 32, 3))
    assert loaded.class_names == ("disc", "triangle", "square", "cross")
