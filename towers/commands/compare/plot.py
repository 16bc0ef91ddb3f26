"""The picture of a comparison: training loss and test accuracy, a colour for each run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from towers.text import cut

if TYPE_CHECKING:
    from towers.commands.compare.runs import Compared

MAX_NAMED = 24  # runs in the legend
SMOOTHED_PART = 0.03  # of a curve's points, over which the line of the loss is a mean


def draw(runs: Sequence["Compared"], path: Path) -> None:
    """Write the curves of runs, which may be empty, as a PNG file; an OSError says it cannot be."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = min(len(runs), MAX_NAMED)
    figure = Figure(figsize=(12, 4.8 + 0.11 * named), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    by_steps = same_batches(runs)
    best_first = sorted(runs, key=lambda run: -max(run.curves.accuracy.values, default=-1.0))
    colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    for run, colour in zip(best_first, colours, strict=True):
        loss, accuracy = run.curves.loss, run.curves.accuracy
        xs = loss.x if by_steps else loss.examples
        left.plot(xs, loss.values, color=colour, alpha=0.2, linewidth=0.8)
        left.plot(xs, smooth(loss.values), color=colour, linewidth=1.3)
        xs = accuracy.x if by_steps else accuracy.examples
        right.plot(xs, accuracy.values, color=colour, marker=".", label=cut(run.name, 50))
    for axes, title in ((left, "training loss, its running mean"), (right, "test accuracy")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("steps" if by_steps else "examples")
        axes.grid(alpha=0.3)
    figure.legend(
        handles=right.lines[:named],
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        title=f"the best {named} of {len(runs)} runs" if named < len(runs) else None,
        title_fontsize=8,
    )
    figure.savefig(path, dpi=120, format="png")


def same_batches(runs: Sequence["Compared"]) -> bool:
    """Tell whether a step is the same in all runs, so that curves can be drawn over steps."""
    sizes = {run.flags.get("batch_size") for run in runs}
    return len(sizes) == 1 and all(run.flags.get("tensorboard_x") != "examples" for run in runs)


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and those before it, over a small part of all, [N]."""
    width = max(int(len(values) * SMOOTHED_PART), 1)
    sums = np.concatenate([np.zeros(width), np.cumsum(values)])
    return (sums[width:] - sums[:-width]) / np.minimum(np.arange(len(values)) + 1, width)
