"""The fast network: what its layers and initial values do."""

import numpy as np
import pytest
import tensorflow as tf

from models import fast

pytestmark = pytest.mark.graph


def gradients(convolve, x, kernel, upstream):
    with tf.GradientTape() as tape:
        tape.watch((x, kernel))
        total = tf.reduce_sum(convolve(x, kernel) * upstream)
    return tape.gradient(total, (x, kernel))


@pytest.mark.run
@pytest.mark.parametrize(
    ("image", "kernel", "known"),
    [
        ((1, 1), (1, 1), True), ((1, 1), (7, 7), False), ((2, 3), (5, 3), True),
        ((2, 3), (7, 7), True), ((7, 7), (3, 3), False), ((11, 10), (1, 1), False),
        ((11, 10), (5, 3), True), ((11, 10), (7, 7), True),
    ],
)  # fmt: skip
def test_gradients_are_those_of_tensorflow(image, kernel, known):
    random = tf.random.Generator.from_seed(0)
    given = [
        random.normal(shape, dtype=tf.float64)
        for shape in ([3, *image, 4], [*kernel, 4, 5], [3, *image, 5])
    ]
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in given]
    if not known:
        specs[0] = tf.TensorSpec([None, None, None, 4], tf.float64)
    ours = tf.function(lambda *a: gradients(fast.convolve, *a), input_signature=specs)
    plain = gradients(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), *given)
    for own, other in zip(ours(*given), plain, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-12)


def test_images_are_small_in_the_first_steps_of_training_alone():
    layer = fast.SmallAtFirst(size=16, num_steps=2)
    images = tf.random.stateless_uniform([1, 32, 24, 3], seed=(1, 2))
    call = tf.function(layer)
    seen = [call(images, training=training) for training in (True, False, True, True, True)]
    assert [tuple(x.shape[1:3]) for x in seen] == [(16, 16), (32, 24), (16, 16), (32, 24), (32, 24)]
    np.testing.assert_array_equal(seen[-1], images)
    assert np.mean(seen[0]) == pytest.approx(np.mean(images), abs=0.01)
    model = fast.fast(width=2, small_size=16, small_steps=1)
    for _ in range(2):
        assert model(tf.zeros([2, 32, 32, 3]), training=True).shape == (2, 10)
