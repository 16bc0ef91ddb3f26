"""What runs differ in: flags, final metrics, the time to an accuracy, and their curves.

It reads what is in the runs' folders, also of runs that still train, and needs no TensorFlow.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from towers.commands.compare.options import CompareOptions
from towers.commands.compare.runs import (
    Compared,
    common_accuracy,
    differing_flags,
    failures,
    find_runs,
    metrics_of,
    read_run,
    to_accuracy,
)
from towers.errors import InputError
from towers.text import table


def compare(options: CompareOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare runs.

    Args:
        options: which, and what to show.
        say: takes the lines of the tables.

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
    common = Path(os.path.commonpath([os.path.abspath(folder) for folder in folders]))
    plot = _plot_path(options.plot, common)
    runs = [read_run(folder, _name(folder, common)) for folder in folders]
    differing = differing_flags(runs)
    target = options.accuracy or common_accuracy(runs)
    entries = [entry_of(run, differing, target) for run in runs]
    for line in report(runs, entries, differing, target):
        say(line)
    for name, error in failures(options.runs).items():
        say(f"failed: {name}: {error}")
    return {
        "runs": entries,
        "differing_flags": differing,
        "accuracy": target,
        "plot": _draw(runs, plot, say) if plot else None,
    }


def _name(folder: Path, common: Path) -> str:
    return os.path.relpath(os.path.abspath(folder), common)


def entry_of(run: Compared, differing: Sequence[str], target: float | None) -> dict[str, Any]:
    """Return what --json says of a run."""
    return {
        "name": run.name,
        "train_dir": str(run.folder),
        "status": run.status,
        "flags": {name: run.flags.get(name) for name in differing},
        "metrics": metrics_of(run),
        "to_accuracy": None if target is None else to_accuracy(run, target),
    }


def report(
    runs: Sequence[Compared],
    entries: Sequence[dict[str, Any]],
    differing: Sequence[str],
    target: float | None,
) -> list[str]:
    """Return the lines of the tables."""
    lines = ["flags that differ" if differing else "no flag differs but the folder"]
    if differing:
        rows = [[e["name"], *(e["flags"][name] for name in differing)] for e in entries]
        header = ["run", *differing]
        if len(header) > 8 and len(header) > len(rows) + 1:  # many flags of few runs: turned round
            header, *rows = map(list, zip(header, *rows, strict=True))
        lines += table(header, rows, widest=44)
    lines += ["", "results", *table(*_results(entries), widest=44)]
    if target is None:
        lines += ["", "no run was evaluated yet"]
    else:
        lines += ["", f"to a test accuracy of {target:.4f}", *table(*_times(entries), widest=44)]
        lines.append(
            "accuracy: of the moving average where there is one; seconds: of training alone, "
            "without start, evaluation, saving and stops"
        )
    for status, what in (("unfinished", "not finished: as far as it is"), ("empty", "no curves")):
        names = [run.name for run in runs if run.status == status]
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 6 else ""
            lines.append(f"{what}: {', '.join(names[: 5 if more else None])}{more}")
    return lines


def _results(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    digits = {
        "accuracy": 4, "test_loss": 4, "train_loss": 4, "examples_per_second": 1, "examples": 0,
        "epochs": 2, "seconds": 2,
    }  # fmt: skip
    rows = [
        [e["name"], e["status"], *(_figure(e["metrics"][name], n) for name, n in digits.items())]
        for e in entries
    ]
    return ["run", "status", *(name.replace("_per_second", "/s") for name in digits)], rows


def _times(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    digits = {"seconds": 2, "steps": 0, "examples": 0, "epochs": 2}
    rows = []
    for entry in entries:
        found = entry["to_accuracy"] or {}
        rows.append([entry["name"], *(_figure(found.get(name), n) for name, n in digits.items())])
    return ["run", *digits], rows


def _figure(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _plot_path(given: str, common: Path) -> Path | None:
    """Return the file for the picture, None if there is to be none.

    Raises:
        InputError: its folder is not there, or cannot be written.
    """
    if given == "none":
        return None
    path = Path(given).expanduser() if given else common / "compare.png"
    if given and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InputError(f"--plot={given}: there is no folder {path.parent} to write to")
    return path


def _draw(runs: Sequence[Compared], path: Path, say: Callable[[str], None]) -> str | None:
    """Draw the curves, or say why there is no picture; return its path."""
    say("")
    if not any(len(run.curves.loss.x) or len(run.curves.accuracy.x) for run in runs):
        say("plot        none: no run has curves")
        return None
    if importlib.util.find_spec("matplotlib") is None:
        say("plot        none: it needs matplotlib: pip install matplotlib")
        return None
    from towers.commands.compare.plot import draw

    try:
        draw(runs, path)
    except OSError as error:
        say(f"plot        none: {path} cannot be written: {error.strerror}; try --plot=FILE.png")
        return None
    say(f"plot        {path}")
    return str(path)
