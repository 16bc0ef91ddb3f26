"""A worker: TensorFlow's server on this machine, for one program at a time.

There are two processes. The supervisor looks at the lock file, and its child is the server. When
the program has left, the child is killed and a new one takes its place on the same port: all memory
is free again within a second. The supervisor has imported TensorFlow and never started it, so that
a fork of it starts quickly.
"""

import ctypes
import dataclasses
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import towers
from towers.errors import InputError, RunError, first_line
from towers.formatting import count, printable
from towers.options.parts import GpuOptions
from towers.workers.addresses import join_address
from towers.workers.lock import INFO_FILE, LockFile, WorkerInfo, to_text

NUM_CPU_DEVICES = 16  # logical ones of a worker without GPUs; more where there are more cores
_POLL_SECONDS = 0.1
_PARTING_SECONDS = 0.3  # in which the server still answers the program that released it
_FREEING_SECONDS = 10.0  # for the kernel to free the port of a server that was killed
_PORTS = range(20000, 32000)  # for port 0: below those that connections take for themselves
_PR_SET_PDEATHSIG = 1


def serve(host: str, port: int, options: GpuOptions, say: Callable[[str], None] = print) -> None:
    """Serve one program after the other, until a signal.

    Args:
        host: name or number of this machine's address, by which programs reach it.
        port: 0 for any free one.
        options: of the GPUs.
        say: prints a line.

    Raises:
        InputError: the port is taken, or the options are impossible here.
        RunError: the server does not start.
    """
    import tensorflow  # noqa: F401

    candidates = [port] if port else random.sample(_PORTS, 100)
    port = next((p for p in candidates if not _port_problem(p)), candidates[0])
    address, introduced = join_address(host, port), False
    if problem := _port_problem(port):
        raise InputError(f"--address={address}: {problem}; give another port")
    while True:
        prefix = "towers-worker-"
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
            process, info = _start(Path(folder), address, options)
            try:
                for line in () if introduced else _introduction(info, address):
                    say(line)
                introduced = True
                say(f"free        for towers train --workers={address}")
                say(f"over        {_lend(Path(folder), process, say)}")
            finally:
                process.kill()
                process.join()
        end = time.monotonic() + _FREEING_SECONDS
        while problem := _port_problem(port):
            if time.monotonic() > end:
                raise RunError(f"--address={address}: {problem}")
            time.sleep(_POLL_SECONDS)


def _port_problem(port: int) -> str:
    """Return why no server can listen on a port, at all addresses of this machine; "" if it can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return f"port {port} cannot be used: {error.strerror}"
    return ""


def _lend(folder: Path, process: multiprocessing.Process, say: Callable[[str], None]) -> str:
    """Lend a server to the first program that asks for it; return why it is free again."""
    lock = LockFile(folder)
    try:
        while process.exitcode is None:
            free = lock.owner is None
            why = lock.look()
            if free and lock.owner:
                say(f"taken       by {printable(lock.owner.owner)}")
            if why:
                time.sleep(_PARTING_SECONDS)
                return why
            time.sleep(_POLL_SECONDS)
    except (OSError, TypeError) as error:  # a program can write anything there
        return f"its lock file can no longer be used: {first_line(error)}"
    return f"the server ended with exit code {process.exitcode}"


def _start(
    folder: Path, address: str, options: GpuOptions
) -> tuple[multiprocessing.Process, WorkerInfo]:
    """Start a server in a child process; raises as `serve` does."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    given = folder, address, options, sending, os.getpid()
    process = multiprocessing.get_context("fork").Process(target=_run, args=given)
    process.start()
    sending.close()
    try:
        answer = receiving.recv()
    except EOFError:
        process.join()
        answer = RunError(f"the server ended with exit code {process.exitcode} as it started")
    receiving.close()
    if isinstance(answer, Exception):
        process.join()
        raise answer
    return process, answer


def _run(folder: Path, address: str, options: GpuOptions, sending: Connection, parent: int) -> None:
    """Be the server: send its `WorkerInfo`, or the error, and never return."""
    # It ends with its parent, however that ends; the parent alone handles Ctrl-C.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir(folder)
    try:
        server, info = _start_server(address, options)
    except (InputError, RunError) as error:
        sending.send(error)
        return
    except Exception as error:
        sending.send(RunError(f"the server does not start: {first_line(error)}"))
        return
    Path(INFO_FILE).write_text(to_text(info), encoding="utf-8")
    sending.send(info)
    server.join()


def _start_server(address: str, options: GpuOptions) -> tuple[object, WorkerInfo]:
    import tensorflow as tf

    from towers import tf_internals
    from towers.devices import gpus, nvml, selection

    gpus.configure(**dataclasses.asdict(options))
    on_gpus, num_cpus = bool(tf.config.list_physical_devices("GPU")), 1
    if not on_gpus:
        if gpus.visible_gpus(nvml.gpus()):
            raise InputError(
                "TensorFlow sees none of this machine's GPUs; type towers doctor, or offer the CPU "
                "with --visible_gpus=none"
            )
        num_cpus = max(NUM_CPU_DEVICES, os.cpu_count() or 1)
    config = gpus.config_proto(num_cpus=num_cpus, **dataclasses.asdict(options))
    described = list(map(str, selection.describe()))
    info = WorkerInfo(
        towers=towers.__version__,
        tensorflow=tf.__version__,
        devices=described,
        kind="gpu" if on_gpus else "cpu",
        num_devices=len(described) if on_gpus else num_cpus,
        deterministic=tf_internals.ops_are_deterministic(),
    )
    return tf.distribute.Server({"worker": [address]}, "worker", 0, config=config), info


def _introduction(info: WorkerInfo, address: str) -> list[str]:
    port = address.rpartition(":")[2]
    lines = [f"worker      {address}, process {os.getpid()}"]
    lines += [f"offers      {device}" for device in info.devices]
    if info.kind == "cpu":
        devices = count(info.num_devices, "logical device")
        lines.append(f"            up to {devices} on it: --towers_per_worker=N uses N")
    return [
        *lines,
        f"versions    towers {info.towers}, tensorflow {info.tensorflow}",
        f"security    anyone who can reach port {port} can run code on this machine; let a "
        "firewall open it only to the program and the other workers",
    ]
