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

    One tower is measured at the whole and at half the batch: the difference is computing, which
    stays the same however the batch is cut. The rest is what a step costs whatever its batch, the
    launch of every op: each tower pays it, side by side as far as there are cores. What crosses is
    copied.
    """
    options = dataclasses.replace(options, variables="cpu")
    half = dataclasses.replace(options, batch_size=max(options.batch_size // 2, 1))
    say("measuring   a few steps of 1, 2 and 4 towers on this machine's cores ...")
    numbers = [number for number in NUMBERS if number <= options.batch_size]
    made = [_make_step(half, dataset, 1)]
    made += [_make_step(options, dataset, number) for number in (1, *numbers)]
    steps, crossing = zip(*made, strict=True)
    half_seconds, whole_seconds, *measured = _time_in_turn(steps)
    each = (whole_seconds - half_seconds) / max(options.batch_size - half.batch_size, 1)
    computing = min(max(each, 0.0) * options.batch_size, whole_seconds)
    launches, speed, cores = whole_seconds - computing, _copy_speed(), os.cpu_count() or 1
    errors = {}
    for number, seconds, num_bytes in zip(numbers, measured, crossing[2:], strict=True):
        predicted = computing + launches * max(1.0, number / cores) + num_bytes / speed
        errors[str(number)] = abs(predicted - seconds) / seconds
        times = f"{predicted * 1e3:.1f} ms predicted, {seconds * 1e3:.1f} ms measured"
        say(f"  {number} towers: {times}")
    return errors


def _make_step(options: Options, dataset: Data, num_towers: int) -> tuple[Callable[[], Any], int]:
    """Return a function that makes a step on logical CPU devices, and the bytes that cross."""
    names = [f"/cpu:{i}" for i in range(num_towers)]
    train_loop = assemble(options, names, dataset).train_loop()
    # One batch again and again: what is predicted is the step without reading.
    batches: Any = dataset.train.train_batches(options.batch_size, seed=options.seed)
    batches = iter(batches.take(1).cache().repeat())
    crossing = read_placement(train_loop, batches, tf.constant(0)).crossing_bytes()
    one = tf.constant(1)
    return lambda: train_loop(batches, one)["loss"].numpy(), sum(crossing.values())


def _time_in_turn(steps: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the shortest time of each, in seconds; in turn, so that all meet the same machine."""
    for step in steps:
        step()
    rounds: list[list[float]] = []
    while len(rounds) < NUM_STEPS or sum(map(sum, rounds)) < SECONDS:
        rounds.append([_seconds(step) for step in steps])
    return [min(times) for times in zip(*rounds, strict=True)]


def _copy_speed() -> float:
    """Return the bytes a second that this machine's memory copies."""
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    return COPIED_BYTES / min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
