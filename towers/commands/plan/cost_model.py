"""How long a step takes on N GPUs: arithmetic alone, every assumption a constant in this file.

    work = Work(tower_seconds=0.01, launch_seconds=0.002, slice_bytes=49_152,
                weights=[4_000_000], exchange_bytes=0)
    step_seconds(work, "sharded", LINKS["PCIe 4 x16"], num_towers=8)

A step is the tower's computing, then all that crosses, one after the other: that transfers hide
behind computing is left out, so a prediction is rather too slow than too fast. Links are full
duplex: what counts is the busier direction. No GPU was at hand to check it.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

GPUS_PER_MACHINE = 8
COUNTS = (1, 2, 4, 8, 16, 32, 64)


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
# Fractions are estimates: headers and packets leave 80 % of PCIe and of NVLink, TCP and one copy in
# memory 70 % of Ethernet. So are latencies: of a copy's launch, and of a socket.
_RATES = {"PCIe 4 x16": 31.5, "PCIe 5 x16": 63.0, "NVLink": 300.0}
LINKS = {name: Link(name, rate) for name, rate in _RATES.items()}
NETWORKS = {f"{r} Gbit/s": Link(f"{r} Gbit/s", r / 8, 0.7, 50e-6) for r in (10, 100, 400)}
# Of one op on a GPU, by TensorFlow's executor: an estimate. Small slices are bound by it.
LAUNCH_SECONDS = 5e-6
HOST_LINK = LINKS["PCIe 5 x16"]  # NVLink does not lead to the host: there it is PCIe


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step computes and moves, whatever the number of towers."""

    tower_seconds: float  # computing of one tower on its slice, without any transfer
    launch_seconds: float  # of the tower's ops, which computing cannot be shorter than
    slice_bytes: float  # of a tower's slice of the batch
    weights: Sequence[int]  # bytes of each trainable variable, and of its gradient
    exchange_bytes: float  # that one tower sends to the others by way of the host, as moments
    exchanges: int = 0  # of them in a step, one after the other

    @property
    def computing_seconds(self) -> float:
        """Seconds of a tower without any transfer."""
        return max(self.tower_seconds, self.launch_seconds)

    def part(self, count: float) -> "Work":
        """Return the work of one of `count` equal parts of the batch."""
        seconds, size = self.tower_seconds / count, self.slice_bytes / count
        return dataclasses.replace(self, tower_seconds=seconds, slice_bytes=size)


def step_seconds(
    work: Work, placement: str, link: Link, num_towers: int, network: Link | None = None
) -> float:
    """Return the predicted seconds of a step of towers that each have this work.

    The placement is "cpu", "sharded" or "replicated"; beyond GPUS_PER_MACHINE there are full
    machines, and the network between them.
    """
    seconds = work.computing_seconds
    if num_towers > 1:
        seconds += _by_host(work, placement, link, num_towers)
        if placement != "cpu":
            seconds += _between_towers(work, placement, link, num_towers)
        if num_towers > GPUS_PER_MACHINE:
            seconds += _between_machines(work, placement, network, num_towers)
    return seconds


def _by_host(work: Work, placement: str, link: Link, num_towers: int) -> float:
    """Return the seconds of what a machine's towers exchange with its memory, over ONE link.

    All GPUs of a machine share it, at the rate of the slower of their own link and HOST_LINK: so it
    is with one root complex. Batch and moments go that way always; weights and gradients of "cpu".
    """
    host = min(link, HOST_LINK, key=lambda one: one.gb_per_second * one.fraction)
    inside = min(num_towers, GPUS_PER_MACHINE)
    weights = sum(work.weights) if placement == "cpu" else 0
    out = inside * (weights + work.slice_bytes + num_towers * work.exchange_bytes)
    back = inside * (weights + work.exchange_bytes)
    return host.seconds(max(out, back), messages=_host_messages(work, placement))


def _host_messages(work: Work, placement: str) -> int:
    """Return how many messages wait for each other: each exchange is one there and one back."""
    return 1 + 2 * work.exchanges + (placement == "cpu")


def _between_towers(work: Work, placement: str, link: Link, num_towers: int) -> float:
    """Return the seconds of weights and gradients that go from GPU to GPU, each over its link."""
    if placement == "replicated":
        return link.seconds(ring_bytes(sum(work.weights), num_towers), 2 * (num_towers - 1))
    # The tower with the largest shard sends it to all others, and sums their gradients.
    largest = largest_shard(work.weights, num_towers)
    sent = (num_towers - 1) * largest + (sum(work.weights) - largest)
    return link.seconds(sent, messages=2)


def _between_machines(work: Work, placement: str, network: Link, num_towers: int) -> float:
    """Return the seconds that the busiest machine's network card takes, in one direction."""
    outside = num_towers - GPUS_PER_MACHINE
    machines = num_towers / GPUS_PER_MACHINE
    weights, rounds = sum(work.weights), 1
    moved = outside * (work.slice_bytes + num_towers * work.exchange_bytes)  # from the one host
    if placement == "cpu":
        moved += outside * weights
    elif placement == "sharded":  # what lies here goes to every tower elsewhere, and gradients back
        here = weights / machines
        moved += outside * here + GPUS_PER_MACHINE * (weights - here)
    else:  # a ring that enters and leaves each machine once
        moved += ring_bytes(weights, num_towers)
        rounds = 2 * (machines - 1)
    return network.seconds(moved, messages=rounds + _host_messages(work, placement))


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
    """Predict each of COUNTS, over each link and, beyond one machine, each network.

    `work` is of a tower with its slice, which is the part `share` of the global batch. In "strong"
    scaling that batch stays, and each tower's part shrinks; in "weak" that part stays. "efficiency"
    is the part of the "seconds" of a step that computes.
    """
    rows, whole = [], work.part(share)
    for scaling, placement, link, count in itertools.product(
        ("strong", "weak"), placements, LINKS.values(), COUNTS
    ):
        part, useful = work, work.computing_seconds
        if scaling == "strong":
            part, useful = whole.part(count), whole.computing_seconds / count
        for network in NETWORKS.values() if count > GPUS_PER_MACHINE else [None]:
            seconds = step_seconds(part, placement, link, count, network)
            row = {"scaling": scaling, "placement": placement, "link": link.name}
            row |= {"network": network.name if network else "", "num_towers": count}
            rows.append(row | {"seconds": seconds, "efficiency": useful / seconds})
    return rows
