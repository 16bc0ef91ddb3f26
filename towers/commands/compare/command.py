"""What runs differ in: flags, final metrics, the time to an accuracy, and their curves.

It reads what is in the runs' folders, also of runs that still train, and needs no TensorFlow.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from towers.commands.compare.options import CompareOptions
from towers.commands.compare.runs import (
    Compared,
    common_accuracy,
    differing_flags,
    find_runs,
    metrics_of,
    read_run,
    to_accuracy,
)
from towers.errors import InputError
from towers.monitoring.results import noted_runs
from towers.text import table

WIDEST = 44  # characters of a column
# The columns of the tables, with their digits.
_RESULTS = {
    "accuracy": 4, "test_loss": 4, "train_loss": 4, "examples_per_second": 1, "examples": 0,
    "epochs": 2, "seconds": 2,
}  # fmt: skip
_TIMES = {"seconds": 2, "steps": 0, "examples": 0, "epochs": 2}


def run(options: CompareOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare runs.

    Returns:
        {"runs": [{"name", "train_dir", "status", "flags", "metrics", "to_accuracy"}],
        "differing_flags", "accuracy", "plot"}.

    Raises:
        InputError: there are fewer than two runs, or the picture cannot be written.
    """
    folders = find_runs(options.runs)
    if len(folders) < 2:
        raise InputError(
            f"{folders[0]} is one run: name another to compare it with, towers compare "
            f"{folders[0]} RUN"
        )
    common = os.path.commonpath([os.path.abspath(folder) for folder in folders])
    plot = Path(options.plot or f"{common}/compare.png").expanduser()
    if options.plot not in ("", "none") and not os.access(plot.parent, os.W_OK):
        raise InputError(f"--plot={options.plot}: there is no folder {plot.parent} to write to")
    runs = [read_run(folder, os.path.relpath(folder, common)) for folder in folders]
    differing = differing_flags(runs)
    target = options.accuracy or common_accuracy(runs)
    entries = [_entry(run, differing, target) for run in runs]
    for line in _tables(entries, differing, target):
        say(line)
    for noted in [noted for name in options.runs for noted in noted_runs(Path(name))]:
        if noted["status"] == "failed":
            say(f"failed: {noted['name']}: {noted['error']}")
    return {
        "runs": entries,
        "differing_flags": differing,
        "accuracy": target,
        "plot": _draw(runs, plot, say) if options.plot != "none" else None,
    }


def _entry(run: Compared, differing: Sequence[str], target: float | None) -> dict[str, Any]:
    """Return what --json says of a run."""
    return {
        "name": run.name,
        "train_dir": str(run.folder),
        "status": run.status,
        "flags": {name: run.flags.get(name) for name in differing},
        "metrics": metrics_of(run),
        "to_accuracy": None if target is None else to_accuracy(run, target),
    }


def _tables(
    entries: Sequence[dict[str, Any]], differing: Sequence[str], target: float | None
) -> list[str]:
    lines = ["flags that differ" if differing else "no flag differs but the folder"]
    if differing:
        header = ["run", *differing]
        rows = [[e["name"], *e["flags"].values()] for e in entries]
        if len(header) > 8 and len(header) > len(rows) + 1:  # many flags of few runs: turned round
            header, *rows = map(list, zip(header, *rows, strict=True))
        lines += table(header, rows, WIDEST)
    header = ["run", "status", *(name.replace("_per_second", "/s") for name in _RESULTS)]
    rows = [[e["name"], e["status"], *_figures(e["metrics"], _RESULTS)] for e in entries]
    lines += ["", "results", *table(header, rows, WIDEST)]
    if target is None:
        return [*lines, "", "no run was evaluated yet"]
    rows = [[e["name"], *_figures(e["to_accuracy"] or {}, _TIMES)] for e in entries]
    lines += ["", f"to a test accuracy of {target:.4f}", *table(["run", *_TIMES], rows, WIDEST)]
    lines.append(
        "accuracy: of the moving average where there is one; seconds: of training alone, "
        "without start, evaluation, saving and stops"
    )
    return lines


def _figures(values: Mapping[str, float | None], digits: Mapping[str, int]) -> list[str | None]:
    found = [(values.get(name), n) for name, n in digits.items()]
    return [None if value is None else f"{value:.{n}f}" for value, n in found]


def _draw(runs: Sequence[Compared], path: Path, say: Callable[[str], None]) -> str | None:
    """Draw the curves, or say why there is no picture; return its path."""
    reason = None
    if all(run.status == "empty" for run in runs):
        reason = "no run has curves"
    elif importlib.util.find_spec("matplotlib") is None:
        reason = "it needs matplotlib: pip install matplotlib"
    else:
        from towers.commands.compare.plot import draw

        try:
            draw(runs, path)
        except OSError as error:
            reason = f"{path} cannot be written: {error.strerror}; try --plot=FILE.png"
    say("")
    say(f"plot        none: {reason}" if reason else f"plot        {path}")
    return None if reason else str(path)
