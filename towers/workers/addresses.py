"""Addresses of workers.

`--workers` names them, or the scheduler whose environment variables do:

    find_workers("node1:2222,node2", os.environ)   ->  ["node1:2222", "node2:2222"]
    find_workers("slurm", os.environ)              the nodes of this Slurm job
    find_workers("kubernetes", os.environ)         the pods of an indexed Job
    find_workers("TF_CONFIG", os.environ)          the workers of TensorFlow's own variable
"""

import contextlib
import itertools
import json
import math
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from towers.errors import InputError

PORT = 2222  # TensorFlow's usual one
_MAX_WORKERS = 65536  # a typo in a list of nodes must not use up all memory
# A server of HTTP/2, as gRPC's, answers this at once with a settings frame.
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_REMEDY = "or name the workers, as --workers=host1:2222,host2:2222"


def find_workers(text: str, environ: Mapping[str, str]) -> list[str]:
    """Return the distinct "host:port" addresses of a value of `--workers`.

    Args:
        text: the value.
        environ: has the scheduler's variables, if the value names one.

    Raises:
        InputError: an address is malformed or named twice, or the environment lacks a variable.
    """

    def refusal(problem: str) -> InputError:
        return InputError(f"--workers={text}: {problem}")

    def read(name: str) -> str:
        if not (value := environ.get(name, "").strip()):
            raise refusal(f"{name} is not in the environment; set it, {_REMEDY}")
        return value

    source, _, port = text.partition(":")
    if source == "slurm":
        nodes = read("SLURM_JOB_NODELIST")
        try:
            parts = [f"{host}:{port or PORT}" for host in _expand_node_list(nodes)]
        except ValueError:
            problem = f"SLURM_JOB_NODELIST={nodes} is no list of nodes; {_REMEDY}"
            raise refusal(problem) from None
    elif source == "kubernetes":  # the DNS names of an indexed Job's pods
        job, number, service = map(read, ("JOB_NAME", "JOB_COMPLETIONS", "JOB_SERVICE"))
        if not re.fullmatch("[1-9][0-9]{0,4}", number):
            raise refusal(f"JOB_COMPLETIONS={number} is no number of pods; {_REMEDY}")
        parts = [f"{job}-{i}.{service}:{port or PORT}" for i in range(int(number))]
    elif text == "TF_CONFIG":
        value = read("TF_CONFIG")
        try:
            parts = json.loads(value)["cluster"]["worker"]
        except (ValueError, TypeError, KeyError, RecursionError):
            parts = None
        if not isinstance(parts, list) or not parts:
            needed = '{"cluster": {"worker": ["host:port", ...]}}'
            raise refusal(f"TF_CONFIG has no {needed}; {_REMEDY}")
    else:
        parts = text.split(",")

    addresses: list[str] = []
    for part in parts:
        if not isinstance(part, str) or not part.strip():
            raise refusal(f"an address is empty; {_REMEDY}")
        host, number = parse_address(part.strip(), "workers")
        address = join_address(host.lower(), number)
        if number == 0:
            raise refusal(f"{part} has no port; a worker prints its own")
        if address in addresses:
            raise refusal(f"{address} is named twice; name each worker once")
        addresses.append(address)
    return addresses


def _expand_node_list(nodes: str) -> list[str]:
    """Expand Slurm's form: "n[01-03,07],gpu5" is n01, n02, n03, n07 and gpu5."""
    names = re.findall(r"(?:[\w.-]|\[[\d,-]+\])+", nodes, re.ASCII)
    if ",".join(names) != nodes:
        raise ValueError(nodes)
    hosts: list[str] = []
    for name in names:
        parts = [_expand_brackets(part) for part in re.findall(r"\[[^]]*\]|[^[]+", name)]
        if len(hosts) + math.prod(map(len, parts)) > _MAX_WORKERS:
            raise ValueError(nodes)
        hosts += map("".join, itertools.product(*parts))
    return hosts


def _expand_brackets(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    numbers = []
    for one in part[1:-1].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", one, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= last - first < _MAX_WORKERS:
            raise ValueError(part)
        numbers += [f"{i:0{len(match[1])}}" for i in range(first, last + 1)]
    return numbers


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Return (host, port) of "node7:2222", "10.0.0.5" or "[fd00::5]:2222".

    Args:
        text: the address; without a port it is 2222.
        flag: name with which the message of an error begins.

    Raises:
        InputError: the address is malformed.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+))(?::(\d{1,5}))?", text, re.ASCII)
    port = int(match[3] or PORT) if match else -1
    if not 0 <= port <= 65535:
        raise InputError(
            f"--{flag}={text}: HOST:PORT is needed, as --{flag}=10.0.0.5:{PORT}; IPv6 in brackets"
        )
    return match[1] or match[2], port


def join_address(host: str, port: int) -> str:
    """Return "host:port", with the brackets of IPv6.

    Args:
        host: name or IP address.
        port: 0..65535.
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(address: str) -> list[tuple[socket.AddressFamily, Any]]:
    """Return (family, socket address) of each IP address of a worker; [] for an unknown host."""
    with contextlib.suppress(OSError):
        where = parse_address(address, "workers")
        return [(info[0], info[4]) for info in socket.getaddrinfo(*where, type=socket.SOCK_STREAM)]
    return []


def check_distinct(addresses: Sequence[str]) -> None:
    """Raise InputError for two names of one worker, as localhost:2222 and 127.0.0.1:2222.

    TensorFlow would hang. A host that does not resolve passes: connecting to it fails.
    """
    seen: dict[tuple[str, int], str] = {}
    for address in addresses:
        for _, (ip, port, *_) in resolve(address):
            ip = ip.removeprefix("::ffff:")
            # TensorFlow listens on the port at all addresses of a machine.
            other = seen.setdefault(("" if is_here(ip) else ip, port), address)
            if other != address:
                raise InputError(
                    f"--workers={','.join(addresses)}: {other} and {address} are the same worker; "
                    "name each worker once"
                )


def is_here(ip: str) -> bool:
    """Return whether an IP address is one of this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as tried:
            tried.bind((ip, 0))
    except OSError:
        return False
    return True


def responds(address: str, timeout_seconds: float) -> bool:
    """Return whether a gRPC server at an address answers in time; a stopped process does not.

    Args:
        address: "host:port".
        timeout_seconds: for the connection, and again for the answer.

    Raises:
        InputError: the address is malformed.
    """
    where = parse_address(address, "workers")
    try:
        with socket.create_connection(where, timeout_seconds) as connection:
            connection.settimeout(timeout_seconds)
            connection.sendall(_HTTP2_GREETING)
            return connection.recv(4)[3:4] == b"\4"  # a settings frame
    except OSError:
        return False
