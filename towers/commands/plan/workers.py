"""How long a step takes with its towers on workers: the arithmetic, with its constants.

    cluster = Cluster(NETWORKS["10 Gbit/s"], LINKS["PCIe 4 x16"], towers_per_worker=8)
    parts(work, "sharded", num_towers=64, cluster)    # {"computing": seconds, "network": ...}

One program holds the graph; the masters lie with it ("cpu") or each on one worker ("sharded"). The
towers of a worker are summed there, so that each weight crosses the network once for each worker,
and its gradient back. With "cpu" all of that goes over the program's card, W times the weights in
each direction. With "sharded" a worker sends its weights to the W - 1 others and its gradients to
those who have the masters: 2 (W - 1) / W of all weights, if these can be shared out evenly. A
weight lies whole on one worker, so that the largest makes its worker the busiest.

Weights may travel while the forward pass computes and gradients while the backward pass does. The
rest is not hidden: way after way of latency, what the program does for each step, each tower and
each tensor that it sends or takes, and the slowest tower of all, for which the update waits.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from towers.commands.plan.cost_model import (
    HOST_BYTES_PER_SECOND,
    LEAST_LINK,
    LINKS,
    UPDATE_PASSES,
    Link,
    Work,
    largest_shard,
    step_seconds,
)

MOST_TOWERS = 1024
# Of the computing of a step; the rest is the backward pass, which has twice the products.
FORWARD = 1 / 3
# One after the other in a step, apart from exchanges: estimates. Ways of 5 ms, as
# `scripts/workers_model.py check` makes them, show that there are more, with "sharded" most.
WAYS = {"cpu": 4, "sharded": 5}
# Of the program: estimates. `scripts/workers_model.py fixed` gave, with workers and towers on the
# same 2 busy cores, 2.5 ms a tower with 2 weights and 6.9 ms with 20, the towers' own ops included.
STEP_SECONDS, TOWER_SECONDS, TENSOR_SECONDS = 1e-3, 0.5e-3, 50e-6
# What TensorFlow's gRPC moves, however fast the card: measured over loopback, both ends on 2 cores.
GRPC_GB_PER_SECOND = 1.3
LATENCY_SECONDS = 100e-6  # of a way of a small tensor through gRPC: an estimate


def network(gbits: float, latency_seconds: float = LATENCY_SECONDS) -> Link:
    """Return what cards of so many 10^9 bits a second leave to tensors: TCP takes 5 %."""
    rate = min(0.95 * gbits / 8, GRPC_GB_PER_SECOND)
    return Link(f"{gbits:g} Gbit/s", rate, 1.0, latency_seconds)


NETWORKS = {link.name: link for link in map(network, (1, 10, 100))}


@dataclass(frozen=True)
class Cluster:
    """Workers, and what lies between them.

    Attributes:
        network: of each machine's card, the program's as well.
        link: between a worker's towers and its memory.
        towers_per_worker: of each worker.
        spread: of a tower's seconds: they are drawn, each step and tower anew, from a log-normal
            distribution whose logarithm has this standard deviation.
        overlap: the part of the passes during which tensors can travel.
        sends_rows: whether the program sends the batch, since workers have no files of it.
    """

    network: Link
    link: Link
    towers_per_worker: int
    spread: float = 0.05
    overlap: float = 1.0
    sends_rows: bool = False


def parts(work: Work, placement: str, num_towers: int, cluster: Cluster) -> dict[str, float]:
    """Return the predicted seconds of a step, by what takes them.

    Args:
        work: of each tower.
        placement: "cpu" or "sharded".
        num_towers: of all workers together.
        cluster: the workers.
    """
    each, network = min(num_towers, cluster.towers_per_worker), cluster.network
    workers = math.ceil(num_towers / each)
    alone = work.computing_seconds() + work.update_launch_seconds
    weights, number = sum(work.weights), len(work.weights)
    # What the busiest card passes on in either direction, and what is added and updated behind it.
    if placement == "cpu":
        moved, home, tensors = workers * weights, weights, 2 * workers * number
    else:
        home = largest_shard(work.weights, workers)
        moved, tensors = (workers - 1) * home, 4 * number * (workers - 1) / workers
    way = network.seconds(moved, 0)
    computing = work.computing_seconds(num_towers)
    forward = FORWARD * computing
    backward = computing - forward
    crossing = sum(max(way - cluster.overlap * hidden, 0.0) for hidden in (forward, backward))
    sent = 2 * work.exchange_bytes + cluster.sends_rows * work.slice_bytes
    return {
        "computing": alone,
        "slowest tower": computing * (slowest(num_towers, cluster.spread) - 1),
        "inside workers": step_seconds(work, "cpu", cluster.link, each) - alone,
        "network": crossing + network.seconds(num_towers * sent, 0),
        "latency": (WAYS[placement] + 2 * work.exchanges) * network.latency_seconds,
        "program": STEP_SECONDS + TOWER_SECONDS * num_towers + TENSOR_SECONDS * tensors,
        "sum and update": (workers + 1 + UPDATE_PASSES) * home / HOST_BYTES_PER_SECOND,
    }


@functools.cache
def slowest(number: int, spread: float) -> float:
    """Return the mean of the largest of `number` draws whose logarithms are of N(0, spread^2)."""
    normal, steps = NormalDist(), 4000
    edges = [-8 + 16 * i / steps for i in range(steps + 1)]
    chances = [normal.cdf(edge) ** number for edge in edges]
    return sum(
        math.exp(spread * (low + high) / 2) * (after - before)
        for (low, high), (before, after) in zip(
            itertools.pairwise(edges), itertools.pairwise(chances), strict=True
        )
    )


def counts(towers_per_worker: int) -> list[int]:
    """Return the numbers of towers that are predicted: of 2, 4, 8, ... workers."""
    doubled = (towers_per_worker * 2**i for i in range(1, MOST_TOWERS.bit_length()))
    return [count for count in doubled if count <= MOST_TOWERS]


def predictions(
    work: Work,
    share: float,
    placements: Sequence[str],
    networks: Sequence[Link],
    towers_per_worker: int,
    straggler_spread: float,
) -> list[dict[str, Any]]:
    """Predict each of `counts`, as `cost_model.predictions` does for one machine."""
    rows, whole = [], work.part(share)
    placements = [placement for placement in placements if placement in WAYS]
    for scaling, placement, network, count in itertools.product(
        ("strong", "weak"), placements, networks, counts(towers_per_worker)
    ):
        part, useful = work, work.computing_seconds()
        if scaling == "strong":
            part, useful = whole.part(count), whole.computing_seconds() / count
        cluster = Cluster(network, LINKS[LEAST_LINK], towers_per_worker, straggler_spread)
        of_step = parts(part, placement, count, cluster)
        seconds = sum(of_step.values())
        rows.append(
            {"scaling": scaling, "placement": placement, "link": LEAST_LINK}
            | {"network": network.name, "num_towers": count, "seconds": seconds}
            | {"efficiency": useful / seconds, "parts": of_step}
        )
    return rows
