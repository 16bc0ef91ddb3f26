"""How long a step takes on N GPUs: arithmetic alone, every assumption a constant in this file.

    work = Work(tower_seconds=0.01, launch_seconds=0.002, slice_bytes=49_152,
                weights=[4_000_000], exchange_bytes=0)
    predict(work, "sharded", LINKS["PCIe 4 x16"], num_towers=8).efficiency

A step is the tower's computing, then all that crosses, one after the other: that transfers hide
behind computing is left out, so a prediction is rather too slow than too fast. Links are full
duplex: what counts is the busier direction. No GPU was at hand to check it.
"""

import dataclasses
from collections.abc import Sequence

GIB = 2**30
GPUS_PER_MACHINE = 8
COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Link:
    """A way between devices.

    Attributes:
        name: "PCIe 4 x16".
        gb_per_second: 10^9 bytes a second in one direction, as its maker says.
        fraction: of that, what programs see.
        latency_seconds: of one message.
    """

    name: str
    gb_per_second: float
    fraction: float
    latency_seconds: float

    def seconds(self, num_bytes: float, messages: float = 1) -> float:
        """Return how long so many bytes take."""
        moved = num_bytes / (self.gb_per_second * 1e9 * self.fraction)
        return moved + messages * self.latency_seconds


# Rates of one direction: PCI-SIG's 16 and 32 GT/s x 16 lanes; 600 GB/s of NVLink 3 (A100) in both.
# Fractions are estimates: headers and packets leave 80 % of PCIe and of NVLink, TCP and one copy in
# memory 70 % of Ethernet. So are latencies: of a copy's launch, and of a socket.
LINKS = {
    link.name: link
    for link in (
        Link("PCIe 4 x16", 31.5, 0.8, 10e-6),
        Link("PCIe 5 x16", 63.0, 0.8, 10e-6),
        Link("NVLink", 300.0, 0.8, 10e-6),
    )
}
NETWORKS = {
    link.name: link
    for link in (
        Link("10 Gbit/s", 1.25, 0.7, 50e-6),
        Link("100 Gbit/s", 12.5, 0.7, 50e-6),
        Link("400 Gbit/s", 50.0, 0.7, 50e-6),
    )
}
# Of one op on a GPU, by TensorFlow's executor: an estimate. Small slices are bound by it.
LAUNCH_SECONDS = 5e-6
HOST_LINK = LINKS["PCIe 5 x16"]  # NVLink does not lead to the host: there it is PCIe


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step computes and moves, whatever the number of towers.

    Attributes:
        tower_seconds: computing of one tower on its slice, without any transfer.
        launch_seconds: of the tower's ops, which computing cannot be shorter than.
        slice_bytes: a tower's slice of the batch.
        weights: bytes of each trainable variable, which are those of its gradient, too.
        exchange_bytes: what one tower sends to the others by way of the host, as moments.
        exchanges: how often in a step, one after the other.
    """

    tower_seconds: float
    launch_seconds: float
    slice_bytes: float
    weights: Sequence[int]
    exchange_bytes: float
    exchanges: int = 0

    @property
    def computing_seconds(self) -> float:
        """Seconds of a tower without any transfer."""
        return max(self.tower_seconds, self.launch_seconds)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.weights)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The step of N towers.

    Attributes:
        placement: of the variables.
        link: between the GPUs of a machine.
        network: between machines, "" within one.
        num_towers: N.
        seconds: of a step.
        efficiency: the part of it that computes: N towers are `N * efficiency` times as fast.
    """

    placement: str
    link: str
    network: str
    num_towers: int
    seconds: float
    efficiency: float


def predict(
    work: Work,
    placement: str,
    link: Link,
    num_towers: int,
    network: Link | None = None,
    per_machine: int = GPUS_PER_MACHINE,
    useful_seconds: float | None = None,
) -> Prediction:
    """Predict a step.

    Args:
        work: of each tower.
        placement: of the variables: "cpu", "sharded", "replicated".
        link: between the GPUs of a machine.
        num_towers: in all; full machines first.
        network: between machines; needed if there are several.
        per_machine: GPUs of a machine.
        useful_seconds: what a step would take if scaling were perfect: by default, the computing.

    Raises:
        ValueError: several machines and no network.
    """
    if num_towers > per_machine and network is None:
        raise ValueError(f"{num_towers} towers on machines of {per_machine} need a network")
    seconds = work.computing_seconds
    if num_towers > 1:
        inside = min(num_towers, per_machine)
        seconds += _by_host(work, placement, link, inside, num_towers)
        if placement != "cpu":
            seconds += _between_towers(work, placement, link, num_towers)
        if num_towers > per_machine:
            seconds += _between_machines(work, placement, network, num_towers, per_machine)
    useful = work.computing_seconds if useful_seconds is None else useful_seconds
    name = network.name if network and num_towers > per_machine else ""
    return Prediction(placement, link.name, name, num_towers, seconds, useful / seconds)


def _by_host(work: Work, placement: str, link: Link, inside: int, num_towers: int) -> float:
    """Return the seconds of what a machine's towers exchange with its memory, over ONE link.

    All GPUs of a machine share it, at the rate of the slower of their own link and HOST_LINK: so it
    is with one root complex. Batch and moments go that way always; weights and gradients of "cpu".
    """
    host = min(link, HOST_LINK, key=lambda one: one.gb_per_second * one.fraction)
    weights = work.weights_bytes if placement == "cpu" else 0
    out = inside * (weights + work.slice_bytes + num_towers * work.exchange_bytes)
    back = inside * (weights + work.exchange_bytes)
    return host.seconds(max(out, back), messages=_host_messages(work, placement))


def _host_messages(work: Work, placement: str) -> int:
    """Return how many messages wait for each other: each exchange is one there and one back."""
    return 1 + 2 * work.exchanges + (placement == "cpu")


def _between_towers(work: Work, placement: str, link: Link, num_towers: int) -> float:
    """Return the seconds of weights and gradients that go from GPU to GPU, each over its link."""
    if placement == "replicated":
        moved = 2 * (num_towers - 1) / num_towers * work.weights_bytes
        return link.seconds(moved, messages=2 * (num_towers - 1))
    # The tower with the largest shard sends it to all others, and sums their gradients.
    largest = largest_shard(work.weights, num_towers)
    sent = (num_towers - 1) * largest + (work.weights_bytes - largest)
    return link.seconds(sent, messages=2)


def _between_machines(
    work: Work, placement: str, network: Link, num_towers: int, per_machine: int
) -> float:
    """Return the seconds that the busiest machine's network card takes, in one direction."""
    outside = num_towers - per_machine
    machines = num_towers / per_machine
    moments = outside * (work.slice_bytes + num_towers * work.exchange_bytes)  # from the one host
    if placement == "cpu":
        moved = moments + outside * work.weights_bytes
    elif placement == "sharded":  # what lies here goes to every tower elsewhere, and gradients back
        here = work.weights_bytes / machines
        moved = moments + outside * here + per_machine * (work.weights_bytes - here)
    else:  # a ring that enters and leaves each machine once
        moved = moments + 2 * (num_towers - 1) / num_towers * work.weights_bytes
    rounds = 2 * (machines - 1) if placement == "replicated" else 1
    return network.seconds(moved, messages=rounds + _host_messages(work, placement))


def largest_shard(weights: Sequence[int], num_towers: int) -> int:
    """Return the bytes of the largest shard, by the rule of `masters.shard`."""
    held = [0] * num_towers
    for size in sorted(weights, reverse=True):
        held[held.index(min(held))] += size
    return max(held)


def predictions(work: Work, placements: Sequence[str], strong: bool = False) -> list[Prediction]:
    """Predict each of COUNTS, over each link and, beyond one machine, each network.

    Args:
        work: of a tower if there were one: the global batch in strong scaling, else a slice.
        placements: of the variables.
        strong: the global batch stays, and each tower's part shrinks; else that part stays.
    """
    found = []
    for placement in placements:
        for link in LINKS.values():
            for count in COUNTS:
                part, useful = work, work.computing_seconds
                if strong:
                    part, useful = split(work, count), useful / count
                networks = NETWORKS.values() if count > GPUS_PER_MACHINE else [None]
                found += [
                    predict(part, placement, link, count, network, useful_seconds=useful)
                    for network in networks
                ]
    return found


def split(work: Work, count: float) -> Work:
    """Return the work of one of `count` equal parts of the batch."""
    return dataclasses.replace(
        work,
        tower_seconds=work.tower_seconds / count,
        slice_bytes=work.slice_bytes / count,
    )


def compute_seconds(flop: float, tflops: float, utilisation: float) -> float:
    """Return how long a GPU takes for so many operations."""
    return flop / (tflops * 1e12 * utilisation)


# Memory.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a tower's device holds at its peak.

    Attributes:
        fixed: {"weights": bytes}: what does not depend on the batch.
        per_example: {"activations": bytes}: of each example of the tower's slice.
        examples: of the slice.
    """

    fixed: dict[str, int]
    per_example: dict[str, float]
    examples: int

    def at(self, examples: int) -> float:
        """Return the bytes with a slice of so many examples."""
        return sum(self.fixed.values()) + examples * sum(self.per_example.values())

    def total(self) -> float:
        """Return the bytes with the slice as it is."""
        return self.at(self.examples)

    def largest_slice(self, limit_bytes: float) -> int:
        """Return the most examples that fit, 0 if not even one does."""
        each = sum(self.per_example.values())
        free = limit_bytes - sum(self.fixed.values())
        if free <= 0 or each <= 0:
            return 0
        number = int(free // each)
        while self.at(number) > limit_bytes:  # rounding
            number -= 1
        return max(number, 0)
