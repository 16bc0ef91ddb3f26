"""What a step of `model.fit` over towers does on GPUs: held on machines without one.

Logical CPUs stand in for GPUs. Plain `fit` on one GPU is the measure.
"""

import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import fits
from tests.runs import rare
from towers.builder.device_types import cpus_for_gpus
from towers.graphs import gpu_estimate
from towers.graphs.gpu_estimate import HOST

pytestmark = pytest.mark.run
GPUS = ["/cpu:1", "/cpu:2"]
RANDOM = np.random.default_rng(0)
DATA = {"x": RANDOM.normal(size=(22, 8, 8, 3)), "y": RANDOM.integers(0, 4, size=22)}
layers = keras.layers


def network(optimizer="adam", steps_per_execution=1):
    model = keras.Sequential(
        [
            keras.Input([8, 8, 3]),
            layers.Conv2D(4, 3, padding="same", use_bias=False),  # which BatchNorm would leave at 0
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.5),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = dict(jit_compile=False, steps_per_execution=steps_per_execution)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def view(num_towers, **options):
    with cpus_for_gpus(), tf.device(GPUS[0]):  # where Keras makes variables on a machine with GPUs
        model = network(**options)
        if num_towers:
            towers.parallelize(model, devices=GPUS[:num_towers])
        batches = tf.data.Dataset.from_tensor_slices((DATA["x"], DATA["y"])).batch(8)
        model.make_train_function()
        called = inspect.getclosurevars(inspect.unwrap(model.train_function)).nonlocals
        step, one = called["multi_step_on_iterator"], model.steps_per_execution == 1
        call = model.train_function
        return gpu_estimate.read(step, iter(batches), call=call, is_one_step=one)


@pytest.mark.parametrize("steps", [1, rare(2)])
def test_a_step_copies_no_more_to_the_host_than_that_of_plain_fit(steps):
    plain = view(0, steps_per_execution=steps)
    # Keras says of no op where it runs, and all are counted as the first GPU's.
    assert len(plain.undirected) > 100 and plain.launches(*plain.scopes) > 100
    assert plain.transfers(HOST) and plain.transfers(target=HOST)
    for num_towers in 1, 2:
        over = view(num_towers, steps_per_execution=steps)
        told = [(t.source, t.type, t.name) for t in over.transfers(target=HOST)]
        assert len(told) <= len(plain.transfers(target=HOST)), told
        for gpu in ("/gpu:0", "/gpu:1")[:num_towers]:
            assert len(over.transfers(HOST, gpu)) <= len(plain.transfers(HOST))
        assert over.without_kernel == [] and len(over.undirected) <= 1
        if num_towers == 1:
            assert over.launches(*over.scopes) < plain.launches(*plain.scopes)


def built_in_fit():
    model = keras.Sequential(network().layers[:-1] + [layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    "build, num_towers, options",
    [
        rare(network, 1, {}),
        (built_in_fit, 2, {}),
        rare(lambda: network("sgd"), 2, {}),
        rare(network, 2, {"variables": "cpu"}),
    ],
)
def test_variables_lie_on_the_gpus_and_the_numbers_are_those_of_one_device(
    build, num_towers, options
):
    models, given = [], DATA | {"batch_size": 8, "validation_split": 0.2}
    plain = fits.fit(build, given)
    with cpus_for_gpus():
        make = lambda: models.append(build()) or models[-1]  # noqa: E731
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
    if build is built_in_fit:
        pairs = zip(model.trainable_variables, model.optimizer._momentums, strict=True)
        together = [(weight.value.device, slot.value.device) for weight, slot in pairs]
        assert all(of_weight == of_slot for of_weight, of_slot in together), together


@pytest.mark.parametrize("before", [rare("predict"), "fit", rare("towers")])
def test_models_that_share_layers_keep_their_weights_together(before):
    """A weight that a function reads which was traced before is not moved from under it."""

    def train(num_towers):
        keras.utils.set_random_seed(0)
        inputs = keras.Input([3])
        shared = layers.Dense(4, "tanh")(inputs)
        model, other = (
            keras.Model(inputs, layers.Dense(size)(layers.Dense(width)(shared)))
            for size, width in ((2, 30), (1, 5))
        )
        for own in (model, other):
            own.compile("adam", "mse", jit_compile=False)
        given = dict(batch_size=8, verbose=0, shuffle=False)
        if before == "predict":
            other.predict(x, verbose=0)
        if before == "fit":
            other.fit(x, x[:, :1], **given)
        figures = []
        for _ in range(2 if num_towers else 0):
            towers.parallelize(model, devices=GPUS[:num_towers])  # twice: functions are made anew
        if num_towers and before == "towers":
            towers.parallelize(other, devices=GPUS[:num_towers])
        for _ in range(2):
            figures += model.fit(x, x[:, :2], **given).history["loss"]
            if before != "predict":
                figures += other.fit(x, x[:, :1], **given).history["loss"]
            figures.append(float(np.sum(other.predict(x, verbose=0))))
        return figures

    x = RANDOM.normal(size=(20, 3))
    with cpus_for_gpus(), tf.device(GPUS[0]), fits.in_float64():
        plain = train(0)
        with pytest.warns(UserWarning, match="call towers.parallelize before"):
            over = train(2)
    np.testing.assert_allclose(over, plain, rtol=1e-9)
