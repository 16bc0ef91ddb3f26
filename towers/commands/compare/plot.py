"""The picture of a comparison: training loss and test accuracy, a colour for each run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from towers.text import cut

if TYPE_CHECKING:
    from towers.commands.compare.runs import Compared

MAX_NAMED = 24  # runs in the legend
SMOOTHED_PART = 0.03  # of a curve's points, over which the line of the loss is a mean


def draw(runs: Sequence["Compared"], path: Path) -> None:
    """Write a PNG file.

    Args:
        runs: with their curves, which may be empty.
        path: of the file.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = min(len(runs), MAX_NAMED)
    figure = Figure(figsize=(12, 4.8 + 0.11 * named), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    by_steps = same_batches(runs)
    best = {run.name for run in best_first(runs)[:MAX_NAMED]}
    for run, colour in zip(runs, colours(len(runs)), strict=True):
        loss, accuracy = run.curves.loss, run.curves.accuracy
        for curve in (loss, accuracy):
            axes = left if curve is loss else right
            xs = curve.x if by_steps else curve.examples
            if curve is loss:
                axes.plot(xs, curve.values, color=colour, alpha=0.2, linewidth=0.8)
            ys = smooth(curve.values) if curve is loss else curve.values
            label = cut(run.name, 50) if curve is accuracy and run.name in best else None
            marker = "." if curve is accuracy else None
            axes.plot(xs, ys, color=colour, marker=marker, linewidth=1.3, label=label)
    _dress(left, "training loss, its running mean", by_steps)
    _dress(right, "test accuracy", by_steps)
    title = f"the best {named} of {len(runs)} runs" if named < len(runs) else None
    handles, labels = right.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=2, fontsize=8, title=title,
        title_fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=120, format="png")


def same_batches(runs: Sequence["Compared"]) -> bool:
    """Tell whether a step is the same in all runs, so that curves can be drawn over steps."""
    sizes = {run.flags.get("batch_size") for run in runs}
    return len(sizes) == 1 and all(run.flags.get("tensorboard_x") != "examples" for run in runs)


def best_first(runs: Sequence["Compared"]) -> list["Compared"]:
    """Return the runs by the highest accuracy that they reached."""
    return sorted(runs, key=lambda run: -max(run.curves.accuracy.values, default=-1.0))


def colours(number: int) -> list[Any]:
    """Return so many colours, as different as so many can be."""
    import matplotlib

    if number <= 20:
        return list(matplotlib.colormaps["tab10" if number <= 10 else "tab20"].colors[:number])
    return list(matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, number)))


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and those before it, over a small part of all, [N]."""
    width = max(int(len(values) * SMOOTHED_PART), 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _dress(axes: Any, title: str, by_steps: bool) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("steps" if by_steps else "examples")
    axes.grid(alpha=0.3)
