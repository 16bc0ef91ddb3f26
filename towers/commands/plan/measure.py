"""The cost model against this machine: steps that were predicted, and then measured."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.data import Data
from towers.graphs.placement import read_placement
from towers.options.run import Options
from towers.training.run import assemble

NUMBERS = (2, 4)  # of towers that are predicted
SECONDS = 6.0  # of steps in all, and at least NUM_STEPS of each
NUM_STEPS = 3
COPIED_BYTES = 2**26


def measure(options: Options, dataset: Data, say: Callable[[str], None]) -> dict[str, float]:
    """Return {"2": 0.06}: how far the predicted step is from the measured one, as a part of it.

    One tower is measured at the whole and at half the batch: the difference is computing, the rest
    what a step costs whatever its batch. The devices share this machine's cores.
    """
    options = dataclasses.replace(options, variables="cpu")
    half = dataclasses.replace(options, batch_size=max(options.batch_size // 2, 1))
    say("measuring   a few steps of 1, 2 and 4 towers on this machine's cores ...")
    numbers = [number for number in NUMBERS if number <= options.batch_size]
    steps = [make_step(half, dataset, 1)]
    steps += [make_step(options, dataset, number) for number in (1, *numbers)]
    half_seconds, whole_seconds, *measured = time_in_turn([step for step, _ in steps])
    fixed, computing = split_seconds(
        whole_seconds, half_seconds, options.batch_size, half.batch_size
    )
    speed, cores = copy_speed(), os.cpu_count() or 1
    errors = {}
    for number, seconds, (_, crossing) in zip(numbers, measured, steps[2:], strict=True):
        predicted = shared_core_seconds(fixed, computing, crossing, speed, number, cores)
        errors[str(number)] = abs(predicted - seconds) / seconds
        times = f"{predicted * 1e3:.1f} ms predicted, {seconds * 1e3:.1f} ms measured"
        say(f"  {number} towers: {times}")
    return errors


def shared_core_seconds(
    fixed_seconds: float,
    seconds_per_batch: float,
    crossing_bytes: float,
    bytes_per_second: float,
    num_towers: int,
    num_cores: int,
) -> float:
    """Predict the step of N towers on logical CPU devices that share `num_cores` cores.

    The batch takes the same computing however it is cut; what each step costs besides, the launch
    of every op, each tower pays, side by side as far as there are cores; what crosses is copied.
    """
    launches = fixed_seconds * max(1.0, num_towers / num_cores)
    return seconds_per_batch + launches + crossing_bytes / bytes_per_second


def split_seconds(whole: float, half: float, batch: int, half_batch: int) -> tuple[float, float]:
    """Return the seconds of a step that its batch does not change, and those that it does.

    Args:
        whole: seconds of a step of `batch` examples.
        half: seconds of one of `half_batch`.
        batch: examples.
        half_batch: fewer, or the same if there is but one.
    """
    if batch == half_batch:
        return 0.0, whole
    each = max((whole - half) / (batch - half_batch), 0.0)
    computing = min(each * batch, whole)
    return whole - computing, computing


def make_step(options: Options, dataset: Data, num_towers: int) -> tuple[Callable[[], Any], int]:
    """Return a function that makes a step on logical CPU devices, and the bytes that cross."""
    names = [f"/cpu:{i}" for i in range(num_towers)]
    train_loop = assemble(options, names, dataset).train_loop()
    # One batch again and again: what is predicted is the step without reading.
    batches: Any = dataset.train.train_batches(options.batch_size, seed=options.seed)
    batches = iter(batches.take(1).cache().repeat())
    crossing = read_placement(train_loop, batches, tf.constant(0)).crossing_bytes()
    one = tf.constant(1)
    return lambda: train_loop(batches, one)["loss"].numpy(), sum(crossing.values())


def time_in_turn(steps: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the shortest time of each, in seconds; in turn, so that all meet the same machine."""
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()
    while len(times[0]) < NUM_STEPS or sum(map(sum, times)) < SECONDS:
        for step, own in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            own.append(time.perf_counter() - start)
    return list(map(min, times))


def copy_speed() -> float:
    """Return the bytes a second that this machine's memory copies."""
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return COPIED_BYTES / min(times)
