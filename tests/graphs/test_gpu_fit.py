"""Where the variables of `model.fit` over towers lie on GPUs, for which logical CPUs stand in."""

import re

import keras
import numpy as np
import pytest

from tests import fits
from tests.runs import rare
from towers.builder.device_types import cpus_for_gpus

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
    assert set(places.values()) == {":CPU:1", ":CPU:2"} - {f":CPU:{num_towers + 1}"}, places
    pairs = zip(model.trainable_variables, model.optimizer._momentums, strict=True)
    together = [(weight.value.device, slot.value.device) for weight, slot in pairs]
    assert all(of_weight == of_slot for of_weight, of_slot in together), together
