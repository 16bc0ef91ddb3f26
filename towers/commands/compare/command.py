"""What runs differ in: flags, final metrics, the time to an accuracy, and their curves.

It reads what is in the runs' folders, also of runs that still train, and needs no TensorFlow.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from towers import files
from towers.commands.compare.options import CompareOptions
from towers.errors import InputError
from towers.monitoring.curves import Curves, read_curves
from towers.monitoring.results import accuracy, noted_runs, number
from towers.options.run import names_that_affect
from towers.text import cut, table

MAX_NAMED = 24  # runs in the legend of the picture
SMOOTHED_PART = 0.03  # of a curve's points, over which the line of the loss is a mean
WIDEST = 44  # characters of a column
# The columns of the tables, with their digits.
_RESULTS = {
    "accuracy": 4, "test_loss": 4, "train_loss": 4, "examples_per_second": 1, "examples": 0,
    "epochs": 2, "seconds": 2,
}  # fmt: skip
_TIMES = {"seconds": 2, "steps": 0, "examples": 0, "epochs": 2}

_OF_ONE_RUN = (*names_that_affect("call"), "visible_gpus")  # which a sweep deals out
_ROUNDING = 1e-6  # event files hold 32 bits: 0.9 is a little less there


@dataclasses.dataclass(frozen=True)
class Compared:
    """A run that is compared."""

    name: str  # that tells it from the others
    folder: Path
    status: str  # "finished", "unfinished" or "empty", which has no curves
    flags: dict[str, str]  # of flags.cfg, as text
    result: dict[str, Any]  # of result.json, {} if it is not finished
    curves: Curves


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
    entries = [
        {
            "name": run.name,
            "train_dir": str(run.folder),
            "status": run.status,
            "flags": {name: run.flags.get(name) for name in differing},
            "metrics": metrics_of(run),
            "to_accuracy": None if target is None else to_accuracy(run, target),
        }
        for run in runs
    ]
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


def find_runs(names: Sequence[str]) -> list[Path]:
    """Return the folders of the runs that are meant; a folder of runs stands for all of them."""
    found: dict[str, Path] = {}
    for name in names:
        folder = Path(name)
        try:
            paths = [folder] if files.is_run(folder) else sorted(folder.iterdir())
        except OSError as error:
            raise InputError(f"{name}: {error.strerror}") from None
        inside = list(filter(files.is_run, paths))
        if not inside:
            raise InputError(f"{name}: there is no run; name the folder of a run, or of a sweep")
        for run in inside:
            found.setdefault(os.path.realpath(run), run)
    return list(found.values())


def read_run(folder: Path, name: str) -> Compared:
    """Return what the folder of a run tells; what is not there is empty."""
    path = folder / "flags.cfg"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = [line[2:].partition("=") for line in lines if line.startswith("--")]
    flags = {flag: value for flag, _, value in pairs if flag not in _OF_ONE_RUN}
    result = files.read_json(folder / "result.json")
    curves = read_curves(folder, _batch_size(flags), flags.get("tensorboard_x") == "examples")
    examples = number(result, "examples") or 0
    if len(curves.examples) and curves.examples[-1] > examples * (1 + _ROUNDING):
        result = {}  # of before the run went on
    status = "finished"
    if accuracy(result) is None:
        status = "unfinished" if len(curves.loss.x) or len(curves.accuracy.x) else "empty"
    return Compared(name, folder, status, flags, result, curves)


def _batch_size(flags: dict[str, str]) -> int:
    return int(flags.get("batch_size", 1))


def differing_flags(runs: Sequence[Compared]) -> list[str]:
    """Return the names of the flags that are not the same in all runs that have any."""
    known = [run.flags for run in runs if run.flags]
    names = dict.fromkeys(name for flags in known for name in flags)
    return [name for name in names if len({flags.get(name) for flags in known}) > 1]


def common_accuracy(runs: Sequence[Compared]) -> float | None:
    """Return the highest accuracy that all runs reached which were evaluated at all."""
    highest = [run.curves.accuracy.values.max() for run in runs if len(run.curves.accuracy.values)]
    return math.floor(min(highest) * 1e4) / 1e4 if highest else None


def metrics_of(run: Compared) -> dict[str, float | None]:
    """Return the last known metrics of a run: of its result, else of its curves."""
    curves, result = run.curves, run.result
    at = number(result, "examples") or (curves.examples[-1] if len(curves.examples) > 1 else None)
    seconds = curves.seconds_at(at) if at else None
    final = accuracy(result)
    return {
        "steps": number(result, "steps"),
        "examples": at,
        "epochs": curves.epochs_at(at) if at else None,
        "accuracy": _last(curves.accuracy.values) if final is None else final,
        "test_loss": number(result, "test_loss"),
        "train_loss": number(result, "train_loss") or _last(curves.loss.values),
        "examples_per_second": number(result, "examples_per_second")
        or (at / seconds if seconds else None),
        "seconds": seconds,
    }


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def to_accuracy(run: Compared, target: float) -> dict[str, float | None] | None:
    """Return when an evaluation first gave that accuracy, None if none did.

    It says {"seconds": of training, "examples", "steps", "epochs"}; None where it is not known.
    """
    curve = run.curves.accuracy
    reached = np.flatnonzero(curve.values >= target - _ROUNDING)
    if not len(reached):
        return None
    examples = float(curve.examples[reached[0]])
    return {
        "seconds": run.curves.seconds_at(examples),
        "examples": round(examples),
        "steps": round(examples / _batch_size(run.flags)),
        "epochs": run.curves.epochs_at(examples),
    }


def _tables(
    entries: Sequence[dict[str, Any]], differing: Sequence[str], target: float | None
) -> list[str]:
    lines = ["flags that differ" if differing else "no flag differs but the folder"]
    if differing:
        rows = [[e["name"], *e["flags"].values()] for e in entries]
        lines += table(["run", *differing], rows, WIDEST)
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
    try:
        draw(runs, path)
    except ImportError:
        reason = "it needs matplotlib: pip install matplotlib"
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}; try --plot=FILE.png"
    else:
        say(f"plot        {path}")
        return str(path)
    say(f"plot        none: {reason}")
    return None


def draw(runs: Sequence[Compared], path: Path) -> None:
    """Write the curves of runs, which may be empty, as a PNG file; an OSError says it cannot be."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8 + 0.11 * min(len(runs), MAX_NAMED)), layout="constrained")
    left, right = figure.subplots(1, 2)
    best_first = sorted(runs, key=lambda run: -max(run.curves.accuracy.values, default=-1.0))
    colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    for run, colour in zip(best_first, colours, strict=True):
        loss, accuracy = run.curves.loss, run.curves.accuracy
        left.plot(loss.examples, loss.values, color=colour, alpha=0.2, linewidth=0.8)
        width = int(len(loss.values) * SMOOTHED_PART) + 1
        means = np.convolve(loss.values, np.full(width, 1 / width), "valid") if len(loss.x) else []
        left.plot(loss.examples[width - 1 :], means, color=colour, linewidth=1.3)
        label = cut(run.name, 50)
        right.plot(accuracy.examples, accuracy.values, color=colour, marker=".", label=label)
    for axes, title in ((left, "training loss, its running mean"), (right, "test accuracy")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("examples")
        axes.grid(alpha=0.3)
    named = right.lines[:MAX_NAMED]
    title = f"the best {MAX_NAMED} of {len(runs)} runs" if len(runs) > MAX_NAMED else None
    figure.legend(handles=named, loc="outside lower center", ncols=2, fontsize=8, title=title)
    figure.savefig(path, dpi=120, format="png")
