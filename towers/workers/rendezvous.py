"""The notice board of a worker: small JSON files in the current folder of its server.

A program reads and writes them by TensorFlow's own file operations, run on the worker's device, so
that nothing but TensorFlow's connection is needed:

    offer.json    what the worker has: an Offer
    claim.ID      written by a program that wants it, and again as a sign of life: a Claim
    lease.json    the worker's answer: the Lease of the program that has it, {} if none has

The worker decides, so that no two programs ever have it. When a lease is over its server is
replaced by a new one with a new, empty board.
"""

import dataclasses
import json
import math
import os
import pwd
import re
from dataclasses import fields
from typing import Any, TypeVar

OFFER, LEASE = "offer.json", "lease.json"
_CLAIM = re.compile(r"claim\.([\w-]{1,80})", re.ASCII)
_LONGEST_TIMEOUT_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True)
class Offered:
    """A device of a worker."""

    name: str  # "/gpu:0"
    what: str = ""  # the product
    memory_bytes: int | None = None  # that TensorFlow may take of it


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a worker is and has; what an older one does not tell is empty."""

    towers: str = ""  # versions
    tensorflow: str = ""
    keras: str = ""
    python: str = ""
    address: str = ""  # "10.0.0.5:2222"
    host: str = ""  # the name of the machine
    pid: int = 0
    folder: str = ""  # where the worker was started; relative paths of data are below it
    devices: tuple[Offered, ...] = ()  # its GPUs, or its one CPU
    kind: str = "cpu"  # "gpu" or "cpu"
    num_cpu_devices: int = 1  # logical ones
    deterministic: bool = False  # whether its ops are


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a program writes, at least every `timeout_seconds`."""

    id: str = ""
    host: str = ""
    pid: int = 0
    user: str = ""
    timeout_seconds: float = 15.0  # without a word for so long, the lease is over
    released: bool = False  # the program needs the worker no more
    address: str = ""  # at which TensorFlow's server in the program answers

    def __post_init__(self) -> None:
        """Take a time that makes no sense for the usual one, and none for longer than an hour."""
        seconds = self.timeout_seconds
        usual = seconds if math.isfinite(seconds) and seconds > 0 else Claim.timeout_seconds
        object.__setattr__(self, "timeout_seconds", min(usual, _LONGEST_TIMEOUT_SECONDS))


@dataclasses.dataclass(frozen=True)
class Lease:
    """Which program has a worker."""

    id: str = ""  # "": none has
    host: str = ""
    pid: int = 0
    user: str = ""
    time: float = 0.0  # of the worker's clock when it was given, in seconds since 1970

    def __str__(self) -> str:
        """Return "anna's program on node7 (pid 17)"; names are a stranger's, and may be odd."""
        user, host = (ascii(name[:60])[1:-1] or "?" for name in (self.user, self.host))
        return f"{user}'s program on {host} (pid {self.pid})"


Notice = TypeVar("Notice", Offer, Claim, Lease)


def claim_file(id: str) -> str:
    """Return the name of the file of a claim; its id is of letters, digits, - and _."""
    return f"claim.{id}"


def claim_id(file: str) -> str:
    """Return the id in the name of a claim's file, "" for another file."""
    match = _CLAIM.fullmatch(file)
    return match[1] if match else ""


def to_text(notice: Offer | Claim | Lease | None) -> str:
    """Return a notice as JSON, {} for None."""
    return json.dumps(dataclasses.asdict(notice) if notice else {})


def from_text(kind: type[Notice], text: str | bytes) -> Notice | None:
    """Return the notice that a text holds, None if it is not whole or another's.

    A file that is being written is read as far as it is there. What newer versions add is left out,
    and what older ones do not have is as by default.
    """
    try:
        return _build(kind, json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _build(kind: type, values: dict[str, Any]) -> Any:
    """Return an instance of the fields that are known; TypeError if one is of another type."""
    known = {name: values[name] for name in values.keys() & {field.name for field in fields(kind)}}
    if "devices" in known:
        known["devices"] = tuple(_build(Offered, one) for one in known["devices"])
    for field in fields(kind):
        allowed = {float: (float, int), tuple[Offered, ...]: tuple}.get(field.type, field.type)
        if field.name in known and not isinstance(known[field.name], allowed):
            raise TypeError(f"{field.name} is {known[field.name]!r}")
    return kind(**known)


def user_name() -> str:
    """Return the name of whoever this process runs as, its number where it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
