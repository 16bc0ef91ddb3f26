"""The workers of a program: taken, watched, and what a run does when one is lost.

    cluster = connect(["host1:2222", "host2:2222"])
    builder = towers.TowerBuilder(cluster.devices, gather_device=cluster.home)

A program connects once. A heartbeat thread for each worker rewrites the program's lock file there;
a worker that does not answer it in time is lost. Nothing is mended inside the process: the run is
saved, and its command is run again with the workers that answer.
"""

import atexit
import contextlib
import dataclasses
import gc
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

import towers
from towers import signals, tf_internals
from towers.devices import remote
from towers.errors import InputError, first_line
from towers.formatting import count, printable, table
from towers.options.parts import DeviceOptions
from towers.workers.addresses import find_workers, join_address, parse_address
from towers.workers.lock import INFO_FILE, Link, Lock, WorkerInfo, own_lock

TIMEOUT_SECONDS = 15.0
_BEATS = 5  # heartbeats in the timeout
_CALL_SECONDS = 3.0  # for a single answer
_PATIENCE_SECONDS = 6.0  # for a worker whose program has just left it to start a new server
_SETTLE_SECONDS = 0.5  # for the worker's supervisor to see who came first
_GRACE_SECONDS = 3.0  # for the main thread to see by itself that a worker is lost
_CONNECTION_ERRORS = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker of this program."""

    address: str  # host:port
    link: Link | None = None
    info: WorkerInfo | None = None
    name: str = ""  # "/job:worker/task:1", once it is taken
    problem: str = ""  # why it is lost or not available

    def devices(self, number: int) -> list[str]:
        """Return the devices of `number` towers; 0: one on each GPU, or one without GPUs."""
        number = number or (self.info.num_devices if self.info.kind == "gpu" else 1)
        return [f"{self.name}/{self.info.kind}:{i}" for i in range(number)]


class TooFewWorkers(InputError):
    """A program has too few workers: they are missing, busy or too old."""


class Cluster:
    """The workers that a program has.

    Attributes:
        workers: all that it was given, also those that are not available.
        devices: of the towers; the workers take turns.
        home: the device of the program on which towers' results are gathered.
    """

    home = "/job:localhost/replica:0/task:0/cpu:0"

    def __init__(self, addresses: Sequence[str], towers_per_worker: int, timeout_seconds: float):
        """Take no worker yet, see `connect`."""
        self.workers = [Worker(address) for address in addresses]
        self.towers_per_worker, self.timeout_seconds = towers_per_worker, timeout_seconds
        self.devices: list[str] = []
        self._own_address = _own_address(addresses[0])
        self._lock = own_lock(timeout_seconds)
        self._closing, self._leaving = threading.Event(), threading.Lock()
        self._run: tuple[Callable, Callable] | None = None  # see `saved_when_lost`
        self.at_least = 1  # number of workers with which a command is run again
        self._ended = ""  # why a run has ended

    def alive(self) -> list[Worker]:
        """Return the workers that this program has."""
        return [worker for worker in self.workers if not worker.problem]

    def open(self, at_least: int = 0) -> None:
        """Take all workers that are available, and connect TensorFlow to them.

        Args:
            at_least: number of workers that is enough; 0: all.

        Raises:
            TooFewWorkers: each that is missing, busy or too old is named.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        for worker in self.workers:
            worker.problem = self._take(worker, until)
            if not worker.problem:
                threading.Thread(target=self._beat, args=[worker], daemon=True).start()
        taken = self.alive()
        if len(taken) < (at_least or len(self.workers)):
            self.close()
            raise TooFewWorkers(f"--workers: {'; '.join(self._missing())}")
        for task, worker in enumerate(taken):
            worker.name = f"/job:worker/task:{task}"
        spec = {"worker": [w.address for w in taken], "localhost": [self._own_address]}
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(spec), "localhost")
        turns = itertools.zip_longest(*(w.devices(self.towers_per_worker) for w in taken))
        self.devices = [device for turn in turns for device in turn if device]
        atexit.register(self.close)

    def report(self) -> list[str]:
        """Return lines: a table of the workers, and the missing ones."""
        header, rows = ("worker", "address", "towers", "device"), []
        for worker in self.alive():
            number = len(worker.devices(self.towers_per_worker))
            kinds = ", ".join(dict.fromkeys(d.partition(" -> ")[2] for d in worker.info.devices))
            rows.append((worker.name, worker.address, number, kinds))
        port = self._own_address.rpartition(":")[2]
        return [
            "workers",
            *(f"  {line}" for line in table(header, rows)),
            *(f"  without {line}" for line in self._missing()),
            f"  they connect to port {port} of this program; a firewall should block all others",
        ]

    def close(self) -> None:
        """Release all workers: they are free for other programs within seconds."""
        self._closing.set()
        for worker in self.alive():
            with contextlib.suppress(tf.errors.OpError):
                worker.link.release(self._lock)

    @contextlib.contextmanager
    def saved_when_lost(
        self, save: Callable[[], str], say: Callable[[str], None]
    ) -> Iterator[None]:
        """Save the run in the block if a worker is lost, and run its command again.

        Args:
            save: saves the state before the call in progress; returns what the run continues from,
                "" if there is nothing yet.
            say: prints a line.

        Raises:
            DevicesLost: the run is saved, and the command is not run again.
        """
        self._run = save, say
        try:
            yield
        except Exception as error:
            if self._find_lost() or isinstance(error, _CONNECTION_ERRORS):
                if line := self._leave(first_line(error)):
                    raise remote.DevicesLost(line) from None
            raise
        finally:
            self._run = None

    def _missing(self) -> list[str]:
        return [f"{worker.address}: it {w}" for worker in self.workers if (w := worker.problem)]

    def _take(self, worker: Worker, until: float) -> str:
        """Take a worker for this program; return why it is not available, "" if it is."""
        before: Lock | None = None
        written = False
        while True:
            try:
                link = Link(worker.address, _CALL_SECONDS)
                worker.info = link.read(WorkerInfo, INFO_FILE)
                if problem := self._mismatch(worker.info):
                    return problem
                lock = link.lock()
                if lock is None:
                    link.write(self._lock)
                    written = True
                    time.sleep(_SETTLE_SECONDS)
                    lock = link.lock()
                problem = f"is busy: {printable(lock.owner)} uses it" if lock else "is not ready"
                if lock and lock.id == self._lock.id:
                    if not written:
                        return "is named twice; name each worker once"
                    worker.link = Link(worker.address, self.timeout_seconds)
                    worker.link.beat(self._lock)
                    return ""
                if lock and before and lock.beat != before.beat:
                    return f"{problem}; wait until it ends, or name another worker"
                if lock and not before:  # its program may be dead
                    until = max(until, time.monotonic() + lock.timeout_seconds + _PATIENCE_SECONDS)
                before = lock or before
            except tf.errors.NotFoundError:
                problem = "is not a worker; start `towers worker` there"
            except tf.errors.OpError:
                problem = (
                    f"does not answer; start `towers worker --address={worker.address}` there, or "
                    "open the port to this machine"
                )
            if time.monotonic() > until:
                return problem
            time.sleep(0.2)

    def _mismatch(self, info: WorkerInfo | None) -> str:
        """Return why a worker does not fit this program, "" if it does."""
        if info is None:
            return "has another version of towers; install the same version on both"
        for package, expected in ("towers", towers.__version__), ("tensorflow", tf.__version__):
            version = getattr(info, package)
            if version.split(".")[:2] != expected.split(".")[:2]:
                return (
                    f"has {package} {version}, but this program has {expected}; install the same "
                    "version on both"
                )
        if info.deterministic != tf_internals.ops_are_deterministic():
            which, where = ("", "here") if info.deterministic else ("not ", "there")
            return f"is {which}deterministic, unlike this program; type --deterministic {where}"
        if self.towers_per_worker > info.num_devices:
            has = count(info.num_devices, f"{info.kind.upper()} device")
            return f"has {has}; type --towers_per_worker={info.num_devices}"
        return ""

    def _beat(self, worker: Worker) -> None:
        """Be the heartbeat thread of a worker."""
        try:
            while not self._closing.wait(self.timeout_seconds / _BEATS):
                worker.link.beat(self._lock)
        except tf.errors.OpError as error:
            worker.problem = worker.problem or f"does not answer ({first_line(error)})"
            if not self._closing.wait(_GRACE_SECONDS):
                self._leave()  # a call may wait for the worker for ever

    def _find_lost(self) -> list[Worker]:
        """Ask each worker, and return those that do not answer."""
        for worker in self.alive():
            try:
                Link(worker.address, _CALL_SECONDS).beat(self._lock)
            except tf.errors.OpError as error:
                worker.problem = worker.problem or f"does not answer ({first_line(error)})"
        return [worker for worker in self.workers if worker.name and worker.problem]

    def _leave(self, error: str = "") -> str:
        """Save the run, and run its command again with the workers that are left.

        Called in the main thread, or in that of a heartbeat while the main thread waits for a lost
        worker. If the command is not run again, the main thread returns the message that says why.
        Another thread ends the process with it, or prints it in a program of the user.
        """
        with self._leaving:  # the first thread that comes does it
            if not self._run:
                return self._ended
            (save, say), self._run = self._run, None
            lost = [worker for worker in self.workers if worker.name and worker.problem]
            for worker in lost:
                say(f"lost        worker {worker.address}: it {worker.problem}")
            where, left = save(), len(self.alive())
            there = f"{count(left, 'worker')} of {len(self.workers)} left"
            listener = signals.owner()
            stays = not listener or listener.asked  # it is another program, or a signal ends it
            if lost and where and not stays and left >= self.at_least:
                say(f"restarting  from {where}: {there}")
                self.close()
                workers = ",".join(worker.address for worker in self.workers)
                listener.run_again(f"--workers={workers}", "--overwrite=false")
            saved = f"{where} is saved" if where else "nothing was written"
            why = there if lost else f"the connection to workers failed: {error}"
            self._ended = line = f"stopped: {why}; {saved}; the same command resumes the run"
            if threading.current_thread() is not threading.main_thread():
                if listener:
                    self.close()
                    listener.leave(signals.EXIT_STOPPED, line)
                say(f"{line} once this process has ended")
            return line


def connect(
    workers: str | Sequence[str],
    towers_per_worker: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
    min_workers: int = 0,
) -> Cluster:
    """Take the workers at these addresses for this program, until it ends.

    Call it before anything creates a variable: TensorFlow loses values that are assigned to a
    variable that is older than the connection. A process connects to one set of workers.

    Args:
        workers: "host1:2222,host2:2222", or another value of `--workers`; or a list of addresses.
        towers_per_worker: towers of each; 0: one on each of its GPUs, or one without GPUs.
        timeout_seconds: time without an answer after which a worker is lost.
        min_workers: number of workers that is enough; 0: all.

    Returns:
        The workers, whose `devices` are those of the towers.

    Raises:
        InputError: a worker is missing, busy or too old, an address is malformed, or the process
            has variables already.
    """
    text = workers if isinstance(workers, str) else ",".join(workers)
    addresses = find_workers(text)
    if min_workers > len(addresses):
        raise InputError(
            f"--min_workers={min_workers}, but --workers has {count(len(addresses), 'worker')}; "
            f"name more workers, or type --min_workers={len(addresses)}"
        )
    if before := remote.current_cluster():
        then = [worker.address for worker in before.workers], before.towers_per_worker
        lost = any(w.name and w.problem for w in before.workers)
        if lost or then != (addresses, towers_per_worker):
            raise InputError(
                f"--workers={text}: this process was connected to {', '.join(then[0])}, and "
                "TensorFlow can connect only once; start another process"
            )
        return before
    if any(issubclass(type(v), tf.Variable) and v.trainable for v in gc.get_objects()):
        raise InputError(
            f"--workers={text}: call towers.devices.connect before the first model is built, or "
            "start another process; TensorFlow loses values assigned to older variables"
        )
    cluster = Cluster(addresses, towers_per_worker, timeout_seconds)
    cluster.open(min_workers)
    remote.set_cluster(cluster)
    return cluster


def connect_run(
    options: DeviceOptions, continues: bool = False, num_towers: int = 0
) -> Cluster | None:
    """Connect to the workers that a run's options name; None if they name none.

    Args:
        options: of the run.
        continues: whether the run has a checkpoint: then one worker is enough, unless the options
            ask for more.
        num_towers: how many are needed, on whatever number of each worker; 0: as the options say.

    Raises:
        InputError: there are too few workers, or devices of this machine were asked for, too.
        DevicesLost: there are too few workers for a run that continues.
    """
    if not options.workers:
        return None
    if options.devices not in ("", "any") or options.num_towers:
        raise InputError(
            f"--workers={options.workers} puts the towers on other machines, but --devices and "
            "--num_towers are for this one; leave them out; --towers_per_worker=N has N on each"
        )
    each = options.towers_per_worker or -(-num_towers // len(find_workers(options.workers)))
    where = options.workers, each, options.worker_timeout_seconds
    try:
        cluster = connect(*where, options.min_workers or int(continues))
        cluster.at_least = max(options.min_workers, 1)
    except TooFewWorkers as error:
        if not continues:
            raise
        raise remote.DevicesLost(f"stopped: {error}; the same command resumes the run") from None
    if num_towers > (there := len(cluster.devices)):
        raise InputError(
            f"--num_towers={num_towers}: the workers have {count(there, 'tower')}; ask for that at "
            "most, or for more on each with --towers_per_worker"
        )
    return cluster


def _own_address(address: str) -> str:
    """Return this machine's address at which a worker can reach it, with a free port."""
    ip = "127.0.0.1"
    with contextlib.suppress(OSError):  # connecting to the worker will fail
        host, port = parse_address(address, "workers")
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(where)  # sends nothing
            ip = route.getsockname()[0]
    with socket.create_server(("", 0)) as free:
        return join_address(ip, free.getsockname()[1])
