"""Estimates a device's memory during a step, from the traced graph, and the largest batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import are_gpus
from towers.devices import memory, remote
from towers.graphs.communication import TracedStep, num_bytes, read_step
from towers.graphs.placement import short_device_name
from towers.training.run.setup import RunContext

# For CUDA's context, its libraries and their workspaces: an estimate.
RESERVED_BYTES = 2**30


def memory_by_purpose(run: RunContext, step: TracedStep, name: str) -> dict[str, int]:
    """Return {purpose: bytes} of the memory of a tower's device during a step.

    Args:
        run: the run, whose variables are counted.
        step: of the run, traced.
        name: of the tower's device, as in `TowerBuilder.devices`.
    """
    train_state, tower = run.train_state, run.builder.devices.index(name)
    received = step.received_bytes(name)
    copies = [v.value for replica in train_state.replicas[1:] for v in replica.weights]
    optimizers = [*train_state.optimizers, *(r.optimizer for r in train_state.replicas[1:])]
    slots = [v.value for optimizer in optimizers for v in optimizer.variables]
    return {
        "weights": _bytes_on(name, [*(v.value for v in train_state.model.variables), *copies]),
        "optimizer": _bytes_on(name, slots),
        "average": _bytes_on(name, [average for _, average in train_state.averages]),
        "weights_received": received["weights"],
        "gradients": sum(num_bytes(v.value) for v in train_state.model.trainable_variables),
        "gather": received["other"] + 2 * step.summed_bytes()[name],
        "reserved": RESERVED_BYTES,
        "activations": step.activation_bytes(tower),
        "batch": received["batch"],
    }


def largest_slice(parts: Mapping[str, int], examples: int, limit: int) -> int:
    """Return how many examples a slice may have to fit into a device.

    Args:
        parts: {purpose: bytes} with a slice of `examples`, see `memory_by_purpose`.
        examples: number of examples in that slice.
        limit: memory of the device in bytes.
    """
    each = max(-(-(parts["activations"] + parts["batch"]) // examples), 1)
    return max(examples + (limit - sum(parts.values())) // each, 0)


def largest_batch(run: RunContext, train_loop: Callable, batches: Iterator) -> int:
    """Return the largest batch size whose steps are expected to fit into the towers' devices.

    Args:
        run: the run, built.
        train_loop: of the run.
        batches: the loop's input, of which nothing is taken.
    """
    names = run.builder.devices
    step = read_step(train_loop.get_concrete_function(batches, tf.constant(0)))
    limits = tf_internals.device_memory_bytes() if are_gpus(names) else {}
    limits |= {name: size for name in names if (size := remote.memory_of(name))}
    of_host = memory.of_host() // len(names)  # which logical CPU devices share
    examples = -(-run.options.batch_size // len(names) // run.options.accumulate_steps)
    slices = [
        largest_slice(
            memory_by_purpose(run, step, name), examples, limits.get(name.lower(), of_host)
        )
        for name in names
    ]
    return min(slices) * len(names) * run.options.accumulate_steps


def _bytes_on(name: str, variables: Sequence[tf.Variable]) -> int:
    return sum(num_bytes(v) for v in variables if short_device_name(v.device) == name)
