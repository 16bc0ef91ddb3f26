"""What a worker and a program tell each other: JSON files in its server's folder.

A program reads and writes them with TensorFlow's own file ops on the worker's device, so nothing
but TensorFlow's connection is needed:

    offer.json    what the worker has: a WorkerInfo
    claim.ID      a program wants the worker; written again and again as a heartbeat: a Claim
    lease.json    the worker's answer: the Lease of the program that has it, or {}

The worker decides, so two programs never have it. When a lease is over the server is replaced by a
new one with a new, empty folder.
"""

import dataclasses
import json
import math
import os
import pwd
import re
from typing import Any, TypeVar

OFFER, LEASE = "offer.json", "lease.json"
_CLAIM = re.compile(r"claim\.([\w-]{1,80})", re.ASCII)
_MAX_TIMEOUT_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """A device of a worker."""

    name: str  # "/gpu:0"
    what: str = ""  # the product
    memory_bytes: int | None = None  # that TensorFlow may take of it


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """What a worker is and has; empty where an older one does not tell."""

    towers: str = ""  # versions
    tensorflow: str = ""
    keras: str = ""
    python: str = ""
    address: str = ""  # "10.0.0.5:2222"
    host: str = ""  # the name of the machine
    pid: int = 0
    folder: str = ""  # where the worker was started; relative paths of data are below it
    devices: tuple[DeviceInfo, ...] = ()  # its GPUs, or its one CPU
    kind: str = "cpu"  # "gpu" or "cpu"
    num_cpu_devices: int = 1  # logical ones
    deterministic: bool = False  # whether its ops are


@dataclasses.dataclass(frozen=True)
class Reservation:
    """What a program writes, at least every `timeout_seconds`."""

    id: str = ""
    host: str = ""
    pid: int = 0
    user: str = ""
    timeout_seconds: float = 15.0  # without a heartbeat for so long, the lease is over
    released: bool = False  # the program needs the worker no more
    address: str = ""  # of TensorFlow's server in the program

    def __post_init__(self) -> None:
        """Replace a timeout that makes no sense by the default, and cap it at an hour."""
        seconds = self.timeout_seconds
        valid = seconds if math.isfinite(seconds) and seconds > 0 else Reservation.timeout_seconds
        object.__setattr__(self, "timeout_seconds", min(valid, _MAX_TIMEOUT_SECONDS))


@dataclasses.dataclass(frozen=True)
class Owner:
    """Which program has a worker."""

    id: str = ""  # "": none has
    host: str = ""
    pid: int = 0
    user: str = ""
    time: float = 0.0  # of the worker's clock when it was given, in seconds since 1970

    def __str__(self) -> str:
        """Return "anna's program on node7 (pid 17)"; a stranger's names are escaped."""
        user, host = (ascii(name[:60])[1:-1] or "?" for name in (self.user, self.host))
        return f"{user}'s program on {host} (pid {self.pid})"


Message = TypeVar("Message", WorkerInfo, Reservation, Owner)


def claim_file(id: str) -> str:
    """Return the file name of a claim; its id is of letters, digits, - and _."""
    return f"claim.{id}"


def claim_id(file: str) -> str:
    """Return the id in the file name of a claim, "" for another file."""
    match = _CLAIM.fullmatch(file)
    return match[1] if match else ""


def to_text(message: WorkerInfo | Reservation | Owner | None) -> str:
    """Return a message as JSON, {} for None."""
    return json.dumps(dataclasses.asdict(message) if message else {})


def from_text(kind: type[Message], text: str | bytes) -> Message | None:
    """Return the message in a text, None if that is incomplete or no such message.

    A file may be read while it is written. Fields that newer versions add are left out, those that
    older ones lack have their defaults.
    """
    try:
        return _build(kind, json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _build(kind: type, values: dict[str, Any]) -> Any:
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    known = {name: values[name] for name in values.keys() & types.keys()}
    if "devices" in known:
        known["devices"] = tuple(_build(DeviceInfo, device) for device in known["devices"])
    for name, value in known.items():
        allowed = {float: (float, int), tuple[DeviceInfo, ...]: tuple}.get(types[name], types[name])
        if not isinstance(value, allowed):
            raise TypeError(f"{name} is {value!r}")
    return kind(**known)


def user_name() -> str:
    """Return the name of this process' user, or the number of one who has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
