import keras
import numpy as np
import pytest
import tensorflow as tf

from models import fast as module
from models.fast import CosinePatterns, IdentityFirst, SmallAtFirst, fast


def test_has_the_weights_that_its_page_says():
    model = fast()
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_variables)
    assert f"{model.count_params():,} weights, of which {trained:,} are" in module.__doc__
    assert trained == 1_971_328


def test_patterns_take_neighbours_and_colours_apart():
    """They are orthonormal, both signs of each, and of a plain patch but one is not 0."""
    kernel = CosinePatterns()([2, 2, 3, 24]).numpy().reshape(12, 24)
    np.testing.assert_allclose(kernel[:, :12].T @ kernel[:, :12], np.eye(12), atol=1e-6)
    np.testing.assert_array_equal(kernel[:, 12:], -kernel[:, :12])
    seen = np.ones(12) @ kernel[:, :12]
    np.testing.assert_allclose(seen, [12**0.5, *[0] * 11], atol=1e-6)


def test_the_first_channels_hand_on_what_they_see():
    kernel = IdentityFirst(seed=1)([3, 3, 5, 8])
    images = tf.random.stateless_normal([2, 6, 7, 5], seed=(1, 2))
    seen = tf.nn.conv2d(images, kernel, 1, "SAME")
    np.testing.assert_allclose(seen[..., :5], images, atol=1e-6)
    assert np.std(kernel[..., 5:]) == pytest.approx((1 / (3 * 45)) ** 0.5, rel=0.2)


def test_images_are_small_in_the_first_steps_of_training_alone():
    layer = SmallAtFirst(size=16, num_steps=2)
    images = tf.random.stateless_uniform([1, 32, 24, 3], seed=(1, 2))
    call = tf.function(layer)
    seen = [call(images, training=training) for training in (True, False, True, True, True)]
    assert [tuple(x.shape[1:3]) for x in seen] == [(16, 16), (32, 24), (16, 16), (32, 24), (32, 24)]
    np.testing.assert_array_equal(seen[-1], images)
    assert np.mean(seen[0]) == pytest.approx(np.mean(images), abs=0.01)


def test_what_it_says_depends_on_no_fixed_size():
    keras.utils.set_random_seed(1)
    model = fast(width=2, small_size=16, small_steps=1)
    assert model(tf.zeros([2, 32, 32, 3]), training=True).shape == (2, 10)
    assert model(tf.zeros([2, 32, 32, 3]), training=True).shape == (2, 10)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(width=0), "width=0"),
        (dict(num_classes="x"), "num_classes='x'"),
        (dict(small_size=11, small_steps=1), "small_size=11"),
        (dict(small_size=2.5), "small_size=2.5"),
        (dict(small_steps=-1), "small_steps=-1"),
        (dict(image_shape=(11, 32, 3)), "image_shape=(11, 32, 3)"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError) as error:
        fast(**arguments)
    assert named in str(error.value) and "must be" in str(error.value)
