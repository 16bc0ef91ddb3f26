"""`towers plan`: what a run would move, hold and launch on GPUs, said before it starts.

The run's real training step is built with its towers on logical CPU devices apart from the host,
as GPUs are; none is needed. What crosses between devices is counted twice, in the graph as it was
traced and in the one that TensorFlow executes; what the devices hold follows from the first.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import devices
from towers.commands.plan import gpus
from towers.commands.plan.options import PlanOptions
from towers.commands.plan.report import report
from towers.data import Data
from towers.errors import InputError
from towers.graphs.placement import read_placement
from towers.graphs.traffic import HOST, Step, executed_bytes, read_step
from towers.options.run import Options
from towers.training import memory
from towers.training.run import Run, assemble, load_data
from towers.training.tensorflow_errors import one_line_errors

DEFAULT_TOWERS = 8
GIB = 2**30


def run(options: PlanOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Say what a run would do on GPUs.

    Returns:
        "num_towers", "batch_size", "placements" {"cpu": {"bytes_per_step", "memory_bytes", "fits",
        "largest_batch_per_tower"}}, "gradients" {"missing"}, "gpu" {"1": `gpus.describe`, "2": of
        two towers}, and "failed": a gradient is missing, or the two counts of bytes differ.

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
    missing = missing_gradients(one)
    # Each run has a loop of its own, which TensorFlow takes for one that is traced too often.
    tf.get_logger().setLevel("ERROR")
    placements = {}
    for placement in one.task.placements:
        say(f"tracing     the step with --variables={placement} on {num_towers} towers ...")
        placed = place(dataclasses.replace(of_run, variables=placement), names, dataset)
        placements[placement] = placed.describe(options.gpu_memory_gib)
    on_gpus = {}
    for count in 1, 2:
        say(f"tracing     the step as GPUs make it, with {count} of them ...")
        on_gpus[str(count)] = gpus.describe(gpus.view(of_run, count, dataset))
    unequal = any(row["bytes_per_step"]["equal"] is False for row in placements.values())
    result = {
        "num_towers": num_towers,
        "batch_size": of_run.batch_size,
        "placements": placements,
        "gradients": {"missing": missing},
        "gpu": on_gpus,
        "failed": bool(missing) or unequal,
    }
    for line in report(result, options.gpu_memory_gib):
        say(line)
    return result


@dataclasses.dataclass(frozen=True)
class Placed:
    """The step with one placement of the variables, whose towers are logical CPU devices."""

    run: Run
    step: Step
    planned: Counter[tuple[str, str]]  # {(source, target): bytes} by the traced graph
    executed: Counter[tuple[str, str]]  # by the executed one
    unknown: Counter[tuple[str, str]]  # number of values whose size that does not tell
    constants: int  # bytes in neither count: values that are known beforehand

    @property
    def examples(self) -> int:
        """Examples of the first tower, which has most."""
        return -(-self.run.options.batch_size // len(self.run.builder.devices))

    @property
    def equal(self) -> bool | None:
        """Tell whether both counts agree; None if the step has loops, which are not looked into."""
        if self.step.loops:
            return None
        return all(
            self.planned[way] == self.executed[way]
            or (self.planned[way] > self.executed[way] and self.unknown[way] > 0)
            for way in self.planned.keys() | self.executed.keys()
        )

    def describe(self, gpu_memory_gib: float) -> dict[str, Any]:
        """Return what the result of the plan says of this placement."""
        held = [memory.held(self.run, self.step, name) for name in self.run.builder.devices]
        parts = max(held, key=lambda parts: sum(parts.values()))
        limit, total = int(gpu_memory_gib * GIB), sum(parts.values())
        summed = self.step.summed_bytes()
        # A ring all-sum moves this part over each member's link (Patarasuk and Yuan 2009).
        ring = 2 * (len(summed) - 1) / max(len(summed), 1)
        return {
            "bytes_per_step": {
                "planned": _routes(self.planned),
                "executed": _routes(self.executed),
                "equal": self.equal,
                "per_device": {
                    name: {
                        "sent": sum(b for (way, _), b in self.planned.items() if way == name),
                        "received": sum(b for (_, way), b in self.planned.items() if way == name),
                        "collective": round(ring * summed[name]),
                    }
                    for name in [HOST, *self.run.builder.devices]
                },
            },
            "memory_bytes": parts | {"total": total},
            "fits": total <= limit,
            "largest_batch_per_tower": memory.largest_part(parts, self.examples, limit),
        }


def place(options: Options, names: Sequence[str], dataset: Data) -> Placed:
    """Build a run's train loop, let TensorFlow place it, and read it both ways; no step is made."""
    run = assemble(options, names, dataset)
    train_loop = run.train_loop(telemetry=False)  # which is not planned
    batches = iter(dataset.train.train_batches(options.batch_size, seed=options.seed))
    with one_line_errors(options):
        placement = read_placement(train_loop, batches, tf.constant(0))
    step = read_step(train_loop.get_concrete_function(batches, tf.constant(0)))
    return Placed(run, step, step.crossing_bytes(), *executed_bytes(placement, step))


def _routes(crossing: Counter[tuple[str, str]]) -> dict[str, int]:
    """Return {"/cpu:0 -> /cpu:1": bytes}."""
    return {f"{source} -> {target}": b for (source, target), b in sorted(crossing.items())}


def missing_gradients(run: Run) -> list[str]:
    """Return the names of weights without a gradient."""
    kept: list[Any] = []

    def traced(example: Any, draws: tf.Tensor) -> None:
        kept.extend(run.task.gradients(*example, draws))

    batches = run.data.train.train_batches(run.options.batch_size, seed=0)
    tf.function(traced, autograph=False).get_concrete_function(*batches.element_spec)
    pairs = zip(run.masters.model.trainable_variables, kept, strict=True)
    return [variable.path for variable, gradient in pairs if gradient is None]
