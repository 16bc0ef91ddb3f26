"""`towers plan`: how a run would scale on GPUs, said before it starts, on any machine.

The run's real training step is built with its towers on logical CPU devices apart from the host,
as GPUs are. What crosses between devices is counted twice, in the graph as it was traced and in the
one that TensorFlow executes; what the devices hold follows from the first. Steps on GPUs that
nobody measured are predicted by `cost_model`.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towers import devices
from towers.commands.plan import cost_model
from towers.commands.plan.measure import measure
from towers.commands.plan.options import PlanOptions
from towers.commands.plan.placed import Placed, place
from towers.commands.plan.report import report
from towers.errors import InputError
from towers.graphs.flops import flop_per_example
from towers.graphs.traffic import num_bytes
from towers.training import masters
from towers.training.run import Run, assemble, load_data
from towers.training.step import make_loss_fn

DEFAULT_TOWERS = 8


def run(options: PlanOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Say how a run would scale.

    Returns:
        "num_towers", "batch_size", "placements" {"cpu": {"bytes_per_step", "memory_bytes", "fits",
        "largest_batch_per_tower"}}, "gradients" {"missing", "shapes_differ"}, "flop_per_example",
        "assumptions", "predictions", "model_error" {"2": 0.06}, and "failed": a gradient is missing
        or of another shape, or the two counts of bytes differ.

    Raises:
        InputError: the options cannot be had.
        RunError: the data set cannot be read.
    """
    of_run, num_towers = options.run, options.num_towers or DEFAULT_TOWERS
    if not 2 <= num_towers <= of_run.batch_size:
        raise InputError(
            f"--num_towers={num_towers}: from 2 to --batch_size={of_run.batch_size} towers can be "
            "planned"
        )
    names = devices.tower_devices(max(num_towers + 1, 4), "cpu")[1 : num_towers + 1]
    dataset = load_data(of_run, say)
    say(
        f"plan        {of_run.model} on {dataset.name}: {num_towers} towers, batch size "
        f"{of_run.batch_size} in all, {of_run.dtype}"
    )
    one = assemble(dataclasses.replace(of_run, variables="cpu"), names[:1], dataset)
    gradients = check_gradients(one)
    images = dataset.train.train_batches(1, seed=0).element_spec[0]
    loss_fn = make_loss_fn(one.masters, one.options)
    flop = flop_per_example(one.masters.model, loss_fn, dataset.image_shape, images.dtype)
    # Each run has a loop of its own, which TensorFlow takes for one that is traced too often.
    tf.get_logger().setLevel("ERROR")
    placements, traffic = {}, None
    for placement in masters.VARIABLES:
        start = time.perf_counter()
        say(f"tracing     the step with --variables={placement} on {num_towers} towers ...")
        placed = place(dataclasses.replace(of_run, variables=placement), names, dataset)
        say(f"  took {time.perf_counter() - start:.0f} s")
        traffic = traffic or placed
        placements[placement] = placed.describe(options.gpu_memory_gib)
    work = work_of(traffic, options, flop)
    share = traffic.examples / of_run.batch_size
    unequal = any(row["bytes_per_step"]["equal"] is False for row in placements.values())
    result = {
        "num_towers": num_towers,
        "batch_size": of_run.batch_size,
        "placements": placements,
        "gradients": gradients,
        "flop_per_example": flop,
        "assumptions": assumptions(options, work),
        "predictions": cost_model.predictions(work, share, masters.VARIABLES),
        "model_error": measure(of_run, dataset, say) if options.measure else {},
        "failed": any(gradients.values()) or unequal,
    }
    for line in report(result):
        say(line)
    return result


def check_gradients(run: Run) -> dict[str, list[str]]:
    """Return the names of weights without a gradient, and with one of another shape."""
    train_step, kept = run.train_step(), []

    def traced(*batch: tf.Tensor) -> None:
        kept.extend(train_step(*batch)[1])

    batches = run.data.train.train_batches(run.options.batch_size, seed=0)
    tf.function(traced, autograph=False).get_concrete_function(*batches.element_spec)
    pairs = list(zip(run.masters.model.trainable_variables, kept, strict=True))
    return {
        "missing": [v.path for v, gradient in pairs if gradient is None],
        "shapes_differ": [
            v.path for v, g in pairs if g is not None and tuple(g.shape) != tuple(v.shape)
        ],
    }


def work_of(placed: Placed, options: PlanOptions, flop: int) -> cost_model.Work:
    """Return what each tower computes and moves, from the step with its variables on the host."""
    step, names = placed.step, placed.run.builder.devices
    received = step.received_bytes(names[0])
    launches = step.num_launches(0) * cost_model.LAUNCH_SECONDS
    seconds = options.step_ms / 1e3
    if seconds:  # a measured step has its launches: a smaller part of the batch saves none of them
        launches = min(launches, seconds)
    else:
        per_second = options.gpu_tflops * 1e12 * options.gpu_utilisation
        seconds = flop * placed.examples / per_second
    return cost_model.Work(
        tower_seconds=seconds,
        launch_seconds=launches,
        slice_bytes=received["batch"],
        weights=[num_bytes(v.value) for v in placed.run.masters.model.trainable_variables],
        exchange_bytes=received["other"] / len(names),
        exchanges=step.num_exchanges(),
    )


def assumptions(options: PlanOptions, work: cost_model.Work) -> dict[str, Any]:
    """Return what the predictions rest on."""
    links = [*cost_model.LINKS.values(), *cost_model.NETWORKS.values()]
    given = ("gpu_tflops", "gpu_utilisation", "gpu_memory_gib")
    return {name: getattr(options, name) for name in given} | {
        "tower_ms": work.computing_seconds * 1e3,
        "launch_ms": work.launch_seconds * 1e3,
        "from": "--step_ms" if options.step_ms else "FLOP",
        "gpus_per_machine": cost_model.GPUS_PER_MACHINE,
        "links": {
            link.name: {"gb_per_second": link.gb_per_second, "fraction": link.fraction}
            for link in links
        },
    }
