"""Tables of `towers plan`: ops and copies on GPUs, bytes between devices, memory."""

from collections.abc import Mapping
from typing import Any

from towers.formatting import table


def report(result: Mapping[str, Any], gpu_memory_gib: float) -> list[str]:
    """Return the lines to print.

    Args:
        result: the result of `command.run`.
        gpu_memory_gib: memory of a GPU, for the title.
    """
    missing = ", ".join(result["gradients"]["missing"])
    failure = f"FAILED      no gradient: {missing}"
    lines = [failure if missing else "gradients   every trainable variable has one"]

    def add(title: str, header: list[str], rows: list[list[Any]]) -> None:
        lines.append(title)
        lines.extend(f"  {line}" for line in table(header, rows))

    views = list(result["gpu"].values())
    rows = [
        ["run on the CPU, for want of a kernel", *(len(view["without_kernel"]) for view in views)]
    ]
    for name, way in (
        ("copy from the host", "from_host"),
        ("copy to the host, and wait", "to_host"),
        ("copy from another GPU", "from_gpus"),
        ("sum over GPUs", "collectives"),
    ):
        copies = [view[way] for view in views]
        rows.append([name, *(f"{c['count']}, {c['bytes'] / 1e6:.3f} MB" for c in copies)])
    for name, part in (
        ("launch kernels in a tower", "tower"),
        ("launch others, as for the update", "update"),
    ):
        rows.append([name, *(view["launches"][part] for view in views)])
    counts = ["1 GPU" if n == "1" else f"each of {n} GPUs" for n in result["gpu"]]
    add("on GPUs a step would, by the kernels that TensorFlow has for them", ["", *counts], rows)
    for op in views[0]["without_kernel"]:
        lines.append(f"  no kernel: {op['op']} of {op['dtype']}, layer {op['layer']}")
    if any(view[way]["repeated"] for view in views for way in ("from_host", "to_host")):
        lines.append(
            "  copies in a loop of the model, as an LSTM has, are made with each iteration"
        )

    rows = []
    for name, row in result["placements"].items():
        host, *towers = row["bytes_per_step"]["per_device"].values()
        cells = [host["sent"], host["received"]]
        cells += [max(tower[key] for tower in towers) for key in ("sent", "received", "collective")]
        rows.append([name, *(f"{b / 1e6:.3f}" for b in cells)])
    header = "variables|host sends|host receives|tower sends|tower receives|ring each"
    title = f"in a step cross, with {result['num_towers']} towers, in MB (a tower: the busiest one)"
    add(title, header.split("|"), rows)
    if row["bytes_per_step"]["loops"]:
        lines.append("  and what crosses in loops and functions of the model, which is not counted")

    rows = []
    for name, row in result["placements"].items():
        held = row["memory_bytes"]
        fits = f"{row['largest_batch_per_tower']} a tower" + ": TOO LARGE" * (not row["fits"])
        rows.append([name, *(f"{b / 1e6:.1f}" for b in held.values()), fits])
    header = ["variables", *(part.replace("_", " ") for part in held), "largest batch"]
    title = f"a tower's GPU holds, in MB, of {gpu_memory_gib:g} GiB (reserved: for CUDA and its "
    add(title + "libraries)", header, rows)
    return lines
