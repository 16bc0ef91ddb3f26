"""Whether a model gives logits: what is seen of its last layer."""

import keras
import pytest

from towers.training.step.output_activation import final_activation

pytestmark = pytest.mark.graph
layers = keras.layers
ENDINGS = {
    "none": ([layers.Dense(3)], None),
    "a layer": ([layers.Dense(3), layers.Softmax()], "softmax"),
    "of the layer": ([layers.Dense(3, activation="softmax")], "softmax"),
    "in another precision": ([layers.Activation("softmax", dtype="float32")], "softmax"),
    "in a model": ([keras.Sequential([layers.Dense(3, "softmax")])], "softmax"),
    "sigmoid": ([layers.Dense(3), layers.Activation("sigmoid")], "sigmoid"),
    "logarithm": ([layers.Dense(3), layers.Activation("log_softmax")], None),
    "in the middle": ([layers.Dense(3, "sigmoid"), layers.Dense(3)], None),
}


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3, "softmax")

    def call(self, inputs):
        return self.head(inputs)


def test_the_last_activation_is_seen_of_models_of_every_kind():
    for ending, (parts, expected) in ENDINGS.items():
        found = final_activation(keras.Sequential([keras.Input((3,)), *parts]))
        assert found == expected, ending
    inputs = keras.Input((3,))
    logits = layers.Dense(3)(inputs)
    assert final_activation(keras.Model(inputs, keras.ops.softmax(logits))) == "softmax"
    assert final_activation(keras.Model(inputs, logits * 2)) is None
    assert final_activation(Subclassed()) == "softmax"
    assert final_activation(keras.Model()) is None
