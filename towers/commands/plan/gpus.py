"""What the run's own step would do on GPUs: what runs, what is copied, what is waited for."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from towers import devices
from towers.builder import kinds
from towers.data import Data
from towers.graphs import gpu_view
from towers.graphs.gpu_nodes import HOST
from towers.graphs.gpu_view import GpuView
from towers.options.run import Options
from towers.training.run import assemble
from towers.training.tensorflow_errors import one_line_errors


def view(options: Options, num_towers: int, dataset: Data) -> GpuView:
    """Build a run as for so many GPUs, and return what its step would do there; none is made."""
    if options.variables == "auto":  # which is a trial, and there is nothing to try
        options = dataclasses.replace(options, variables="default")
    with kinds.cpus_for_gpus():
        run = assemble(options, devices.tower_devices(num_towers, "cpu"), dataset)
        batches = iter(run.batches(0, 0))
        with one_line_errors(options):
            return gpu_view.read(run.train_loop(), batches, tf.constant(0))


def describe(found: GpuView) -> dict[str, Any]:
    """Return what the result of the plan says of a step on GPUs; counts are of the busiest one.

    Returns:
        "without_kernel" [{"op", "dtype", "layer"}]; "undirected" [names]; what is copied in a step
        "from_host", "to_host", "from_gpus" and what "collectives" sum, each {"count", "bytes",
        "repeated": how many a loop of the model repeats}; "launches" of kernels {"tower", "update":
        all else}.
    """
    missing = dict.fromkeys((op.type, op.dtype, op.layer) for op in found.without_kernel)
    gpus = sorted({op.gpu for op in found.ops}) or ["/gpu:0"]
    summed = [[c for c in found.collectives if c.gpu == gpu] for gpu in gpus]
    between = [
        [t for t in found.transfers(target=gpu) if HOST not in (t.source, t.target)] for gpu in gpus
    ]
    towers = {scope for scope in found.scopes if scope.startswith("tower_")}
    rest = set(found.scopes) - towers
    return {
        "without_kernel": [
            dict(zip(("op", "dtype", "layer"), one, strict=True)) for one in missing
        ],
        "undirected": list(found.undirected),
        "from_host": _most(found.transfers(HOST, gpu) for gpu in gpus),
        "to_host": _most(found.transfers(gpu, HOST) for gpu in gpus),
        "from_gpus": _most(between),
        "collectives": _most(summed),
        "launches": {
            "tower": max((found.launches(scope) for scope in towers), default=0),
            "update": found.launches(*rest),
        },
    }


def _most(found: Iterable[Iterable[Any]]) -> dict[str, int]:
    """Return the count and the bytes of the longest, and how many of it a loop repeats."""
    longest = max(map(list, found), key=len, default=[])
    return {
        "count": len(longest),
        "bytes": sum(one.bytes or 0 for one in longest),
        "repeated": sum(getattr(one, "repeated", False) for one in longest),
    }
