"""Measures the training step in ratios of interleaved windows, on this machine.

    python scripts/step_speed.py [--data_dir=DIR] [--windows=9] [--seconds=4]

The tutorial's CNN with its augmentation and a moving average, float32, global batch 256. With a
data_dir that holds CIFAR-10 it reads that, else the shapes. The variants run in turn, so that a
slow minute of the machine slows all of them.
"""

import argparse
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tensorflow as tf  # noqa: E402

from towers.devices import tower_devices  # noqa: E402
from towers.options import Options  # noqa: E402
from towers.run import prepare  # noqa: E402
from towers.step import make_train_loop  # noqa: E402

BATCH_SIZE = 256


def make_runner(arguments: argparse.Namespace, towers: int, constant: bool, loop: int) -> Callable:
    """Return a function that trains for some seconds and returns its examples/s."""
    options = Options(
        dataset="cifar10" if arguments.data_dir else "shapes",
        data_dir=arguments.data_dir,
        num_towers=towers,
        batch_size=BATCH_SIZE,
        learning_rate=0.001,
        ema_decay=0.999,
        devices="cpu" if not tf.config.list_physical_devices("GPU") else "",
    )
    run = prepare(options)
    train_loop = make_train_loop(
        run.builder,
        run.masters,
        options,
        train_size=run.data.train.size,
        total_epochs=run.total_epochs,
    )
    batches = run.data.train.train_batches(BATCH_SIZE, seed=0)
    if constant:
        batches = tf.data.Dataset.from_tensors(next(iter(batches))).repeat()
    iterator, num_steps = iter(batches), tf.constant(loop)

    def runner(seconds: float) -> float:
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            train_loop(iterator, num_steps)["loss"].numpy()
            steps += loop
        return steps * BATCH_SIZE / (time.perf_counter() - start)

    runner(seconds=0.1)  # builds the graph
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        tower_devices(2)  # before TensorFlow starts
    base = "2 towers"
    variants = {
        base: (2, False, 10),
        "one device": (1, False, 10),
        "2 towers, constant input": (2, True, 10),
        "2 towers, --steps_per_loop=1": (2, False, 1),
    }
    runners = {name: make_runner(arguments, *variant) for name, variant in variants.items()}
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(arguments.windows):
        for name, runner in runners.items():
            rates[name].append(runner(arguments.seconds))
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}, batch {BATCH_SIZE}, {arguments.windows} windows of "
        f"{arguments.seconds:g} s each\n"
    )
    print("| variant | examples/s, median (range) | 2 towers / this, median (range) |")
    print("|---|---|---|")
    for name, values in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(rates[base], values, strict=True)]
        print(
            f"| {name} | {statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\npeak memory of this process, all variants together: {peak:.2f} GiB")


if __name__ == "__main__":
    main()
