"""The workers of a program: connected, reserved, watched, released, and taken back.

    cluster = connect(["host1:2222", "host2:2222"])
    builder = towers.TowerBuilder(cluster.devices, gather_device=cluster.home)

A worker (`towers worker`) is TensorFlow's server, which runs in a folder of its own. Worker and
program exchange files there (`rendezvous`), which the program reads and writes with TensorFlow's
file ops on the worker's device: there is no other connection.

A heartbeat thread for each worker rewrites the program's reservation. A worker that does not answer
in time is lost: its connections are shut, so that calls that wait for it fail as they do when a
worker is killed.
"""

import atexit
import contextlib
import dataclasses
import gc
import itertools
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

import towers
from towers import tf_internals
from towers.builder.device_types import HOST, PROGRAM
from towers.devices import remote
from towers.errors import InputError, RunError
from towers.formatting import count, first_line, table
from towers.options.parts import DeviceOptions
from towers.workers import bind_filter, rendezvous
from towers.workers.addresses import check_distinct, find_workers, resolve, responds
from towers.workers.rendezvous import Message, Reservation, WorkerInfo

TIMEOUT_SECONDS = 15.0
_HEARTBEATS = 5  # in the timeout
_SHUT_SECONDS = 0.1  # pause between shutting connections: gRPC opens them again
_STARVED_SECONDS = 1.0  # a thread that wakes so late was kept from it by Python's lock
_PATIENCE_SECONDS = 8.0  # for a worker that is free again to start a new server
_BUSY_SECONDS = 60.0  # pause before another program's worker is asked again: it costs a rebuild
_PARTING_SECONDS = 2.0  # for disconnecting from workers that are not available
_POLL_SECONDS = 1.0  # pause between checks of lost workers
_NO_ANSWER = (
    "does not answer: start `towers worker --address={}` there, or open the port to this machine"
)


@dataclasses.dataclass
class Worker:
    """A worker: its address, its devices, and whether this program has it."""

    address: str  # host:port
    task: int  # its number: "/job:worker/task:1"
    info: WorkerInfo = dataclasses.field(default_factory=WorkerInfo)
    devices: list[str] = dataclasses.field(default_factory=list)  # of its towers
    is_alive: bool = False
    last_answer: float = 0.0  # by time.monotonic
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # held during calls
    problem: str = ""  # why it is lost or not available
    busy_until: float = 0.0  # by time.monotonic: when to ask it again
    heartbeat: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Return "/job:worker/task:1"."""
        return f"/job:worker/task:{self.task}"

    @property
    def host(self) -> str:
        """Return the device on which the worker's files are read."""
        return self.name + HOST

    def __str__(self) -> str:
        """Return the name for people."""
        return f"worker {self.task} ({self.address})"


class Cluster:
    """The workers of a program.

    Attributes:
        workers: all of them, also the lost ones.
        home: the device of the program on which towers' results are gathered.
        returned: whether a lost worker responds again, see `watch_for_returns`.
    """

    home = PROGRAM + HOST

    def __init__(self, addresses: Sequence[str], towers_per_worker: int, timeout_seconds: float):
        """Set the workers; connect to none yet.

        Args:
            addresses: of the workers, HOST:PORT.
            towers_per_worker: 0: one on each GPU of a worker, else one.
            timeout_seconds: without an answer, after which a worker is lost.
        """
        check_distinct(addresses)
        self.workers = [Worker(address, task) for task, address in enumerate(addresses)]
        self.towers_per_worker, self.timeout_seconds = towers_per_worker, timeout_seconds
        self.returned = False
        self._id = secrets.token_hex(8)
        self._own_address = _address_towards(addresses[0])
        self._port, self._is_filtered = 0, False  # of this program; the workers connect to it
        self._closing = threading.Event()

    @property
    def devices(self) -> list[str]:
        """Return the devices of the towers on the workers that are alive, worker by worker."""
        return [device for worker in self.alive() for device in worker.devices]

    def alive(self) -> list[Worker]:
        """Return the workers that this program has."""
        return [worker for worker in self.workers if worker.is_alive]

    def open(self, at_least: int = 0) -> None:
        """Reserve all workers that are available.

        Args:
            at_least: number of workers that is enough; 0: all.

        Raises:
            InputError: there are too few; each that is missing, busy or too old is named.
        """
        if at_least > len(self.workers):
            raise InputError(
                f"--min_workers={at_least}, but --workers has {count(len(self.workers), 'worker')}"
                f": name more of them, or type --min_workers={len(self.workers)}"
            )
        self._reserve(self.workers)
        if len(self.alive()) < (at_least or len(self.workers)):
            missing = [f"{w} {w.problem}" for w in self.workers if not w.is_alive]
            self.close()
            raise InputError(f"--workers: {'; '.join(missing)}")

    def report(self) -> list[str]:
        """Return lines: a table of the workers, and the missing ones."""
        header, rows = ("worker", "address", "host", "towers", "TensorFlow", "device"), []
        for worker in self.alive():
            info = worker.info
            products = ", ".join(sorted({device.what for device in info.devices}))
            where = worker.task, worker.address, info.host, len(worker.devices)
            rows.append((*where, info.tensorflow, products))
        where = f"at {self._own_address} alone" if self._is_filtered else "at all its addresses"
        return [
            "workers",
            *(f"  {line}" for line in table(header, rows)),
            *(f"  without {w}: it {w.problem}" for w in self.workers if not w.is_alive),
            f"  this program listens on port {self._port} {where}, for the workers; close it to "
            "all others",
        ]

    def find_lost(self) -> list[Worker]:
        """Return the workers that were alive and do not respond."""
        seconds = self.timeout_seconds / _HEARTBEATS
        for worker, answer in _ask_each(self.alive(), lambda w: responds(w.address, seconds)):
            if not answer:
                worker.problem = worker.problem or "is gone"
        return [worker for worker in self.alive() if worker.problem]

    def drop_lost(self) -> list[Worker]:
        """Disconnect from lost workers, so that the others can go on; return the lost ones.

        Variables on the other workers are lost, too: the caller must rebuild everything.
        """

        def ownership_problem(worker: Worker) -> str:
            try:
                owner = self._read(worker, rendezvous.OWNER_FILE, Reservation)
            except tf.errors.OpError as error:
                return f"does not answer: {first_line(error)}"
            return "" if owner and owner.id == self._id else "was started again"

        dropped, lost = [], [worker for worker in self.alive() if worker.problem]
        while True:
            for worker in lost:
                worker.is_alive = False
            with self.cut_off(lost):
                self._connect()
            dropped += lost
            # A worker that was restarted does not know this program any more.
            for worker, problem in _ask_each(self.alive(), ownership_problem):
                worker.problem = worker.problem or problem
            if not (lost := [worker for worker in self.alive() if worker.problem]):
                return dropped

    def watch_for_returns(self) -> None:
        """Set `returned`, from a thread, once a lost worker responds again."""
        self.returned = False

        def watch() -> None:
            while not self.returned and not self._closing.wait(_POLL_SECONDS):
                self.returned = any(responds(worker.address, 1.0) for worker in self._absent())

        if len(self.alive()) < len(self.workers):
            threading.Thread(target=watch, name="lost workers", daemon=True).start()

    def _absent(self) -> list[Worker]:
        now = time.monotonic()
        return [w for w in self.workers if not w.is_alive and w.busy_until < now]

    def take_back(self, at_least: int) -> bool:
        """Reserve the workers that respond again; wait for `at_least`, return whether they came.

        Variables on all workers are lost if there are new ones.
        """
        until = time.monotonic() + self.timeout_seconds + _PATIENCE_SECONDS
        while True:
            answers = _ask_each(self._absent(), lambda worker: responds(worker.address, 1.0))
            if back := [worker for worker, answer in answers if answer]:
                self._reserve(back, patience=self.timeout_seconds)
            if len(self.alive()) >= at_least or time.monotonic() > until:
                return len(self.alive()) >= at_least
            time.sleep(0.2)

    def close(self) -> None:
        """Release all workers: they are free for other programs within seconds."""
        self._closing.set()
        for worker in self.alive():
            worker.is_alive = False
            with contextlib.suppress(tf.errors.OpError):
                self._write_reservation(worker, released=True)
        with self.cut_off([worker for worker in self.workers if worker.problem]):
            self._connect()
        if remote.current_cluster() is self:
            remote.set_cluster(None)
        atexit.unregister(self.close)

    def _reserve(self, wanted: Sequence[Worker], patience: float = _PATIENCE_SECONDS) -> None:
        """Reserve the available ones of these workers; set `problem` of the others."""
        until, left = time.monotonic() + patience, list(wanted)

        def wait(worker: Worker) -> bool:
            while not (answer := responds(worker.address, 2.0)) and time.monotonic() < until:
                time.sleep(0.2)
            return answer

        while left:
            answered = []
            for worker, answer in _ask_each(left, wait):
                worker.info = WorkerInfo()  # it stays empty if the worker stops to answer
                worker.problem = "" if answer else _NO_ANSWER.format(worker.address)
                if answer:
                    answered.append(worker)
            answered = self._connect_servers(answered)
            for worker, problem in _ask_each(answered, self._reserve_one):
                worker.problem, worker.is_alive = problem, not problem
                if problem and worker.info != WorkerInfo():  # it does not fit, or is another's
                    worker.busy_until = time.monotonic() + _BUSY_SECONDS
            if refused := [worker for worker in answered if not worker.is_alive]:
                with self.cut_off(refused, after=_PARTING_SECONDS):
                    self._connect()
            # One whose server ends just now, as another program has released it, is asked again.
            left = [w for w in left if w.info == WorkerInfo() and time.monotonic() < until]
        for worker in wanted:
            if worker.is_alive:
                worker.heartbeat = threading.Thread(target=self._beat, args=[worker], daemon=True)
                worker.heartbeat.start()

    def _connect_servers(self, answered: list[Worker]) -> list[Worker]:
        """Connect to those workers that are TensorFlow's servers, and return them."""
        with self.cut_off(answered, after=self.timeout_seconds):
            while True:
                try:
                    self._connect(*answered)
                    return answered
                except tf.errors.OpError as error:
                    if not answered:
                        raise
                    named = re.search(r"/job:worker/replica:0/task:(\d+)", str(error))
                    foreign = [w for w in answered if named and w.task == int(named[1])] or answered
                    problem = f"is no TensorFlow server ({first_line(error)}): name another address"
                    for worker in foreign:
                        worker.problem = problem
                    answered = [worker for worker in answered if worker not in foreign]

    def _reserve_one(self, worker: Worker) -> str:
        """Reserve a connected worker; return why it is not available, "" if it is."""
        try:
            worker.info = self._read(worker, rendezvous.INFO_FILE, WorkerInfo) or WorkerInfo()
            if problem := self._mismatch(worker):
                return problem
            until = time.monotonic() + _PATIENCE_SECONDS
            while time.monotonic() < until:
                self._write_reservation(worker)
                owner = self._read(worker, rendezvous.OWNER_FILE, Reservation)
                if owner and owner.id == self._id:
                    worker.last_answer = time.monotonic()
                    return ""
                time.sleep(0.1)
        except tf.errors.OpError as error:
            worker.info = WorkerInfo()
            return f"does not answer: {first_line(error)}"
        if owner and owner.id:
            return f"is busy: {owner} has it; wait for its end, or name another worker"
        return "does not give itself to anybody: start `towers worker` there again"

    def _mismatch(self, worker: Worker) -> str:
        """Return why a worker does not fit this program, "" if it does."""
        info = worker.info
        for package, expected in ("towers", towers.__version__), ("tensorflow", tf.__version__):
            version = getattr(info, package)
            if version.split(".")[:2] != expected.split(".")[:2]:
                return (
                    f"has {package} {version}, and this program {expected}: install the same "
                    "version on both"
                )
        if tf_internals.ops_are_deterministic() and not info.deterministic:
            return "is not deterministic: start `towers worker --deterministic` there"
        if info.deterministic and not tf_internals.ops_are_deterministic():
            return "is deterministic, and this program is not: type --deterministic here, too"
        there = len(info.devices) if info.kind == "gpu" else info.num_cpu_devices
        wanted = self.towers_per_worker or (there if info.kind == "gpu" else 1)
        if wanted > there:
            return (
                f"has {count(there, f'{info.kind.upper()} device')}, and --towers_per_worker="
                f"{wanted} asks for more: type --towers_per_worker={there}"
            )
        worker.devices = [f"{worker.name}/{info.kind}:{i}" for i in range(wanted)]
        return ""

    def _beat(self, worker: Worker) -> None:
        pause = self.timeout_seconds / _HEARTBEATS
        while worker.is_alive:
            until = time.monotonic() + pause
            if self._closing.wait(pause):
                return
            # Time in which Python's lock was held, as while TensorFlow registers a large function,
            # does not count.
            worker.last_answer += max(time.monotonic() - until, 0.0)
            try:
                self._write_reservation(worker)
            except tf.errors.OpError:
                silent = time.monotonic() - worker.last_answer
                if silent > self.timeout_seconds:
                    worker.problem = worker.problem or f"has not answered for {silent:.0f} s"
                    while worker.is_alive and not self._closing.wait(_SHUT_SECONDS):
                        _shut_connections([worker])  # others may wait for it still
                pause = _SHUT_SECONDS
                continue
            worker.last_answer, pause = time.monotonic(), self.timeout_seconds / _HEARTBEATS

    def _read(self, worker: Worker, name: str, kind: type[Message]) -> Message | None:
        with self._asking(worker):
            return rendezvous.from_text(kind, remote.read_file(worker.host, name))

    def _write_reservation(self, worker: Worker, released: bool = False) -> None:
        who = self._id, socket.gethostname(), os.getpid(), rendezvous.user_name()
        address = f"{self._own_address}:{self._port}"
        reservation = Reservation(*who, self.timeout_seconds, released, address)
        with self._asking(worker):
            with tf.device(self.home):
                name = tf.constant(rendezvous.reservation_file(self._id))
                text = tf.constant(rendezvous.to_text(reservation))
            with tf.device(worker.host):
                tf.raw_ops.WriteFile(filename=name, contents=text)

    @contextlib.contextmanager
    def _asking(self, worker: Worker) -> Iterator[None]:
        """Make ops in the block fail with an OpError if the worker does not answer in time."""
        with worker.lock:
            now = time.monotonic()
            left = self.timeout_seconds - (now - (worker.last_answer or now))
            with self.cut_off([worker], after=max(left, 0.5)), tf_internals.unary_rpcs():
                yield

    def _connect(self, *more: Worker) -> None:
        """Connect to the workers that are alive and to `more`; disconnect from all others.

        TensorFlow holds Python's lock meanwhile and waits for other threads' calls to workers: a
        deadlock, unless there are none.
        """
        for worker in self.workers:
            if worker.heartbeat and not worker.is_alive:
                worker.heartbeat.join()
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(worker.lock)
            tasks = {worker.task: worker.address for worker in [*self.alive(), *more]}
            self._port = tf_internals.connect({"worker": tasks}, self._own_address)
        try:
            bind_filter.only_to(self._own_address.strip("[]"), self._port)
            self._is_filtered = True
        except RunError:
            self._is_filtered = False

    @contextlib.contextmanager
    def cut_off(self, workers: Sequence[Worker], after: float = 0.0) -> Iterator[None]:
        """Make calls to workers fail with an OpError if the block takes too long.

        The workers' connections are shut, again and again, for all threads of this process.

        Args:
            workers: those that calls wait for.
            after: seconds that the block may take; 0: they fail at once.
        """
        done = threading.Event()

        def shut() -> None:
            pause = after
            while True:
                until = time.monotonic() + pause
                if done.wait(pause):
                    return
                if time.monotonic() - until > _STARVED_SECONDS:
                    pause = _STARVED_SECONDS  # an answer may wait to be read
                    continue
                pause = _SHUT_SECONDS
                _shut_connections(workers)

        thread = threading.Thread(target=shut, name="connections", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def connect(
    workers: str | Sequence[str],
    towers_per_worker: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
    min_workers: int = 0,
) -> Cluster:
    """Reserve the workers at these addresses for this program, until it ends.

    Call it before anything creates a variable: TensorFlow loses values that are assigned to a
    variable that is older than the connection.

    Args:
        workers: "host1:2222,host2:2222", or another value of `--workers`; or a list of addresses.
        towers_per_worker: towers of each; 0: one on each of its GPUs, else one.
        timeout_seconds: time without an answer after which a worker is lost.
        min_workers: number of workers that is enough; 0: all.

    Returns:
        The workers, whose `devices` are those of the towers.

    Raises:
        InputError: a worker is missing, busy or too old, or an address is malformed.
    """
    text = workers if isinstance(workers, str) else ",".join(workers)
    addresses = find_workers(text, os.environ)
    if not tf_internals.was_connected():
        variables = [v for v in gc.get_objects() if isinstance(v, tf.Variable) and v.trainable]
        if variables:
            warnings.warn(
                f"{count(len(variables), 'variable')} made before workers were connected to, as "
                f"{variables[0].name}, lose what is assigned to them from now on: build models "
                "after towers.devices.connect, or in another process",
                stacklevel=2,
            )
    if (before := remote.current_cluster()) is not None:
        same = [worker.address for worker in before.workers] == addresses
        if same and before.towers_per_worker == towers_per_worker:
            return before
        before.close()
    cluster = Cluster(addresses, towers_per_worker, timeout_seconds)
    cluster.open(min_workers)
    atexit.register(cluster.close)
    remote.set_cluster(cluster)
    return cluster


def connect_run(options: DeviceOptions, goes_on: bool = False) -> Cluster | None:
    """Connect to the workers that a run's options name; None if they name none.

    Args:
        options: of the run.
        goes_on: whether one worker is enough unless the options ask for more; else all are needed.

    Raises:
        InputError: there are too few workers, or another number of towers was asked for.
    """
    if not options.workers:
        return None
    if options.devices:
        raise InputError(
            f"--devices={options.devices} is of this machine's devices, and --workers has the "
            "towers on theirs: leave one of them out; --towers_per_worker=N asks for N on each"
        )
    where = options.workers, options.towers_per_worker, options.worker_timeout_seconds
    cluster = connect(*where, options.min_workers or int(goes_on))
    number, whole = len(cluster.devices), len(cluster.alive()) == len(cluster.workers)
    if whole and options.num_towers not in (0, number):
        cluster.close()
        raise InputError(
            f"--num_towers={options.num_towers}, but {count(len(cluster.workers), 'worker')} have "
            f"{count(number, 'tower')}: type --num_towers=0; --towers_per_worker=N has N on each"
        )
    return cluster


def alternating_devices(options: DeviceOptions, numbers: Sequence[int]) -> list[str]:
    """Connect to the options' workers; return their devices, alternating between the workers.

    Args:
        options: of the run; without `towers_per_worker` each has as many as needed.
        numbers: the numbers of towers to try.

    Returns:
        The devices; [] if the options name no workers.

    Raises:
        InputError: as `connect_run`, or there are too few devices.
    """
    if not options.workers:
        return []
    num_workers = len(find_workers(options.workers, os.environ))
    each = options.towers_per_worker or -(-max(numbers) // num_workers)
    cluster = connect_run(dataclasses.replace(options, towers_per_worker=each))
    turns = itertools.zip_longest(*(worker.devices for worker in cluster.alive()))
    devices = [device for turn in turns for device in turn if device]
    if max(numbers) > len(devices):
        raise InputError(
            f"--num_towers={','.join(map(str, numbers))}: the workers have "
            f"{count(len(devices), 'tower')}; ask for at most {len(devices)}, or for more of each "
            "with --towers_per_worker"
        )
    return devices


def _ask_each(workers: Sequence[Worker], ask: Callable[[Worker], Any]) -> list[tuple[Worker, Any]]:
    # Asks in parallel; returns (worker, its answer) for each.
    with ThreadPoolExecutor(len(workers) or 1) as pool:
        return list(zip(workers, pool.map(ask, workers), strict=True))


def _address_towards(address: str) -> str:
    # The address of this machine at which a worker can reach it.
    with contextlib.suppress(OSError):  # connecting to the worker will fail
        for family, where in resolve(address)[:1]:
            with socket.socket(family, socket.SOCK_DGRAM) as route:
                route.connect(where)  # sends nothing
                ip = route.getsockname()[0]
            return f"[{ip}]" if ":" in ip else ip
    return "127.0.0.1"


def _shut_connections(workers: Sequence[Worker]) -> None:
    peers = {where[:2] for worker in workers for _, where in resolve(worker.address)}
    for connection in bind_filter.open_sockets():
        with contextlib.suppress(OSError):
            host, port = connection.getpeername()[:2]
            if (host.removeprefix("::ffff:"), port) in peers:
                connection.shutdown(socket.SHUT_RDWR)
