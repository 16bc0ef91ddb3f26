"""The arithmetic of a step, as `towers plan` tells it."""

import keras
import pytest
import tensorflow as tf

from models.cnn import cnn
from towers.data import augment
from towers.graphs.flops import flop_per_example


@pytest.mark.graph
def test_the_arithmetic_of_a_step():
    network = cnn(lrn=False)
    first = 24 * 24 * 64 * (5 * 5 * 3)  # no gradient of the images is needed
    rest = 12 * 12 * 64 * (5 * 5 * 64) + 2304 * 384 + 384 * 192 + 192 * 10
    inputs = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(4, 1)(inputs)
    x = keras.layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(x)
    x = keras.layers.Activation("tanh")(x)  # else no gradient would need its value
    depthwise = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))
    for model, shape, products in (
        (network, (24, 24, 3), 2 * first + 3 * rest),
        (depthwise, (8, 8, 4), 2 * 64 * 4 * 4 + 3 * 64 * 8 * 9),
    ):

        def loss_fn(images, labels, draws, model=model):
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))

        images, labels = tf.TensorSpec([None, *shape]), tf.TensorSpec([None], tf.int32)
        batch = (images, labels), tf.TensorSpec([None, augment.NUM_DRAWS])
        assert flop_per_example(model, loss_fn, batch) == 2 * products
