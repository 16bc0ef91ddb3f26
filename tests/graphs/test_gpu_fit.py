"""Where the variables of `model.fit` over towers lie on GPUs, for which logical CPUs stand in."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import fits
from tests.runs import rare, released
from towers.builder.device_names import cpus_for_gpus

pytestmark = pytest.mark.run
GPUS = ["/cpu:1", "/cpu:2"]
RANDOM = np.random.default_rng(0)
DATA = {"x": RANDOM.normal(size=(22, 8, 8, 3)), "y": RANDOM.integers(0, 4, size=22)}
layers = keras.layers


def built_in_fit():
    conv = layers.Conv2D(4, 3, padding="same", use_bias=False)  # a bias BatchNorm would leave at 0
    body = conv, layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5)
    model = keras.Sequential([*body, layers.GlobalAveragePooling2D(), layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    "num_towers, options", [rare(1, {}), (2, {}), rare(2, {"variables": "cpu"})]
)
def test_variables_lie_on_the_gpus_and_the_numbers_are_those_of_one_device(num_towers, options):
    models, given = [], DATA | {"batch_size": 8, "validation_split": 0.2}
    plain = fits.fit(built_in_fit, given)
    with cpus_for_gpus():
        make = lambda: models.append(built_in_fit()) or models[-1]  # noqa: E731
        over = fits.fit(make, given, devices=GPUS[:num_towers], **options)
    assert fits.differences(plain, over) == {}
    of_plain, of_towers = (
        [re.sub(r"_\d+", "", name) for name, _ in found["optimizer"]] for found in (plain, over)
    )
    assert of_plain == of_towers
    if options:
        return
    (model,) = models
    places = {v.path: v.value.device[-6:] for v in model.variables + model.optimizer.variables}
    assert set(places.values()) == {":CPU:1"}, places


# Weights on all GPUs, whoever changes them.


class Poking(keras.callbacks.Callback):
    """Assigns a weight and the learning rate after each batch, or after each epoch."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, f"on_{hook}_end", self.poke)

    def poke(self, *_, **__):
        weight = self.model.trainable_variables[0]
        weight.assign(weight * 0.9)
        self.model.optimizer.learning_rate = 0.7 * float(self.model.optimizer.learning_rate)


class Halved(keras.optimizers.SGD):
    """An optimizer of the user's, which has a state that its config does not tell."""

    factor = 1.0

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, self.factor * learning_rate)


def halved():
    optimizer = Halved(0.1)
    optimizer.factor = 0.5
    return optimizer


def of_optimizer(make, words=False, penalty=keras.regularizers.L2):
    def build():
        seen = [layers.Embedding(6, 4)] if words else []
        body = layers.Flatten(), layers.Dense(6, "relu", kernel_regularizer=penalty())
        dense = layers.SpectralNormalization(layers.Dense(5))
        model = keras.Sequential([*seen, *body, dense, layers.Dropout(0.5), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make(), loss, metrics=["accuracy"])
        return model

    return build


optimizers = keras.optimizers


class OfExamples(keras.regularizers.Regularizer):
    """A penalty that is random."""

    def __init__(self):
        self.seed = keras.random.SeedGenerator(0)

    def __call__(self, weight):
        factors = keras.random.uniform(weight.shape, seed=self.seed, dtype=weight.dtype)
        return 0.1 * keras.ops.sum(factors * weight**2)


SCHEDULE = optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
WORDS = {"x": RANDOM.integers(0, 6, size=(22, 3)), "y": DATA["y"]}


def uneven():
    """Batches of which some have fewer examples than there are towers."""
    places = np.split(np.arange(22), [2, 9, 10, 16])
    while True:
        for rows in places:
            yield DATA["x"][rows], DATA["y"][rows]


def arrays(**others):
    return lambda: DATA | {"batch_size": 8, "validation_split": 0.2} | others


def one_by_one():
    data = tf.data.Dataset.from_tensor_slices((DATA["x"][:3], DATA["y"][:3]))
    return {"x": data.batch(1, drop_remainder=True), "shuffle": False}


def ema():
    return optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3)


def decaying():
    return optimizers.AdamW(SCHEDULE, weight_decay=0.1, clipnorm=0.3)


SGD = lambda: optimizers.SGD(0.1, 0.9)  # noqa: E731
ADAM = lambda: optimizers.Adam(0.01)  # noqa: E731
SCALED = lambda: optimizers.LossScaleOptimizer(SGD())  # noqa: E731
UNEVEN = {"steps_per_epoch": 6, "shuffle": False}
CASES = {
    "averages that replace weights": (of_optimizer(ema), arrays()),
    "a schedule, a decay, a clip": (of_optimizer(decaying), arrays()),
    "a loss scale": (of_optimizer(SCALED), arrays()),
    "an optimizer of the user's": (of_optimizer(halved), arrays()),
    "rows that are squared": (of_optimizer(ADAM, words=True), lambda: WORDS),
    "rows that may be added": (of_optimizer(SGD, words=True), lambda: WORDS),
    "a callback after each batch": (of_optimizer(ADAM), arrays(callbacks=[Poking("train_batch")])),
    "a callback after each epoch": (of_optimizer(ADAM), arrays(callbacks=Poking("epoch"))),
    "a penalty that is random": (of_optimizer(ADAM, penalty=OfExamples), arrays()),
    "one example": (of_optimizer(ADAM), one_by_one),
    "fewer examples than towers": (of_optimizer(ADAM), lambda: UNEVEN | {"x": uneven()}),
}
RARE = {
    "averages that replace weights", "rows that may be added", "an optimizer of the user's",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:no example for")
@pytest.mark.parametrize("name", released(CASES, *CASES.keys() - RARE))
def test_every_gpu_has_the_weights_of_one_device(name):
    build, given = CASES[name]
    devices = [*GPUS, "/cpu:3"] if "than towers" in name else GPUS
    with cpus_for_gpus():
        found = fits.fit(build, given(), devices=devices)
    assert fits.differences(fits.fit(build, given()), found) == {}


class Silent:
    """A callback that is no `keras.callbacks.Callback`, with the methods that `fit` calls."""

    def __getattr__(self, name):
        if name.startswith(("on_train", "on_epoch", "set_")):
            return lambda *_, **__: None
        raise AttributeError(name)


def test_weights_that_are_set_between_two_calls_are_those_of_every_gpu():
    def losses(parallel):
        with fits.in_float64():
            keras.utils.set_random_seed(0)
            model = of_optimizer(lambda: optimizers.Adam(0.01))()
            if parallel:
                towers.parallelize(model, devices=GPUS)
            x, y = DATA["x"][:8], DATA["y"][:8]
            found = model.fit(x, y, batch_size=4, verbose=0).history["loss"]
            model.set_weights([0.5 * value for value in model.get_weights()])
            found += [model.train_on_batch(x, y)[0], model.evaluate(x, y, verbose=0)[0]]
            for rate in 0.1, SCHEDULE:
                model.optimizer.learning_rate = rate
                found += model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"]
            found += model.fit(x, y, verbose=0, callbacks=[Silent()]).history["loss"]
            model.optimizer.beta_1, rows = 0.5, {"batch_size": 4, "sample_weight": np.ones(8)}
            model.trainable_variables[0].regularizer = keras.regularizers.L1(0.1)
            return found + model.fit(x, y, **rows, epochs=2, verbose=0).history["loss"]

    with cpus_for_gpus():
        assert losses(True) == pytest.approx(losses(False), rel=1e-9)
