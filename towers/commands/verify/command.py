"""`towers verify`: checks that N towers compute what one device computes, on the user's model.

Runs on one device and with each number of towers are built from the flags, in float64, so that
rounding cannot hide a fault. `towers.verify` compares runs of `fit` by the same functions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towers import devices
from towers.builder import device_names
from towers.commands.verify.differences import TOLERANCES
from towers.commands.verify.options import VerifyOptions
from towers.commands.verify.reference import PlainRunner
from towers.commands.verify.report import verify_runners
from towers.commands.verify.runner import TrainRunner, in_float64, numbers_to_compare
from towers.devices import remote
from towers.options.run import Options
from towers.training.run import loss_checks
from towers.training.run.process_state import preserve_rng
from towers.training.run.setup import RunContext, assemble, load_data


@preserve_rng()
def run(options: VerifyOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare runs on towers with one on one device; return the same as `towers.verify`.

    The dtype is the run's own if the model cannot be trained in float64; see `flags.Verb`.
    """
    # Callbacks may ask for the accuracy of a batch. Towers stay towers, whatever is found of them.
    of_run = dataclasses.replace(options.run, callbacks="", on_inexact="warn")
    devices.configure_run(of_run)
    devices.try_out()
    numbers = numbers_to_compare(options.num_towers, "" if of_run.workers else of_run.devices)
    cluster = remote.connect_run(of_run, num_towers=max(numbers))
    names = cluster.devices if cluster else devices.tower_devices(max(numbers), of_run.devices)
    dataset = load_data(of_run)
    exact = dataclasses.replace(of_run, dtype="float64")
    say(
        f"verify      {of_run.model} on {dataset.name}: {options.steps} steps of batch size "
        f"{of_run.batch_size} in float64, one device against {','.join(map(str, numbers))} towers"
    )
    source = dataset.train.train_batches(of_run.batch_size, seed=of_run.seed)
    batches, notes = list(source.take(options.steps)), []
    example, counted = next(iter(dataset.test.eval_batches(of_run.batch_size)))
    padded = tf.range(of_run.batch_size) < max(of_run.batch_size - 1, 1)  # the last one is padding
    steps = batches, (example, counted * tf.cast(padded, counted.dtype)), say

    def towers(options: Options, number: int) -> RunContext:
        return assemble(options, names[:number], dataset, exact=True)

    def one_device(options: Options) -> PlainRunner:
        # A plain CPU if CPUs emulate GPUs; other machines are compared with this one.
        one = "/cpu:0" if device_names.stand_in() else names[0]
        one = devices.tower_devices(0)[0] if device_names.are_remote(names) else one
        run = towers(options, 1)  # refuses what a run refuses
        notes[:] = loss_checks.check(run.task, batches[0])
        return PlainRunner(run, options, one)

    failure = f"{of_run.model} cannot be trained"
    reference = in_float64(lambda: one_device(exact), batches[0], failure, say)
    if reference is None:
        exact, reference = of_run, one_device(of_run)
        say(f"in {of_run.dtype:9}instead, with tolerance {TOLERANCES[of_run.dtype]:g}")
    for line in notes:
        say(line)
    runners = [TrainRunner(towers(exact, number)) for number in numbers]
    return verify_runners(reference, runners, *steps)
