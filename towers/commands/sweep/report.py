"""What a sweep says: a line for each run, the table, what sweep.json holds.

Accuracy is that of the moving average of the weights where a run has one. It is the mean over the
runs that differ in their seed alone. The best combination has the highest one; those of which a run
failed come after those of which none did.
"""

import dataclasses
import math
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towers import files
from towers.commands.sweep.combinations import OWN, PlannedRun, describe, text_of
from towers.commands.sweep.options import SweepOptions
from towers.options.run import Options
from towers.text import table

METRICS = ("accuracy", "test_loss", "train_loss", "examples_per_second")


def noted_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs that sweep.json of a folder names, whatever else may stand in that file."""
    runs = files.read_json(folder / "sweep.json").get("runs")
    runs = runs if isinstance(runs, list) else []
    return [run for run in runs if isinstance(run, dict) and isinstance(run.get("name"), str)]


def accuracy(result: Mapping[str, Any] | None) -> float | None:
    """Return the test accuracy of a run: of the moving average if there is one."""
    averaged = number(result, "test_accuracy_ema")
    return number(result, "test_accuracy") if averaged is None else averaged


def number(result: Mapping[str, Any] | None, name: str) -> float | None:
    """Return a figure of a result that was read from a file; None if it is no finite number."""
    value = (result or {}).get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def summarise(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each combination of what is varied but the seed, the best first.

    Args:
        entries: of the runs, {"name", "flags", "status", "result"}.

    Returns:
        Rows {"flags", "runs": names, "finished": n, "failed": n, "accuracy": {"mean", "std", "min",
        "max"}, "test_loss", "train_loss" and "examples_per_second" likewise}; None in their place
        where no run has the number; "std" is that of a sample, None of fewer than two.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        rest = {name: value for name, value in entry["flags"].items() if name != "seed"}
        groups.setdefault(describe(rest), []).append(entry)
    rows = [_row(group) for group in groups.values()]
    return sorted(rows, key=_rank)


def _row(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    results = [entry["result"] for entry in group if entry["status"] == "finished"]
    numbers = {name: [number(result, name) for result in results] for name in METRICS[1:]}
    numbers["accuracy"] = [accuracy(result) for result in results]
    return {
        "flags": {name: value for name, value in group[0]["flags"].items() if name != "seed"},
        "runs": [entry["name"] for entry in group],
        "finished": len(results),
        "failed": sum(entry["status"] == "failed" for entry in group),
        **{name: _spread(numbers[name]) for name in METRICS},
    }


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": statistics.fmean(known),
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "min": min(known),
        "max": max(known),
    }


def _rank(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """Order rows: with an accuracy, without failures, by accuracy."""
    found = row["accuracy"]
    return (found is None, row["failed"] > 0, -found["mean"] if found else 0.0)


def best_of(
    rows: Sequence[Mapping[str, Any]], runs: Mapping[str, PlannedRun], sweep_dir: str
) -> dict[str, Any] | None:
    """Return what is best, with the command that makes it again; None if no run is finished.

    Args:
        rows: of `summarise`.
        runs: of the sweep, by name.
        sweep_dir: where their flagfiles are.
    """
    if not rows or rows[0]["accuracy"] is None:
        return None
    row = rows[0]
    changed = [f"--{name}={text_of(value)}" for name, value in row["flags"].items()]
    if "seed" in runs[row["runs"][0]].flags:
        changed.append(f"--seed={runs[row['runs'][0]].flags['seed']}")
    folder = f"{os.path.normpath(sweep_dir)}-best"
    flagfile = f"--flagfile={flagfile_of(sweep_dir, row['runs'][0])}"
    return {
        "flags": row["flags"],
        "runs": row["runs"],
        "accuracy": row["accuracy"],
        "command": shlex.join(["towers", "train", flagfile, *changed, f"--train_dir={folder}"]),
    }


def flagfile_of(sweep_dir: str | Path, name: str) -> str:
    """Return the path of the flagfile with which a run is started."""
    return f"{sweep_dir}/{name}.cfg"


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of `summarise` for a person."""
    names = list(rows[0]["flags"]) if rows else []
    header = [*names, "accuracy", "std", "min", "max", "n", "examples/s", "failed"]
    lines = []
    for row in rows:
        found, rate = row["accuracy"] or {}, row["examples_per_second"] or {}
        lines.append(
            [text_of(row["flags"][name]) for name in names]
            + [_figure(found.get(key)) for key in ("mean", "std", "min", "max")]
            + [row["finished"], _figure(rate.get("mean"), 1), row["failed"]]
        )
    return table(header, lines)


def _figure(value: float | None, digits: int = 4) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def line_of(entry: Mapping[str, Any], number: int, total: int) -> str:
    """Return the line that tells how a run ended."""
    head = f"run {number} of {total} {entry['name']}:"
    if entry["status"] == "finished":
        return f"{head} accuracy {accuracy(entry['result']):.4f} ({entry['seconds']:.0f} s)"
    return f"{head} {entry['status']} ({entry['seconds']:.0f} s), {entry['error']}"


def document(
    options: SweepOptions,
    runs: Sequence[PlannedRun],
    entries: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what sweep.json holds, and --json prints."""
    varied = {name for run in runs for name in run.flags}
    base = {f.name: getattr(options, f.name) for f in dataclasses.fields(Options)}
    rows = summarise(entries)
    counts = [entry["status"] for entry in entries]
    return {
        "sweep_dir": options.sweep_dir,
        "base_flags": {n: v for n, v in base.items() if n not in varied and n not in OWN},
        "vary": list(options.vary),
        "samples": options.samples,
        "sweep_seed": options.sweep_seed,
        "total": len(entries),
        **{status: counts.count(status) for status in ("finished", "failed", "stopped")},
        "runs": list(entries),
        "summary": rows,
        "best": best_of(rows, {run.name: run for run in runs}, options.sweep_dir),
    }


def closing_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what a sweep says at its end."""
    lines = []
    if result["finished"]:
        lines += ["", *table_lines(result["summary"]), ""]
        lines.append(
            "accuracy: on the test set, of the moving average where there is one; mean over n seeds"
        )
    for entry in result["runs"]:
        if entry["status"] == "failed":
            lines.append(f"failed      {entry['name']}: {entry['error']} ({entry['log']})")
    if best := result["best"]:
        found = best["accuracy"]
        what = describe(best["flags"]) or "as the flags are"
        lines += [f"best        {what}: accuracy {found['mean']:.4f}", f"  {best['command']}"]
    return lines
