"""Compares the steps of towers with those of one device.

After each step all results are compared; the next one starts everywhere from the variables of the
one device. Towers add in another order, so results differ by rounding. An array that is zero in
theory, like the gradient of a bias in front of BatchNorm, holds only rounding errors. Its scale is
the effect of a tiny change of the weights (`_rounding_noise`).
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from towers.commands.verify.runner import Arrays, Runner

TOLERANCE = 1e-9
_TRIALS = 3
# Scale of an array that stays exactly zero on one device, as a share of the largest of its kind.
_ZERO_SCALE = 1e-6
# For each compute dtype. Correct models stay far below; in half precision only faults of several
# percent can be detected.
TOLERANCES = defaultdict(lambda: 0.05, float64=TOLERANCE, float32=1e-4)
_NUDGE_PART = 1e-3  # of a tolerance: an array may differ by 1000 times its own rounding


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between an array of some towers and that of one device.

    Attributes:
        num_towers: number of the runner's towers.
        step: 0 for the first; -1 for the initial variables.
        name: as "loss", "model/conv1/kernel" or "evaluation/loss".
        relative_difference: largest absolute difference, divided by the array's largest value, or
            by its rounding noise if that is known and larger; if both are zero, by a millionth of
            the largest array of its kind.
    """

    num_towers: int
    step: int
    name: str
    relative_difference: float


def compare(
    reference: Runner,
    runners: Sequence[Runner],
    batches: Sequence[Any],
    test: Any,
    say: Callable[[str], None],
    tolerance: float,
) -> Iterator[Difference]:
    """Make a step of each batch on all runners, from the reference's variables; yield differences.

    They come by step, then by runner, then in the order of `Runner.make_step`.

    Args:
        reference: the runner on one device.
        runners: the runners to compare with it.
        batches: a batch for each step.
        test: batch to evaluate after the last step, with trained BatchNorm statistics and averages.
        say: called with a message after the first step.
        tolerance: relative difference above which `_rounding_noise` is measured, too.
    """
    expected = reference.variables()
    for runner in runners:
        yield from differences(runner.variables(), expected, runner.num_towers, -1)
    for step, batch in enumerate(batches):
        arguments = batch, test if step == len(batches) - 1 else None
        reference.set_variables(expected)  # runners may share variables
        before, expected, noise = expected, _results_of(reference, *arguments), None
        for runner in runners:
            runner.set_variables(before)  # else rounding errors may grow from step to step
            actual = _results_of(runner, *arguments)
            result = list(differences(actual, expected, runner.num_towers, step))
            # The noise takes time, and correct models mostly do not need it.
            if any(not d.relative_difference <= tolerance for d in result):
                if noise is None:
                    repeat = functools.partial(_results_of, reference, *arguments)
                    nudge = tolerance * _NUDGE_PART
                    noise = _rounding_noise(reference, before, expected, repeat, nudge)
                result = list(differences(actual, expected, runner.num_towers, step, noise))
            yield from result
        if step == 0:
            say(f"step 0      done by {len(runners) + 1} runs, {len(batches) - 1} steps left")


def _results_of(runner: Runner, batch: Any, test: Any) -> Arrays:
    return runner.make_step(batch) | (runner.evaluate(test) if test is not None else {})


def differences(
    actual: Arrays,
    expected: Arrays,
    num_towers: int,
    step: int,
    noise: Mapping[str, float] | None = None,
) -> Iterator[Difference]:
    """Yield the differences between results on towers and on one device, array by array.

    See `Difference` for the numbers; `noise` is the result of `_rounding_noise`, None if unknown.
    """
    noise, largest = noise or {}, _largest_of_kinds(expected)
    for name in [*expected, *(actual.keys() - expected.keys())]:
        array, other = expected.get(name), actual.get(name)
        if array is None or other is None or other.shape != array.shape:
            yield Difference(num_towers, step, name, float("inf"))
            continue
        off = _distance(other, array)
        scale = max(_size(array), noise.get(name, 0.0)) or _ZERO_SCALE * largest[kind_of(name)]
        relative = off / scale if off and scale else off
        yield Difference(num_towers, step, name, relative)


def _rounding_noise(
    reference: Runner,
    before: Arrays,
    expected: Arrays,
    step: Callable[[], Arrays],
    nudge: float,
) -> dict[str, float]:
    """Return {name: largest change of an array for a relative change of 1 in all weights}.

    It is extrapolated from steps of the reference with each weight multiplied by
    1 + nudge * (-1 to 1). Returns {} if the step does not reproduce `expected`: noise would hide a
    layer that draws by itself, or counts its calls.
    """
    random, noise = np.random.default_rng(0), dict.fromkeys(expected, 0.0)
    largest = _largest_of_kinds(expected)
    try:
        reference.set_variables(before)
        for name, array in step().items():
            if not _distance(array, expected[name]) <= TOLERANCE * largest[kind_of(name)]:
                return {}
        for _ in range(_TRIALS):
            nudged = dict(before)
            for name in reference.weight_names():  # zeros stay zero
                factors = 1.0 + nudge * random.uniform(-1.0, 1.0, before[name].shape)
                nudged[name] = (before[name] * factors).astype(before[name].dtype)
            reference.set_variables(nudged)
            for name, array in step().items():
                change = _distance(array, expected[name]) / nudge
                if np.isfinite(change):
                    noise[name] = max(noise[name], change)
    finally:
        reference.set_variables(expected)
    return noise


def kind_of(name: str) -> str:
    """Return "model" for "model/conv1/kernel"."""
    return name.partition("/")[0]


def _distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest absolute difference; infinity if only one of two elements is NaN."""
    wide = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    off = float(np.max(np.where(same, 0.0, wide), initial=0.0))
    return float("inf") if np.isnan(off) else off


def _largest_of_kinds(arrays: Arrays) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, array in arrays.items():
        largest[kind_of(name)] = max(largest.get(kind_of(name), 0.0), _size(array))
    return largest


def _size(array: np.ndarray) -> float:
    """Return the largest finite absolute value, 0 for none."""
    return float(np.max(np.abs(array.astype(np.float64)), initial=0.0, where=np.isfinite(array)))
