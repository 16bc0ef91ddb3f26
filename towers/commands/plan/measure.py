"""The cost model against this machine: steps that were predicted, and then measured."""

import dataclasses
import os
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.data import Data
from towers.options.run import Options
from towers.training.run import assemble

NUMBERS = (2, 4)  # of towers that are predicted
SECONDS = 6.0  # of steps in all, and at least NUM_STEPS of each
NUM_STEPS = 3


def measure(options: Options, dataset: Data, say: Callable[[str], None]) -> dict[str, float]:
    """Return {"2": 0.06}: how far the predicted step is from the measured one, as a part of it.

    One tower is measured at the whole and at half the batch: the difference is computing, which
    stays the same however the batch is cut. The rest is what a step costs whatever its batch, the
    launch of every op: each tower pays it, side by side as far as there are cores. What crosses
    between CPU devices of one process is handed over, not copied.
    """
    options = dataclasses.replace(options, variables="cpu")
    half = dataclasses.replace(options, batch_size=max(options.batch_size // 2, 1))
    say("measuring   a few steps of 1, 2 and 4 towers on this machine's cores ...")
    numbers = [number for number in NUMBERS if number <= options.batch_size]
    steps = [_make_step(half, dataset, 1)]
    steps += [_make_step(options, dataset, number) for number in (1, *numbers)]
    half_seconds, whole_seconds, *measured = _time_in_turn(steps)
    each = (whole_seconds - half_seconds) / max(options.batch_size - half.batch_size, 1)
    computing = min(max(each, 0.0) * options.batch_size, whole_seconds)
    launches, cores = whole_seconds - computing, os.cpu_count() or 1
    errors = {}
    for number, seconds in zip(numbers, measured, strict=True):
        predicted = computing + launches * max(1.0, number / cores)
        errors[str(number)] = abs(predicted - seconds) / seconds
        times = f"{predicted * 1e3:.1f} ms predicted, {seconds * 1e3:.1f} ms measured"
        say(f"  {number} towers: {times}, {100 * errors[str(number)]:.0f} % off")
    return errors


def _make_step(options: Options, dataset: Data, num_towers: int) -> Callable[[], Any]:
    """Return a function that makes a step on logical CPU devices."""
    train_loop = assemble(options, [f"/cpu:{i}" for i in range(num_towers)], dataset).train_loop()
    # One batch again and again: what is predicted is the step without reading.
    batches: Any = dataset.train.train_batches(options.batch_size, seed=options.seed)
    batches = iter(batches.take(1).cache().repeat())
    one = tf.constant(1)
    return lambda: train_loop(batches, one)["loss"].numpy()


def _time_in_turn(steps: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the shortest time of each, in seconds; in turn, so that all meet the same machine."""
    for step in steps:
        step()
    rounds: list[list[float]] = []
    while len(rounds) < NUM_STEPS or sum(map(sum, rounds)) < SECONDS:
        rounds.append([timeit.timeit(step, number=1) for step in steps])
    return [min(times) for times in zip(*rounds, strict=True)]
