"""Master variables: named without towers or devices, the same in each process."""

import keras
import numpy as np
import pytest

from tests import tiny
from towers.training.masters import Masters
from towers.training.update import make_optimizer


def namesakes(num_classes, image_shape):
    """Two blocks whose inner layers bear the same name."""

    def block(name):
        return keras.Sequential([keras.layers.Dense(4, name="same")], name=name)

    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(name="flat.with.dots"),
            block("left"),
            block("right"),
            keras.layers.Dense(num_classes, name="head.with.dots"),
        ]
    )


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
    return list(tiny.Loop(tiny.options("unused", **changes)).masters.variables())


def test_names_say_what_a_variable_is_and_not_where_it_is_used():
    assert names(ema_decay=0.9, num_towers=2) == [
        "model/sequential/dense/kernel",
        "model/sequential/dense/bias",
        "model/sequential/dense_1/kernel",
        "model/sequential/dense_1/bias",
        "optimizer/sgd/iteration",
        "optimizer/sgd/learning_rate",
        "optimizer/sgd/sequential_dense_kernel_momentum",
        "optimizer/sgd/sequential_dense_bias_momentum",
        "optimizer/sgd/sequential_dense_1_kernel_momentum",
        "optimizer/sgd/sequential_dense_1_bias_momentum",
        "average/sequential/dense/kernel",
        "average/sequential/dense/bias",
        "average/sequential/dense_1/kernel",
        "average/sequential/dense_1/bias",
        "step",
        "examples",
    ]


def test_names_do_not_change_in_a_process_that_built_other_models():
    """A notebook continues a run that it stopped, and Keras has counted its layers since."""
    before = names(model="tests.tiny:cnn", optimizer="adamw", ema_decay=0.5)
    layers = [keras.layers.Dense(1).name for _ in range(3)]
    assert names(model="tests.tiny:cnn", optimizer="adamw", ema_decay=0.5) == before
    assert keras.layers.Dense(1).name not in layers  # the user's own layers are counted on


def test_the_number_of_towers_changes_no_name_and_no_device():
    for num_towers in 1, 4:
        loop = tiny.Loop(tiny.options("unused", num_towers=num_towers, dtype="mixed_float16"))
        loop()
        variables = loop.masters.variables()
        assert not [name for name in variables if "tower" in name or "cpu" in name.lower()]
        assert {v.device.rsplit("/", 1)[-1] for v in variables.values()} == {"device:CPU:0"}


@pytest.mark.parametrize("model", ["namesakes", "pair"])
def test_layers_of_one_name_are_told_apart(model):
    loop = tiny.Loop(tiny.options("unused", model=f"tests.test_masters:{model}", ema_decay=0.5))
    variables = loop.masters.variables()
    trained = loop.masters.model.trainable_variables
    assert len(variables) == 3 * len(trained) + 4
    assert {id(v) for v in variables.values()} > {id(v.value) for v in trained}


def test_the_averages_start_as_copies_of_the_weights():
    loop = tiny.Loop(tiny.options("unused", model="tests.tiny:cnn", ema_decay=0.9))
    state = loop.state()
    averages = {n.removeprefix("average/"): v for n, v in state.items() if n[:8] == "average/"}
    weights = {n.removeprefix("model/"): v for n, v in state.items() if n[:6] == "model/"}
    assert "sequential/batch_normalization/moving_variance" in averages
    tiny.assert_identical(averages, {name: weights[name] for name in averages})
    assert all(v.dtype.kind != "f" for name, v in weights.items() if name not in averages)

    loop(2)
    after = loop.state()
    assert np.any(after["average/sequential/dense/kernel"] != averages["sequential/dense/kernel"])
    assert np.any(
        after["average/sequential/dense/kernel"] != after["model/sequential/dense/kernel"]
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model/sequential/dense/bias", "average/sequential/dense/bias"])
def test_one_bad_number_is_found(name, bad):
    loop = tiny.Loop(tiny.options("unused", ema_decay=0.9))
    assert loop.masters.finite()
    value = loop.masters.variables()[name]
    value.assign(np.where(np.arange(value.shape[0]) == 1, bad, value))
    assert not loop.masters.finite()


def test_masters_can_be_made_of_a_model_of_ones_own():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, name="head")])
    masters = Masters(model, make_optimizer(model, tiny.options("unused", optimizer="sgd")))
    assert [n for n in masters.variables() if n.startswith("model/")] == [
        f"model/{v.path}" for v in model.variables
    ]
    assert masters.loss_scale is None and masters.averages == []
