"""The most expensive ops of a profile in plain text, read from the trace; no plugin is needed.

    trace = read_trace(path)
    times = op_times(trace, placement)
    lines = report(times, num_steps=10) + problems(trace, times, placement)

A trace holds a plane for the host, with a line for each of its threads, and one for each GPU, with
a line for each stream. Time counts once: what is nested in an op is taken off the op around it.
"""

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers import text
from towers.errors import RunError
from towers.graphs.placement import Op, Placement, traced_name

NUM_OPS = 10  # of each device
OUTSIDE = "outside of the step (input, evaluation, checkpoints)"
XLA = "programs of XLA's on CPUs, of all towers"
_MAX_MIB = 512  # in memory, a trace takes several times its size on disk
_OP = re.compile(r"([\w./>\\-]+):(\w+)(#.*)?")  # "tower_0/conv1/convolution:Conv2D"
_BACKWARD = re.compile(r"Grad(?!ient)|Backprop")  # but not StopGradient
_CALLS = re.compile(r"while|body|cond|then|else|gradient_tape|(Stateful)?PartitionedCall|_\d+|")
_COPIES = {"H2D": "host to GPU", "D2H": "GPU to host", "P2P": "GPU to GPU"}  # as CUPTI says it
_NOBODYS = ("", "_Recv", "_HostRecv")  # types of what only waits, or chooses the next op


@dataclasses.dataclass(frozen=True)
class OpTime:
    """What an op of a layer took of a device in a profile."""

    device: str  # or `OUTSIDE`, or `XLA`
    stage: str  # "forward" or "backward" in a tower, else ""
    layer: str  # the layers or the scopes that the op stands in
    type: str
    calls: int  # on a GPU, of its kernels
    seconds: float  # in all, without what is nested in it


def read_trace(path: Path) -> Any:
    """Read a trace, "....xplane.pb".

    Raises:
        RunError: it is too large to be read as a whole.
    """
    size_mib = path.stat().st_size / 2**20
    if size_mib > _MAX_MIB:
        raise RunError(
            f"{path} has {size_mib:.0f} MiB, too much for a summary: profile fewer steps"
        )
    return xplane_pb2.XSpace.FromString(path.read_bytes())


def op_times(trace: Any, placement: Placement) -> list[OpTime]:
    """Return the time of each op, of each device, the most expensive ones first.

    Logical CPU devices share the host's threads: an op's device is known by its name, and one that
    is not in the placement is `OUTSIDE`. What the host does for an op of a GPU is to launch it, and
    does not count. A GPU's kernel is of that GPU if its op is not known.
    """
    devices = {op.name: op.device for op in (*placement.compiled, *placement.ops) if op.device}

    @functools.cache
    def device_of(name: str) -> str:
        return devices.get(name) or devices.get(traced_name(name, devices), "")

    totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for plane in trace.planes:
        gpu = re.match(r"/device:GPU:(\d+)\b", plane.name)  # and its product's name
        if not gpu and plane.name != "/host:CPU":
            continue
        for name, kind, picoseconds in _own_times(plane, bool(gpu)):
            device = device_of(name) or (XLA if kind.startswith("XLA: ") else OUTSIDE)
            if gpu and not device.startswith("/gpu"):  # a copy may bear the name of a CPU's op
                device = f"/gpu:{gpu[1]}"
            elif not gpu and device.startswith("/gpu"):
                continue
            total = totals[(device, *_describe(name, kind))]
            total[0] += 1
            total[1] += picoseconds
    rows = [OpTime(*key, calls, time / 1e12) for key, (calls, time) in totals.items()]
    return sorted(rows, key=lambda row: (not row.device.startswith("/"), row.device, -row.seconds))


def copies(trace: Any) -> dict[str, tuple[int, int]] | None:
    """Return {"host to GPU": (number, bytes), ...} of what all GPUs copied; None without a GPU."""
    found = {way: [0, 0] for way in _COPIES.values()}
    recorded = False
    for plane in trace.planes:
        streams = [line for line in plane.lines if line.name.startswith("Stream")]
        if not plane.name.startswith("/device:GPU:") or not streams:
            continue
        recorded = True
        for event in (event for line in streams for event in line.events):
            title = plane.event_metadata[event.metadata_id].name
            if way := _COPIES.get(title.removeprefix("Memcpy")):
                size = re.search(r"\bsize:(\d+)", _stats(plane, event).get("memcpy_details", ""))
                found[way][0] += 1
                found[way][1] += int(size[1]) if size else 0
    return {way: (number, size) for way, (number, size) in found.items()} if recorded else None


def report(times: Sequence[OpTime], num_steps: int) -> list[str]:
    """Return a table of the most expensive ops for each device, in a profile of so many steps."""
    lines = []
    for device in dict.fromkeys(row.device for row in times):
        rows = [row for row in times if row.device == device]
        busy = sum(row.seconds for row in rows)
        lines.append(
            f"{device}: busy {1e3 * busy:.3f} ms, {1e3 * busy / num_steps:.3f} ms a step; "
            f"{len(rows[:NUM_OPS])} of {len(rows)} ops"
        )
        header = ("calls", "total ms", "% of busy", "ms/step", "pass", "type", "op")
        cells = []
        for row in rows[:NUM_OPS]:
            share, ms = 100 * row.seconds / (busy or 1), 1e3 * row.seconds
            numbers = (row.calls, f"{ms:.3f}", f"{share:.1f}", f"{ms / num_steps:.3f}")
            cells.append((*numbers, row.stage or "-", row.type, row.layer))
        lines += text.table(header, cells)
    note = "on a CPU, TensorFlow records no op that it has found to take some microseconds only"
    return [*lines, note]


def problems(trace: Any, times: Sequence[OpTime], placement: Placement) -> list[str]:
    """Return what the profiler complains of, and the GPUs of which nothing was recorded."""
    used = {op.device for op in placement.ops if "/gpu:" in op.device}
    found = [said.splitlines()[0] for said in (*trace.errors, *trace.warnings) if said]
    if silent := sorted(used - {row.device for row in times}):
        found.append(
            f"no kernel of {', '.join(silent)} was recorded; the driver may keep its "
            "counters for root (NVreg_RestrictProfilingToAdminUsers)"
        )
    return [f"warning: {line}" for line in found]


def _describe(name: str, kind: str) -> tuple[str, str, str]:
    """Return stage, layer and type of the op that an event is of."""
    op = Op(name, re.sub("^_Mkl(Native)?", "", kind), "", "")
    if op.tower is not None:
        backward = "gradient_tape" in op.name or _BACKWARD.search(op.type)
        return "backward" if backward else "forward", op.layer, op.type
    *scopes, last = name.split("/")
    known = [re.sub(r"_\d+$", "", scope) for scope in scopes if not _CALLS.fullmatch(scope)]
    return "", "/".join(known) or last or "-", op.type


def _own_times(plane: Any, on_gpu: bool) -> list[tuple[str, str, int]]:
    """Return (name of an op, its type, its own picoseconds) of what ran on a plane."""
    found = []
    for line in plane.lines:
        if on_gpu and not line.name.startswith("Stream"):  # it repeats the same time, in groups
            continue
        open_events: list[list] = []  # [name, type, own picoseconds, end], outermost first
        for event in sorted(line.events, key=lambda e: (e.offset_ps, -e.duration_ps)):
            if (op := _op(plane, event, on_gpu)) is None:
                continue
            start, end = event.offset_ps, event.offset_ps + event.duration_ps
            while open_events and open_events[-1][3] <= start:
                open_events.pop()
            if open_events:
                open_events[-1][2] -= min(end, open_events[-1][3]) - start
            open_events.append([*op, event.duration_ps, end])
            found.append(open_events[-1])
    return [(name, kind, own) for name, kind, own, _ in found if kind not in _NOBODYS]


def _op(plane: Any, event: Any, on_gpu: bool) -> tuple[str, str] | None:
    """Return name and type of the op that an event is of, "" for what chooses the next op.

    None is returned for what tells of no op, as the parts of one do.
    """
    title = plane.event_metadata[event.metadata_id].name
    match = _OP.fullmatch(title)
    if match and not on_gpu:
        return match[1], match[2]
    if title == "ExecutorState::Process":  # may be nested in an op
        return "", ""
    stats = _stats(plane, event)
    kind = f"XLA: {re.sub(r'[.0-9]+$', '', stats['hlo_op'])}" if "hlo_op" in stats else None
    if not on_gpu:
        return kind and ("", kind)
    match = _OP.fullmatch(stats.get("tf_op", ""))
    return (match[1], match[2]) if match else ("", kind or title)


def _stats(plane: Any, event: Any) -> dict[str, str]:
    """Return the texts that an event comes with, by name."""
    stats = {}
    for stat in event.stats:
        value = stat.str_value
        if stat.WhichOneof("value") == "ref_value":  # TensorFlow keeps such texts once
            value = plane.stat_metadata[stat.ref_value].name
        stats[plane.stat_metadata[stat.metadata_id].name] = value
    return stats
