"""What `towers plan` prints: what crosses, what is held, how long a step would take, and advice."""

from collections.abc import Mapping, Sequence
from typing import Any

from towers.commands.plan.cost_model import GIB, GPUS_PER_MACHINE
from towers.graphs.traffic import HOST

_ENOUGH = 0.8  # an efficiency that is not worth working on
_ADVISED_LINK = "PCIe 4 x16"  # what a machine has at least
_MB = 1e6


def report(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the result of `plan.plan`."""
    return [
        *gradient_lines(result["gradients"]),
        *bytes_lines(result),
        *memory_lines(result),
        *prediction_lines(result),
        *error_lines(result["model_error"]),
        f"advice      {advice(result)}",
    ]


def gradient_lines(gradients: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what was found of gradients and shapes."""
    if not any(gradients.values()):
        return ["gradients   every trainable variable has one, of its own shape"]
    what = {"missing": "no gradient", "shapes_differ": "a gradient of another shape"}
    return [
        f"FAILED      {what[kind]}: {', '.join(names)}"
        for kind, names in gradients.items()
        if names
    ]


def bytes_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the table of the bytes that cross in a step."""
    lines = [
        f"in a step cross, with {result['num_towers']} towers, in MB (a tower: the busiest one)",
        "  variables   host sends  host receives  tower sends  tower receives  ring each  executed",
    ]
    for name, row in result["placements"].items():
        counts = row["bytes_per_step"]
        host = counts["per_device"][HOST]
        towers = [v for device, v in counts["per_device"].items() if device != HOST]
        cells = [
            host["sent"],
            host["received"],
            *(max(tower[key] for tower in towers) for key in ("sent", "received", "collective")),
        ]
        widths = (11, 15, 13, 16, 11)
        text = "".join(f"{b / _MB:{width}.3f}" for b, width in zip(cells, widths, strict=True))
        lines.append(f"  {name:11}{text}  {_verdict(counts)}")
        lines += _differing(counts)
    return lines


def _verdict(counts: Mapping[str, Any]) -> str:
    if counts["equal"] is None:
        return "not compared: loops"
    if counts["equal"]:
        return "equal" + f", {counts['unknown_sizes']} unknown" * (counts["unknown_sizes"] > 0)
    off = sum(counts["planned"].values()) - sum(counts["executed"].values())
    return f"DIFFERS by {off} B"


def _differing(counts: Mapping[str, Any]) -> list[str]:
    """Return a line for each route whose two counts differ."""
    planned, executed = counts["planned"], counts["executed"]
    return [
        f"    {route}: planned {planned.get(route, 0)}, executed {executed.get(route, 0)} bytes"
        for route in sorted(planned.keys() | executed.keys())
        if planned.get(route, 0) != executed.get(route, 0)
    ]


def memory_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the table of a tower's memory."""
    limit = result["assumptions"]["gpu_memory_gib"]
    lines = [
        f"a tower's GPU holds, in MB, of {limit:g} GiB (received: from other devices)",
        "  variables   weights  slots, average  received, gathered  gradients  activations    total"
        "  fits up to",
    ]
    for name, row in result["placements"].items():
        held = row["memory_bytes"]
        cells = [
            held["weights"],
            held["optimizer"] + held["average"],
            held["weights_received"] + held["gather"] + held["batch"],
            held["gradients"],
            held["activations"],
            held["total"],
        ]
        widths = (8, 16, 20, 11, 13, 9)
        text = "".join(f"{b / _MB:{width}.1f}" for b, width in zip(cells, widths, strict=True))
        fits = f"{row['largest_batch_per_tower']} a tower" + ("" if row["fits"] else ": TOO LARGE")
        lines.append(f"  {name:11}{text}  {fits}")
    reserved = next(iter(result["placements"].values()))["memory_bytes"]["reserved"]
    lines.append(f"  the total has {reserved / GIB:g} GiB for CUDA and its libraries")
    return lines


def prediction_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what the predictions assume, and their table."""
    given, rows = result["assumptions"], result["predictions"]
    how = "as --step_ms says"
    if given["from"] == "FLOP":
        how = (
            f"{result['flop_per_example'] / 1e6:.3g} MFLOP an example at "
            f"{given['gpu_utilisation']:g} of {given['gpu_tflops']:g} TFLOP/s"
        )
    links = [
        f"{name} {link['gb_per_second']:g} x {link['fraction']:g}"
        for name, link in given["links"].items()
    ]
    lines = [
        "predicted for GPUs; none was measured",
        f"  a tower computes {given['tower_ms']:.2f} ms: {how},",
        f"  but {given['launch_ms']:.2f} ms at least, to launch its ops; transfers come after it",
        "  links, GB/s of one direction x the part that is reached:",
        *(f"  {', '.join(group)}" for group in (links[:3], links[3:])),
        "  all GPUs of a machine share one PCIe link to the host, whatever joins them",
        "  a ring that sums crosses each machine's network card once; --batch_size is global",
        "  efficiency in %: with the global batch as it is / with a tower's part as it is",
        "",
    ]
    counts = [1, 2, 4, 8]
    lines += _efficiencies(rows, "GPUs of one machine", counts, [""])
    networks = list(dict.fromkeys(row["network"] for row in rows if row["network"]))
    more = [16, 32, 64]
    title = f"machines of {GPUS_PER_MACHINE}, {_ADVISED_LINK}"
    return lines + _efficiencies(rows, title, more, networks)


def _efficiencies(
    rows: Sequence[Mapping[str, Any]], title: str, counts: Sequence[int], networks: Sequence[str]
) -> list[str]:
    """Return a table: a line for each placement and link, a column for each number of GPUs."""
    lines = [f"  {title:34}" + "".join(f"{count:>12}" for count in counts)]
    several = networks != [""]
    found = {
        (r["placement"], r["network"] if several else r["link"], r["num_towers"], r["scaling"]): r
        for r in rows
        if r["network"] in networks and (r["link"] == _ADVISED_LINK or not several)
    }
    for placement, way in dict.fromkeys(key[:2] for key in found):
        cells = []
        for count in counts:
            pair = [found[placement, way, count, s]["efficiency"] for s in ("strong", "weak")]
            cells.append(" / ".join(f"{100 * value:3.0f}" for value in pair))
        lines.append(f"  {placement:12}{way:22}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def error_lines(errors: Mapping[str, float]) -> list[str]:
    """Return how far the model is off on this machine."""
    if not errors:
        return []
    parts = [f"{number} towers {100 * error:.0f} %" for number, error in errors.items()]
    return [f"model error on this machine: {', '.join(parts)}"]


def advice(result: Mapping[str, Any]) -> str:
    """Return one sentence: which placement, and what limits it."""
    if result["failed"]:
        return "mend what FAILED or DIFFERS above before you rely on this plan"
    fitting = [name for name, row in result["placements"].items() if row["fits"]]
    if not fitting:
        most = max(row["largest_batch_per_tower"] for row in result["placements"].values())
        return (
            f"the batch does not fit: type --batch_size={most * result['num_towers']}"
            if most
            else "the model does not fit at any batch: it needs GPUs with more memory"
        )
    rows = [
        row
        for row in result["predictions"]
        if row["scaling"] == "strong" and row["link"] == _ADVISED_LINK and not row["network"]
        if row["placement"] in fitting and row["num_towers"] <= result["num_towers"]
    ]
    number = max(row["num_towers"] for row in rows)
    best = max(
        (row for row in rows if row["num_towers"] == number), key=lambda row: row["efficiency"]
    )
    weak = next(
        row["efficiency"]
        for row in result["predictions"]
        if row["scaling"] == "weak"
        and all(row[key] == best[key] for key in ("placement", "link", "num_towers"))
    )
    limit = "computing is the limit"
    if weak < _ENOUGH:
        limit = "what crosses is the limit, and a larger --batch_size helps"
    elif best["efficiency"] < _ENOUGH:
        limit = "a tower's part of the batch is small, and a larger --batch_size helps"
    return (
        f"--variables={best['placement']} is the fastest on {number} GPUs over {_ADVISED_LINK}, at "
        f"{100 * best['efficiency']:.0f} % efficiency; {limit}"
    )
