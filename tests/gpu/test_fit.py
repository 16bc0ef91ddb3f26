"""`fit` over two GPUs beside `fit` of Keras alone on the CPU, in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import fits
from towers.devices import selection

pytestmark = pytest.mark.run
layers = keras.layers
GPUS = ["/gpu:0", "/gpu:1"]


def network(*middle):
    first, last = layers.Conv2D(4, 3, activation="relu"), layers.GlobalAveragePooling2D()
    head = layers.Dense(3, activation="softmax")
    model = keras.Sequential([keras.Input((8, 8, 3)), first, *middle, last, head])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


MODELS = {
    "plain": network,
    "dropout": lambda: network(layers.Dropout(0.3)),
    "batch norm": lambda: network(layers.BatchNormalization()),
}


def test_fit_on_the_second_gpu_takes_nothing_more_of_the_first(capsys):
    def peak():
        return tf.config.experimental.get_memory_info("GPU:0")["peak"]

    model = network(layers.BatchNormalization())
    selection._print_once.cache_clear()
    towers.parallelize(model, devices="/gpu:1")
    assert "memory of /gpu:0 (" in capsys.readouterr().err
    x, y = np.zeros((40, 8, 8, 3), np.float32), np.zeros(40, np.int32)
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = peak()
    model.fit(x, y, batch_size=9, epochs=2, verbose=0, validation_split=0.2)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert peak() == before


@pytest.mark.parametrize("name", MODELS)
def test_two_gpus_fit_as_the_cpu_does(name):
    random = np.random.default_rng(0)
    x, y = random.random((40, 8, 8, 3)), random.integers(0, 3, 40)
    found = []
    with fits.in_float64():
        for devices in ["/cpu:0"], GPUS:
            keras.utils.set_random_seed(0)
            model = towers.parallelize(MODELS[name](), devices=devices)
            losses = model.fit(x, y, batch_size=9, epochs=2, verbose=0).history["loss"]
            weights = [v.numpy() for v in model.weights]
            figures = [*losses, *model.evaluate(x, y, batch_size=9, verbose=0)]
            found.append([*figures, *weights, model.predict(x, batch_size=9, verbose=0)])
    for one, two in zip(*found, strict=True):
        assert fits.relative_difference(one, two) < 1e-9
