"""Restricts TensorFlow's server, which listens at all addresses of a machine, to one of them.

    only_to("10.0.0.5", 2222)     # after it began to listen, before it answers

A filter on the listening socket (Linux' classic BPF, which needs no privilege) drops packets for
other addresses; accepted connections inherit the filter.
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
_NETWORK_HEADER = 0xFFF00000  # its offset in a filter: SKF_NET_OFF
_OTHERWISE = "towers worker --any_address serves at all addresses"
_OPEN = ("01", "08")  # states of open connections in the kernel's table
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06


class Reached(RunError):
    """Somebody was connected to the port before it was restricted to one address."""


def only_to(ip: str, port: int) -> None:
    """Drop packets for this process' server at any address other than `ip`.

    Args:
        ip: a numeric address of this machine, IPv4 or IPv6.
        port: on which the process listens.

    Raises:
        Reached: somebody was connected at another address before.
        RunError: this system does not allow it, or nothing listens on the port.
    """
    program = _filter(ip)
    code = ctypes.create_string_buffer(program)
    option = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    num_listeners = 0
    try:
        for listener in open_sockets():
            listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and listener.getsockname()[1] == port:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
                num_listeners += 1
    except OSError as error:
        raise RunError(
            f"port {port} cannot be kept to {ip}: {error.strerror}; {_OTHERWISE}"
        ) from None
    if not num_listeners or sys.platform != "linux":
        raise RunError(f"port {port} cannot be kept to {ip} on this system; {_OTHERWISE}")
    if others := _connected(port) - {ipaddress.ip_address(ip)}:
        raise Reached(f"somebody reached port {port} at {min(map(str, others))}, not {ip}")


def open_sockets() -> Iterator[socket.socket]:
    """Yield a copy of each internet socket of this process, TensorFlow's included."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{descriptor}").st_mode):
                with socket.socket(fileno=os.dup(int(descriptor))) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                        yield duplicate


def _filter(ip: str) -> bytes:
    """Assemble a BPF program that passes packets for one address."""
    address = ipaddress.ip_address(ip)
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    start = 16 if address.version == 4 else 24  # of the destination, in the network header
    code = [(_LOAD_BYTE, _NETWORK_HEADER), (_AND, 0xF0), (_JUMP_IF_EQUAL, address.version << 4)]
    for i, word in enumerate(words):
        code += [(_LOAD_WORD, _NETWORK_HEADER + start + 4 * i), (_JUMP_IF_EQUAL, word)]
    code += [(_RETURN, 0xFFFFFFFF), (_RETURN, 0)]
    last = len(code) - 1  # where a comparison that fails jumps to; jumps are relative
    return b"".join(
        struct.pack("HBBI", op, 0, last - line - 1 if op == _JUMP_IF_EQUAL else 0, value)
        for line, (op, value) in enumerate(code)
    )


def _connected(port: int) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    # This machine's addresses at which somebody is connected: the filter misses older connections.
    addresses = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a machine without IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                local, _, state = line.split()[1:4]
                host, _, local_port = local.partition(":")
                if state in _OPEN and int(local_port, 16) == port:
                    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
                    addresses.add(getattr(address, "ipv4_mapped", None) or address)
    return addresses
