"""What `towers plan` prints: what crosses, what is held, how long a step would take."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from towers.commands.plan.cost_model import (
    ALL_SUM_SECONDS,
    HOST_LINK,
    LAUNCH_SECONDS,
    LEAST_LINK,
)
from towers.commands.plan.workers import (
    MOST_TOWERS,
    STEP_SECONDS,
    TENSOR_SECONDS,
    TOWER_SECONDS,
)
from towers.text import table


def report(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the result of `command.run`."""
    missing = ", ".join(result["gradients"]["missing"])
    found = f"FAILED      no gradient: {missing}"
    lines = [found if missing else "gradients   every trainable variable has one"]
    return lines + _on_gpus(result) + _bytes(result) + _memory(result) + _predictions(result)


def _on_gpus(result: Mapping[str, Any]) -> list[str]:
    """Return the table of what the step would do on GPUs, and the ops that these cannot run."""
    views = result["gpu"]
    parts: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "run on the CPU, for want of a kernel": lambda view: len(view["without_kernel"]),
        "ask for no device": lambda view: len(view["undirected"]),
        "copy from the host": lambda view: _copied(view["from_host"]),
        "copy to the host, and wait": lambda view: _copied(view["to_host"]),
        "copy from another GPU": lambda view: _copied(view["from_gpus"]),
        "sum over GPUs": lambda view: _copied(view["collectives"]),
        "launch kernels in a tower": lambda view: view["launches"]["tower"],
        "launch others, as for the update": lambda view: view["launches"]["update"],
        "transpose images": lambda view: view["transposes"],
    }
    rows = [[name, *map(part, views.values())] for name, part in parts.items()]
    counts = ["1 GPU" if number == "1" else f"each of {number} GPUs" for number in views]
    lines = ["on GPUs a step would, by the kernels that TensorFlow has for them"]
    lines += _indented(table(["", *counts], rows))
    lines += [
        f"  no kernel: {op['op']} of {op['dtype']}, layer {op['layer']}"
        for op in next(iter(views.values()))["without_kernel"]
    ]
    if any(v[way]["repeated"] for v in views.values() for way in ("from_host", "to_host")):
        lines.append(
            "  copies in a loop of the model, as an LSTM has, are made with each iteration"
        )
    return lines


def _copied(found: Mapping[str, int]) -> str:
    return f"{found['count']}, {found['bytes'] / 1e6:.3f} MB"


def _bytes(result: Mapping[str, Any]) -> list[str]:
    """Return the table of the bytes that cross in a step."""
    header = (
        "variables, host sends, host receives, tower sends, tower receives, ring each, executed"
    )
    rows = []
    for name, row in result["placements"].items():
        counts = row["bytes_per_step"]
        host, *towers = counts["per_device"].values()
        cells = [host["sent"], host["received"]]
        cells += [max(tower[key] for tower in towers) for key in ("sent", "received", "collective")]
        verdict = {True: "equal", False: "DIFFERS", None: "not compared: loops"}[counts["equal"]]
        rows.append([name, *(f"{b / 1e6:.3f}" for b in cells), verdict])
    title = f"in a step cross, with {result['num_towers']} towers, in MB (a tower: the busiest one)"
    return [title, *_indented(table(header.split(", "), rows))]


def _memory(result: Mapping[str, Any]) -> list[str]:
    """Return the table of a tower's memory."""
    rows = []
    for name, row in result["placements"].items():
        held = row["memory_bytes"]
        fits = f"{row['largest_batch_per_tower']} a tower" + ": TOO LARGE" * (not row["fits"])
        rows.append([name, *(f"{b / 1e6:.1f}" for b in held.values()), fits])
    header = ["variables", *(part.replace("_", " ") for part in held), "fits up to"]
    limit = result["assumptions"]["gpu_memory_gib"]
    return [
        f"a tower's GPU holds, in MB, of {limit:g} GiB (reserved: for CUDA and its libraries)",
        *_indented(table(header, rows)),
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
        if result["flop_unseen"]:
            how += ", without what is inside loops and functions, as an LSTM's: give --step_ms"
    waits = f"{1e6 * HOST_LINK.latency_seconds:g} us a copy that waits"
    links = [f"{name} {rate:.3g}" for name, rate in given["links_gb_per_second"].items()]
    return [
        "estimated for GPUs; none was measured",
        f"  a tower computes {given['tower_ms']:.2f} ms: {how},",
        f"  but {given['launch_ms']:.2f} ms at least, to launch its ops, "
        f"{given['more_launch_ms']:.2f} ms more among several GPUs, and "
        f"{given['update_launch_ms']:.2f} ms those of the update; transfers come after it",
        f"  estimates: {1e6 * LAUNCH_SECONDS:g} us a launch, {waits}, "
        f"{1e6 * ALL_SUM_SECONDS:g} us a small all-sum by NCCL",
        f"  in one direction pass, in GB/s: {', '.join(links)}",
        "  all GPUs of a machine share one PCIe link to the host, whatever joins them",
        *_of_workers(result),
        "  efficiency in %: with the global batch as it is / with a tower's part as it is",
        "",
        *_efficiencies(result, "GPUs of one machine, estimated", "link"),
        *_efficiencies(
            result,
            f"workers of {given['towers_per_worker']}, {LEAST_LINK}, estimated",
            "network",
        ),
        *_limits(result),
    ]


def _of_workers(result: Mapping[str, Any]) -> list[str]:
    """Return what predictions for workers assume."""
    given = result["assumptions"]
    return [
        f"  towers of workers: a small tensor takes {given['network_latency_ms']:.3g} ms to get "
        "there; weights and gradients travel while towers compute, as far as there is time;",
        f"  a tower's time is drawn from a log-normal distribution, sigma "
        f"{given['straggler_spread']:g}, and all wait for the slowest; the program takes "
        f"{1e3 * STEP_SECONDS:.3g} ms a step,",
        f"  {1e3 * TOWER_SECONDS:.3g} ms a tower, and {1e3 * TENSOR_SECONDS:.3g} ms a tensor that "
        "it or a worker sends or takes (estimates); rows are read by the workers",
    ]


def _limits(result: Mapping[str, Any]) -> list[str]:
    """Return the sentences about what limits workers, and how far one program goes."""
    rows = [row for row in result["predictions"] if row["network"] and row["scaling"] == "weak"]
    lines = [""]
    for (placement, network), found in groupby(
        rows, key=lambda row: (row["placement"], row["network"])
    ):
        found = list(found)
        last = found[-1]
        most = max(last["parts"], key=lambda name: last["parts"][name])
        enough = [row["num_towers"] for row in found if row["efficiency"] >= 0.5]
        up_to = (
            f"half of the step or more computes up to {max(enough)} GPUs"
            if enough
            else (f"less than half of the step computes on {found[0]['num_towers']} GPUs")
        )
        lines.append(
            f"  {placement}, {network}: {up_to}; on {last['num_towers']} most of it is {most}"
        )
    minutes = result["graph_seconds"] / result["num_towers"] * MOST_TOWERS / 60
    lines.append(
        f"  one program holds the graph: {result['graph_seconds']:.0f} s to build and place it for "
        f"{result['num_towers']} towers here, in proportion {minutes:.0f} min for {MOST_TOWERS:,}"
    )
    return lines


def _efficiencies(result: Mapping[str, Any], title: str, way: str) -> list[str]:
    """Return a table: a line for each placement and link, or network, a column for each count."""
    cells: dict[tuple[str, str], dict[int, list[str]]] = {}
    for row in result["predictions"]:  # strong scaling, then weak
        if bool(row["network"]) == (way == "network"):
            of_row = cells.setdefault((row["placement"], row[way]), {})
            of_row.setdefault(row["num_towers"], []).append(f"{100 * row['efficiency']:3.0f}")
    rows = [[*key, *map(" / ".join, of_row.values())] for key, of_row in cells.items()]
    counts = next(iter(cells.values()))
    return _indented(table([title, "", *map(str, counts)], rows))


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
