"""The step with one placement of the variables: what crosses between devices, what they hold."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.commands.plan.cost_model import ring_bytes
from towers.data import Data
from towers.graphs.placement import read_placement, short
from towers.graphs.traffic import HOST, Step, executed_bytes, num_bytes, read_step
from towers.options.run import Options
from towers.training.run import Run, assemble
from towers.training.tensorflow_errors import one_line_errors

GIB = 2**30
# Of a GPU's memory, for CUDA's context, its libraries and their workspaces: an estimate.
RESERVED_BYTES = GIB


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
        routes = self.planned.keys() | self.executed.keys()
        more = {way for way in routes if self.planned[way] > self.executed[way]}
        fewer = {way for way in routes if self.planned[way] < self.executed[way]}
        return not fewer and all(self.unknown[way] for way in more)

    def describe(self, gpu_memory_gib: float) -> dict[str, Any]:
        """Return what the result of the plan says of this placement."""
        held = [self.memory_of(name) for name in self.run.builder.devices]
        fixed, each = max(held, key=lambda held: total(*held, self.examples))
        parts = fixed | {k: round(v * self.examples) for k, v in each.items()}
        limit = gpu_memory_gib * GIB
        summed = self.step.summed_bytes()
        return {
            "bytes_per_step": {
                "planned": _routes(self.planned),
                "executed": _routes(self.executed),
                "equal": self.equal,
                "constants": self.constants,
                "unknown_sizes": sum(self.unknown.values()),
                "per_device": {
                    name: {
                        "sent": sum(b for (way, _), b in self.planned.items() if way == name),
                        "received": sum(b for (_, way), b in self.planned.items() if way == name),
                        "collective": round(ring_bytes(summed[name], len(summed))),
                    }
                    for name in [HOST, *self.run.builder.devices]
                },
            },
            "memory_bytes": parts | {"total": sum(parts.values())},
            "fits": total(fixed, each, self.examples) <= limit,
            "largest_batch_per_tower": largest_slice(fixed, each, limit),
        }

    def memory_of(self, name: str) -> tuple[dict[str, int], dict[str, float]]:
        """Return the bytes that a tower's device holds, whatever the batch and of each example."""
        masters, tower = self.run.masters, self.run.builder.devices.index(name)
        received = self.step.received_bytes(name)
        copies = [v.value for replica in masters.replicas[1:] for v in replica.weights]
        slots = [v.value for replica in masters.replicas for v in replica.optimizer.variables]
        fixed = {
            "weights": _bytes_on(name, [*(v.value for v in masters.model.variables), *copies]),
            "optimizer": _bytes_on(name, slots),
            "average": _bytes_on(name, [average for _, average in masters.averages]),
            "weights_received": received["weights"],
            "gradients": sum(num_bytes(v.value) for v in masters.model.trainable_variables),
            "gather": received["other"] + 2 * self.step.summed_bytes()[name],
            "reserved": RESERVED_BYTES,
        }
        activations = self.step.activation_bytes(tower) / self.examples
        return fixed, {"activations": activations, "batch": received["batch"] / self.examples}


def place(options: Options, names: Sequence[str], dataset: Data) -> Placed:
    """Build a run's train loop, let TensorFlow place it, and read it both ways; no step is made."""
    run = assemble(options, names, dataset)
    train_loop = run.train_loop(telemetry=False)  # which is not planned
    batches = iter(dataset.train.train_batches(options.batch_size, seed=options.seed))
    with one_line_errors(options):
        placement = read_placement(train_loop, batches, tf.constant(0))
    step = read_step(train_loop.get_concrete_function(batches, tf.constant(0)))
    return Placed(run, step, step.crossing_bytes(), *executed_bytes(placement, step))


def total(fixed: Mapping[str, int], each: Mapping[str, float], examples: int) -> float:
    """Return the bytes with a slice of so many examples."""
    return sum(fixed.values()) + examples * sum(each.values())


def largest_slice(fixed: Mapping[str, int], each: Mapping[str, float], limit: float) -> int:
    """Return the most examples that fit, 0 if not even one does."""
    number = max(int((limit - sum(fixed.values())) // sum(each.values())), 0)
    return number - (number > 0 and total(fixed, each, number) > limit)  # by rounding


def _routes(crossing: Counter[tuple[str, str]]) -> dict[str, int]:
    """Return {"/cpu:0 -> /cpu:1": bytes}."""
    return {f"{source} -> {target}": b for (source, target), b in sorted(crossing.items())}


def _bytes_on(name: str, variables: Sequence[tf.Variable]) -> int:
    return sum(num_bytes(v) for v in variables if short(v.device) == name)
