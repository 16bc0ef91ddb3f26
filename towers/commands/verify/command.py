"""`towers verify`: N towers compute what one device computes, shown on the user's own model.

One run on one device and one with each number of towers make the same steps side by side, in
float64, so that rounding cannot hide a fault. After each step the loss, the gradients and all
master variables are compared; the next step starts everywhere from those of the one device. After
the last, an evaluation of a batch of the test set is compared, too.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import data, devices, tf_private
from towers.builder import kinds
from towers.builder.kinds import are_of_workers
from towers.commands.verify.causes import likely_causes
from towers.commands.verify.differences import (
    NUDGE_PART,
    TOLERANCE,
    Difference,
    differences,
    kind_of,
    rounding_noise,
    tolerance_of,
)
from towers.commands.verify.lane import Lane
from towers.commands.verify.options import VerifyOptions
from towers.devices import cluster
from towers.devices.addresses import find_workers
from towers.devices.gpus import precision
from towers.errors import InputError
from towers.options.fields import parse_tower_numbers
from towers.options.run import Options
from towers.text import count, first_line, table
from towers.training import fitting
from towers.training.guest import without_advice
from towers.training.run import load_data

KINDS = (
    "loss", "metric", "gradient", "model", "optimizer", "average", "evaluation", "prediction"
)  # fmt: skip
SHOWN = 12  # arrays in the table


@without_advice()
def run(options: VerifyOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare runs with the towers of `options.num_towers` with one device.

    Returns:
        "passed"; "first_difference": None, or the first array that differs, by step and by order,
        with its "num_towers", "step", "name", "relative_difference" and likely "cause";
        "max_relative_difference": {"2": 1e-15}; "differences": {name: {"2": 1e-15}}; "dtype", that
        of the comparison: float64, or the run's own if the model cannot be trained in that; and
        with `float32` "ulps": {"2": 3.0}.

    Raises:
        InputError: the options cannot be had.
        RunError: the data set cannot be read.
    """
    of_run, numbers = options.run, parse_tower_numbers(options.num_towers)
    devices.configure(**dataclasses.asdict(of_run.gpu_options()))
    devices.try_out()
    names = _tower_devices(of_run, numbers)
    dataset = load_data(of_run, say)
    own = dataclasses.replace(of_run, num_towers=max(numbers), workers="")
    exact = dataclasses.replace(own, dtype="float64")
    scaled = of_run.dtype == "mixed_float16"
    say(
        f"verify      {of_run.model} on {dataset.name}: {options.steps} steps of batch size "
        f"{of_run.batch_size} in float64, one device against {options.num_towers} towers"
    )
    reference = _in_float64(exact, names, dataset, scaled, say)
    if reference is None:
        exact, reference = own, _plain(own, names, dataset, scaled)
        say(f"in {own.dtype:9}it is compared, to {tolerance_of(own.dtype):g}")
    if options.float32 or exact.dtype != "float64":
        for line in precision():
            say(line)
    tolerance = tolerance_of(exact.dtype)
    how = numbers, names, dataset, options.steps, scaled, say
    found = list(compare(reference, exact, *how, tolerance, tolerance * NUDGE_PART))
    causes = functools.partial(
        likely_causes, options=exact, names=names, dataset=dataset, scaled=scaled
    )
    result = outcome(found, numbers, causes, say, tolerance) | {"dtype": exact.dtype}
    if options.float32:
        again = list(compare(_plain(own, names, dataset, scaled), own, *how))
        result["ulps"] = by_number(again, numbers, "ulps")
        for number, ulps in result["ulps"].items():
            say(f"{of_run.dtype:11} {number} towers: {ulps:.1f} units of the last place")
    return result


def outcome(
    found: Sequence[Difference],
    numbers: Sequence[int],
    causes: Callable[[Difference], Iterator[str]],
    say: Callable[[str], None],
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Say what was found, and return the JSON of it; `causes` yields those of a difference."""
    failed = [d for d in found if not d.relative_difference <= tolerance]
    largest = by_number(found, numbers, "relative_difference")
    result = {
        "passed": not failed,
        "first_difference": None,
        "max_relative_difference": largest,
        "differences": by_name(found, numbers),
    }
    for line in table_lines(result["differences"], numbers):
        say(line)
    if failed:
        first = min(failed, key=lambda d: d.step)  # the order within a step is kept
        cause = next(causes(first))
        result["first_difference"] = dataclasses.asdict(first) | {"cause": cause}
        when = f"at step {first.step}" if first.step >= 0 else "before the first step"
        say(
            f"FAILED      {first.name} is the first to differ, by {first.relative_difference:.1e} "
            f"{when} on {first.num_towers} towers"
        )
        say(f"likely      {cause}")
    else:
        say(
            f"passed      the largest relative difference is {max(largest.values()):.1e}, under "
            f"{tolerance:g}"
        )
    return result


def by_number(found: Sequence[Difference], numbers: Sequence[int], what: str) -> dict[str, float]:
    """Return {"2": the largest difference on two towers}."""
    return {
        str(number): max((getattr(d, what) for d in found if d.num_towers == number), default=0.0)
        for number in numbers
    }


def by_name(found: Sequence[Difference], numbers: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return {name: {"2": its largest difference on two towers}}, the largest first."""
    result: dict[str, dict[str, float]] = {}
    for d in found:
        row = result.setdefault(d.name, dict.fromkeys(map(str, numbers), 0.0))
        row[str(d.num_towers)] = max(row[str(d.num_towers)], d.relative_difference)
    return dict(sorted(result.items(), key=lambda item: -max(item[1].values())))


def table_lines(
    differences: Mapping[str, Mapping[str, float]], numbers: Sequence[int]
) -> list[str]:
    """Return a table: the largest difference of each kind, then the arrays that differ most."""
    rows = []
    for kind in KINDS:
        of_kind = [row.values() for name, row in differences.items() if kind_of(name) == kind]
        if of_kind:
            label = kind if len(of_kind) == 1 else f"{kind}, of {len(of_kind)}"
            rows.append([label, *map(max, zip(*of_kind, strict=True))])
    rows += [[name, *row.values()] for name, row in differences.items()][:SHOWN]
    cells = [[name, *(f"{value:.1e}" for value in values)] for name, *values in rows]
    header = ["largest relative difference, towers:", *map(str, numbers)]
    return [f"  {line}" for line in table(header, cells, widest=100)]


def _tower_devices(options: Options, numbers: Sequence[int]) -> list[str]:
    """Return the devices of the most towers; of workers those come in turn: two are on two."""
    if not options.workers:
        return devices.tower_devices(max(numbers), options.devices)
    num_workers = len(find_workers(options.workers, os.environ))
    each = options.towers_per_worker or -(-max(numbers) // num_workers)
    workers = cluster.of_run(dataclasses.replace(options, towers_per_worker=each))
    turns = itertools.zip_longest(*(worker.devices for worker in workers.alive()))
    found = [device for turn in turns for device in turn if device]
    if max(numbers) > len(found):
        raise InputError(
            f"--num_towers={','.join(map(str, numbers))}: the workers have "
            f"{count(len(found), 'tower')}; ask for at most {len(found)}, or for more of each "
            "with --towers_per_worker"
        )
    return found


def _plain(options: Options, names: Sequence[str], dataset: data.Data, scaled: bool) -> Lane:
    """Return the lane of one device; where CPUs stand in for GPUs, of a CPU as such."""
    plain = dataclasses.replace(options, variables="cpu", jit_compile=False)
    one = ["/cpu:0"] if kinds.stand_in() else names[:1]
    if are_of_workers(names):  # they are compared with a device of this machine
        one = devices.tower_devices(0)[:1]
    return Lane(plain, one, dataset, scaled, plain=True)


def _in_float64(
    exact: Options,
    names: Sequence[str],
    dataset: data.Data,
    scaled: bool,
    say: Callable[[str], None],
) -> Lane | None:
    """Return the lane of one device, which has tried a step; None if it cannot make one."""
    try:
        lane = _plain(exact, names, dataset, scaled)
        before, unseeded = lane.variables(), tf_private.state_of_unseeded_draws()
        drawn = tf.identity(unseeded)
        batch = next(iter(dataset.train.train_batches(exact.batch_size, seed=exact.seed)))
        notes = fitting.check(lane.run.task, batch)
        lane.make_step(batch)
        lane.take(before)
        unseeded.assign(drawn)
    except InputError:
        raise
    except Exception as error:  # of any kind: the model's own code may say it
        say(f"in float64  {exact.model} cannot be trained: {first_line(error)}")
        return None
    for line in notes:
        say(line)
    return lane


def compare(
    reference: Lane,
    options: Options,
    numbers: Sequence[int],
    names: Sequence[str],
    dataset: data.Data,
    num_steps: int,
    scaled: bool,
    say: Callable[[str], None],
    tolerance: float = TOLERANCE,
    nudge: float = 0.0,
) -> Iterator[Difference]:
    """Make steps on one device and on each number of towers, and yield all differences.

    They come by step, then by number of towers, then in the order of `Lane.make_step`.
    """
    lanes = [Lane(options, names[:number], dataset, scaled) for number in numbers]
    batches = dataset.train.train_batches(options.batch_size, seed=options.seed).take(num_steps)

    def steps() -> Iterator[tuple]:
        for step, batch in enumerate(batches):
            # Evaluation is the same graph after any step. After the last, BatchNorm's statistics
            # and the averages are what training made of them, and its tracing and its pass cost
            # once.
            last = step == num_steps - 1
            yield batch, first_test_batch(dataset, options.batch_size) if last else None
            if step == 0:
                say(f"step 0      done on {len(lanes) + 1} runs, {num_steps - 1} to come")

    yield from side_by_side(reference, lanes, steps(), results_of, tolerance, nudge)


def side_by_side(
    reference: Any,
    lanes: Sequence[Any],
    steps: Iterable[tuple],
    results_of: Callable,
    tolerance: float = TOLERANCE,
    nudge: float = 0.0,
) -> Iterator[Difference]:
    """Make steps on all lanes, each from the reference's variables, and yield all differences.

    Args:
        reference: the lane of one device.
        lanes: of towers, with the methods of `Lane`.
        steps: the arguments of each.
        results_of: `results_of(lane, *arguments)` makes a step and returns {name: array}.
        tolerance: above it, rounding is looked at.
        nudge: of `rounding_noise`.
    """
    expected = reference.variables()
    for lane in lanes:
        yield from differences(lane.variables(), expected, lane.num_towers, -1)
    for step, arguments in enumerate(steps):
        reference.take(expected)  # lanes may be of the same variables
        before, expected, noise = expected, results_of(reference, *arguments), None
        for lane in lanes:
            lane.take(before)  # its own: chaos, at a high learning rate, makes much of rounding
            found = results_of(lane, *arguments)
            result = list(differences(found, expected, lane.num_towers, step))
            # Sound models mostly never pay for the noise.
            if any(not d.relative_difference <= tolerance for d in result):
                if noise is None:
                    repeat = functools.partial(results_of, reference, *arguments)
                    noise = rounding_noise(reference, before, expected, repeat, nudge)
                result = list(differences(found, expected, lane.num_towers, step, noise))
            yield from result


def results_of(lane: Lane, batch: Any, test: Any) -> dict[str, np.ndarray]:
    """Make a step, then evaluate a batch of the test set; return all that comes of it."""
    return lane.make_step(batch) | (lane.evaluate(test) if test else {})


def first_test_batch(dataset: data.Data, batch_size: int) -> tuple[Any, tf.Tensor]:
    """Return the first batch of the test set; its last example counts as padding."""
    example, counted = next(iter(dataset.test.eval_batches(batch_size)))
    if batch_size > 1:
        counted = counted * tf.cast(tf.range(batch_size) < batch_size - 1, counted.dtype)
    return example, counted
