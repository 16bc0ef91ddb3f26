"""Speed of `fit` over two towers beside one device and MirroredStrategy, on one of the examples.

    python scripts/fit_speed.py --example=segmentation --batch_size=256

The three take turns, so that a slow minute of the machine slows all of them alike.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import keras
    import tensorflow as tf

import towers  # noqa: E402
from scripts.exactness_cost import spread  # noqa: E402
from towers.text import markdown  # noqa: E402

DEVICES = ["/cpu:0", "/cpu:1"]


def make(way: str, example: object) -> keras.Model:
    """Return the example's model, to be fitted in one of three ways."""
    keras.utils.set_random_seed(0)
    if way == "MirroredStrategy":
        with tf.distribute.MirroredStrategy(DEVICES).scope():
            return example.build()
    model = example.build()
    return towers.parallelize(model, devices=DEVICES) if way == "2 towers" else model


def rate(model: keras.Model, given: dict, batch_size: int, steps: int) -> float:
    """Return examples/s of some steps of `fit`."""
    start = time.perf_counter()
    model.fit(**given, batch_size=batch_size, steps_per_epoch=steps, verbose=0)
    return steps * batch_size / (time.perf_counter() - start)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", default="segmentation", help="a file of scripts/examples")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30, help="of a window")
    arguments = parser.parse_args()
    towers.devices.tower_devices(2, "cpu")
    example = importlib.import_module(f"scripts.examples.{arguments.example}")
    given = example.data(arguments.batch_size * arguments.steps)
    ways = ["2 towers", "one device", "MirroredStrategy"]
    models = {way: make(way, example) for way in ways}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for window in range(arguments.windows + 1):  # the first one traces
        for way in ways[:: -1 if window % 2 else 1]:
            found[way].append(rate(models[way], given, arguments.batch_size, arguments.steps))
    rows = []
    for way in ways:
        pairs = zip(found["2 towers"][1:], found[way][1:], strict=True)
        rows.append([way, spread(found[way][1:], 0), spread([a / b for a, b in pairs], 2)])
    heading = ["fit", "examples/s, median (range)", "2 towers / this, median (range)"]
    print("\n".join(markdown(heading, rows)))


if __name__ == "__main__":
    main()
