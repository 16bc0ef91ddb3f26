"""Measures what it costs that N towers compute what one device computes.

    python scripts/exactness_cost.py [--data_dir=DIR] [--windows=7] [--seconds=3] [--batch_size=128]
        [--num_towers=2,4] [--depth=20]

Examples/s on logical CPU devices, each exact step beside the one that it replaces: BatchNorm's
moments over the global batch (--batch_norm=sync) or over a tower's slice (local), in a ResNet; and
dropout masks drawn by example or by tower, in a CNN. The input is one batch of the shapes, with a
data_dir of CIFAR-10, again and again: reading costs nothing here. The variants run in turn, so that
a slow minute of the machine slows all of them; a ratio is that of two neighbouring windows.
"""

import argparse
import contextlib
import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import keras
    import tensorflow as tf

from towers.builder import draws  # noqa: E402
from towers.devices.selection import tower_devices  # noqa: E402
from towers.errors import InputError, RunError  # noqa: E402
from towers.options.run import Options  # noqa: E402
from towers.training.run import prepare  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model with one of its two ways; `by_example` is whether towers draw their rows."""

    name: str
    model: str
    model_args: str = ""
    batch_norm: str = "sync"
    by_example: bool = True


def make_pairs(depth: int) -> list[tuple[Variant, Variant]]:
    """Return the pairs of variants: the exact one, then what it is compared with."""
    resnet, args = "models.resnet:resnet", f"depth={depth}"
    dropout = "scripts.exactness_cost:dropout_cnn"
    return [
        (
            Variant(f"resnet{depth}, batch_norm=sync", resnet, args),
            Variant(f"resnet{depth}, batch_norm=local", resnet, args, batch_norm="local"),
        ),
        (
            Variant("dropout CNN, draws by example", dropout),
            Variant("dropout CNN, draws by tower", dropout, by_example=False),
        ),
    ]


def dropout_cnn(num_classes: int, image_shape: tuple[int, int, int]) -> keras.Model:
    """Build two convolutions and a wide dense layer, each with dropout."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(2048, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(num_classes),
        ]
    )


def make_step(variant: Variant, num_towers: int, batch_size: int, data_dir: str = "") -> Callable:
    """Return a function that makes a step and returns its loss; the first call builds the graph."""
    options = Options(
        model=variant.model,
        model_args=variant.model_args,
        dataset="cifar10" if data_dir else "shapes",
        data_dir=data_dir,
        augment="resnet",
        batch_size=batch_size,
        num_towers=num_towers,
        devices="cpu",
        batch_norm=variant.batch_norm,
        learning_rate=0.001,
    )
    run = prepare(options)
    train_loop = run.train_loop()
    batch = next(iter(run.data.train.train_batches(batch_size, seed=0)))
    batches, one = iter(tf.data.Dataset.from_tensors(batch).repeat()), tf.constant(1)
    by_tower = mock.patch.object(draws.Draws, "drawing", lambda _: contextlib.nullcontext())

    def step() -> float:
        with contextlib.nullcontext() if variant.by_example else by_tower:  # where it is traced
            return float(train_loop(batches, one)["loss"])

    return step


def rate(step: Callable, batch_size: int, seconds: float) -> float:
    """Return the examples/s of some seconds of steps."""
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        step()
        steps += 1
    return steps * batch_size / (time.perf_counter() - start)


def spread(values: list[float], digits: int) -> str:
    """Return median and range of some values."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def numbers(text: str) -> list[int]:
    """Return "2,4" as numbers of towers."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 tower is needed")
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--num_towers", type=numbers, default=[2, 4])
    parser.add_argument("--depth", type=int, default=20, help="of the ResNet")
    arguments = parser.parse_args()
    if arguments.windows < 1 or arguments.seconds <= 0:
        parser.error("--windows must be at least 1, --seconds above 0")
    tower_devices(max(arguments.num_towers), "cpu")  # before TensorFlow starts
    size = arguments.batch_size
    pairs = make_pairs(arguments.depth)
    steps = {
        (variant, towers): make_step(variant, towers, size, arguments.data_dir)
        for pair in pairs
        for towers in arguments.num_towers
        for variant in pair
    }
    for step in steps.values():
        step()
    rates: dict[tuple[Variant, int], list[float]] = {key: [] for key in steps}
    for window in range(arguments.windows):
        # Every other window backwards: neither of a pair is always the first.
        for key in list(steps)[:: -1 if window % 2 else 1]:
            rates[key].append(rate(steps[key], size, arguments.seconds))
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}, float32, batch {size} of "
        f"{'cifar10' if arguments.data_dir else 'shapes'}, constant input, "
        f"{arguments.windows} windows of {arguments.seconds:g} s each\n"
    )
    print("| variant | towers | examples/s, median (range) | exact / this, median (range) |")
    print("|---|---|---|---|")
    for exact, other in pairs:
        for towers in arguments.num_towers:
            ours, theirs = rates[exact, towers], rates[other, towers]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            print(f"| {exact.name} | {towers} | {spread(ours, 0)} | exact |")
            print(f"| {other.name} | {towers} | {spread(theirs, 0)} | {spread(ratios, 2)} |")


if __name__ == "__main__":
    try:
        main()
    except (InputError, RunError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
