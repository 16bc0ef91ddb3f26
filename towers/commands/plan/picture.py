"""The picture of `towers plan --plot`: efficiency by the number of GPUs."""

import os
from collections.abc import Mapping
from typing import Any


def draw(result: Mapping[str, Any], path: str) -> None:
    """Write a PNG file: a line for each placement and network, from one GPU to all workers."""
    from matplotlib.figure import Figure

    given = result["assumptions"]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    titles = {"strong": "the global batch stays", "weak": "a tower's part stays"}
    for axes, (scaling, title) in zip(
        figure.subplots(1, 2, sharey=True), titles.items(), strict=True
    ):
        rows = [row for row in result["predictions"] if row["scaling"] == scaling]
        for way in dict.fromkeys((r["placement"], r["network"]) for r in rows if r["network"]):
            points = [r for r in rows if (r["placement"], r["network"]) == way]
            inside = [
                r for r in rows
                if (r["placement"], r["link"], r["network"]) == (way[0], points[0]["link"], "")
                and r["num_towers"] < points[0]["num_towers"]
            ]  # fmt: skip
            points = [*inside, *points]
            numbers = [point["num_towers"] for point in points]
            parts = [100 * point["efficiency"] for point in points]
            axes.plot(numbers, parts, "o-" if way[0] == "cpu" else "s--", label=", ".join(way))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(f"GPUs, {given['towers_per_worker']} on a worker; {title}")
        axes.set_ylim(0, 105)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("part of a step that computes, %: estimated")
    figure.axes[1].legend(fontsize=8)
    figure.savefig(os.path.expanduser(path), dpi=120)
