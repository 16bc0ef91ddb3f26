"""The workers of a program: found, claimed, watched, let go, and taken back.

    cluster = connect(["host1:2222", "host2:2222"])
    builder = towers.TowerBuilder(cluster.devices, gather_device=cluster.home)

A worker (`towers worker`) is TensorFlow's server, which runs in a folder of its own. What worker
and program have to say to each other stands there in files (`rendezvous`), which the program reads
and writes by TensorFlow's own file ops on the worker's device: there is no other connection.

A thread for each worker writes the program's claim again and again. Who does not answer for the
timeout is lost: its connections are shut, so that a call that waits for it fails as it does when a
worker is killed.
"""

import atexit
import contextlib
import dataclasses
import gc
import os
import re
import secrets
import socket
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import towers
from towers import tf_private
from towers.builder.kinds import HOST, PROGRAM
from towers.devices import remote
from towers.errors import InputError, RunError
from towers.options.run import Options
from towers.text import count, first_line, table
from towers.workers import bind_filter, rendezvous
from towers.workers.addresses import check_distinct, find_workers, greets, parse_address
from towers.workers.rendezvous import Claim, Lease, Notice, Offer

TIMEOUT_SECONDS = 15.0
_BEATS = 5  # in the time after which a worker is lost
_CUT_SECONDS = 0.1  # from one shutting of connections to the next: gRPC opens them again
_STARVED_SECONDS = 1.0  # that a thread wakes up too late, as it does without Python's lock
_PATIENCE_SECONDS = 8.0  # a worker that is free again needs some for a new server
_BUSY_SECONDS = 60.0  # to the next look at one that another program has: it has the run built anew
_PARTING_SECONDS = 2.0  # in which a worker that cannot be had may hear so
_LOOK_SECONDS = 1.0  # from one look for lost workers to the next
_CLOCKS_SECONDS = 2.0  # by which they may differ without a word
_NO_ANSWER = (
    "does not answer: start `towers worker --address={}` there, or see what lies between by "
    "`towers doctor --workers`"
)

@dataclasses.dataclass
class Worker:
    """A worker: where it is, what it offers, and whether this program has it."""

    address: str  # host:port
    task: int  # its place among all: "/job:worker/task:1"
    offer: Offer = dataclasses.field(default_factory=Offer)
    devices: list[str] = dataclasses.field(default_factory=list)  # of its towers
    is_alive: bool = False
    clock_seconds: float = 0.0  # its clock's minus that of the program
    heard_at: float = 0.0  # when it last answered, by time.monotonic
    asking: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    lost_because: str = ""
    busy_until: float = 0.0  # by time.monotonic: that it is asked again before makes no sense

    @property
    def name(self) -> str:
        """Return "/job:worker/task:1"."""
        return f"/job:worker/task:{self.task}"

    @property
    def host(self) -> str:
        """Return the device on which its files are read."""
        return f"{self.name}/cpu:0"

    def __str__(self) -> str:
        """Return how a person knows it."""
        return f"worker {self.task} ({self.address})"


class Cluster:
    """The workers that a program has, see the module; `workers` are all, also those lost.

    Attributes:
        home: the device of the program on which towers' results are gathered.
        returned: whether a worker that was lost answers again, see `look_for_the_lost`.
    """

    home = PROGRAM + HOST

    def __init__(
        self,
        addresses: Sequence[str],
        towers_per_worker: int = 0,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ):
        """Connect to nothing yet; two names of one worker are an InputError."""
        check_distinct(addresses)
        self.workers = [Worker(address, task) for task, address in enumerate(addresses)]
        self.towers_per_worker, self.timeout_seconds = towers_per_worker, timeout_seconds
        self._id = secrets.token_hex(8)
        self._own_address = _address_towards(addresses[0])
        self.returned = False
        self._port, self._closed = 0, False  # of this program, to which the workers connect
        self._threads: dict[int, threading.Thread] = {}
        self._closing = threading.Event()

    @property
    def devices(self) -> list[str]:
        """Return the devices of the towers, worker by worker, of those that are there."""
        return [device for worker in self.alive() for device in worker.devices]

    def is_on_loopback(self, machine: str) -> bool:
        """Tell whether a worker, "/job:worker/task:1", is reached by the loopback interface."""
        named = [worker.address for worker in self.workers if worker.name == machine]
        return bool(named) and _address_towards(named[0]) in ("localhost", "127.0.0.1", "[::1]")

    def alive(self) -> list[Worker]:
        """Return the workers that this program has."""
        return [worker for worker in self.workers if worker.is_alive]

    def open(self, at_least: int = 0) -> None:
        """Claim all workers that are there.

        Args:
            at_least: with how many workers to be content; 0: all.

        Raises:
            InputError: there are too few; each that is missing, busy or too old is named.
        """
        if at_least > len(self.workers):
            named = count(len(self.workers), "worker")
            raise InputError(
                f"--min_workers={at_least}, but --workers has {named}: name more of them, or type "
                f"--min_workers={len(self.workers)}"
            )
        self._claim(self.workers)
        if len(self.alive()) < (at_least or len(self.workers)):
            missing = [f"{w} {w.lost_because}" for w in self.workers if not w.is_alive]
            self.close()
            raise InputError(f"--workers: {'; '.join(missing)}")

    def report(self) -> list[str]:
        """Return the lines of a table of the workers, of those that are missing, and of doubts."""
        header = ("worker", "address", "host", "towers", "TensorFlow", "clock s", "device")
        rows = []
        for worker in self.alive():
            offer, clock = worker.offer, f"{worker.clock_seconds:+.3f}"
            what = ", ".join(sorted({device.what for device in offer.devices}))
            where = worker.task, worker.address, offer.host
            rows.append((*where, len(worker.devices), offer.tensorflow, clock, what))
        lines = ["workers", *(f"  {line}" for line in table(header, rows))]
        gone = [worker for worker in self.workers if not worker.is_alive]
        lines += [f"  without {worker}: it {worker.lost_because}" for worker in gone]
        where = f"at {self._own_address} alone" if self._closed else "at all its addresses"
        lines.append(
            f"  this program listens on port {self._port} {where}, for the workers; close it to "
            "all others"
        )
        return lines + self._doubts()

    def lost(self) -> list[Worker]:
        """Return the workers that were there and do not answer; whoever hangs is known already."""
        asked, seconds = self.alive(), self.timeout_seconds / _BEATS
        for worker, answer in zip(
            asked, _each(asked, lambda worker: greets(worker.address, seconds)), strict=True
        ):
            if not answer:
                self._lose(worker, "is gone")
        return [worker for worker in asked if worker.lost_because]

    def drop(self) -> list[Worker]:
        """Let go of workers that are lost, for those that are left to go on; return them.

        What lies on the others is gone, too: whoever calls builds everything anew.
        """
        dropped, gone = [], [worker for worker in self.alive() if worker.lost_because]
        while True:
            for worker in gone:
                worker.is_alive = False
            with self.cut_off(gone):
                for worker in gone:
                    if thread := self._threads.pop(worker.task, None):
                        thread.join()
                self._connect(self._tasks())
            dropped += gone
            self._ask_all()
            if not (gone := [worker for worker in self.alive() if worker.lost_because]):
                return dropped

    def _ask_all(self) -> None:
        """Find out which workers have lost this program, as one has that was started again."""
        asked = self.alive()
        for worker, problem in zip(asked, _each(asked, self._ask), strict=True):
            if problem:
                self._lose(worker, problem)

    def look_for_the_lost(self) -> None:
        """Look in a thread whether workers that were lost answer again, which sets `returned`."""
        self.returned = False

        def look() -> None:
            while not self.returned and not self._closing.wait(_LOOK_SECONDS):
                self.returned = bool(self._answering())

        if len(self.alive()) < len(self.workers):
            threading.Thread(target=look, name="lost workers", daemon=True).start()

    def _answering(self) -> list[Worker]:
        """Return the workers that were lost and answer again, but for those known to be busy."""
        now = time.monotonic()
        gone = [w for w in self.workers if not w.is_alive and w.busy_until < now]
        answers = _each(gone, lambda worker: greets(worker.address, 1.0))
        return [worker for worker, answer in zip(gone, answers, strict=True) if answer]

    def take_back(self) -> list[Worker]:
        """Claim the workers that answer again; return them. What lay on workers is gone."""
        back = self._answering()
        if not back:
            return []
        self._claim(back, patience=self.timeout_seconds)
        return [worker for worker in back if worker.is_alive]

    def wait_for(self, number: int) -> bool:
        """Tell whether so many workers are there, after waiting for those that come back."""
        until = time.monotonic() + self.timeout_seconds + _PATIENCE_SECONDS
        while len(self.alive()) < number and time.monotonic() < until:
            if not self.take_back():
                time.sleep(0.2)
        return len(self.alive()) >= number

    def close(self) -> None:
        """Let go of all workers: they are free for other programs within seconds."""
        self._closing.set()
        for worker in self.alive():
            worker.is_alive = False
            with contextlib.suppress(tf.errors.OpError):
                self._guarded(worker, lambda w=worker: self._write_claim(w, released=True))
        with self.cut_off([worker for worker in self.workers if worker.lost_because]):
            for thread in self._threads.values():
                thread.join()
            self._threads.clear()
            self._connect({})
        if remote.current() is self:
            remote.set_cluster(None)
        atexit.unregister(self.close)

    def _tasks(self) -> dict[int, str]:
        return {worker.task: worker.address for worker in self.alive()}

    def _claim(self, wanted: Sequence[Worker], patience: float = _PATIENCE_SECONDS) -> None:
        """Take what can be had of these workers; `lost_because` says why of the others.

        One whose server ends just now, as when another program has let go of it, is asked again.
        """
        until, left = time.monotonic() + patience, list(wanted)
        while left:
            self._claim_once(left, max(until - time.monotonic(), 0.0))
            left = [w for w in left if w.offer == Offer() and time.monotonic() < until]
        for worker in wanted:
            if worker.is_alive:
                self._watch(worker)

    def _claim_once(self, wanted: Sequence[Worker], patience: float) -> None:
        """Take what can be had; a worker that did not answer to the end has an empty offer."""
        answers = _each(wanted, lambda worker: _await(worker.address, patience))
        found = [worker for worker, answer in zip(wanted, answers, strict=True) if answer]
        for worker in wanted:
            worker.lost_because = "" if worker in found else _NO_ANSWER.format(worker.address)
            worker.offer = Offer()
        with self.cut_off(found, after=self.timeout_seconds):
            found = self._connect_to(found)
        for worker, problem in zip(found, _each(found, self._claim_one), strict=True):
            worker.lost_because, worker.is_alive = problem, not problem
            if problem and worker.offer != Offer():  # somebody else has it, or it does not fit
                worker.busy_until = time.monotonic() + _BUSY_SECONDS
        if refused := [worker for worker in found if not worker.is_alive]:
            with self.cut_off(refused, after=_PARTING_SECONDS):
                self._connect(self._tasks())

    def _connect_to(self, found: list[Worker]) -> list[Worker]:
        """Connect to these workers, too, but for those that are something else; return the rest."""
        while True:
            try:
                self._connect(self._tasks() | {worker.task: worker.address for worker in found})
                return found
            except tf.errors.OpError as error:
                if not found:
                    raise
                named = re.search(r"/job:worker/replica:0/task:(\d+)", str(error))
                foreign = [w for w in found if named and w.task == int(named[1])] or found
                for worker in foreign:
                    worker.lost_because = (
                        f"is no TensorFlow server ({first_line(error)}): name another address"
                    )
                found = [worker for worker in found if worker not in foreign]

    def _claim_one(self, worker: Worker) -> str:
        """Claim a worker that is connected; return why it cannot be had, "" if it can."""
        try:
            offer = self._guarded(worker, lambda: _read(worker, rendezvous.OFFER, Offer))
            worker.offer = offer or Offer()
            if problem := self._unfit(worker):
                return problem
            until = time.monotonic() + _PATIENCE_SECONDS
            while time.monotonic() < until:
                self._guarded(worker, lambda: self._write_claim(worker))
                lease = self._guarded(worker, lambda: _read(worker, rendezvous.LEASE, Lease))
                if lease and lease.id == self._id:
                    worker.heard_at = time.monotonic()
                    return ""
                time.sleep(0.1)
        except tf.errors.OpError as error:
            worker.offer = Offer()
            return f"does not answer: {first_line(error)}"
        if lease and lease.id:
            return f"is busy: {lease} has it; wait for its end, or name another worker"
        return "does not give itself to anybody: start `towers worker` there again"

    def _unfit(self, worker: Worker) -> str:
        """Return what of a worker does not go with this program, "" if nothing."""
        offer = worker.offer
        ours = {"towers": towers.__version__, "tensorflow": tf.__version__}
        for package, version in ours.items():
            there = getattr(offer, package)
            if there.split(".")[:2] != version.split(".")[:2]:
                return (
                    f"has {package} {there}, and this program {version}: install the same version "
                    "on both"
                )
        if tf_private.ops_are_deterministic() and not offer.deterministic:
            return "is not deterministic: start `towers worker --deterministic` there"
        if offer.deterministic and not tf_private.ops_are_deterministic():
            return "is deterministic, and this program is not: type --deterministic here, too"
        kind = offer.kind
        there = len(offer.devices) if kind == "gpu" else offer.num_cpu_devices
        wanted = self.towers_per_worker or (there if kind == "gpu" else 1)
        if wanted > there:
            return (
                f"has {count(there, f'{kind.upper()} device')}, and --towers_per_worker={wanted} "
                f"asks for more: type --towers_per_worker={there}"
            )
        worker.devices = [f"{worker.name}/{kind}:{i}" for i in range(wanted)]
        if not offer.deterministic:  # where TensorFlow refuses to read a clock
            sent = time.time()
            there = self._guarded(worker, lambda: _clock(worker))
            worker.clock_seconds = there - (sent + time.time()) / 2
        return ""

    def _doubts(self) -> list[str]:
        """Return lines about what may be otherwise than the user thinks."""
        found = []
        for worker in self.alive():
            if abs(worker.clock_seconds) > _CLOCKS_SECONDS:
                found.append(
                    f"warning     the clock of {worker} is {worker.clock_seconds:+.1f} s from this "
                    "machine's: times in its logs are not those of here"
                )
            if (version := worker.offer.keras) != keras.__version__:
                found.append(
                    f"note        {worker} has keras {version}; this program's, "
                    f"{keras.__version__}, is what counts"
                )
        return found

    def _watch(self, worker: Worker) -> None:
        """Begin to write the claim to a worker again and again, in a thread of its own."""

        def beat() -> None:
            pause = self.timeout_seconds / _BEATS
            while worker.is_alive:
                until = time.monotonic() + pause
                if self._closing.wait(pause):
                    return
                # While Python's lock was held, as TensorFlow does in registering a large function,
                # nobody could hear.
                worker.heard_at += max(time.monotonic() - until, 0.0)
                try:
                    self._guarded(worker, lambda: self._write_claim(worker))
                except tf.errors.OpError:
                    silent = time.monotonic() - worker.heard_at
                    if silent > self.timeout_seconds:
                        self._lose(worker, f"has not answered for {silent:.0f} s")
                        while worker.is_alive and not self._closing.wait(_CUT_SECONDS):
                            _shut_connections([worker.address])  # others may wait for it still
                    pause = _CUT_SECONDS
                    continue
                worker.heard_at, pause = time.monotonic(), self.timeout_seconds / _BEATS

        name = f"worker {worker.task}"
        self._threads[worker.task] = threading.Thread(target=beat, name=name, daemon=True)
        self._threads[worker.task].start()

    def _ask(self, worker: Worker) -> str:
        """Return why a worker is not this program's any more, "" if it is."""
        try:
            lease = self._guarded(worker, lambda: _read(worker, rendezvous.LEASE, Lease))
        except tf.errors.OpError as error:
            return f"does not answer: {first_line(error)}"
        return "" if lease and lease.id == self._id else "was started again"

    def _lose(self, worker: Worker, why: str) -> None:
        worker.lost_because = worker.lost_because or why

    def _guarded(self, worker: Worker, call: Callable[[], Any]) -> Any:
        """Return what a call returns that asks a worker; it fails if the answer takes too long."""
        left = self.timeout_seconds - (time.monotonic() - (worker.heard_at or time.monotonic()))
        with worker.asking, self.cut_off([worker], after=max(left, 0.5)):
            with tf_private.asked_by_calls():
                return call()

    def _connect(self, tasks: Mapping[int, str]) -> None:
        """Connect to these workers and no others, while no thread asks any.

        TensorFlow holds Python's lock in this, and waits for what other threads have asked: they
        could not end.
        """
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(worker.asking)
            self._port = tf_private.connect(tasks, self._own_address)
        self._closed = True
        try:
            bind_filter.only_to(self._own_address.strip("[]"), self._port)
        except RunError:
            self._closed = False

    @contextlib.contextmanager
    def cut_off(self, workers: Sequence[Worker], after: float = 0.0) -> Iterator[None]:
        """Let what waits for workers fail with an OpError once the block takes longer than `after`.

        Their connections are shut, again and again, for all threads of this process.
        """
        done = threading.Event()

        def shut() -> None:
            pause = after
            while True:
                until = time.monotonic() + pause
                if done.wait(pause):
                    return
                if time.monotonic() - until > _STARVED_SECONDS:
                    pause = _STARVED_SECONDS  # an answer may be there that nobody could take
                    continue
                pause = _CUT_SECONDS
                _shut_connections([worker.address for worker in workers])

        thread = threading.Thread(target=shut, name="connections", daemon=True)
        if workers:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if workers:
                thread.join()

    def _write_claim(self, worker: Worker, released: bool = False) -> None:
        who = self._id, socket.gethostname(), os.getpid(), rendezvous.user_name()
        own = f"{self._own_address}:{self._port}"
        claim = Claim(*who, self.timeout_seconds, released, own)
        _write(worker, rendezvous.claim_file(self._id), rendezvous.to_text(claim))


def connect(
    workers: str | Sequence[str],
    towers_per_worker: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
    min_workers: int = 0,
) -> Cluster:
    """Return the workers at these addresses, claimed for this program until it ends.

    It comes before anything creates a variable: TensorFlow loses what is assigned, by `assign`, to
    one that is older than a connection; such a variable can only be read.

    Args:
        workers: "host1:2222,host2:2222", or what else `--workers` takes; or a list of addresses.
        towers_per_worker: towers of each; 0: one on each of its GPUs, else one.
        timeout_seconds: after which a worker that does not answer is lost.
        min_workers: with how many to be content; 0: all.

    Raises:
        InputError: a worker is missing, busy or too old, or an address is malformed.
    """
    text = workers if isinstance(workers, str) else ",".join(workers)
    found = find_workers(text, os.environ)
    _warn_of_variables()
    if (before := remote.current()) is not None:
        same = [worker.address for worker in before.workers] == found
        if same and before.towers_per_worker == towers_per_worker:
            return before
        before.close()
    cluster = Cluster(found, towers_per_worker, timeout_seconds)
    cluster.open(min_workers)
    atexit.register(cluster.close)
    remote.set_cluster(cluster)
    return cluster


def _warn_of_variables() -> None:
    """Say what TensorFlow does to variables that were made before the first connection."""
    if tf_private.was_connected():
        return
    made = [v for v in gc.get_objects() if isinstance(v, tf.Variable) and v.trainable]
    if made:
        warnings.warn(
            f"{count(len(made), 'variable')} made before workers were connected to, as "
            f"{made[0].name}, lose what is assigned to them from now on: build models after "
            "towers.devices.connect, or in another process",
            stacklevel=3,
        )


def of_run(options: Options, goes_on: bool = False) -> Cluster | None:
    """Return the workers that a run's options name, None if they name none.

    Raises:
        InputError: there are fewer than a run begins with; one that `goes_on` does so with one.
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


def _await(address: str, patience: float) -> bool:
    """Tell whether a server answers at an address, or does so soon."""
    until = time.monotonic() + patience
    while not (found := greets(address, 2.0)) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def _each(workers: Sequence[Worker], ask: Callable[[Worker], Any]) -> list[Any]:
    """Return what each worker answers, all being asked at once."""
    answers: list[Any] = [None] * len(workers)

    def store(i: int) -> None:
        answers[i] = ask(workers[i])

    threads = [threading.Thread(target=store, args=[i]) for i in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _write(worker: Worker, name: str, text: str) -> None:
    """Write a file on a worker's board."""
    with tf.device(Cluster.home):
        name, text = tf.constant(name), tf.constant(text)
    with tf.device(worker.host):
        tf.raw_ops.WriteFile(filename=name, contents=text)


def _read(worker: Worker, name: str, kind: type[Notice]) -> Notice | None:
    """Return what a file on a worker's board says, None if it is being written."""
    return rendezvous.from_text(kind, remote.read_file(worker.host, name))


def _clock(worker: Worker) -> float:
    """Return what a worker's clock says, in seconds."""
    with tf.device(worker.host):
        there = tf.timestamp()
    with tf.device(Cluster.home):
        return float(tf.identity(there))


def _address_towards(address: str) -> str:
    """Return the address of this machine by which a worker reaches it."""
    try:
        found = socket.getaddrinfo(*parse_address(address, "workers"), type=socket.SOCK_DGRAM)
    except OSError:
        return "localhost"
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as way:
        try:
            way.connect(where)  # sends nothing
        except OSError:
            return "localhost"
        own = way.getsockname()[0]
    return f"[{own}]" if ":" in own else own


def _shut_connections(addresses: Sequence[str]) -> None:
    """Shut this process' connections to these addresses."""
    peers = set()
    for address in addresses:
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(*parse_address(address, "workers"), type=socket.SOCK_STREAM)
            peers |= {where[:2] for *_, where in found}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{number}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                host, port = connection.getpeername()[:2]
                if (host.removeprefix("::ffff:"), port) in peers:
                    connection.shutdown(socket.SHUT_RDWR)
