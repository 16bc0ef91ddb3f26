"""A worker: TensorFlow's server on this machine, for one program at a time.

There are two processes. The supervisor decides which program has the worker (see `rendezvous`); its
child is the server. When the program has left, the child is killed and a new one takes its place on
the same port: all memory is free again within a second. The supervisor has imported TensorFlow and
never started it, so that a fork of it starts quickly.
"""

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import multiprocessing
import os
import platform
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from towers import files
from towers.devices.memory import in_words, of_host
from towers.errors import InputError, RunError
from towers.formatting import count, first_line
from towers.options.gpu import GpuOptions
from towers.workers import bind_filter, rendezvous
from towers.workers.addresses import is_here, join_address, responds
from towers.workers.rendezvous import DeviceInfo, Reservation, WorkerInfo

NUM_CPU_DEVICES = 16  # logical ones of a worker without GPUs; more where there are more cores
_POLL_SECONDS = 0.1
_RESPONSE_SECONDS = 4.0
_MAX_TIMEOUTS = 20.0  # without a heartbeat; what answers later may be another program's server
_PARTING_SECONDS = 0.3  # in which the server still answers the program that released it
_PORTS = range(20000, 32000)  # for port 0: below those that connections take for themselves
_ATTEMPTS = 3  # with other ports, for port 0
_ABANDONED_SECONDS = 60.0  # after which an unlocked folder is a killed worker's
_PR_SET_PDEATHSIG = 1
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and how the machine itself reaches it then


def serve(
    host: str,
    port: int,
    options: GpuOptions,
    any_address: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Serve one program after the other, until a signal.

    Args:
        host: name or number of an address of this machine, the only one that the server answers at.
        port: 0 for any free one.
        options: of the GPUs.
        any_address: serve at all addresses of the machine, whatever `host` is.
        say: prints a line.

    Raises:
        InputError: the address is not this machine's, the port is taken, or the options are
            impossible here.
        RunError: the server does not start.
    """
    attempts = 1 if port else _ATTEMPTS
    ip, port = _find_address(host, port, any_address)
    introduced = False
    import tensorflow  # noqa: F401

    while True:
        address = join_address(socket.gethostname() if ip in _ANY_ADDRESS else ip, port)
        try:
            with _folder() as folder, _server(folder, address, ip, options, any_address) as server:
                process, info = server
                if not introduced:
                    for line in _introduction(info, ip, any_address):
                        say(line)
                    introduced = True
                say(f"free        for towers train --workers={address}")
                say(f"over        {_lend(folder, process, say)}")
        except bind_filter.Reached as error:
            say(f"warning     {error}: the server is started again")
        except RunError:
            attempts -= 1
            if introduced or not attempts:
                raise
            ip, port = _find_address(host, 0, any_address)  # that one may have been taken meanwhile
        # The kernel needs time to free the port of a server that was killed.
        end = time.monotonic() + 10
        while problem := _port_problem(ip, port):
            if time.monotonic() > end:
                raise RunError(f"port {port} is not free again: {os.strerror(problem.errno)}")
            time.sleep(_POLL_SECONDS)


def _lend(folder: Path, process: multiprocessing.Process, say: Callable[[str], None]) -> str:
    """Lend a server to the first program that asks for it; return why it is free again."""
    try:
        reservations = Reservations(folder)
        while True:
            free = reservations.owner is None
            why = reservations.look()
            if free and reservations.owner:
                say(f"taken       by {reservations.owner}")
            if why:
                time.sleep(_PARTING_SECONDS)
                return why
            if process.exitcode is not None:
                return f"the server ended ({_ending(process)})"
            time.sleep(_POLL_SECONDS)
    except OSError as error:  # a program can do anything there
        return f"its folder cannot be used any more: {error.strerror}"


class Reservations:
    """The programs' reservations of a worker.

    Attributes:
        owner: that of the program that has the worker, or None.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        """Start as a free worker.

        Args:
            folder: of the reservations.
            clock: returns seconds.
        """
        self.owner: Reservation | None = None
        self._folder, self._clock = folder, clock
        self._by_id: dict[str, Reservation] = {}
        # {id: (when its file was last seen to change, (modification time, size))}.
        self._last_changes: dict[str, tuple[float, tuple[int, int]]] = {}
        self._publish()

    def look(self) -> str:
        """Read the reservations; return why the owner has lost the worker, "" if it has not."""
        now = self._clock()
        for path in sorted(self._folder.iterdir()):
            if program := rendezvous.reservation_id(path.name):
                with contextlib.suppress(OSError):
                    about = path.stat()
                    state = about.st_mtime_ns, about.st_size
                    if self._last_changes.get(program, (0.0, None))[1] != state:
                        if wanted := rendezvous.from_text(Reservation, path.read_bytes()):
                            self._by_id[program] = wanted
                        self._last_changes[program] = now, state  # half a file counts, too
        if self.owner is None:
            for program, wanted in self._by_id.items():
                if not wanted.released:
                    self.owner = dataclasses.replace(wanted, id=program)
                    self._publish()
                    break
            return ""
        wanted = self._by_id[self.owner.id]
        if wanted.released:
            return "the program has released it"
        timeouts = (now - self._last_changes[self.owner.id][0]) / wanted.timeout_seconds
        # While TensorFlow registers a large function, it holds Python's lock, and the program
        # cannot write. Its server still answers; that of a stopped process does not.
        with contextlib.suppress(InputError):  # the program's address may be malformed
            if timeouts <= 1.0 or (
                timeouts <= _MAX_TIMEOUTS and responds(wanted.address, _RESPONSE_SECONDS)
            ):
                return ""
        return f"no word from the program for {wanted.timeout_seconds:g} s"

    def _publish(self) -> None:
        temporary = self._folder / f".{rendezvous.OWNER_FILE}"
        temporary.write_text(rendezvous.to_text(self.owner), encoding="utf-8")
        temporary.replace(self._folder / rendezvous.OWNER_FILE)  # read whole, or not at all


def _find_address(host: str, port: int, any_address: bool) -> tuple[str, int]:
    """Return (ip, port) at which this process can listen; raises as `serve` does."""
    flag = f"--address={join_address(host, port)}"
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InputError(f"{flag}: no machine is known by the name {host}") from None
    ip = resolved[0][4][0]
    if ip in _ANY_ADDRESS and not any_address:
        raise InputError(
            f"{flag} is every address of this machine, and whoever reaches the port can run code "
            "here: give the one in the network of your program, or add --any_address"
        )
    for candidate in [port] if port else random.sample(_PORTS, 100):
        if not (problem := _port_problem(ip, candidate)):
            return ip, candidate
        if isinstance(problem, PermissionError):
            raise InputError(f"{flag}: ports below 1024 are root's; take another")
        if not is_here(ip):
            why = os.strerror(problem.errno)
            raise InputError(f"{flag}: {ip} is no address of this machine ({why}); see hostname -I")
    raise InputError(
        f"{flag}: the port is taken by another process, perhaps another worker; give another port"
    )


def _port_problem(ip: str, port: int) -> OSError | None:
    # TensorFlow listens at all addresses. Old connections of a server that was killed do not count.
    dual = socket.has_dualstack_ipv6()
    for host in ip, "::" if dual else "":
        family, both = socket.AF_INET6 if ":" in host else socket.AF_INET, dual and host == "::"
        try:
            socket.create_server((host, port), family=family, dualstack_ipv6=both).close()
        except OSError as error:
            return error
    return None


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for a server, locked while it is in use; delete those of killed workers."""
    prefix = "towers-worker-"
    with files.Lock() as lock:
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError, InputError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    lock.take(path)
                    shutil.rmtree(path)
        try:
            folder = tempfile.mkdtemp(prefix=prefix)
        except OSError as error:
            raise RunError(f"no folder can be made for the server: {error.strerror}") from None
        try:
            lock.take(Path(folder))
            yield Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _server(
    folder: Path, address: str, ip: str, options: GpuOptions, any_address: bool
) -> Iterator[tuple[multiprocessing.Process, WorkerInfo]]:
    """Run a server in a child process during the block; raises as `serve` does."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()

    def run() -> None:
        # It ends with its parent, however that ends; the parent alone handles Ctrl-C.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        started_in = os.getcwd()
        os.chdir(folder)
        try:
            server, devices = _start(address, ip, any_address, options)
            info = _worker_info(address, started_in, parent, devices)
            Path(rendezvous.INFO_FILE).write_text(rendezvous.to_text(info), encoding="utf-8")
            sending.send(info)
        except (InputError, RunError) as error:
            sending.send(error)
            return
        except Exception as error:
            sending.send(RunError(f"the server does not start: {first_line(error)}"))
            return
        server.join()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        sending.close()
        try:
            answer = receiving.recv()
        except EOFError:
            process.join()
            raise RunError(f"the server ended ({_ending(process)}) as it started") from None
        if isinstance(answer, Exception):
            raise answer
        yield process, answer
    finally:
        process.kill()
        process.join()
        receiving.close()


def _start(address: str, ip: str, any_address: bool, options: GpuOptions) -> tuple[Any, list[Any]]:
    """Start TensorFlow's server; return it and its devices as TensorFlow lists them."""
    import tensorflow as tf

    from towers.devices import gpus, nvml

    gpus.configure(**dataclasses.asdict(options))
    num_cpus = 1
    if not tf.config.list_physical_devices("GPU"):
        if gpus.visible_gpus(nvml.gpus()):
            raise InputError(
                "TensorFlow sees none of this machine's GPUs: type towers doctor, or offer the CPU "
                "with --visible_gpus=none"
            )
        num_cpus = max(NUM_CPU_DEVICES, os.cpu_count() or 1)
    config = gpus.config_proto(num_cpus=num_cpus, **dataclasses.asdict(options))
    server = tf.distribute.Server(
        {"worker": [address]}, job_name="worker", task_index=0, config=config, start=False
    )
    port = int(address.rpartition(":")[2])
    if not any_address:
        bind_filter.only_to(ip, port)  # before it answers anybody
    server.start()
    with tf.compat.v1.Session(f"grpc://{join_address(_ANY_ADDRESS.get(ip, ip), port)}") as session:
        return server, session.list_devices()


def _worker_info(address: str, folder: str, pid: int, devices: list[Any]) -> WorkerInfo:
    from towers import tf_internals
    from towers.devices import selection

    cpus, gpus = [[d for d in devices if d.device_type == kind] for kind in ("CPU", "GPU")]
    memory = [device.memory_limit_bytes for device in gpus] or [of_host()]
    described = selection.describe([f"/gpu:{i}" for i in range(len(gpus))] or ["/cpu:0"])
    infos = [DeviceInfo(d.device, d.name or "", m) for d, m in zip(described, memory, strict=True)]
    return WorkerInfo(
        **{name: importlib.metadata.version(name) for name in ("towers", "tensorflow", "keras")},
        python=platform.python_version(),
        address=address,
        host=socket.gethostname(),
        pid=pid,
        folder=folder,
        devices=tuple(infos),
        kind="gpu" if gpus else "cpu",
        num_cpu_devices=len(cpus),
        deterministic=tf_internals.ops_are_deterministic(),
    )


def _introduction(info: WorkerInfo, ip: str, any_address: bool) -> list[str]:
    lines = [f"worker      {info.address} on {info.host}, process {info.pid}"]
    for device in info.devices:
        memory = f", {in_words(device.memory_bytes)}" if device.memory_bytes else ""
        lines.append(f"offers      {device.name} {device.what}{memory}")
    if info.kind == "cpu":
        devices = count(info.num_cpu_devices, "logical device")
        lines.append(f"            up to {devices} on it: --towers_per_worker=N uses N")
    where = "at every address of this machine" if any_address else f"at {ip} alone"
    lines += [
        f"versions    towers {info.towers}, tensorflow {info.tensorflow}, keras {info.keras}, "
        f"python {info.python}",
        f"security    it listens {where}; whoever reaches the port can run code as "
        f"{rendezvous.user_name()}: close it to all but the program and the other workers",
    ]
    if ip.startswith("127.") or ip == "::1":
        lines.append("            (this address is reached from this machine alone)")
    return lines


def _ending(process: multiprocessing.Process) -> str:
    code = process.exitcode
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
