"""Curves of the workers of a run: what their towers take, wait for, hold, send and receive.

All is read over TensorFlow's connection, so a worker needs no program of ours for it: Linux tells
in files what its network interfaces have carried. These counters are the machine's: what others
send there is in them, and with several workers on one machine each shows all of it.
"""

import re
from collections.abc import Mapping, Sequence

from towers.builder.kinds import machine_of
from towers.devices import memory, remote

_COUNTERS = "/proc/net/dev"  # a row for each interface; 1st number: bytes received, 9th: sent
_NUMBER = re.compile(r"task:(\d+)$")


class WorkerCurves:
    """Makes the curves of the workers on which these towers are; none where there is no worker."""

    def __init__(self, devices: Sequence[str]):
        """Have read no counters yet."""
        self._towers: dict[str, list[int]] = {}
        for tower, device in enumerate(devices):
            if machine := machine_of(device):
                self._towers.setdefault(machine, []).append(tower)
        self._before: Mapping[str, tuple[int, int]] = {}
        self._step = 0

    def point(self, step: int, tower_seconds: Sequence[float]) -> dict[str, float]:
        """Return {tag: value} after `step` steps.

        Bytes are those of a step, since the point before. `tower_seconds` are of each tower's step,
        none if they are not known.
        """
        found: dict[str, float] = {}
        counters = {machine: _carried(machine) for machine in self._towers}
        slowest = max(tower_seconds, default=0.0)
        for machine, towers in self._towers.items():
            values: dict[str, float] = {}
            if tower_seconds:
                own = max(tower_seconds[tower] for tower in towers)
                values |= {"step_seconds": own, "wait_seconds": slowest - own}
            if held := memory.of_device(f"{machine}/cpu:0"):
                values |= {"memory_mib": held[0], "peak_memory_mib": held[1]}
            now, before = counters[machine], self._before.get(machine)
            if now and before and step > self._step:
                received, sent = (b - a for a, b in zip(before, now, strict=True))
                values["received_bytes"] = received / (step - self._step)
                values["sent_bytes"] = sent / (step - self._step)
            number = _NUMBER.search(machine)[1]
            found |= {f"worker_{number}/{name}": value for name, value in values.items()}
        self._before = {machine: value for machine, value in counters.items() if value}
        self._step = step
        return found


def _carried(machine: str) -> tuple[int, int] | None:
    """Return the bytes that a worker's interfaces have received and sent; None: it does not tell.

    The loopback interface counts only for a worker of this machine, which is reached by it.
    """
    text = remote.read_text(machine, _COUNTERS)
    rows = re.findall(r"^\s*(\S+):\s*(.*)$", text or "", re.MULTILINE)
    numbers = {name: [int(n) for n in row.split()] for name, row in rows}
    if not numbers:
        return None
    cluster = remote.current()
    local = bool(cluster) and cluster.is_on_loopback(machine)
    used = [row for name, row in numbers.items() if (name == "lo") == local]
    return sum(row[0] for row in used), sum(row[8] for row in used)
