"""Messages between a worker and a program: JSON files in the server's folder.

A program reads and writes them with TensorFlow's file ops on the worker's device, so TensorFlow's
connection is the only one:

    offer.json    written by the worker: a WorkerInfo
    claim.ID      written by a program, again and again as a heartbeat: a Reservation
    lease.json    the worker's answer: the Reservation of the program that has it, or {}

The worker decides, so two programs never have it. When the program has left, a new server with a
new, empty folder replaces the old one.
"""

import dataclasses
import json
import math
import os
import pwd
import re
from typing import Any, TypeVar

INFO_FILE, OWNER_FILE = "offer.json", "lease.json"
_CLAIM = re.compile(r"claim\.([\w-]{1,80})", re.ASCII)
_MAX_TIMEOUT_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """A device of a worker."""

    name: str  # "/gpu:0"
    what: str = ""  # the product
    memory_bytes: int | None = None  # that TensorFlow may use


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """A worker's versions, address and devices; fields are empty if an older worker lacks them."""

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
    """A program's request for a worker, rewritten at least every `timeout_seconds`."""

    id: str = ""  # "": of nobody
    host: str = ""
    pid: int = 0
    user: str = ""
    timeout_seconds: float = 15.0  # without a heartbeat for so long, the worker is free again
    released: bool = False  # whether the program has released the worker
    address: str = ""  # of TensorFlow's server in the program

    def __post_init__(self) -> None:
        """Replace an invalid timeout by the default, and cap it at an hour."""
        seconds = self.timeout_seconds
        valid = seconds if math.isfinite(seconds) and seconds > 0 else Reservation.timeout_seconds
        object.__setattr__(self, "timeout_seconds", min(valid, _MAX_TIMEOUT_SECONDS))

    def __str__(self) -> str:
        """Return "anna's program on node7 (pid 17)"; a stranger's names are escaped."""
        user, host = (ascii(name[:60])[1:-1] or "?" for name in (self.user, self.host))
        return f"{user}'s program on {host} (pid {self.pid})"


Message = TypeVar("Message", WorkerInfo, Reservation)


def reservation_file(id: str) -> str:
    """Return the file name of a reservation; its id has letters, digits, - and _."""
    return f"claim.{id}"


def reservation_id(file: str) -> str:
    """Return the id in the file name of a reservation, "" for another file."""
    match = _CLAIM.fullmatch(file)
    return match[1] if match else ""


def to_text(message: WorkerInfo | Reservation | None) -> str:
    """Return a message as JSON, {} for None."""
    return json.dumps(dataclasses.asdict(message) if message else {})


def from_text(kind: type[Message], text: str | bytes) -> Message | None:
    """Parse a message; return None if the text is incomplete, as while it is written, or invalid.

    Args:
        kind: class of the message.
        text: its JSON; unknown fields, of newer versions, are ignored, missing ones have defaults.
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
    """Return the name of this process' user, the number if there is no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
