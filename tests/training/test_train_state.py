"""Master variables: named without towers or devices, the same in each process."""

import keras
import numpy as np
import pytest

from tests import tiny
from towers.training.run.setup import prepare
from towers.training.step.train_state import not_finite

pytestmark = pytest.mark.graph


def namesakes(num_classes, image_shape):
    """Two blocks whose inner layers bear the same name."""

    def block(name):
        return keras.Sequential([keras.layers.Dense(4, name="same")], name=name)

    first, last = keras.layers.Flatten(name="flat.with.dots"), keras.layers.Dense
    inner = [first, block("left"), block("right"), last(num_classes, name="head.with.dots")]
    return keras.Sequential([keras.Input(image_shape), *inner])


class Pair(keras.Model):
    """Two layers of one name on one level, which Keras allows in a model of one's own."""

    def __init__(self, num_classes):
        super().__init__()
        self.first = keras.layers.Dense(4, name="dense")
        self.second = keras.layers.Dense(num_classes, name="dense")
        self.flatten = keras.layers.Flatten()

    def call(self, inputs):
        return self.second(self.first(self.flatten(inputs)))


def pair(num_classes):
    return Pair(num_classes)


def names(**changes):
    return list(prepare(tiny.options("unused", **changes)).train_state.variables())


def test_names_say_what_a_variable_is_and_not_where_it_is_used():
    weights = [f"{layer}/{kind}" for layer in ("dense", "dense_1") for kind in ("kernel", "bias")]
    assert names(ema_decay=0.9, num_towers=2) == [
        *(f"model/sequential/{weight}" for weight in weights),
        "optimizer/sgd/iteration",
        "optimizer/sgd/learning_rate",
        *(f"optimizer/sgd/sequential_{w.replace('/', '_')}_momentum" for w in weights),
        *(f"average/sequential/{weight}" for weight in weights),
        "step",
        "examples",
    ]


def test_names_do_not_change_in_a_process_that_built_other_models():
    """A notebook continues a run that it stopped, and Keras has counted its layers since."""
    before = names(model="tests.tiny:cnn", optimizer="adamw", ema_decay=0.5)
    layers = [keras.layers.Dense(1).name for _ in range(3)]
    assert names(model="tests.tiny:cnn", optimizer="adamw", ema_decay=0.5) == before
    assert keras.layers.Dense(1).name not in layers  # the user's own layers are counted on


@pytest.mark.parametrize("model", ["namesakes", "pair"])
def test_layers_of_one_name_are_told_apart(model):
    given = dict(model=f"tests.training.test_train_state:{model}", ema_decay=0.5)
    train_state = prepare(tiny.options("unused", **given)).train_state
    variables, trained = train_state.variables(), train_state.model.trainable_variables
    assert len(variables) == 3 * len(trained) + 4
    assert {id(v) for v in variables.values()} > {id(v.value) for v in trained}


def test_one_bad_number_is_found():
    train_state = prepare(tiny.options("unused", ema_decay=0.9)).train_state
    assert not_finite(train_state.variables()) == []
    for bad, kind in (np.nan, "model"), (np.inf, "average"):
        value = train_state.variables()[f"{kind}/sequential/dense/bias"]
        good = value.numpy()
        value.assign(np.where(np.arange(value.shape[0]) == 1, bad, good))
        assert not_finite(train_state.variables()) == [f"{kind}/sequential/dense/bias"]
        value.assign(good)
