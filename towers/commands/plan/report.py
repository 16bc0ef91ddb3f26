"""What `towers plan` prints: what crosses, what is held, how long a step would take, and advice."""

from collections.abc import Mapping, Sequence
from typing import Any

from towers.commands.plan.cost_model import GPUS_PER_MACHINE
from towers.commands.plan.placed import GIB
from towers.text import table

_ENOUGH = 0.8  # an efficiency that is not worth working on
_ADVISED_LINK = "PCIe 4 x16"  # what a machine has at least


def report(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the result of `command.run`."""
    gradients, errors = result["gradients"], result["model_error"]
    lines = []
    if not any(gradients.values()):
        lines.append("gradients   every trainable variable has one, of its own shape")
    if gradients["missing"]:
        lines.append(f"FAILED      no gradient: {', '.join(gradients['missing'])}")
    if gradients["shapes_differ"]:
        names = ", ".join(gradients["shapes_differ"])
        lines.append(f"FAILED      a gradient of another shape: {names}")
    lines += _bytes(result) + _memory(result) + _predictions(result)
    if errors:
        parts = [f"{number} towers {100 * error:.0f} %" for number, error in errors.items()]
        lines.append(f"model error on this machine: {', '.join(parts)}")
    return [*lines, f"advice      {advice(result)}"]


def _bytes(result: Mapping[str, Any]) -> list[str]:
    """Return the table of the bytes that cross in a step, and where two counts differ."""
    header = (
        "variables, host sends, host receives, tower sends, tower receives, ring each, executed"
    )
    rows, differing = [], []
    for name, row in result["placements"].items():
        counts = row["bytes_per_step"]
        planned, executed = counts["planned"], counts["executed"]
        host, *towers = counts["per_device"].values()
        cells = [host["sent"], host["received"]]
        cells += [max(tower[key] for tower in towers) for key in ("sent", "received", "collective")]
        verdict = f"DIFFERS by {sum(planned.values()) - sum(executed.values())} B"
        if counts["equal"] is None:
            verdict = "not compared: loops"
        elif counts["equal"]:
            unknown = counts["unknown_sizes"]
            verdict = "equal" + f", {unknown} unknown" * (unknown > 0)
        rows.append([name, *(f"{b / 1e6:.3f}" for b in cells), verdict])
        differing += [
            f"{name}, {route}: planned {planned.get(route, 0)}, executed {executed.get(route, 0)} B"
            for route in sorted(planned.keys() | executed.keys())
            if planned.get(route, 0) != executed.get(route, 0)
        ]
    title = f"in a step cross, with {result['num_towers']} towers, in MB (a tower: the busiest one)"
    return [title, *_indented(table(header.split(", "), rows)), *_indented(differing)]


def _memory(result: Mapping[str, Any]) -> list[str]:
    """Return the table of a tower's memory."""
    header = ["variables", "weights", "slots, average", "received, gathered", "gradients"]
    rows = []
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
        fits = f"{row['largest_batch_per_tower']} a tower" + ": TOO LARGE" * (not row["fits"])
        rows.append([name, *(f"{b / 1e6:.1f}" for b in cells), fits])
    limit = result["assumptions"]["gpu_memory_gib"]
    return [
        f"a tower's GPU holds, in MB, of {limit:g} GiB (received: from other devices)",
        *_indented(table([*header, "activations", "total", "fits up to"], rows)),
        f"  the total has {held['reserved'] / GIB:g} GiB for CUDA and its libraries",
    ]


def _predictions(result: Mapping[str, Any]) -> list[str]:
    """Return what the predictions assume, and their tables."""
    given = result["assumptions"]
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
    return [
        "predicted for GPUs; none was measured",
        f"  a tower computes {given['tower_ms']:.2f} ms: {how},",
        f"  but {given['launch_ms']:.2f} ms at least, to launch its ops; transfers come after it",
        "  links, GB/s of one direction x the part that is reached:",
        *(f"  {', '.join(group)}" for group in (links[:3], links[3:])),
        "  all GPUs of a machine share one PCIe link to the host, whatever joins them",
        "  a ring that sums crosses each machine's network card once; --batch_size is global",
        "  efficiency in %: with the global batch as it is / with a tower's part as it is",
        "",
        *_efficiencies(result, "GPUs of one machine", "link"),
        *_efficiencies(result, f"machines of {GPUS_PER_MACHINE}, {_ADVISED_LINK}", "network"),
    ]


def _efficiencies(result: Mapping[str, Any], title: str, way: str) -> list[str]:
    """Return a table: a line for each placement and link, or network, a column for each count."""
    cells: dict[tuple[str, str], dict[int, list[str]]] = {}
    for row in result["predictions"]:  # strong scaling, then weak
        if (
            row["network"] and row["link"] == _ADVISED_LINK
            if way == "network"
            else not row["network"]
        ):
            of_row = cells.setdefault((row["placement"], row[way]), {})
            of_row.setdefault(row["num_towers"], []).append(f"{100 * row['efficiency']:3.0f}")
    rows = [[*key, *map(" / ".join, of_row.values())] for key, of_row in cells.items()]
    counts = next(iter(cells.values()))
    return _indented(table([title, "", *map(str, counts)], rows))


def advice(result: Mapping[str, Any]) -> str:
    """Return one sentence: which placement, and what limits it."""
    if result["failed"]:
        return "mend what FAILED or DIFFERS above before you rely on this plan"
    placements = result["placements"]
    fitting = [name for name, row in placements.items() if row["fits"]]
    most = max(row["largest_batch_per_tower"] for row in placements.values())
    if not fitting and not most:
        return "the model does not fit at any batch: it needs GPUs with more memory"
    if not fitting:
        return f"the batch does not fit: type --batch_size={most * result['num_towers']}"
    rows = [
        row
        for row in result["predictions"]
        if row["link"] == _ADVISED_LINK and not row["network"] and row["placement"] in fitting
    ]
    number = max(r["num_towers"] for r in rows if r["num_towers"] <= result["num_towers"])
    strong, weak = (
        {r["placement"]: r["efficiency"] for r in rows if (r["scaling"], r["num_towers"]) == key}
        for key in (("strong", number), ("weak", number))
    )
    best = max(strong, key=strong.get)
    limit = "computing is the limit"
    if weak[best] < _ENOUGH:
        limit = "what crosses is the limit, and a larger --batch_size helps"
    elif strong[best] < _ENOUGH:
        limit = "a tower's part of the batch is small, and a larger --batch_size helps"
    return (
        f"--variables={best} is the fastest on {number} GPUs over {_ADVISED_LINK}, at "
        f"{100 * strong[best]:.0f} % efficiency; {limit}"
    )


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
