"""What `towers plan` prints: what a step would do on GPUs, what crosses, what is held."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towers.text import table


def report(result: Mapping[str, Any], gpu_memory_gib: float) -> list[str]:
    """Return the lines of the result of `command.run`."""
    missing = ", ".join(result["gradients"]["missing"])
    found = f"FAILED      no gradient: {missing}"
    lines = [found if missing else "gradients   every trainable variable has one"]
    return lines + _on_gpus(result) + _bytes(result) + _memory(result, gpu_memory_gib)


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


def _memory(result: Mapping[str, Any], gpu_memory_gib: float) -> list[str]:
    """Return the table of a tower's memory."""
    rows = []
    for name, row in result["placements"].items():
        held = row["memory_bytes"]
        fits = f"{row['largest_batch_per_tower']} a tower" + ": TOO LARGE" * (not row["fits"])
        rows.append([name, *(f"{b / 1e6:.1f}" for b in held.values()), fits])
    header = ["variables", *(part.replace("_", " ") for part in held), "fits up to"]
    return [
        f"a tower's GPU holds, in MB, of {gpu_memory_gib:g} GiB "
        "(reserved: for CUDA and its libraries)",
        *_indented(table(header, rows)),
    ]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
