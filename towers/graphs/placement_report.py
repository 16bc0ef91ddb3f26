"""Reports of placement: a run's lines, the error of strict mode, a table and a file."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from towers import files, formatting
from towers.devices.shown_names import short_device_name
from towers.errors import RunError
from towers.graphs.placement import Placement

_MOST = 8  # lines of strays


def report(placement: Placement, stray: Sequence[str]) -> list[str]:
    """Return a run's lines on where its ops ran, and on the bytes sent in a step.

    Args:
        placement: of the executed graph.
        stray: the lines of `strays`, of which the first are shown.
    """
    ours = [op for op in placement.ops if op.tower is not None]
    lines = [f"placement   {len(ours)} ops in towers, each on its tower's device"]
    if num_compiled := len({op.tower for op in placement.compiled} - {None}):
        towers = "1 tower" if num_compiled == 1 else f"{num_compiled} towers, each"
        lines = [f"placement   {towers} compiled by XLA on its tower's device"]
    if stray:
        lines = [f"placement   of {len(ours)} ops in towers, some run on other devices:"]
        lines += [f"  {line}" for line in stray[:_MOST]]
        if len(stray) > _MOST:
            lines.append(f"  and {len(stray) - _MOST} more: see --log_device_placement")
    crossing = placement.crossing_bytes()
    unknown = sum(transfer.bytes is None for transfer in placement.transfers)
    if crossing:
        routes = [f"{_size(b)} {source} -> {to}" for (source, to), b in sorted(crossing.items())]
        more = f", and {unknown} of unknown size" if unknown else ""
        lines.append(f"  copied per step: {', '.join(routes)}{more}")
    return lines


def check_strict(stray: Sequence[str]) -> None:
    """Raise a RunError that names the first stray, if there is one."""
    if stray:
        more = f", and {len(stray) - 1} more" if len(stray) > 1 else ""
        raise RunError(
            f"--placement=strict: {stray[0]}{more}; remove tf.device from the model, or type "
            "--placement=report"
        )


def strays(
    placement: Placement,
    devices: Sequence[str],
    variables: Mapping[str, tf.Variable],
    master_devices: Sequence[str],
) -> list[str]:
    """Return a line for each layer of a tower, and each master, that is on another device.

    Args:
        placement: of the executed graph.
        devices: of the towers, in their order.
        variables: {name: variable}.
        master_devices: allowed devices of variables.
    """
    types: dict[tuple, list[str]] = defaultdict(list)
    shown = list(map(short_device_name, devices))
    for op in placement.misplaced(devices):
        types[op.tower, op.layer, op.device, op.requested].append(op.type.lstrip("_"))
    lines = []
    for (tower, layer, device, requested), names in sorted(types.items()):
        names = ", ".join(dict.fromkeys(names))
        why = _why(requested, device, shown[tower])
        lines.append(f"tower {tower} on {shown[tower]}, layer {layer}: {names} on {device}{why}")
    homes = [short_device_name(device) for device in master_devices]
    home = " or ".join(dict.fromkeys(homes))
    for name, variable in variables.items():
        if (device := short_device_name(variable.device)) not in homes:
            lines.append(f"variable {name} on {device}, not {home}")
    return lines


def _why(requested: str, device: str, tower: str) -> str:
    if requested == device:
        return ", placed there by tf.device"
    if requested == tower:
        return f", by soft placement: {tower} cannot run it"
    return f", by soft placement: it asks for {requested}" if requested else ""


def table(placement: Placement) -> list[str]:
    """Return the lines of a table: the number of ops of each type on each device."""
    counts = Counter((op.device, op.type) for op in placement.ops)
    devices = sorted({device for device, _ in counts})
    types = sorted({kind for _, kind in counts})
    rows = [(kind, *(counts[device, kind] or None for device in devices)) for kind in types]
    rows.append(("all", *(sum(counts[d, kind] for kind in types) for d in devices)))
    return [f"  {line}" for line in formatting.table(("op type", *devices), rows)]


def write_tsv(path: Path, placement: Placement) -> None:
    """Write a row for every op; an op that was folded, fused or pruned has the device "-".

    Args:
        path: of the file, which is replaced.
        placement: of the executed graph.

    Raises:
        RunError: the file cannot be written.
    """
    rows = [("name", "type", "tower", "layer", "requested", "device")]
    for op in placement.ops + placement.compiled + placement.gone:
        tower, layer = ("", "") if op.tower is None else (str(op.tower), op.layer)
        rows.append((op.name, op.type, tower, layer, op.requested, op.device or "-"))
    files.write_text(path, "".join("\t".join(row) + "\n" for row in rows))


def _size(num_bytes: int) -> str:
    unit, name = (1e6, "MB") if num_bytes >= 1e5 else (1e3, "kB")
    return f"{num_bytes / unit:.2f} {name}"
