"""The picture of a benchmark: examples/s beside other programs, and scaling beside the control."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

_SCALING = {"strong": "the same global batch", "weak": "that batch on each tower"}


def draw(result: Mapping[str, Any], path: str) -> None:
    """Write a PNG file.

    Args:
        result: of `benchmark.benchmark`.
        path: of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    bars, scaling = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_bars(bars, result)
    _draw_scaling(scaling, result["results"])
    where = result["machine"]
    figure.suptitle(f"{where['cores']} cores, {where['processor']}", fontsize=9)
    figure.savefig(os.path.expanduser(path), dpi=120)


def _draw_bars(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw examples/s of ours at the same global batch, then of the others, with their ranges."""
    strong = [row for row in result["results"] if row["scaling"] == "strong"]
    rates = {
        f"{r['num_towers']} tower{'s' * (r['num_towers'] > 1)}": r["examples_per_second"]
        for r in strong
    }
    names = [*rates, *result["peers"]]
    spreads = [*rates.values(), *(p["examples_per_second"] for p in result["peers"].values())]
    colours = ["tab:blue"] * len(rates) + ["tab:gray"] * len(result["peers"])
    middles = [s["median"] for s in spreads]
    axes.barh(names, middles, color=colours, xerr=_errors(spreads), capsize=3)
    for i, (middle, values) in enumerate(zip(middles, spreads, strict=True)):
        axes.text(values["max"], i, f"  {middle:.0f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"examples/s at batch size {strong[-1]['batch_size']}: median and range")


def _draw_scaling(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    """Draw examples/s over the number of towers, whole lines; dashed ones are the control."""
    one = [row for row in results if row["num_towers"] == 1]
    for scaling, colour in (("strong", "tab:blue"), ("weak", "tab:orange")):
        rows = one + [r for r in results if r["scaling"] == scaling and r["num_towers"] > 1]
        if scaling == "weak" and len(rows) == len(one):
            continue
        towers = [row["num_towers"] for row in rows]
        for key, style, label in (
            ("examples_per_second", "-o", f"{scaling}: {_SCALING[scaling]}"),
            ("control", "--x", "its control: gradients alone"),
        ):
            spreads = [row[key] for row in rows]
            axes.errorbar(
                towers,
                [s["median"] for s in spreads],
                yerr=_errors(spreads),
                fmt=style,
                color=colour,
                capsize=3,
                label=label,
            )
    axes.set_xticks(sorted({row["num_towers"] for row in results}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("towers")
    axes.set_ylabel("examples/s")
    axes.legend(fontsize=8, loc="lower right")


def _errors(spreads: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Return how far each median is from the least and from the greatest value."""
    return [[s["median"] - s["min"] for s in spreads], [s["max"] - s["median"] for s in spreads]]
