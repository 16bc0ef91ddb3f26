"""TensorFlow's server listens on all addresses of a machine: here it is kept to one.

    only_to("10.0.0.5", 2222)     # after it began to listen, before it answers

A filter on the listening socket lets the kernel drop what is addressed to any other; connections
that it accepts inherit the filter. No privilege is needed. It is Linux' classic BPF.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from towers.errors import RunError

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0xFFF00000  # where it begins in a filter's eyes: SKF_NET_OFF
_OTHERWISE = "towers worker --any_address serves at all addresses"
_OPEN = ("01", "08")  # states of a connection, in the kernel's table, in which it may be served
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06


class Reached(RunError):
    """Somebody was connected to the port before it was kept to one address."""


def only_to(ip: str, port: int) -> None:
    """Drop what reaches this process' server at any other address than `ip`.

    Args:
        ip: an address of this machine, of IPv4 or IPv6, in numbers.
        port: on which the process listens.

    Raises:
        Reached: somebody was connected at another address before.
        RunError: it cannot be had here.
    """
    found = 0
    try:
        filtering = _filter(ip)
        for listener in _listeners(port):
            code = ctypes.create_string_buffer(filtering)
            about = struct.pack("HP", len(filtering) // 8, ctypes.addressof(code))
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, about)
            found += 1
    except OSError as error:
        raise RunError(
            f"port {port} cannot be kept to {ip}: {error.strerror}; {_OTHERWISE}"
        ) from None
    if not found or sys.platform != "linux":
        raise RunError(f"port {port} cannot be kept to {ip} on this system; {_OTHERWISE}")
    if others := _connected(port) - {ipaddress.ip_address(ip)}:
        raise Reached(f"somebody reached port {port} at {min(map(str, others))}, not {ip}")


def _filter(ip: str) -> bytes:
    """Return the program of a filter that passes packets for one address."""
    address = ipaddress.ip_address(ip)
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    start = 16 if address.version == 4 else 24  # of the destination, in the network header
    tests = [(_LOAD_BYTE, 0, None), (_AND, 0xF0, None), (_JUMP_IF_EQUAL, address.version << 4, 1)]
    for place, word in enumerate(words):
        tests += [(_LOAD_WORD, start + 4 * place, None), (_JUMP_IF_EQUAL, word, 1)]
    lines = []
    for line, (code, value, jumps) in enumerate(tests):
        if code in (_LOAD_BYTE, _LOAD_WORD):
            value += _NETWORK_HEADER
        lines.append((code, 0, len(tests) - line if jumps else 0, value))  # not equal: the last
    lines += [(_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yield copies of the sockets on which this process listens, on any address of a port."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is closed by now
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                internet = found.family in (socket.AF_INET, socket.AF_INET6)
                if listens and internet and found.getsockname()[1] == port:
                    yield found


def _connected(port: int) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of this machine at which somebody is connected to a port.

    Who came before the filter is not seen by it.
    """
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a machine without IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                local, _, state = line.split()[1:4]
                host, _, local_port = local.partition(":")
                if state in _OPEN and int(local_port, 16) == port:
                    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
                    found.add(getattr(address, "ipv4_mapped", None) or address)
    return found
