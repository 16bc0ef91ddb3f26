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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers import text
from towers.builder.layers import tower_of
from towers.errors import RunError
from towers.graphs.placement import Op, Placement, traced_name

NUM_OPS = 10  # of each device
OUTSIDE = "outside of the step (input, evaluation, checkpoints)"
_MAX_MIB = 512  # in memory, a trace takes several times its size on disk
_OP = re.compile(r"([\w./>\\-]+):(\w+)(#.*)?")  # "tower_0/conv1/convolution:Conv2D"
_BACKWARD = re.compile(r"Grad(?!ient)|Backprop")  # but not StopGradient
_NO_STAGE = re.compile(r"_(Host)?Send|(Stateful)?PartitionedCall")
_CALLS = re.compile(r"while|body|cond|then|else|gradient_tape|(Stateful)?PartitionedCall|_\d+|")
_ASYNC = "ExecutorState::ProcessAsync::"  # an op that does not block its thread: start and end
_NOBODYS = ("", "_Recv", "_HostRecv")  # types of what only waits, or chooses the next op


@dataclasses.dataclass(frozen=True)
class OpTime:
    """What an op of a layer took of a device in a profile."""

    device: str  # or `OUTSIDE`
    stage: str  # "forward" or "backward" in a tower, else ""
    layer: str  # the layers or the scopes that the op stands in
    type: str
    calls: int  # on a GPU, of its kernels
    seconds: float  # in all, without what is nested in it


@dataclasses.dataclass(frozen=True)
class _Event:
    """A span of a thread or a stream, in picoseconds, and the op or XLA program it is a part of."""

    start: int
    end: int
    name: str = ""
    type: str = ""
    program: str = ""
    calls: int = 1


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
    does not count.
    """
    devices = {op.name: op.device for op in (*placement.compiled, *placement.ops) if op.device}
    gpus = {plane.name: match for plane in trace.planes if (match := _gpu(plane.name))}

    @functools.cache
    def device_of(name: str) -> str:
        return devices.get(name) or devices.get(traced_name(name, devices), "")

    totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for plane in trace.planes:
        gpu = gpus.get(plane.name)
        if not gpu and plane.name != "/host:CPU":
            continue
        for event, picoseconds in _own_times(plane, bool(gpu)):
            device = device_of(event.name)
            if gpu:
                if event.name and not event.program and not device:
                    device = OUTSIDE
                elif not device.startswith("/gpu"):  # a copy may bear the name of a CPU's op
                    device = gpu
            elif device.startswith("/gpu") or (
                gpus and not device and tower_of(event.name) is not None
            ):
                continue
            total = totals[(device or OUTSIDE, *_describe(event))]
            total[0] += event.calls
            total[1] += picoseconds
    rows = [OpTime(*key, calls, time / 1e12) for key, (calls, time) in totals.items()]
    return sorted(rows, key=lambda row: (row.device == OUTSIDE, row.device, -row.seconds))


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
    used = {op.device for op in placement.ops if op.device.startswith("/gpu")}
    found = [said.splitlines()[0] for said in (*trace.errors, *trace.warnings) if said]
    if silent := sorted(used - {row.device for row in times}):
        found.append(
            f"no kernel of {', '.join(silent)} was recorded; the driver may keep its "
            "counters for root (NVreg_RestrictProfilingToAdminUsers)"
        )
    return [f"warning: {line}" for line in found]


def _gpu(plane: str) -> str | None:
    """Return "/gpu:0" for "/device:GPU:0" or "/device:GPU:0 NVIDIA A100", None for other planes."""
    match = re.match(r"/device:GPU:(\d+)\b", plane)
    return match and f"/gpu:{match[1]}"


def _describe(event: _Event) -> tuple[str, str, str]:
    """Return stage, layer and type of what an event is a part of."""
    if event.program:
        return "", f"XLA: {event.type}", re.sub(r"[.\d]+$", "", event.type)
    op = Op(event.name, re.sub("^_Mkl(Native)?", "", event.type), "", "")
    if op.tower is not None:
        backward = "gradient_tape" in op.name or _BACKWARD.search(op.type)
        stage = "backward" if backward else "forward"
        return "" if _NO_STAGE.fullmatch(op.type) else stage, op.layer, op.type
    *scopes, last = event.name.split("/")
    known = [re.sub(r"_\d+$", "", scope) for scope in scopes if not _CALLS.fullmatch(scope)]
    return "", "/".join(known) or last or "-", op.type


def _own_times(plane: Any, on_gpu: bool) -> list[tuple[_Event, int]]:
    """Return (event, its own picoseconds) of what ran on a plane.

    An op of a program of XLA's bears no name of ours: it is of the op that called the program.
    """
    found, callers = [], {}
    for line in plane.lines:
        if on_gpu and not line.name.startswith("Stream"):  # it repeats the same time, in groups
            continue
        open_events: list[list] = []  # [event, own picoseconds], outermost first
        for event in sorted(_events(plane, line, on_gpu), key=lambda e: (e.start, -e.end)):
            while open_events and open_events[-1][0].end <= event.start:
                open_events.pop()
            if open_events:
                around = open_events[-1]
                around[1] -= min(event.end, around[0].end) - event.start
                caller = callers.get(around[0].program) or around[0].name
                if event.program and caller:
                    callers[event.program] = caller
            open_events.append([event, event.end - event.start])
            found.append(open_events[-1])
    return [
        (dataclasses.replace(event, name=callers.get(event.program, event.name)), picoseconds)
        for event, picoseconds in found
        if event.type not in _NOBODYS
    ]


def _events(plane: Any, line: Any, on_gpu: bool) -> Iterator[_Event]:
    """Yield those events of a line that are of an op, or of none for sure."""
    told = on_gpu or any(stat.name == "hlo_op" for stat in plane.stat_metadata.values())
    for event in line.events:
        name = plane.event_metadata[event.metadata_id].name
        span = event.offset_ps, event.offset_ps + event.duration_ps
        match = _OP.fullmatch(name)
        known = told if on_gpu or not match else False
        stats = _stats(plane, event.stats) if known or name.startswith(_ASYNC) else {}
        if on_gpu:
            match = _OP.fullmatch(stats.get("tf_op", ""))
        if "hlo_op" in stats:
            program = stats.get("hlo_module") or "XLA"
            yield _Event(*span, match[1] if match else "", stats["hlo_op"], program)
        elif match or on_gpu:
            yield _Event(*span, *(match.groups()[:2] if match else ("", name)))
        elif name.startswith(_ASYNC):
            kind, start = stats.get("kernel_type", ""), name.endswith("Start")
            yield _Event(*span, stats.get("name", ""), kind, calls=int(start))
        elif name == "ExecutorState::Process":  # chooses the next op; may be nested in one
            yield _Event(*span)


def _stats(plane: Any, stats: Iterable[Any]) -> Mapping[str, str]:
    """Return {name: text} of what is known of an event."""
    texts = {}
    for stat in stats:
        text = stat.str_value
        if stat.WhichOneof("value") == "ref_value":  # TensorFlow keeps such texts once
            text = plane.stat_metadata[stat.ref_value].name
        texts[plane.stat_metadata[stat.metadata_id].name] = text
    return texts
