"""Curves of a run's workers: what their towers take, wait for, hold, send and receive.

All is read over TensorFlow's connection, from Linux' files there. Network counters are the
machine's: what others send is in them, and each of several workers on one machine shows all of it.
"""

import re
from collections.abc import Mapping, Sequence

from towers.builder.device_types import machine_of
from towers.devices import memory, remote

_COUNTERS = "/proc/net/dev"  # a row for each interface; 1st number: bytes received, 9th: sent


class MachineCurves:
    """Makes curves of the workers that hold the towers; none where there is no worker."""

    def __init__(self, devices: Sequence[str]):
        """Take the devices of the towers, in tower order."""
        self._towers: dict[str, list[int]] = {}
        for tower, device in enumerate(devices):
            if machine := machine_of(device):
                self._towers.setdefault(machine, []).append(tower)
        self._before: Mapping[str, tuple[int, int]] = {}
        self._step = 0

    def point(self, step: int, tower_seconds: Sequence[float]) -> dict[str, float]:
        """Return {tag: value} after `step` steps.

        Args:
            step: of which there are so many; bytes are those of a step since the point before.
            tower_seconds: of each tower's step; empty if they are not known.
        """
        found: dict[str, float] = {}
        counters = {machine: _network_bytes(machine) for machine in self._towers}
        slowest = max(tower_seconds, default=0.0)
        for machine, towers in self._towers.items():
            tag = f"worker_{machine.rpartition(':')[2]}"
            if tower_seconds:
                own = max(tower_seconds[tower] for tower in towers)
                found |= {f"{tag}/step_seconds": own, f"{tag}/wait_seconds": slowest - own}
            if held := memory.of_device(f"{machine}/cpu:0"):
                found |= {f"{tag}/memory_mib": held[0], f"{tag}/peak_memory_mib": held[1]}
            now, before = counters[machine], self._before.get(machine)
            if now and before and step > self._step:
                received, sent = (b - a for a, b in zip(before, now, strict=True))
                found[f"{tag}/received_bytes"] = received / (step - self._step)
                found[f"{tag}/sent_bytes"] = sent / (step - self._step)
        self._before = {machine: value for machine, value in counters.items() if value}
        self._step = step
        return found


def _network_bytes(machine: str) -> tuple[int, int] | None:
    """Return the bytes that a worker's interfaces have received and sent; None: it does not tell.

    The loopback interface counts only for a worker of this machine, which is reached by it.
    """
    text, cluster = remote.read_text(machine, _COUNTERS), remote.current_cluster()
    local = bool(cluster) and cluster.is_on_loopback(machine)
    rows = re.findall(r"^\s*(\S+):\s*(.*)$", text or "", re.MULTILINE)
    used = [[int(n) for n in row.split()] for name, row in rows if (name == "lo") == local]
    return (sum(row[0] for row in used), sum(row[8] for row in used)) if rows else None
