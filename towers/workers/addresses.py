"""Addresses of workers: find_workers("node1:2222,node2") -> ["node1:2222", "node2:2222"]."""

import re

from towers.errors import InputError

PORT = 2222  # TensorFlow's usual one


def find_workers(text: str) -> list[str]:
    """Return the distinct "host:port" addresses of a value of `--workers`.

    Args:
        text: addresses separated by commas.

    Raises:
        InputError: an address is malformed or named twice.
    """
    addresses: list[str] = []
    for part in text.split(","):
        host, number = parse_address(part.strip(), "workers")
        address = join_address(host.lower(), number)
        if number == 0:
            raise InputError(f"--workers={text}: {part} has no port; a worker prints its own")
        if address in addresses:
            raise InputError(f"--workers={text}: {address} is named twice; name each worker once")
        addresses.append(address)
    return addresses


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
