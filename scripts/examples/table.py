"""Regression on the columns of a table, of numbers and of categories, each an input of its name.

python scripts/examples/table.py --num_towers=2
"""

import argparse

import keras
import numpy as np
from keras import layers

import towers

NUM_DISTRICTS = 5


def data(size=2000, seed=0):
    """Return columns of flats, {name: [N, 1]}, and what each costs, [N, 1]."""
    random = np.random.default_rng(seed)
    area = random.uniform(20, 150, (size, 1))
    age = random.uniform(0, 100, (size, 1))
    district = random.integers(0, NUM_DISTRICTS, (size, 1))
    price = area * (1 + district) / 100 - 0.01 * age + random.normal(0, 0.1, (size, 1))
    columns = {"area": area, "age": age, "district": district}
    return {"x": columns, "y": price.astype("float32")}


def build():
    columns = data(size=200)["x"]
    inputs = {
        "area": keras.Input([1], name="area"),
        "age": keras.Input([1], name="age"),
        "district": keras.Input([1], name="district", dtype="int32"),
    }
    encoded = [layers.CategoryEncoding(NUM_DISTRICTS)(inputs["district"])]
    for name in ("area", "age"):
        normalize = layers.Normalization()
        normalize.adapt(columns[name])
        encoded.append(normalize(inputs[name]))
    x = layers.Concatenate()(encoded)
    x = layers.Dense(16, activation="relu", kernel_regularizer="l2")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(
        optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.001, use_ema=True),
        loss="mse",
        metrics=["mae", keras.metrics.R2Score(name="r2")],
    )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_towers", type=int, default=2)
    devices = towers.devices.tower_devices(parser.parse_args().num_towers)  # before any tensor
    keras.utils.set_random_seed(0)
    model = towers.parallelize(build(), devices=devices)
    model.fit(**data(), batch_size=64, epochs=5, validation_split=0.1, verbose=2)


if __name__ == "__main__":
    main()
