"""Whether a model gives logits: what is seen of its last layer, and said before the first step."""

import keras
import pytest

from towers import cli
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


def last_layer(num_classes, image_shape):
    """The usual mistake, in the head that the guide to mixed precision recommends."""
    head = layers.Dense(num_classes, activation="softmax", dtype="float32")
    return keras.Sequential([keras.Input(image_shape), layers.Flatten(), head])


@pytest.mark.run
def test_training_says_so_once_before_the_first_step(tmp_path, capsys):
    flags = "--dataset=tests.tiny:images --augment=none --batch_size=7 --max_steps=1".split()
    flags += [f"--model={__name__}:last_layer", "--dtype=mixed_bfloat16", "--num_towers=1"]
    assert cli.main(["train", *flags, f"--train_dir={tmp_path}/run"]) == 0
    out = capsys.readouterr().out
    line = (
        f"warning     {__name__}:last_layer ends in a softmax, and the loss takes logits, of which "
        "it takes the softmax itself: it will learn badly; take the softmax off the last layer\n"
    )
    assert out.count(line) == out.count("ends in a") == 1
    assert line not in out[out.index("new run") :]
