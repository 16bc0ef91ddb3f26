"""Whether a model gives logits: what is seen in its graph, and said before the first step."""

import keras
import pytest
import tensorflow as tf

from tests import tiny
from towers import cli
from towers.training.logits import final_activation

layers = keras.layers


class Ending(layers.Layer):
    def __init__(self, ending, **keywords):
        super().__init__(**keywords)
        self.ending = ending

    def call(self, x):
        return self.ending(x)


def by_hand(x):
    powers = tf.exp(x - tf.reduce_max(x, axis=-1, keepdims=True))
    return powers / tf.reduce_sum(powers, axis=-1, keepdims=True)


def reshaped(x):
    return tf.squeeze(tf.reshape(tf.nn.softmax(x), [-1, 1, tiny.NUM_CLASSES]), axis=1)


ENDINGS = {
    "none": (lambda x: x, None),
    "keras": (layers.Softmax(), "softmax"),
    "ops": (keras.ops.softmax, "softmax"),
    "by hand": (by_hand, "softmax"),
    "cast": (lambda x: tf.cast(tf.nn.softmax(tf.cast(x, tf.float16)), tf.float32), "softmax"),
    "reshaped": (reshaped, "softmax"),
    "in a function": (tf.function(tf.nn.softmax, autograph=False), "softmax"),
    "sigmoid": (tf.sigmoid, "sigmoid"),
    "logarithm": (tf.nn.log_softmax, None),
    "logarithm by hand": (lambda x: tf.math.log(tf.nn.softmax(x)), None),
    "gate": (lambda x: x * tf.nn.softmax(x), None),
    "norm": (lambda x: x / tf.reduce_sum(x, axis=-1, keepdims=True), None),
}


def net(num_classes, image_shape, ending="none"):
    head = [layers.Flatten(), layers.Dense(num_classes), Ending(ENDINGS[ending][0])]
    return keras.Sequential([keras.Input(image_shape), *head])


def attends(num_classes, image_shape):
    """Has softmax and sigmoid in its middle."""
    images = keras.Input(image_shape)
    x = layers.Reshape((-1, image_shape[-1]))(images)
    x = layers.Activation("sigmoid")(layers.MultiHeadAttention(2, 3)(x, x))
    return keras.Model(images, layers.Dense(num_classes)(layers.Flatten()(x)))


def last_layer(num_classes, image_shape):
    """The usual mistake, in the head that the guide to mixed precision recommends."""
    head = layers.Dense(num_classes, activation="softmax", dtype="float32")
    return keras.Sequential([keras.Input(image_shape), layers.Flatten(), head])


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_last_activation_is_seen(ending):
    model = net(tiny.NUM_CLASSES, tiny.IMAGE_SHAPE, ending)
    assert final_activation(model, tiny.IMAGE_SHAPE) == ENDINGS[ending][1]


def test_only_the_last_activation_counts():
    assert final_activation(attends(3, tiny.IMAGE_SHAPE), tiny.IMAGE_SHAPE) is None


FLAGS = "--dataset=tests.tiny:images --augment=none --batch_size=7".split()


@pytest.mark.parametrize(
    "model, dtype, lines",
    [("last_layer", "mixed_bfloat16", 1), ("last_layer", "float64", 1), ("attends", "float32", 0)],
)
def test_training_says_so_once_before_the_first_step(tmp_path, capsys, model, dtype, lines):
    flags = [*FLAGS, f"--model={__name__}:{model}", f"--dtype={dtype}", "--max_steps=1"]
    assert cli.main(["train", *flags, "--num_towers=2", f"--train_dir={tmp_path}/run"]) == 0
    out = capsys.readouterr().out
    line = (
        f"warning     {__name__}:{model} ends in a softmax, and the loss takes logits, of which it "
        "takes the softmax itself: it will learn badly; take the softmax off the last layer\n"
    )
    assert out.count(line) == out.count("ends in a") == lines
    assert line not in out[out.index("new run") :]


def test_verify_says_so_once(capsys):
    flags = [*FLAGS, f"--model={__name__}:last_layer", "--steps=1", "--num_towers=2", "--float32"]
    assert cli.main(["verify", *flags]) == 0
    assert capsys.readouterr().out.count("ends in a softmax") == 1
