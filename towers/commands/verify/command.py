"""`towers verify`: checks that N towers compute what one device computes, on the user's model.

Runs on one device and with each number of towers are built from the flags, in float64, so that
rounding cannot hide a fault. `towers.verify` compares runs of `fit` by the same functions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import devices
from towers.builder import device_types
from towers.commands.verify.differences import TOLERANCE, TOLERANCES, compare
from towers.commands.verify.options import VerifyOptions
from towers.commands.verify.report import largest_by_array, largest_by_towers, verify_runners
from towers.commands.verify.runner import TrainRunner, in_float64, numbers_to_compare
from towers.devices import remote
from towers.devices.gpus import precision
from towers.options.run import Options
from towers.training.run.process_state import preserve_rng
from towers.training.run.setup import assemble, load_data
from towers.training.step import loss_checks

_NUDGE = 1e-12  # relative change of a weight in float64; else as many units of the last place


@preserve_rng()
def run(options: VerifyOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare runs on towers with one on one device.

    Args:
        options: the run, its numbers of towers and steps.
        say: called with each line to print.

    Returns:
        "passed"; "first_difference": None, or the first array that differs, by step and by order,
        with its "num_towers", "step", "name", "relative_difference" and likely "cause";
        "max_relative_difference": {"2": 1e-15}; "differences": {name: {"2": 1e-15}}; "dtype", that
        of the comparison: float64, or the run's own if the model cannot be trained in that; and
        with `float32` "ulps": {"2": 3.0}.
    """
    of_run = options.run
    devices.configure_run(of_run)
    devices.try_out()
    numbers = numbers_to_compare(options.num_towers, "" if of_run.workers else of_run.devices)
    cluster = remote.connect_run(of_run, num_towers=max(numbers))
    names = cluster.devices if cluster else devices.tower_devices(max(numbers), of_run.devices)
    dataset = load_data(of_run)
    exact = dataclasses.replace(of_run, dtype="float64")
    scaled = of_run.dtype == "mixed_float16"
    say(
        f"verify      {of_run.model} on {dataset.name}: {options.steps} steps of batch size "
        f"{of_run.batch_size} in float64, one device against {','.join(map(str, numbers))} towers"
    )
    batches = dataset.train.train_batches(of_run.batch_size, seed=of_run.seed).take(options.steps)
    batch, notes = next(iter(batches)), []
    example, counted = next(iter(dataset.test.eval_batches(of_run.batch_size)))
    padded = tf.range(of_run.batch_size) < max(of_run.batch_size - 1, 1)  # the last one is padding
    steps = batches, (example, counted * tf.cast(padded, counted.dtype)), options.steps, say

    def runner(options: Options, names: Sequence[str], plain: bool = False) -> TrainRunner:
        run = assemble(options, names, dataset, loss_scaling=scaled, exact=True)
        return TrainRunner(run, plain)

    def one_device(options: Options) -> TrainRunner:
        options = dataclasses.replace(options, variables="cpu", jit_compile=False)
        # A plain CPU if CPUs emulate GPUs; other machines are compared with this one.
        one = ["/cpu:0"] if device_types.stand_in() else names[:1]
        one = devices.tower_devices(0)[:1] if device_types.are_remote(names) else one
        reference = runner(options, one, plain=True)
        notes[:] = loss_checks.check(reference.run.task, batch)
        return reference

    failure = f"{of_run.model} cannot be trained"
    reference = in_float64(lambda: one_device(exact), batch, failure, say)
    if reference is None:
        exact, reference = of_run, one_device(of_run)
        say(f"in {of_run.dtype:9}it is compared, to {TOLERANCES[of_run.dtype]:g}")
    for line in notes:
        say(line)
    runners = [runner(exact, names[:number]) for number in numbers]
    result = verify_runners(reference, runners, *steps)
    if options.float32:
        for line in precision() if exact.dtype == "float64" else ():
            say(line)
        nudge = _NUDGE * np.finfo(of_run.input_dtype).eps / np.finfo(np.float64).eps
        runners = [runner(of_run, names[:number]) for number in numbers]
        differences = list(compare(one_device(of_run), runners, *steps, TOLERANCE, nudge))
        result["ulps"] = largest_by_towers(largest_by_array(differences, "ulps"))
        for number, ulps in result["ulps"].items():
            say(f"{of_run.dtype:11} {number} towers: {ulps:.1f} units of the last place")
    return result
