"""`towers compare`: flags that differ, final metrics, and the time to a value of one.

It reads the runs' folders, also while they train, and needs no TensorFlow.
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from towers import files
from towers.commands.compare.options import CompareOptions
from towers.errors import InputError
from towers.formatting import table
from towers.monitoring import results
from towers.monitoring.results import Objective, averaged_number, metric_name, number
from towers.monitoring.scalar_reader import Curves, read_curves
from towers.options.flags import RENAMED
from towers.options.run import names_that_affect

WIDEST = 44  # characters of a column
# The columns of the tables after the objective, with their digits.
_RESULTS = {"test_loss": 4, "examples_per_second": 1, "examples": 0, "seconds": 2}
_TIMES = {"seconds": 2, "steps": 0, "examples": 0}

_FLAGS_OF_A_RUN = (*names_that_affect("call"), "visible_gpus")  # a sweep deals GPUs out
_ROUNDING = 1e-6  # event files hold 32 bits: 0.9 is a little less there


class _Run(NamedTuple):
    """A run to compare; fields that its folder says nothing about are empty."""

    name: str  # relative to the common folder
    folder: Path
    status: str  # "finished", "unfinished" or "empty", which has no curves
    flags: dict[str, str]  # of flags.cfg, as text
    batch_size: int  # 1 if unknown
    result: dict[str, Any]  # of result.json, {} if it is not finished
    curves: Curves


def run(options: CompareOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare runs.

    Args:
        options: the runs, the objective and its target.
        say: called with each line to print.

    Returns:
        {"runs": [{"name", "train_dir", "status", "flags", "metrics", "to_target"}],
        "differing_flags", "objective", "direction", "target"}.
    """
    folders = _find_runs(options.runs)
    if len(folders) < 2:
        raise InputError(f"one run: name another, as towers compare {folders[0]} RUN")
    common = os.path.commonpath([os.path.abspath(folder) for folder in folders])
    runs = [_read_run(folder, os.path.relpath(folder, common)) for folder in folders]
    known = [run.flags for run in runs if run.flags]
    names = dict.fromkeys(name for flags in known for name in flags)
    differing = [name for name in names if len({flags.get(name) for flags in known}) > 1]
    objective, note = _find_objective(runs, options.monitor)
    if note:
        say(f"objective   {note}")
    target_value = options.target_value
    target = float(target_value) if target_value else _common_target(runs, objective)
    entries = [
        {
            "name": run.name,
            "train_dir": str(run.folder),
            "status": run.status,
            "flags": {name: run.flags.get(name) for name in differing},
            "metrics": _metrics_of(run, objective[0]),
            "to_target": None if target is None else _time_to_target(run, objective, target),
        }
        for run in runs
    ]
    for line in _tables(entries, differing, objective[0], target):
        say(line)
    say(f"curves      tensorboard --logdir={common}")
    for noted in [noted for name in options.runs for noted in results.noted_runs(Path(name))]:
        if noted["status"] == "failed":
            say(f"failed: {noted['name']}: {noted.get('error')}")
    return {
        "runs": entries,
        "differing_flags": differing,
        "objective": objective[0],
        "direction": objective[1],
        "target": target,
    }


def _find_runs(names: Sequence[str]) -> list[Path]:
    """Return the folders of runs among `names`, and those in folders among them."""
    folders: dict[str, Path] = {}
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
            folders.setdefault(os.path.realpath(run), run)
    return list(folders.values())


def _read_run(folder: Path, name: str) -> _Run:
    lines = (files.read_text(folder / "flags.cfg") or "").splitlines()
    pairs = [line[2:].partition("=") for line in lines if line.startswith("--")]
    flags = {RENAMED.get(f, f): value for f, _, value in pairs if f not in _FLAGS_OF_A_RUN}
    batch_size = 1
    with contextlib.suppress(ValueError):
        batch_size = min(max(int(flags.get("batch_size", 1)), 1), 10**9)
    curves = read_curves(folder, batch_size, flags.get("tensorboard_x") == "examples")
    result = results.read_result(folder)
    examples = number(result, "examples") or 0
    if len(curves.examples) and curves.examples[-1] > examples * (1 + _ROUNDING):
        result = {}  # from before the run was continued
    status = "finished"
    if "steps" not in result:
        status = "unfinished" if len(curves.loss.values) or curves.evaluated else "empty"
    return _Run(name, folder, status, flags, batch_size, result, curves)


def _find_objective(runs: Sequence[_Run], wanted: str) -> tuple[Objective, str]:
    """Return the objective to compare by, `wanted` or the runs' own, and a note on it."""
    finished = [run.result for run in runs if run.result]
    tags = {tag for run in runs for tag in run.curves.evaluated}
    if not wanted and finished:
        return results.common_objective(finished)
    if not wanted:
        by_loss = tags and "accuracy" not in tags
        return (("test_loss", "min") if by_loss else ("test_accuracy", "max")), ""
    splits = ("test_", "validation_")
    of_results = {name for result in finished for name in result if name.startswith(splits)}
    directions = {metric_name(n): way for n, way in map(results.objective_of, finished)}
    directions |= {"accuracy": "max", "loss": "min"}
    names = {n.removesuffix("_ema") for n in {*map(metric_name, of_results), *tags}} - {"examples"}
    metric, way = results.parse_monitor(wanted, {n: directions.get(n) for n in sorted(names)})
    if wanted.rpartition(":")[2].startswith("val"):
        splits = splits[::-1]
    known = (split + metric for split in splits if split + metric in of_results)
    return (next(known, splits[0] + metric), way), ""


def _common_target(runs: Sequence[_Run], objective: Objective) -> float | None:
    """Return the best value that all evaluated runs reached, None without an evaluation."""
    sign = 1 if objective[1] == "max" else -1
    curves = (sign * run.curves.of(metric_name(objective[0])).values for run in runs)
    best = [values.max() for values in curves if len(values)]
    return sign * math.floor(min(best) * 1e4) / 1e4 if best else None


def _metrics_of(run: _Run, objective: str) -> dict[str, float | None]:
    """Return the last known metrics of a run, from its result or else from its curves."""
    curves, result = run.curves, run.result
    at = number(result, "examples") or (curves.examples[-1] if len(curves.examples) > 1 else None)
    seconds = curves.seconds_at(at) if at else None
    final = averaged_number(result, objective)
    return {
        "steps": number(result, "steps"),
        "examples": at,
        "objective": curves.of(metric_name(objective)).last if final is None else final,
        "test_loss": number(result, "test_loss"),
        "examples_per_second": number(result, "examples_per_second") or (seconds and at / seconds),
        "seconds": seconds,
    }


def _time_to_target(
    run: _Run, objective: Objective, target: float
) -> dict[str, float | None] | None:
    """Return the seconds, examples and steps up to the target, None if never reached."""
    curve, sign = run.curves.of(metric_name(objective[0])), 1 if objective[1] == "max" else -1
    rounding = _ROUNDING * max(abs(target), 1.0)
    reached = np.flatnonzero(sign * (curve.values - target) >= -rounding)
    if not len(reached):
        return None
    examples = float(curve.examples[reached[0]])
    return {
        "seconds": run.curves.seconds_at(examples),
        "examples": round(examples),
        "steps": round(examples / run.batch_size),
    }


def _tables(
    entries: Sequence[dict[str, Any]],
    differing: Sequence[str],
    objective: str,
    target: float | None,
) -> list[str]:
    def digits(values: Mapping[str, Any], columns: Mapping[str, int]) -> list[str | None]:
        pairs = ((values.get(name), n) for name, n in columns.items())
        return [None if value is None else f"{value:.{n}f}" for value, n in pairs]

    lines = ["flags that differ" if differing else "no flag differs but the folder"]
    if differing:
        rows = [[e["name"], *e["flags"].values()] for e in entries]
        lines += table(["run", *differing], rows, WIDEST)
    columns = {"objective": 4} | {name: n for name, n in _RESULTS.items() if name != objective}
    metric = metric_name(objective)
    heads = [name.replace("_per_second", "/s") for name in columns][1:]
    rows = [[e["name"], e["status"], *digits(e["metrics"], columns)] for e in entries]
    lines += ["", "results", *table(["run", "status", metric, *heads], rows, WIDEST)]
    if target is None:
        return [*lines, "", "no run was evaluated yet"]
    rows = [[e["name"], *digits(e["to_target"] or {}, _TIMES)] for e in entries]
    title = f"to a {objective.replace('_', ' ', 1)} of {target:.4f}"
    note = f"{metric}: of the moving average where there is one; seconds: of training"
    return [*lines, "", title, *table(["run", *_TIMES], rows, WIDEST), note]
