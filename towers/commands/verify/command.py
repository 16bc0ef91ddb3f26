"""`towers verify`: N towers compute what one device computes, shown on the user's own model.

One run on one device and one with each number of towers make the same steps side by side, in
float64, so that rounding cannot hide a fault. After each step the loss, the gradients and all
master variables are compared; the next step starts everywhere from those of the one device. After
the last, an evaluation of a batch of the test set is compared, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import data, devices
from towers.commands.verify.differences import TOLERANCE, Difference, differences, rounding_noise
from towers.commands.verify.lane import Lane
from towers.commands.verify.likely_cause import cause_of
from towers.commands.verify.options import VerifyOptions
from towers.commands.verify.report import by_name, by_number, table
from towers.options.run import Options
from towers.training import logits
from towers.training.run import load_data


def verify(options: VerifyOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare runs with the towers of `options.num_towers` with one device.

    Returns:
        "passed"; "first_difference": None, or the first array that differs, by step and by order,
        with its "num_towers", "step", "name", "relative_difference" and likely "cause";
        "max_relative_difference": {"2": 1e-15}; "differences": {name: {"2": 1e-15}}; and with
        `float32` "ulps": {"2": 3.0}.

    Raises:
        InputError: the options cannot be had.
        RunError: the data set cannot be read.
    """
    numbers = options.tower_numbers()
    devices.configure(**dataclasses.asdict(options.gpu_options()))
    devices.try_out()
    names = devices.tower_devices(max(numbers), options.devices)
    dataset = load_data(options, say)
    exact = options.of_run(dtype="float64", num_towers=max(numbers))
    scaled = options.dtype == "mixed_float16"
    say(
        f"verify      {options.model} on {dataset.name}: {options.steps} steps of batch size "
        f"{options.batch_size} in float64, one device against {options.num_towers} towers"
    )
    found = list(compare(exact, names, numbers, dataset, options.steps, scaled, say))
    failed = [d for d in found if not d.relative <= TOLERANCE]
    result = {
        "passed": not failed,
        "first_difference": None,
        "max_relative_difference": by_number(found, numbers, "relative"),
        "differences": by_name(found, numbers),
    }
    for line in table(result, numbers):
        say(line)
    if failed:
        first = min(failed, key=lambda d: d.step)  # the order within a step is kept
        cause = cause_of(first, exact, names, dataset, scaled)
        result["first_difference"] = {
            "num_towers": first.num_towers,
            "step": first.step,
            "name": first.name,
            "relative_difference": first.relative,
            "cause": cause,
        }
        when = f"at step {first.step}" if first.step >= 0 else "before the first step"
        say(
            f"FAILED      {first.name} is the first to differ, by {first.relative:.1e} {when} on "
            f"{first.num_towers} towers"
        )
        say(f"likely      {cause}")
    else:
        largest = max(result["max_relative_difference"].values())
        say(f"passed      the largest relative difference is {largest:.1e}, under {TOLERANCE:g}")
    if options.float32:
        own = options.of_run(num_towers=max(numbers))
        again = list(compare(own, names, numbers, dataset, options.steps, scaled, say))
        result["ulps"] = by_number(again, numbers, "ulps")
        relative = by_number(again, numbers, "relative")
        for number in map(str, numbers):
            say(
                f"{options.dtype:11} {number} towers: {result['ulps'][number]:.1f} units of the "
                f"last place, relative {relative[number]:.1e}"
            )
    return result


def compare(
    options: Options,
    names: Sequence[str],
    numbers: Sequence[int],
    dataset: data.Data,
    num_steps: int,
    scaled: bool,
    say: Callable[[str], None],
) -> Iterator[Difference]:
    """Make steps on one device and on each number of towers, and yield all differences.

    They come by step, then by number of towers, then in the order of `Lane.make_step`.
    """
    plain = dataclasses.replace(options, variables="cpu", jit_compile=False)
    reference = Lane(plain, names[:1], dataset, scaled)
    if options.dtype == "float64":  # the run's own precision comes after it
        for line in logits.notes(reference.run):
            say(line)
    lanes = [Lane(options, names[:number], dataset, scaled) for number in numbers]
    expected = reference.variables()
    for lane in lanes:
        yield from differences(lane.variables(), expected, lane.num_towers, -1)
    batches = dataset.train.train_batches(options.batch_size, seed=options.seed).take(num_steps)
    for step, batch in enumerate(batches):
        # Evaluation is the same graph after any step. After the last, BatchNorm's statistics and
        # the averages are what training made of them, and its tracing and its pass cost once.
        tests = [first_test_batch(dataset, options.batch_size)] if step == num_steps - 1 else []
        before, expected, noise = expected, results_of(reference, batch, tests), None
        for lane in lanes:
            found = results_of(lane, batch, tests)
            result = list(differences(found, expected, lane.num_towers, step))
            if any(not d.relative <= TOLERANCE for d in result):  # sound models mostly never pay
                if noise is None:
                    repeat = functools.partial(results_of, reference, batch, tests)
                    noise = rounding_noise(reference, before, expected, repeat)
                result = list(differences(found, expected, lane.num_towers, step, noise))
            yield from result
            lane.take(expected)  # else chaos, at a high learning rate, makes much of rounding
        if step == 0:
            say(f"step 0      done on {len(lanes) + 1} runs, {num_steps - 1} to come")


def results_of(
    lane: Lane, batch: Sequence[tf.Tensor], tests: Sequence[Sequence[tf.Tensor]]
) -> dict[str, np.ndarray]:
    """Make a step, then evaluate the batches of the test set; return all that comes of it."""
    found = lane.make_step(batch)
    for test in tests:
        found |= lane.evaluate(test)
    return found


def first_test_batch(dataset: data.Data, batch_size: int) -> tuple[tf.Tensor, ...]:
    """Return the first batch of the test set; its last example counts as padding."""
    images, labels, weights = next(iter(dataset.test.eval_batches(batch_size)))
    if batch_size > 1:
        weights = weights * tf.cast(tf.range(batch_size) < batch_size - 1, weights.dtype)
    return images, labels, weights
