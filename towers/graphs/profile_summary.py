"""The most expensive ops of a profile in plain text, read from the trace; no plugin is needed.

    times = op_times(read_trace(path), placement)
    for line in report(times, num_steps=10):
        print(line)

A trace holds a plane for the host, with a line for each of its threads, and one for each GPU, with
a line for each stream. Time counts once: what is nested in an op is taken off the op around it.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from towers.errors import RunError
from towers.graphs.placement import Op, Placement

NUM_OPS = 10  # of each device
_TYPE_WIDTH = 40  # of a kernel without an op, the type is its name, and C++ has long ones
OUTSIDE = "outside of the step (input, evaluation, checkpoints)"
_MAX_MIB = 512  # in memory, a trace takes several times its size on disk
_HOST = "/host:CPU"
_OP = re.compile(r"([\w./>\\-]+):(\w+)")  # "tower_0/conv1/convolution:Conv2D"
_BACKWARD = re.compile(r"Grad(?!ient)|Backprop")  # but not StopGradient
_NO_STAGE = re.compile(r"_(Host)?Send|(Stateful)?PartitionedCall")
_CALLS = re.compile(r"while|body|cond|then|else|gradient_tape|(Stateful)?PartitionedCall|_\d+|")
_ASYNC = "ExecutorState::ProcessAsync::"  # an op that does not block its thread: start and end
_EXECUTOR = "ExecutorState::Process"  # chooses the next op; may be nested in one that has ended
_WAITING = ("_Recv", "_HostRecv")


@dataclasses.dataclass(frozen=True)
class OpTime:
    """What an op of a layer took of a device in a profile.

    Attributes:
        device: "/gpu:0", or `OUTSIDE`.
        stage: "forward" or "backward" in a tower, else "".
        layer: the layers or the scopes that the op stands in.
        type: "Conv2D".
        calls: how often it ran; on a GPU, its kernels.
        seconds: in all, without what is nested in it.
    """

    device: str
    stage: str
    layer: str
    type: str
    calls: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Label:
    """Whose time an event is: of the op `name`, or of `program`, which XLA made; else nobody's."""

    name: str = ""
    type: str = ""
    program: str = ""
    calls: int = 1


def read_trace(path: Path) -> Any:
    """Read a trace.

    The only place that knows TensorFlow's private description of it.

    Args:
        path: "....xplane.pb".

    Returns:
        An XSpace.

    Raises:
        RunError: it is too large to be read as a whole.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    size_mib = path.stat().st_size / 2**20
    if size_mib > _MAX_MIB:
        raise RunError(
            f"{path} has {size_mib:.0f} MiB, too much for a summary: profile fewer steps"
        )
    return xplane_pb2.XSpace.FromString(path.read_bytes())


def op_times(space: Any, placement: Placement) -> list[OpTime]:
    """Return the time of each op, of each device, the most expensive ones first.

    Logical CPU devices share the host's threads: an op's device is known by its name. What the host
    does for an op of a GPU is to launch it, and does not count.

    Args:
        space: as `read_trace` returns it.
        placement: of the train loop; ops that are not in it are `OUTSIDE`.
    """
    device_of = _device_finder(placement)
    totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    gpus = [(_gpu(plane.name), plane) for plane in space.planes if _gpu(plane.name)]
    for plane in space.planes:
        if plane.name != _HOST:
            continue
        for label, picoseconds in _host_times(plane):
            device = device_of(label.name)
            outside_on_gpu = gpus and not device and Op(label.name, "", "", "").tower is not None
            if not outside_on_gpu and not (device or "").startswith("/gpu"):
                _add(totals, device or OUTSIDE, label, picoseconds)
    for gpu, plane in gpus:
        for label, picoseconds in _gpu_times(plane):
            device = device_of(label.name)
            if label.name and not label.program and not device:
                device = OUTSIDE
            elif not (device or "").startswith("/gpu"):  # a copy may bear the name of a CPU's op
                device = gpu
            _add(totals, device, label, picoseconds)
    rows = [OpTime(*key, calls, time / 1e12) for key, (calls, time) in totals.items()]
    return sorted(rows, key=lambda row: (row.device == OUTSIDE, row.device, -row.seconds))


def report(times: Sequence[OpTime], num_steps: int) -> list[str]:
    """Return a table of the most expensive ops for each device.

    Args:
        times: as `op_times` returns them.
        num_steps: of the profile.
    """
    lines = []
    for device in dict.fromkeys(row.device for row in times):
        rows = [row for row in times if row.device == device]
        busy = sum(row.seconds for row in rows)
        shown = rows[:NUM_OPS]
        width = max(len(row.type[:_TYPE_WIDTH]) for row in shown)
        lines += [
            f"{device}: busy {1e3 * busy:.3f} ms, {1e3 * busy / num_steps:.3f} ms a step; "
            f"{len(shown)} of {len(rows)} ops",
            f"{'calls':>10}{'total ms':>12}{'% of busy':>11}{'ms/step':>11}  pass      "
            f"{'type':{width}}  op",
        ]
        lines += [
            f"{row.calls:10}{1e3 * row.seconds:12.3f}{100 * row.seconds / (busy or 1):11.1f}"
            f"{1e3 * row.seconds / num_steps:11.3f}  {row.stage or '-':10}"
            f"{row.type[:_TYPE_WIDTH]:{width}}  {row.layer}"
            for row in shown
        ]
    return [
        *lines,
        "on a CPU, TensorFlow records no op that it has found to take some microseconds only",
    ]


def problems(space: Any, times: Sequence[OpTime], placement: Placement) -> list[str]:
    """Return what the profiler complains of, and the GPUs of which nothing was recorded."""
    used = {op.device for op in placement.ops if op.device.startswith("/gpu")}
    silent = sorted(used - {row.device for row in times})
    lines = [
        f"warning: {text.splitlines()[0]}" for text in (*space.errors, *space.warnings) if text
    ]
    if silent:
        lines.append(
            f"warning: no kernel of {', '.join(silent)} was recorded; the driver may keep its "
            "counters for root (NVreg_RestrictProfilingToAdminUsers)"
        )
    return lines


def _add(totals: dict[tuple, list[int]], device: str, label: _Label, picoseconds: int) -> None:
    total = totals[(device, *_describe(label))]
    total[0] += label.calls
    total[1] += picoseconds


def _describe(label: _Label) -> tuple[str, str, str]:
    """Return stage, layer and type of what a label stands for."""
    if label.program:
        return "", f"XLA: {label.type}", re.sub(r"[.\d]+$", "", label.type)
    op = Op(label.name, re.sub("^_Mkl(Native)?", "", label.type), "", "")
    if op.tower is not None:
        backward = "gradient_tape" in op.name or _BACKWARD.search(op.type)
        stage = "backward" if backward else "forward"
        return "" if _NO_STAGE.fullmatch(op.type) else stage, op.layer, op.type
    *scopes, last = label.name.split("/")
    known = [re.sub(r"_\d+$", "", scope) for scope in scopes if not _CALLS.fullmatch(scope)]
    return "", "/".join(known) or last or "-", op.type


def _device_finder(placement: Placement) -> Any:
    """Return a function that gives the device of an op by its name, None if it is not known."""
    devices = {op.name: op.device for op in (*placement.compiled, *placement.ops) if op.device}
    found: dict[str, str | None] = {}

    def device_of(name: str) -> str | None:
        if name not in found:  # inlining puts the call's scope in front of it
            parts = re.split(r"/_\d+/", name)
            names = [name, *("/".join(parts[i:]) for i in range(len(parts)))]
            found[name] = next((devices[n] for n in names if n in devices), None)
        return found[name]

    return device_of


def _gpu(plane: str) -> str | None:
    """Return "/gpu:0" for "/device:GPU:0" or "/device:GPU:0 NVIDIA A100", None for other planes."""
    match = re.match(r"/device:GPU:(\d+)\b", plane)
    return match and f"/gpu:{match[1]}"


def _host_times(plane: Any) -> list[tuple[_Label, int]]:
    """Return (label, its own picoseconds) of the events of the host's threads.

    An op of a program of XLA's bears no name of ours: it is of the op that called the program.
    """
    times, callers = [], {}
    for line in plane.lines:
        for label, around, picoseconds in _own_times(_labels(plane, line)):
            if label.program and around.name:
                callers[label.program] = around.name
            times.append((label, picoseconds))
    return [
        (dataclasses.replace(label, name=callers.get(label.program, label.name)), time)
        for label, time in times
        if label.type
    ]


def _labels(plane: Any, line: Any) -> Iterator[tuple[Any, _Label]]:
    """Yield (event, label) of those events of a thread that are of an op, or of none for sure."""
    names = {i: metadata.name for i, metadata in plane.event_metadata.items()}
    programs = any(stat.name == "hlo_op" for stat in plane.stat_metadata.values())
    for event in line.events:
        name = names.get(event.metadata_id, "")
        if match := _OP.fullmatch(name.partition("#")[0]):
            yield event, _Label(*match.groups()) if match[2] not in _WAITING else _Label()
        elif name.startswith(_ASYNC):
            stats = _stats(plane, event)
            calls = int(name.endswith("Start"))
            op, kind = stats.get("name", ""), stats.get("kernel_type", "")
            yield event, _Label(op, kind, calls=calls) if kind not in _WAITING else _Label()
        elif name == _EXECUTOR:
            yield event, _Label()
        elif programs and "hlo_op" in (stats := _stats(plane, event)):
            yield event, _Label("", stats["hlo_op"], stats.get("hlo_module", "") or "XLA")


def _gpu_times(plane: Any) -> Iterator[tuple[_Label, int]]:
    """Yield (label, picoseconds) of the kernels and copies of a GPU."""
    for line in plane.lines:
        if not line.name.startswith("Stream"):  # others repeat the same time, in groups
            continue
        for event in line.events:
            stats = _stats(plane, event)
            kernel = plane.event_metadata[event.metadata_id].name
            match = _OP.fullmatch(str(stats.get("tf_op", "")).partition("#")[0])
            if "hlo_op" in stats:
                program = stats.get("hlo_module", "") or "XLA"
                label = _Label(match[1] if match else "", stats["hlo_op"], program)
            else:
                label = _Label(*match.groups()) if match else _Label("", kernel)
            yield label, event.duration_ps


def _stats(plane: Any, event: Any) -> Mapping[str, Any]:
    """Return {name: value} of what is known of an event."""
    found = {}
    for stat in event.stats:
        kind = stat.WhichOneof("value")
        value = getattr(stat, kind) if kind else ""
        if kind == "ref_value":
            value = plane.stat_metadata[value].name
        found[plane.stat_metadata[stat.metadata_id].name] = value
    return found


def _own_times(
    labelled: Iterable[tuple[Any, _Label]],
) -> Iterator[tuple[_Label, _Label, int]]:
    """Yield (label, label of the op around it, own picoseconds) of each event of a thread."""
    spans = [(e.offset_ps, e.offset_ps + e.duration_ps, label) for e, label in labelled]
    open_events: list[list] = []  # [end, label, around, own picoseconds], outermost first
    for start, end, label in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_events and open_events[-1][0] <= start:
            yield tuple(open_events.pop()[1:])
        around = _Label()
        if open_events:
            last = open_events[-1]
            last[3] -= min(end, last[0]) - start
            around = last[2] if last[1].program else last[1]
        open_events.append([end, label, around, end - start])
    while open_events:
        yield tuple(open_events.pop()[1:])
