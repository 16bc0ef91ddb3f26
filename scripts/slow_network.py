"""A network of machines that are network namespaces, with slow cards and long ways. Root only.

    with slow_network(3, mbits=1000, delay_ms=0.25) as hosts:
        subprocess.run([*enter(1), "ping", "-c1", hosts[2]])

Each namespace has one card, a TUN device, and a thread of this process carries packets from one to
another: by the rate of the card that sends and of that which takes, and after a delay, on each way.
(`tc netem` does that, too, where the kernel has it.) Packets are large, as cards that segment them
by themselves let the kernel have them, so that carrying takes little of the processor.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

MTU = 65_000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000


def enter(machine: int) -> list[str]:
    """Return what to put before a command that is to run on a machine."""
    return ["ip", "netns", "exec", f"tp{machine}"]


@contextlib.contextmanager
def slow_network(number: int, mbits: float, delay_ms: float) -> Iterator[list[str]]:
    """Make machines tp0, tp1, ..., and yield their addresses; nothing of them is left behind."""
    hosts = [f"10.213.0.{i + 1}" for i in range(number)]
    cards: list[int] = []
    done = threading.Event()
    carrier = threading.Thread(
        target=_carry, args=(cards, mbits * 1e6 / 8, delay_ms / 1e3, done), daemon=True
    )
    try:
        for i, host in enumerate(hosts):
            cards.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            flags = struct.pack("16sH22x", f"tpc{i}".encode(), IFF_TUN | IFF_NO_PI)
            fcntl.ioctl(cards[-1], TUNSETIFF, flags)
            _run("ip", "netns", "add", f"tp{i}")
            _run(*f"ip link set tpc{i} netns tp{i}".split())
            _run(*enter(i), *f"ip link set tpc{i} mtu {MTU} txqueuelen 10000 up".split())
            _run(*enter(i), *f"ip address add {host}/24 dev tpc{i}".split())
            _run(*enter(i), *"ip link set lo up".split())
        carrier.start()
        yield hosts
    finally:
        done.set()
        if carrier.is_alive():
            carrier.join()
        for card in cards:
            os.close(card)
        for i in range(number):
            subprocess.run(["ip", "netns", "delete", f"tp{i}"], capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _carry(
    cards: Sequence[int], bytes_per_second: float, delay: float, done: threading.Event
) -> None:
    """Carry packets; card i has the address that ends with i + 1."""
    free_out, free_in = [0.0] * len(cards), [0.0] * len(cards)
    queue: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    while not done.is_set():
        now = time.perf_counter()
        wait = max(min(queue[0][0] - now, 0.1), 0.0) if queue else 0.1
        for card in select.select(cards, [], [], wait)[0]:
            source = cards.index(card)
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(card, MTU + 100)
                    target = packet[19] - 1  # of IPv4
                    if packet[0] >> 4 != 4 or not 0 <= target < len(cards):
                        continue
                    taken = len(packet) / bytes_per_second
                    sent = max(time.perf_counter(), free_out[source]) + taken
                    there = max(sent + delay, free_in[target] + taken)
                    free_out[source], free_in[target] = sent, there
                    heapq.heappush(queue, (there, next(order), target, packet))
        now = time.perf_counter()
        while queue and queue[0][0] <= now:
            _, _, target, packet = heapq.heappop(queue)
            with contextlib.suppress(OSError):  # the other one is gone
                os.write(cards[target], packet)
