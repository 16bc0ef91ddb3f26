"""How long a step takes on N GPUs of one machine: arithmetic alone, each assumption a constant.

    work = Work(tower_seconds=0.01, launch_seconds=0.002, update_launch_seconds=0.0003,
                slice_bytes=49_152, weights=[4_000_000], exchange_bytes=0)
    step_seconds(work, "sharded", LINKS["PCIe 4 x16"], num_towers=8)

A step is the tower's computing and the update, then all that crosses, one after the other: that
transfers hide behind computing is left out, so a prediction is rather too slow than too fast. Each
value that comes from the host or goes there is a wait, on one GPU, too; what towers exchange in the
middle of a step is an all-sum of its own. Links are full duplex: what counts is the busier
direction. No GPU was at hand to check it: the constants that are estimates are said to be.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

COUNTS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Link:
    """A way between devices."""

    name: str
    gb_per_second: float  # 10^9 bytes a second in one direction, as its maker says
    fraction: float = 0.8  # of that, what programs see
    latency_seconds: float = 10e-6  # of one message

    def seconds(self, num_bytes: float, messages: float = 1) -> float:
        """Return how long so many bytes take."""
        moved = num_bytes / (self.gb_per_second * 1e9 * self.fraction)
        return moved + messages * self.latency_seconds


# Rates of one direction: PCI-SIG's 16 and 32 GT/s x 16 lanes; 600 GB/s of NVLink 3 (A100) in both.
# Estimates are the fraction, what headers and packets leave, and the latency, of a copy's launch.
_RATES = {"PCIe 4 x16": 31.5, "PCIe 5 x16": 63.0, "NVLink": 300.0}
LINKS = {name: Link(name, rate) for name, rate in _RATES.items()}
LEAST_LINK = "PCIe 4 x16"  # what a machine has at least
# Of one op on a GPU, by TensorFlow's executor: an estimate. Small slices are bound by it.
LAUNCH_SECONDS = 5e-6
# Of a small all-sum by NCCL between the GPUs of a machine, its launch included: an estimate.
ALL_SUM_SECONDS = 30e-6
# What a host reads and writes for add_n and the update: an estimate. An update reads a weight, its
# slot and its gradient, and writes two of them.
HOST_BYTES_PER_SECOND, UPDATE_PASSES = 20e9, 5
HOST_LINK = LINKS["PCIe 5 x16"]  # NVLink does not lead to the host: there it is PCIe


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step computes and moves, whatever the number of towers."""

    tower_seconds: float  # computing of one tower on its slice, without any transfer
    launch_seconds: float  # of the ops of one tower, which computing cannot be shorter than
    update_launch_seconds: float  # of what comes after the towers
    slice_bytes: float  # of a tower's slice of the batch
    weights: Sequence[int]  # bytes of each trainable variable, and of its gradient
    exchange_bytes: float  # that one tower sends to the others in the middle of a step, as moments
    host_copies: int = 1  # from the host or to it, of one GPU that has all variables: the batch
    exchanges: int = 0  # of them in a step, one after the other
    more_launch_seconds: float = 0.0  # of a tower among several, as for BatchNorm over all

    def computing_seconds(self, num_towers: int = 1) -> float:
        """Return the seconds of a tower, one of so many, without any transfer."""
        more = self.more_launch_seconds if num_towers > 1 else 0.0
        return max(self.tower_seconds, self.launch_seconds + more)

    def part(self, count: float) -> "Work":
        """Return the work of one of `count` equal parts of the batch."""
        seconds, size = self.tower_seconds / count, self.slice_bytes / count
        return dataclasses.replace(self, tower_seconds=seconds, slice_bytes=size)


def step_seconds(work: Work, placement: str, link: Link, num_towers: int) -> float:
    """Return the predicted seconds of a step of towers that each have this work.

    The placement is "cpu", "sharded" or "replicated", both of which are everything on the GPU where
    there is one.
    """
    weights, messages = sum(work.weights), 2 * len(work.weights)  # each there, its gradient back
    by_host = weights if placement == "cpu" else 0
    seconds = work.computing_seconds(num_towers) + work.update_launch_seconds
    if by_host:
        seconds += (num_towers + 1 + UPDATE_PASSES) * weights / HOST_BYTES_PER_SECOND

    # What a machine's towers exchange with its memory goes over one link, which all share: so it is
    # with one root complex. The batch goes that way always; the copies of one tower wait in turn.
    waits = work.host_copies + messages * (placement == "cpu")
    shared = min(link, HOST_LINK, key=lambda one: one.gb_per_second * one.fraction)
    seconds += shared.seconds(num_towers * (by_host + work.slice_bytes), waits)
    if num_towers == 1:
        return seconds

    # From GPU to GPU, each over its own link.
    seconds += work.exchanges * ALL_SUM_SECONDS
    seconds += link.seconds(ring_bytes(work.exchange_bytes, num_towers), 0)
    ring = ring_bytes(weights, num_towers)
    if placement == "replicated":
        seconds += ALL_SUM_SECONDS + link.seconds(ring, 2 * (num_towers - 1))
    elif placement == "sharded":  # the tower with the largest shard is the busiest
        largest = largest_shard(work.weights, num_towers)
        seconds += link.seconds((num_towers - 1) * largest + (weights - largest), messages)
    return seconds


def ring_bytes(num_bytes: float, num_members: int) -> float:
    """Return what a ring all-sum moves over each member's link (Patarasuk and Yuan 2009)."""
    return 2 * (num_members - 1) / max(num_members, 1) * num_bytes


def largest_shard(weights: Sequence[int], num_towers: int) -> int:
    """Return the bytes of the largest shard, by the rule of `masters.shard`."""
    held = [0] * num_towers
    for size in sorted(weights, reverse=True):
        held[held.index(min(held))] += size
    return max(held)


def predictions(work: Work, share: float, placements: Sequence[str]) -> list[dict[str, Any]]:
    """Predict each of COUNTS over each link.

    `work` is of a tower with its slice, which is the part `share` of the global batch. In "strong"
    scaling that batch stays, and each tower's part shrinks; in "weak" that part stays. "efficiency"
    is the part of the "seconds" of a step that computes.
    """
    rows, whole = [], work.part(share)
    for scaling, placement, count in itertools.product(("strong", "weak"), placements, COUNTS):
        part, useful = work, work.computing_seconds()
        if scaling == "strong":
            part, useful = whole.part(count), whole.computing_seconds() / count
        for link in LINKS.values():
            seconds = step_seconds(part, placement, link, count)
            row = {"scaling": scaling, "placement": placement, "link": link.name, "network": ""}
            row |= {"num_towers": count, "seconds": seconds, "efficiency": useful / seconds}
            rows.append(row)
    return rows
