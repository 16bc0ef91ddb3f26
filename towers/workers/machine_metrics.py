"""Curves of a run's workers: their step and wait times, memory and network traffic.

They are read over TensorFlow's connection from files of Linux there. Network counters are those of
the machine: they include other programs' traffic, and several workers on a machine share them.
"""

import re
from collections.abc import Mapping, Sequence

from towers.builder.device_types import machine_of
from towers.devices import memory, remote

_COUNTERS = "/proc/net/dev"  # a row for each interface; 1st number: bytes received, 9th: sent
MACHINE_CHARTS = {  # {chart: tags}; {} stands for each worker
    "seconds of each worker's slowest tower": "worker_{}/step_seconds",
    "seconds that it waits for the slowest of all": "worker_{}/wait_seconds",
    "memory of each worker's process, MiB": "worker_{}/memory_mib worker_{}/peak_memory_mib",
    "bytes of a step, as its network interfaces count": (
        "worker_{}/received_bytes worker_{}/sent_bytes"
    ),
}


class MachineCurves:
    """Computes curves of the workers that hold the towers."""

    def __init__(self, devices: Sequence[str]):
        """Set the devices of the towers, in tower order."""
        self._towers: dict[str, list[int]] = {}
        for tower, device in enumerate(devices):
            if machine := machine_of(device):
                self._towers.setdefault(machine, []).append(tower)
        self._before: Mapping[str, tuple[int, int]] = {}
        self._step = 0

    def point(self, step: int, tower_seconds: Sequence[float]) -> dict[str, float]:
        """Return {tag: value} after `step` steps.

        Args:
            step: number of steps; bytes are means for a step since the last point.
            tower_seconds: of each tower's step; empty if unknown.
        """
        scalars: dict[str, float] = {}
        counters = {machine: _network_bytes(machine) for machine in self._towers}
        slowest = max(tower_seconds, default=0.0)
        for machine, towers in self._towers.items():
            tag = f"worker_{machine.rpartition(':')[2]}"
            if tower_seconds:
                taken = max(tower_seconds[tower] for tower in towers)
                scalars |= {f"{tag}/step_seconds": taken, f"{tag}/wait_seconds": slowest - taken}
            if held := memory.of_device(f"{machine}/cpu:0"):
                scalars |= {f"{tag}/memory_mib": held[0], f"{tag}/peak_memory_mib": held[1]}
            now, before = counters[machine], self._before.get(machine)
            if now and before and step > self._step:
                received, sent = (b - a for a, b in zip(before, now, strict=True))
                scalars[f"{tag}/received_bytes"] = received / (step - self._step)
                scalars[f"{tag}/sent_bytes"] = sent / (step - self._step)
        self._before = {machine: value for machine, value in counters.items() if value}
        self._step = step
        return scalars


def _network_bytes(machine: str) -> tuple[int, int] | None:
    """Return the bytes that a worker's interfaces have received and sent, None if unknown.

    The loopback interface counts only for a worker on this machine.
    """
    text, worker = remote.read_text(machine, _COUNTERS), remote.find_machine(machine)
    local = worker is not None and worker.is_on_loopback()
    rows = re.findall(r"^\s*(\S+):\s*(.*)$", text or "", re.MULTILINE)
    used = [[int(n) for n in row.split()] for name, row in rows if (name == "lo") == local]
    return (sum(row[0] for row in used), sum(row[8] for row in used)) if rows else None
