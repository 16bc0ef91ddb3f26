"""Counts kernels, copies and collectives of a run's step on GPUs."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from towers import devices
from towers.builder import device_types
from towers.data import Data
from towers.graphs import gpu_estimate
from towers.graphs.executed_graph import HOST
from towers.graphs.gpu_estimate import GpuEstimate
from towers.options.run import Options
from towers.training.run.setup import assemble
from towers.training.run.tensorflow_errors import user_facing_errors


def estimate(options: Options, num_towers: int, dataset: Data) -> GpuEstimate:
    """Build a run for GPUs and analyse its step, without running it.

    Args:
        options: options of the run.
        num_towers: number of GPUs, each with a tower; CPU devices stand for them.
        dataset: the data set.
    """
    if options.variables == "auto":  # a trial of real steps
        options = dataclasses.replace(options, variables="default")
    with device_types.cpus_for_gpus():
        run = assemble(options, devices.tower_devices(num_towers, "cpu"), dataset)
        batches = iter(run.batches(0, 0))
        with user_facing_errors(options):
            return gpu_estimate.read(run.train_loop(), batches, tf.constant(0))


def describe(gpu_view: GpuEstimate) -> dict[str, Any]:
    """Return the plan's entry for a step on GPUs; counts are those of the busiest GPU.

    Returns:
        "without_kernel" [{"op", "dtype", "layer"}]; "undirected" [names]; copies in a step
        "from_host", "to_host", "from_gpus" and "collectives", each {"count", "bytes", "repeated":
        number of copies inside a loop of the model}; kernel "launches" {"tower", "update": others}.
    """
    gpus = sorted({op.gpu for op in gpu_view.ops}) or ["/gpu:0"]
    towers = {scope for scope in gpu_view.scopes if scope.startswith("tower_")}

    def busiest(of_gpu: Callable[[str], Iterable[Any]]) -> dict[str, int]:
        longest = max((list(of_gpu(gpu)) for gpu in gpus), key=len)
        return {
            "count": len(longest),
            "bytes": sum(one.bytes or 0 for one in longest),
            "repeated": sum(getattr(one, "repeated", False) for one in longest),
        }

    def from_gpus(gpu: str) -> list[Any]:
        return [t for t in gpu_view.transfers(target=gpu) if HOST not in (t.source, t.target)]

    missing = dict.fromkeys((op.type, op.dtype, op.layer) for op in gpu_view.without_kernel)
    return {
        "without_kernel": [
            {"op": op, "dtype": dtype, "layer": layer} for op, dtype, layer in missing
        ],
        "undirected": list(gpu_view.undirected),
        "from_host": busiest(lambda gpu: gpu_view.transfers(HOST, gpu)),
        "to_host": busiest(lambda gpu: gpu_view.transfers(gpu, HOST)),
        "from_gpus": busiest(from_gpus),
        "collectives": busiest(lambda gpu: (c for c in gpu_view.collectives if c.gpu == gpu)),
        "launches": {
            "tower": max((gpu_view.launches(scope) for scope in towers), default=0),
            "update": gpu_view.launches(*(set(gpu_view.scopes) - towers)),
        },
    }
