"""The losses that layers add: Keras still collects them where they are looked for."""

import keras
import tensorflow as tf

from towers.tf_private_losses import added_losses


class Adds(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_sum(inputs))
        return inputs


def test_the_open_scope_has_what_layers_add_and_no_regularizer_of_weights():
    dense = keras.layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l1")
    model = keras.Sequential([keras.Input((3,)), Adds(), dense])
    inputs = tf.ones([4, 3])
    assert added_losses() == []
    with keras.StatelessScope(collect_losses=True):
        outputs = model(inputs)
        found = [float(loss) for loss in added_losses()]
        with keras.StatelessScope():  # an inner one, which collects nothing
            model(inputs)
            assert added_losses() == []
    assert found == [12.0, float(0.01 * tf.reduce_sum(tf.abs(outputs)) / 4)]
    assert added_losses() == []
