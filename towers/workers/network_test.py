"""`towers doctor --workers=...`: tests each worker and the network between all machines.

Calls that take too long are cut off and fail.
"""

import contextlib
import dataclasses
import itertools
import os
import socket
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from towers.devices import self_test
from towers.devices.checks import NOTE, OK, PROBLEM, Check
from towers.errors import InputError
from towers.formatting import count, first_line, table
from towers.options.run import Options
from towers.workers.addresses import find_workers, parse_address, responds
from towers.workers.cluster import MAX_CLOCK_SKEW_SECONDS, Cluster, Worker

_CONNECT_SECONDS = 2.0
_FREE_SECONDS = 4.0  # in which a worker that has just been released starts a new server
_COPY_SECONDS = 20.0  # timeout of a copy: 4 MiB over 2 Mbit/s
_COPY_BYTES = 2**22
_ROUND_TRIPS = 20
_COPIES = 3  # timed, after one that opens connections


@dataclasses.dataclass(frozen=True)
class WorkerCheck(Check):
    """The result of a worker's test, with its figures."""

    address: str = ""
    round_trip_seconds: float | None = None  # of one number, with TensorFlow's overhead
    to_bytes_per_second: float | None = None  # from this machine to the worker
    from_bytes_per_second: float | None = None
    clock_seconds: float | None = None  # its clock's minus that of this machine


def check_network(options: Options, say: Callable[[str], None]) -> Iterator[Check]:
    """Test the workers that the options name; yield each result, then print a table.

    Args:
        options: `workers`, `towers_per_worker` and `worker_timeout_seconds` are read.
        say: prints a line.

    Raises:
        InputError: an address is malformed, or two are of the same worker.
    """
    named = find_workers(options.workers, os.environ)
    with ThreadPoolExecutor(len(named)) as pool:
        problems = dict(zip(named, pool.map(_why_unreachable, named), strict=True))
    for address, problem in problems.items():
        if problem:
            remedy = f"start `towers worker --address={address}` there, or open the port to this "
            name = f"worker {address}"
            yield WorkerCheck(name, PROBLEM, problem, f"{remedy}machine", address)
    if not (reached := [address for address in named if not problems[address]]):
        return
    cluster = Cluster(reached, options.towers_per_worker, options.worker_timeout_seconds)
    with contextlib.suppress(InputError):  # `problem` of each says why
        cluster.open(1)
    try:
        for worker in cluster.workers:
            if not worker.is_alive:
                end = "; " if "busy" in worker.problem.partition(": ")[0] else ": "
                detail, _, remedy = worker.problem.partition(end)
                name = f"worker {worker.address}"
                yield WorkerCheck(name, PROBLEM, f"it {detail}", remedy, worker.address)
        sound = []
        for worker in cluster.alive():
            yield (check := _check_worker(cluster, worker))
            if check.status != PROBLEM:
                sound.append((worker, check))
        if sound:
            yield _check_copies(cluster, [worker for worker, _ in sound])
            header = "worker", "host", "towers", "clock s", "round trip ms", "to MB/s", "from MB/s"
            rows = []
            for worker, check in sound:
                where = worker.address, worker.info.host, len(worker.devices)
                times = f"{worker.clock_seconds:+.3f}", f"{check.round_trip_seconds * 1e3:.2f}"
                speeds = check.to_bytes_per_second, check.from_bytes_per_second
                rows.append((*where, *times, *(f"{speed / 1e6:.0f}" for speed in speeds)))
            for line in table(header, rows):
                say(f"  {line}")
    finally:
        cluster.close()


def _why_unreachable(address: str) -> str:
    """Return why no TensorFlow server answers at an address, "" if one does."""
    host, port = where = parse_address(address, "workers")
    until = time.monotonic() + _FREE_SECONDS
    while True:
        try:
            socket.create_connection(where, _CONNECT_SECONDS).close()
            break
        except socket.gaierror:
            return f"this machine knows no host {host}"
        except ConnectionRefusedError:
            if time.monotonic() > until:
                return f"nothing listens at port {port} of {host}"
            time.sleep(0.2)
        except TimeoutError:
            return f"no answer from {host} in {_CONNECT_SECONDS:g} s: it is off, or a firewall"
        except OSError as error:
            return f"{host} cannot be reached: {error.strerror}"
    if responds(address, _CONNECT_SECONDS):
        return ""
    return f"what listens at port {port} of {host} hangs, or is no TensorFlow server"


def _check_worker(cluster: Cluster, worker: Worker) -> WorkerCheck:
    name, info = f"worker {worker.address}", worker.info
    numbers = np.random.default_rng(0).standard_normal(_COPY_BYTES // 4, np.float32)
    with tf.device(cluster.home):
        here, one = tf.constant(numbers), tf.constant(1.0)

    def send(value: tf.Tensor) -> tf.Tensor:
        with tf.device(worker.host):
            return tf.identity(value)

    def send_all() -> tf.Tensor:
        sent = send(here)
        with tf.device(worker.host):
            sent[0].numpy()  # wait until it has arrived
        return sent

    try:
        with cluster.cut_off([worker], _COPY_SECONDS):
            round_trip = _median_seconds(lambda: send(one).numpy(), _ROUND_TRIPS)
            to = _median_seconds(send_all, _COPIES)
            there = iter([send_all() for _ in range(_COPIES + 1)])  # a fetched tensor is cached
            back = _median_seconds(lambda: next(there).numpy(), _COPIES)
    except tf.errors.OpError as error:
        problem, remedy = first_line(error), "look at its log, and at the network between"
        return WorkerCheck(name, PROBLEM, f"a copy failed: {problem}", remedy, worker.address)
    speeds = (_COPY_BYTES / max(seconds - round_trip, 1e-6) for seconds in (to, back))
    devices = ", ".join(f"{device.name} {device.what}" for device in info.devices)
    versions = f"tensorflow {info.tensorflow}, keras {info.keras}, towers {info.towers}"
    status, remedy, clock = OK, "", worker.clock_seconds
    if abs(clock) > MAX_CLOCK_SKEW_SECONDS:
        status, remedy = NOTE, f"set its clock, which is {clock:+.1f} s from here"
    detail = f"{info.host}: {devices}; {versions}"
    return WorkerCheck(name, status, detail, remedy, worker.address, round_trip, *speeds, clock)


def _check_copies(cluster: Cluster, workers: Sequence[Worker]) -> Check:
    """Copy random bits from the program to each device of these workers, and between them."""
    routes = [(cluster.home, device, [w]) for w in workers for device in w.devices]
    pairs = itertools.permutations(workers, 2)
    routes += [(a.devices[0], b.devices[0], [a, b]) for a, b in pairs]
    wrong = []
    for source, target, ends in routes:
        with cluster.cut_off(ends, _COPY_SECONDS):
            problem = self_test.probe_copy(source, target)
        if problem:
            wrong.append(f"{source.removeprefix('/job:localhost')} to {target}: {problem}")
    name = "copies over the network"
    if wrong:
        remedy = "workers need each other's ports, too: open them, or leave a worker out"
        return Check(name, PROBLEM, "; ".join(wrong), remedy)
    return Check(name, OK, f"{count(len(routes), 'way')}, bit for bit")


def _median_seconds(call: Callable[[], object], number: int) -> float:
    call()  # warms up
    return statistics.median(timeit.repeat(call, repeat=number, number=1))
