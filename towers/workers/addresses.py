"""Addresses of workers: what people type, and what schedulers say.

find_workers("node1:2222,node2", os.environ)   ->  ["node1:2222", "node2:2222"]
find_workers("slurm", os.environ)              the nodes of this job of Slurm
find_workers("kubernetes", os.environ)         the pods of an indexed Job
find_workers("TF_CONFIG", os.environ)          the workers of TensorFlow's own variable
"""

import itertools
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towers.errors import InputError

PORT = 2222  # TensorFlow's usual one
_MOST = 65536  # workers; a typo in a list of nodes is not to take all memory
# What a server that speaks HTTP/2, as gRPC does, answers at once, by its settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_TYPE = "or name the workers, as --workers=host1:2222,host2:2222"


def find_workers(text: str, environ: Mapping[str, str]) -> list[str]:
    """Return ["host:port", ...] of what `--workers` says, in its order.

    Raises:
        InputError: one line: an address is malformed or named twice, or the environment does not
            say what it is asked for.
    """
    source, _, port = text.partition(":")
    if source == "slurm":
        hosts = list(_expand(_look_up("SLURM_JOB_NODELIST", text, environ), text))
    elif source == "kubernetes":
        hosts = _of_kubernetes(text, environ)
    else:
        parts = _of_tf_config(text, environ) if text == "TF_CONFIG" else text.split(",")
        return _checked(text, parts)
    return _checked(text, [f"{host}:{port or PORT}" for host in hosts])


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Return (host, port) of "node7:2222", "10.0.0.5" or "[fd00::5]:2222".

    Raises:
        InputError: one line that begins with the flag's name.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+))(?::(\d{1,5}))?", text, re.ASCII)
    port = int(match[3] or PORT) if match else -1
    if not 0 <= port <= 65535:
        raise InputError(
            f"--{flag}={text}: HOST:PORT is needed, as --{flag}=10.0.0.5:{PORT}; IPv6 in brackets"
        )
    return match[1] or match[2], port


def join_address(host: str, port: int) -> str:
    """Return "host:port", with the brackets of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_distinct(addresses: Sequence[str]) -> None:
    """Refuse two names of one worker, as localhost:2222 and 127.0.0.1:2222: it would wait for ever.

    A host that is not known passes; whoever connects to it is told so.

    Raises:
        InputError: one line that names both.
    """
    found: dict[tuple[str, int], str] = {}
    for address in addresses:
        for place in _places(address):
            if found.setdefault(place, address) != address:
                raise InputError(
                    f"--workers={','.join(addresses)}: {found[place]} and {address} are the same "
                    "worker; name each worker once"
                )


def _places(address: str) -> set[tuple[str, int]]:
    """Return (IP, port) of an address; TensorFlow takes a port of all of a machine's addresses."""
    host, port = parse_address(address, "workers")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    numbers = {where[0].removeprefix("::ffff:") for *_, where in found}
    return {("" if is_here(number) else number, port) for number in numbers}


def is_here(ip: str) -> bool:
    """Tell whether an address is one of this machine's."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as tried:
        try:
            tried.bind((ip, 0))
        except OSError:
            return False
    return True


def _checked(text: str, parts: Sequence[Any]) -> list[str]:
    """Return the addresses with their ports, each once, or raise as `find_workers` does."""
    found: list[str] = []
    for part in parts:
        if not isinstance(part, str) or not part.strip():
            raise InputError(f"--workers={text}: an address is empty; {_TYPE}")
        host, port = parse_address(part.strip(), "workers")
        address = join_address(host.lower(), port)
        if port == 0:
            raise InputError(f"--workers={text}: {part} has no port; a worker prints its own")
        if address in found:
            raise InputError(f"--workers={text}: {address} is named twice; name each worker once")
        found.append(address)
    return found


def _look_up(name: str, text: str, environ: Mapping[str, str]) -> str:
    """Return a variable of the environment that `--workers` needs, or raise an InputError."""
    if not (value := environ.get(name, "").strip()):
        raise InputError(f"--workers={text}: {name} is not in the environment; set it, {_TYPE}")
    return value


def _expand(nodes: str, text: str) -> Iterator[str]:
    """Yield the nodes of Slurm's form: "n[01-03,07],gpu5" is n01, n02, n03, n07 and gpu5."""
    wrong = InputError(f"--workers={text}: SLURM_JOB_NODELIST={nodes} is no list of nodes; {_TYPE}")
    names = re.findall(r"(?:[\w.-]|\[[\d,-]+\])+", nodes, re.ASCII)
    if ",".join(names) != nodes:
        raise wrong
    number = 0
    for name in names:
        parts = [_numbers(part, wrong) for part in re.findall(r"\[[^]]*\]|[^[]+", name)]
        for combination in itertools.product(*parts):
            number += 1
            if number > _MOST:
                raise wrong
            yield "".join(combination)


def _numbers(part: str, wrong: InputError) -> list[str]:
    """Return ["01", "02", "07"] of "[01-02,07]", and what is not in brackets as it is."""
    if not part.startswith("["):
        return [part]
    found = []
    for one in part[1:-1].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", one, re.ASCII)
        if not match or not 0 <= int(match[2] or match[1]) - int(match[1]) < _MOST:
            raise wrong
        last = int(match[2] or match[1])
        found += [f"{i:0{len(match[1])}}" for i in range(int(match[1]), last + 1)]
    return found


def _of_kubernetes(text: str, environ: Mapping[str, str]) -> list[str]:
    """Return the pods of an indexed Job, whose names in DNS are JOB-INDEX.SERVICE."""
    names = "JOB_NAME", "JOB_COMPLETIONS", "JOB_SERVICE"
    job, completions, service = (_look_up(name, text, environ) for name in names)
    if not re.fullmatch("[1-9][0-9]{0,4}", completions):
        raise InputError(
            f"--workers={text}: JOB_COMPLETIONS={completions} is no number of pods; {_TYPE}"
        )
    return [f"{job}-{index}.{service}" for index in range(int(completions))]


def _of_tf_config(text: str, environ: Mapping[str, str]) -> list[Any]:
    """Return the workers of TF_CONFIG."""
    value = _look_up("TF_CONFIG", text, environ)
    try:
        found = json.loads(value)["cluster"]["worker"]
    except (ValueError, TypeError, KeyError, RecursionError):
        found = None
    if not isinstance(found, list) or not found:
        raise InputError(
            f'--workers={text}: TF_CONFIG has no {{"cluster": {{"worker": ["host:port", ...]}}}}; '
            + _TYPE
        )
    return found


def greets(address: str, timeout_seconds: float) -> bool:
    """Tell whether a gRPC server answers at an address, and is not stopped."""
    where = parse_address(address, "workers")
    try:
        with socket.create_connection(where, timeout_seconds) as connection:
            connection.settimeout(timeout_seconds)
            connection.sendall(_GREETING)
            return connection.recv(4)[3:4] == b"\4"  # a frame of settings
    except OSError:
        return False
