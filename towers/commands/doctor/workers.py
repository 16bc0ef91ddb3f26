"""`towers doctor --workers=...`: each worker, and what lies between them and this machine."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from towers.commands.doctor.checks import NOTE, OK, PROBLEM, Check
from towers.errors import InputError
from towers.options.run import Options
from towers.text import count, table
from towers.workers import network_test
from towers.workers.addresses import find_workers
from towers.workers.cluster import Cluster, Worker
from towers.workers.network_test import Way

_START = "start `towers worker --address={}` there, or open the port to this machine"
_CLOCKS_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class WorkerCheck(Check):
    """A finding about a worker, with its figures."""

    address: str = ""
    round_trip_seconds: float | None = None
    to_bytes_per_second: float | None = None  # from this machine to the worker
    from_bytes_per_second: float | None = None
    clock_seconds: float | None = None  # its clock's minus that of this machine


def check_workers(options: Options, say: Callable[[str], None]) -> Iterator[Check]:
    """Try out the workers that the options name; yield what is found, then print a table."""
    named = find_workers(options.workers, os.environ)
    with ThreadPoolExecutor(len(named)) as pool:
        problems = dict(zip(named, pool.map(network_test.unreachable, named), strict=True))
    for address, problem in problems.items():
        if problem:
            remedy = _START.format(address)
            yield WorkerCheck(f"worker {address}", PROBLEM, problem, remedy, address)
    reached = [address for address in named if not problems[address]]
    if not reached:
        return
    cluster = Cluster(reached, options.towers_per_worker, options.worker_timeout_seconds)
    with contextlib.suppress(InputError):  # each says itself why it cannot be had
        cluster.open(1)
    try:
        for worker in cluster.workers:
            if not worker.is_alive:
                yield _refused(worker)
        ways = {}
        for worker in cluster.alive():
            ways[worker.address] = way = network_test.measure(cluster, worker)
            yield _check(worker, way)
        sound = [w for w in cluster.alive() if isinstance(ways[w.address], Way)]
        if sound:
            yield _check_copies(*network_test.wrong_copies(cluster, sound))
            for line in _table(sound, [ways[w.address] for w in sound]):
                say(line)
    finally:
        cluster.close()


def _refused(worker: Worker) -> Check:
    """Return why a worker that answers cannot be had."""
    detail, _, remedy = worker.lost_because.partition(": ")
    if "busy" in detail:
        detail, _, remedy = worker.lost_because.partition("; ")
    name = f"worker {worker.address}"
    return WorkerCheck(name, PROBLEM, f"it {detail}", remedy, worker.address)


def _check(worker: Worker, way: Way | str) -> Check:
    """Return what is known of a worker that this program has."""
    name, offer = f"worker {worker.address}", worker.offer
    if isinstance(way, str):
        remedy = "look at its log, and at the network between"
        return WorkerCheck(name, PROBLEM, f"a copy failed: {way}", remedy, worker.address)
    devices = ", ".join(f"{device.name} {device.what}" for device in offer.devices)
    versions = f"tensorflow {offer.tensorflow}, keras {offer.keras}, towers {offer.towers}"
    status, remedy = OK, ""
    if abs(worker.clock_seconds) > _CLOCKS_SECONDS:
        status, remedy = NOTE, f"set its clock, which is {worker.clock_seconds:+.1f} s from here"
    figures = *dataclasses.astuple(way), worker.clock_seconds
    detail = f"{offer.host}: {devices}; {versions}"
    return WorkerCheck(name, status, detail, remedy, worker.address, *figures)


def _check_copies(number: int, wrong: dict[str, str]) -> Check:
    if wrong:
        detail = "; ".join(f"{way}: {problem}" for way, problem in wrong.items())
        remedy = "workers need each other's ports, too: open them, or leave a worker out"
        return Check("copies over the network", PROBLEM, detail, remedy)
    return Check("copies over the network", OK, f"{count(number, 'way')}, bit for bit")


def _table(workers: Sequence[Worker], ways: Sequence[Way]) -> list[str]:
    header = ("worker", "host", "towers", "clock s", "round trip ms", "to MB/s", "from MB/s")
    rows = []
    for worker, way in zip(workers, ways, strict=True):
        speeds = (f"{speed / 1e6:.0f}" for speed in dataclasses.astuple(way)[1:])
        figures = f"{worker.clock_seconds:+.3f}", f"{way.round_trip_seconds * 1e3:.2f}", *speeds
        rows.append((worker.address, worker.offer.host, len(worker.devices), *figures))
    return [f"  {line}" for line in table(header, rows)]
