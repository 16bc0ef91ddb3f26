"""What runs differ in: flags, final metrics, the time to a value of one, and their curves.

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
from towers.monitoring.results import (
    Objective,
    common_objective,
    figure,
    noted_runs,
    number,
    objective_of,
    read_result,
    short,
)
from towers.options.run import names_that_affect
from towers.text import cut, table

MAX_NAMED = 24  # runs in the legend of the picture
SMOOTHED_PART = 0.03  # of a curve's points, over which the line of the loss is a mean
WIDEST = 44  # characters of a column
# The columns of the tables, with their digits; the objective is before them.
_RESULTS = {
    "test_loss": 4, "train_loss": 4, "examples_per_second": 1, "examples": 0, "epochs": 2,
    "seconds": 2,
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
        {"runs": [{"name", "train_dir", "status", "flags", "metrics", "to_target"}],
        "differing_flags", "objective", "direction", "target", "plot"}; of an accuracy, metrics have
        it as "accuracy" beside "objective", and "accuracy" and "to_accuracy" are target and times.

    Raises:
        InputError: there are fewer than two runs, the picture cannot be written, or the objective
            is none of theirs.
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
    objective, note = find_objective(runs, "accuracy" if options.accuracy else options.objective)
    if note:
        say(f"objective   {note}")
    given = options.accuracy or (float(options.target_value) if options.target_value else None)
    target = common_target(runs, objective) if given is None else given
    entries = [
        {
            "name": run.name,
            "train_dir": str(run.folder),
            "status": run.status,
            "flags": {name: run.flags.get(name) for name in differing},
            "metrics": metrics_of(run, objective[0]),
            "to_target": None if target is None else to_target(run, objective, target),
        }
        for run in runs
    ]
    for line in _tables(entries, differing, objective[0], target):
        say(line)
    for noted in [noted for name in options.runs for noted in noted_runs(Path(name))]:
        if noted["status"] == "failed":
            say(f"failed: {noted['name']}: {noted.get('error')}")
    result = {
        "runs": entries,
        "differing_flags": differing,
        "objective": objective[0],
        "direction": objective[1],
        "target": target,
        "plot": _draw(runs, objective, plot, say) if options.plot != "none" else None,
    }
    if short(objective[0]) == "accuracy":
        result["accuracy"] = target
        for entry in entries:
            entry["metrics"]["accuracy"] = entry["metrics"]["objective"]
            entry["to_accuracy"] = entry["to_target"]
    return result


def find_runs(names: Sequence[str]) -> list[Path]:
    """Return the folders of the runs that are meant; a folder of runs stands for all of them."""
    found: dict[str, Path] = {}
    for name in names:
        folder = Path(name)
        try:
            paths = [folder] if files.is_run(folder) else sorted(folder.iterdir())
            inside = list(filter(files.is_run, paths))
        except OSError as error:
            raise InputError(f"{name}: {error.strerror}") from None
        if not inside:
            raise InputError(f"{name}: there is no run; name the folder of a run, or of a sweep")
        for run in inside:
            found.setdefault(os.path.realpath(run), run)
    return list(found.values())


def read_run(folder: Path, name: str) -> Compared:
    """Return what the folder of a run tells; what is not there is empty."""
    path = folder / "flags.cfg"
    try:
        files.check_is_file(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    except (OSError, UnicodeDecodeError):
        files.damaged(path)
        lines = []
    pairs = [line[2:].partition("=") for line in lines if line.startswith("--")]
    flags = {flag: value for flag, _, value in pairs if flag not in _OF_ONE_RUN}
    result = read_result(folder)
    curves = read_curves(folder, _batch_size(flags), flags.get("tensorboard_x") == "examples")
    examples = number(result, "examples") or 0
    if len(curves.examples) and curves.examples[-1] > examples * (1 + _ROUNDING):
        result = {}  # of before the run went on
    status = "finished"
    if "steps" not in result:
        status = "unfinished" if len(curves.loss.x) or curves.evaluated else "empty"
    return Compared(name, folder, status, flags, result, curves)


def _batch_size(flags: dict[str, str]) -> int:
    given = flags.get("batch_size", "1")
    return max(int(given), 1) if given.isascii() and given.isdecimal() and len(given) < 19 else 1


def differing_flags(runs: Sequence[Compared]) -> list[str]:
    """Return the names of the flags that are not the same in all runs that have any."""
    known = [run.flags for run in runs if run.flags]
    names = dict.fromkeys(name for flags in known for name in flags)
    return [name for name in names if len({flags.get(name) for flags in known}) > 1]


def find_objective(runs: Sequence[Compared], wanted: str) -> tuple[Objective, str]:
    """Return by what runs are compared, and a line that says so if that is not clear.

    Args:
        runs: of which those count that are finished, if there are any.
        wanted: as --objective has it; "" for the runs' own.

    Raises:
        InputError: no run has that metric, or nobody knows which is better.
    """
    results = [run.result for run in runs if run.result]
    if not wanted and results:
        return common_objective(results)
    tags = {tag for run in runs for tag in run.curves.evaluated}
    if not wanted:
        by_loss = tags and "accuracy" not in tags
        return (("test_loss", "min") if by_loss else ("test_accuracy", "max")), ""
    given, _, name = wanted.rpartition(":")
    name = "validation_" + name.removeprefix("val_") if name.startswith("val_") else name
    parts = ("test_", "validation_")
    of_results = {name for result in results for name in result if name.startswith(parts)}
    known = {name.removesuffix("_ema") for name in {*map(short, of_results), *tags}} - {"examples"}
    if given not in ("", "max", "min") or short(name) not in known:
        names = ", ".join(sorted(known)) or "no metric yet"
        raise InputError(
            f"--objective={wanted}: the runs have {names}; max: or min: may be before it"
        )
    directions = {short(n): way for n, way in map(objective_of, results)}
    directions |= {"accuracy": "max", "loss": "min"}
    direction = given or directions.get(short(name))
    if not direction:
        raise InputError(
            f"--objective={wanted}: whether more of it is better is not known; type "
            f"--objective=max:{wanted} or min:{wanted}"
        )
    if not name.startswith(parts):
        name = next((part + name for part in parts if part + name in of_results), f"test_{name}")
    return (name, direction), ""


def common_target(runs: Sequence[Compared], objective: Objective) -> float | None:
    """Return the best value that all runs reached which were evaluated at all."""
    name, direction = objective
    curves = [values for run in runs if len(values := run.curves.of(short(name)).values)]
    if not curves:
        return None
    if direction == "max":
        return math.floor(min(values.max() for values in curves) * 1e4) / 1e4
    return math.ceil(max(values.min() for values in curves) * 1e4) / 1e4


def metrics_of(run: Compared, objective: str = "test_accuracy") -> dict[str, float | None]:
    """Return the last known metrics of a run: of its result, else of its curves."""
    curves, result = run.curves, run.result
    at = number(result, "examples") or (curves.examples[-1] if len(curves.examples) > 1 else None)
    seconds = curves.seconds_at(at) if at else None
    final = figure(result, objective)
    return {
        "steps": number(result, "steps"),
        "examples": at,
        "epochs": curves.epochs_at(at) if at else None,
        "objective": _last(curves.of(short(objective)).values) if final is None else final,
        "test_loss": number(result, "test_loss"),
        "train_loss": number(result, "train_loss") or _last(curves.loss.values),
        "examples_per_second": number(result, "examples_per_second")
        or (at / seconds if seconds else None),
        "seconds": seconds,
    }


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def to_target(run: Compared, objective: Objective, target: float) -> dict[str, float | None] | None:
    """Return when an evaluation first gave that value or a better one, None if none did.

    It says {"seconds": of training, "examples", "steps", "epochs"}; None where it is not known.
    """
    name, direction = objective
    curve, sign = run.curves.of(short(name)), 1 if direction == "max" else -1
    rounding = _ROUNDING * max(abs(target), 1.0)
    reached = np.flatnonzero(sign * (curve.values - target) >= -rounding)
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
    entries: Sequence[dict[str, Any]],
    differing: Sequence[str],
    objective: str,
    target: float | None,
) -> list[str]:
    lines = ["flags that differ" if differing else "no flag differs but the folder"]
    if differing:
        rows = [[e["name"], *e["flags"].values()] for e in entries]
        lines += table(["run", *differing], rows, WIDEST)
    others = {name: digits for name, digits in _RESULTS.items() if name != objective}
    heads = [short(objective), *(name.replace("_per_second", "/s") for name in others)]
    header, digits = ["run", "status", *heads], {"objective": 4} | others
    rows = [[e["name"], e["status"], *_figures(e["metrics"], digits)] for e in entries]
    lines += ["", "results", *table(header, rows, WIDEST)]
    if target is None:
        return [*lines, "", "no run was evaluated yet"]
    rows = [[e["name"], *_figures(e["to_target"] or {}, _TIMES)] for e in entries]
    title = f"to a {_words(objective)} of {target:.4f}"
    lines += ["", title, *table(["run", *_TIMES], rows, WIDEST)]
    lines.append(
        f"{short(objective)}: of the moving average where there is one; seconds: of training "
        "alone, without start, evaluation, saving and stops"
    )
    return lines


def _figures(values: Mapping[str, float | None], digits: Mapping[str, int]) -> list[str | None]:
    found = [(values.get(name), n) for name, n in digits.items()]
    return [None if value is None else f"{value:.{n}f}" for value, n in found]


def _words(objective: str) -> str:
    return objective.replace("_", " ", 1)


def _draw(
    runs: Sequence[Compared], objective: Objective, path: Path, say: Callable[[str], None]
) -> str | None:
    """Draw the curves, or say why there is no picture; return its path."""
    try:
        draw(runs, objective, path)
    except ImportError:
        reason = "it needs matplotlib: pip install matplotlib"
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}; try --plot=FILE.png"
    else:
        say(f"plot        {path}")
        return str(path)
    say(f"plot        none: {reason}")
    return None


def _plain(text: str) -> str:
    """Return a text that Matplotlib shows as it is: it sets formulas, and leaves out _names."""
    return f" {text}".replace("$", r"\$")


def draw(runs: Sequence[Compared], objective: Objective, path: Path) -> None:
    """Write the curves of runs, which may be empty, as a PNG file; an OSError says it cannot be."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8 + 0.11 * min(len(runs), MAX_NAMED)), layout="constrained")
    left, right = figure.subplots(1, 2)
    name, direction = objective
    sign = -1 if direction == "max" else 1

    def best(run: Compared) -> float:
        return min(sign * run.curves.of(short(name)).values, default=math.inf)

    best_first = sorted(runs, key=best)
    colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    for run, colour in zip(best_first, colours, strict=True):
        loss, evaluated = run.curves.loss, run.curves.of(short(name))
        left.plot(loss.examples, loss.values, color=colour, alpha=0.2, linewidth=0.8)
        width = int(len(loss.values) * SMOOTHED_PART) + 1
        means = np.convolve(loss.values, np.full(width, 1 / width), "valid") if len(loss.x) else []
        left.plot(loss.examples[width - 1 :], means, color=colour, linewidth=1.3)
        label = _plain(cut(run.name, 50))
        right.plot(evaluated.examples, evaluated.values, color=colour, marker=".", label=label)
    for axes, title in ((left, "training loss, its running mean"), (right, _plain(_words(name)))):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("examples")
        axes.grid(alpha=0.3)
    named = right.lines[:MAX_NAMED]
    title = f"the best {MAX_NAMED} of {len(runs)} runs" if len(runs) > MAX_NAMED else None
    figure.legend(handles=named, loc="outside lower center", ncols=2, fontsize=8, title=title)
    figure.savefig(path, dpi=120, format="png")
