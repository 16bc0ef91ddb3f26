"""What lies between this program and its workers, tried out: ports, copies, speeds.

Nothing here waits for long: who does not answer in time is cut off, and what was asked fails.
"""

import contextlib
import dataclasses
import itertools
import socket
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from towers.text import first_line
from towers.workers.addresses import greets, parse_address
from towers.workers.cluster import Cluster, Worker

CONNECT_SECONDS = 2.0
_FREE_SECONDS = 4.0  # a worker that has just been released starts a new server
_COPY_SECONDS = 20.0  # that a copy may take: 4 MiB over 2 Mbit/s
_COPY_BYTES = 2**22
_ROUND_TRIPS = 20
_COPIES = 3  # which are timed, after one that opens connections


@dataclasses.dataclass(frozen=True)
class Way:
    """How fast a worker and the program reach each other."""

    round_trip_seconds: float  # of a number, there and back, TensorFlow's part in it included
    to_bytes_per_second: float  # from the program to the worker
    from_bytes_per_second: float


def unreachable(address: str) -> str:
    """Return why nothing of TensorFlow's answers at an address, "" if it does."""
    until = time.monotonic() + _FREE_SECONDS
    while True:
        problem, refused = _reach(address)
        if not refused or time.monotonic() > until:
            return problem
        time.sleep(0.2)


def _reach(address: str) -> tuple[str, bool]:
    """Return what keeps this machine from an address, "" if nothing; and if that may pass."""
    host, port = where = parse_address(address, "workers")
    try:
        socket.create_connection(where, CONNECT_SECONDS).close()
    except socket.gaierror:
        return f"this machine knows no host {host}", False
    except ConnectionRefusedError:
        return f"nothing listens at port {port} of {host}", True
    except TimeoutError:
        return f"no answer from {host} in {CONNECT_SECONDS:g} s: it is off, or a firewall", False
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror}", False
    if greets(address, CONNECT_SECONDS):
        return "", False
    return f"what listens at port {port} of {host} hangs, or is no TensorFlow server", False


def measure(cluster: Cluster, worker: Worker) -> Way | str:
    """Return how fast a worker is reached, or what went wrong."""
    numbers = np.random.default_rng(0).standard_normal(_COPY_BYTES // 4, np.float32)
    with tf.device(cluster.home):
        here, one = tf.constant(numbers), tf.constant(1.0)

    def there_and_back() -> None:
        _on(worker.host, one).numpy()

    def send() -> tf.Tensor:
        sent = _on(worker.host, here)
        with tf.device(worker.host):
            sent[0].numpy()  # when it is there
        return sent

    try:
        with cluster.cut_off([worker], _COPY_SECONDS):
            round_trip = _seconds(there_and_back, _ROUND_TRIPS)
            to = _seconds(send, _COPIES)
            there = []
            for _ in range(_COPIES + 1):  # a tensor that was fetched is kept here
                there.append(send())
            fetched = iter(there)
            back = _seconds(lambda: next(fetched).numpy(), _COPIES)
    except tf.errors.OpError as error:
        return first_line(error)
    speeds = (_COPY_BYTES / max(seconds - round_trip, 1e-6) for seconds in (to, back))
    return Way(round_trip, *speeds)


def wrong_copies(cluster: Cluster, workers: Sequence[Worker]) -> tuple[int, dict[str, str]]:
    """Copy random bits from the program to each device of these workers, and between all workers.

    Returns:
        How many copies were tried, and {"/cpu:0 to /job:worker/task:0/gpu:1": what was wrong}.
    """
    words = np.random.default_rng(1).integers(0, 2**32, _COPY_BYTES // 4, np.uint32)
    own = [(cluster.home, device, [w]) for w in workers for device in w.devices]
    between = [(a.devices[0], b.devices[0], [a, b]) for a, b in itertools.permutations(workers, 2)]
    wrong = {}
    for source, target, ends in own + between:
        try:
            with cluster.cut_off(ends, _COPY_SECONDS):
                sent = _on(source, tf.constant(words.view(np.float32)))  # int32 stays on hosts
                found = _on(target, sent).numpy().view(np.uint32)
            different = int((found != words).sum())
            problem = different and f"{different} of {words.size} words arrived wrong"
        except tf.errors.OpError as error:
            problem = first_line(error)
        if problem:
            wrong[f"{source.removeprefix('/job:localhost')} to {target}"] = problem
    return len(own) + len(between), wrong


def _on(device: str, value: tf.Tensor) -> tf.Tensor:
    with tf.device(device):
        return tf.identity(value)


def _seconds(call: Callable[[], object], number: int) -> float:
    """Return the median time of a call, after one that warms up."""
    taken = []
    with contextlib.suppress(StopIteration):
        for _ in range(number + 1):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
