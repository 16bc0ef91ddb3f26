"""The lock file by which a program takes a worker, and the worker's description beside it.

Both are JSON files in the folder of the worker's server: worker.json, a `WorkerInfo`, and lock, a
`Lock` that the program writes again and again as a heartbeat. A program reads and writes them with
TensorFlow's file ops in a session on the server, each call of which has a time limit. The first
program that writes a lock has the worker until it releases it, or until its heartbeat stops.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

LOCK_FILE, INFO_FILE = "lock", "worker.json"
_MAX_TIMEOUT_SECONDS = 86_400.0


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """The versions and devices of a worker."""

    towers: str  # versions
    tensorflow: str
    devices: list[str]  # its GPUs, or its CPU, as `towers.devices.describe` has them
    kind: str  # "gpu" or "cpu"
    num_devices: int  # logical ones, of the kind
    deterministic: bool  # whether its ops are


@dataclasses.dataclass(frozen=True)
class Lock:
    """The content of a lock file."""

    id: str  # of a program
    owner: str  # "anna's program on node7 (pid 17)"
    timeout_seconds: float  # without a heartbeat, after which the worker is free; 0: it is free now
    beat: int = 0  # number of the heartbeat


def own_lock(timeout_seconds: float) -> Lock:
    """Return a lock of this process, with a new id."""
    user = os.environ.get("USER", os.geteuid())
    owner = f"{user}'s program on {socket.gethostname()} (pid {os.getpid()})"
    return Lock(secrets.token_hex(8), owner, timeout_seconds)


def to_text(message: Lock | WorkerInfo) -> str:
    """Return the text of a message's file."""
    return json.dumps(dataclasses.asdict(message))


def from_text(kind: type, text: str | bytes) -> Any:
    """Return the message in a file; None if it is incomplete, as while it is written.

    Args:
        kind: `Lock` or `WorkerInfo`.
        text: content of the file.
    """
    try:
        return kind(**json.loads(text))
    except (ValueError, TypeError):
        return None


class Link:
    """A session on a worker's server, to read and write its files.

    All methods raise `tf.errors.OpError` if the server does not answer in time, whether it has
    ended or hangs.
    """

    def __init__(self, address: str, timeout_seconds: float):
        """Connect at the first call.

        Args:
            address: of the worker, HOST:PORT.
            timeout_seconds: of each call.
        """
        with tf.Graph().as_default() as graph:
            self._name, self._text = (tf.compat.v1.placeholder(tf.string, []) for _ in range(2))
            self._read = tf.io.read_file(self._name)
            self._write = tf.io.write_file(self._name, self._text)
        config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=int(timeout_seconds * 1000))
        self._session = tf.compat.v1.Session(f"grpc://{address}", graph, config)
        self._beating, self._released = threading.Lock(), False

    def read(self, kind: type, name: str = LOCK_FILE) -> Any:
        """Return the message in a file; None if it is incomplete.

        Args:
            kind: of the message.
            name: of the file.

        Raises:
            tf.errors.NotFoundError: there is no such file.
        """
        return from_text(kind, self._session.run(self._read, {self._name: name}))

    def lock(self) -> Lock | None:
        """Return the lock that is in force; None without one."""
        with contextlib.suppress(tf.errors.NotFoundError):
            return self.read(Lock)
        return None

    def write(self, lock: Lock) -> None:
        """Write the lock file."""
        feed = {self._name: LOCK_FILE, self._text: to_text(lock)}
        self._session.run(self._write, feed)

    def beat(self, lock: Lock) -> None:
        """Write the next heartbeat; raise AbortedError or NotFoundError if the lock is lost."""
        with self._beating:
            if self._released:
                return
            now = self.read(Lock) or lock  # half a file is what another thread writes
            if now.id != lock.id:
                raise tf.errors.AbortedError(None, None, f"{now.owner} uses it")
            self.write(dataclasses.replace(lock, beat=now.beat + 1))

    def release(self, lock: Lock) -> None:
        """Write that the worker is free; later heartbeats write nothing."""
        with self._beating:
            self._released = True
            self.write(dataclasses.replace(lock, timeout_seconds=0.0))


class LockFile:
    """The lock file of a worker, as its supervisor sees it.

    Attributes:
        owner: the lock of the program that has the worker, or None.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        """Start as a free worker.

        Args:
            folder: of the file.
            clock: returns seconds.
        """
        self.owner: Lock | None = None
        self._path, self._clock = folder / LOCK_FILE, clock
        self._seen, self._changed_at = b"", 0.0

    def look(self) -> str:
        """Read the file; return why the owner has lost the worker, "" if it has not."""
        now, text = self._clock(), b""
        with contextlib.suppress(FileNotFoundError):
            text = self._path.read_bytes()
        if text != self._seen:
            self._seen, self._changed_at = text, now
            lock = from_text(Lock, text)
            if lock and self.owner and lock.id != self.owner.id:  # it came at the same moment
                self._path.write_text(to_text(self.owner), encoding="utf-8")
            elif lock:
                self.owner = lock
                if lock.timeout_seconds <= 0:
                    return "the program has released it"
        if not self.owner:
            return ""
        timeout_seconds = min(self.owner.timeout_seconds, _MAX_TIMEOUT_SECONDS)
        silent = now - self._changed_at > timeout_seconds
        return f"no heartbeat from the program for {timeout_seconds:g} s" if silent else ""
