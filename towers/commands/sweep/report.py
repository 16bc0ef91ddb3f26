"""What a sweep says: a line for each run, the table, what sweep.json holds.

What counts is the runs' objective, of the moving average of the weights where a run has one. It is
the mean over the runs that differ in their seed alone. The best combination has the highest or the
lowest one; those of which a run failed come after those of which none did.
"""

import os
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from towers.commands.sweep.options import SweepOptions, describe
from towers.monitoring.results import (
    Objective,
    common_objective,
    figure,
    number,
    objective_of,
    short,
)
from towers.options.run import text_of
from towers.text import table


def summarise(
    entries: Sequence[Mapping[str, Any]], objective: Objective = ("test_accuracy", "max")
) -> list[dict[str, Any]]:
    """Return a row for each combination of what is varied but the seed, the best first.

    Args:
        entries: of the runs, {"name", "flags", "status", "result"}.
        objective: by which they are compared.

    Returns:
        Rows {"flags", "runs": names, "finished": n, "failed": n, "objective": {"mean", "std",
        "min", "max"}, "examples_per_second" likewise}; None in their place where no run has the
        number; "std" is that of a sample, None of fewer than two. An accuracy is there as
        "accuracy", too.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(describe(entry["flags"] | {"seed": 0}), []).append(entry)
    name, direction = objective
    rows = [_row(group, name) for group in groups.values()]
    return sorted(rows, key=lambda row: _rank(row, direction))


def _row(group: Sequence[Mapping[str, Any]], objective: str) -> dict[str, Any]:
    results = [entry["result"] for entry in group if entry["status"] == "finished"]
    found = _spread(figure(result, objective) for result in results)
    return {
        "flags": {flag: value for flag, value in group[0]["flags"].items() if flag != "seed"},
        "runs": [entry["name"] for entry in group],
        "finished": len(results),
        "failed": sum(entry["status"] == "failed" for entry in group),
        "objective": found,
        **({"accuracy": found} if _is_accuracy(objective) else {}),
        "examples_per_second": _spread(number(r, "examples_per_second") for r in results),
    }


def _spread(values: Iterable[float | None]) -> dict[str, float | None] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": statistics.fmean(known),
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "min": min(known),
        "max": max(known),
    }


def _is_accuracy(objective: str) -> bool:
    return objective.endswith("_accuracy")


def _rank(row: Mapping[str, Any], direction: str) -> tuple[bool, bool, float]:
    """Order rows: with an objective, without failures, by the objective."""
    found, sign = row["objective"], -1 if direction == "max" else 1
    return (found is None, row["failed"] > 0, sign * found["mean"] if found else 0.0)


def document(options: SweepOptions, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what sweep.json holds, and --json prints."""
    results = [entry["result"] for entry in entries if entry["result"]]
    objective, note = common_objective(results)
    rows = summarise(entries, objective)
    ends = [entry["status"] for entry in entries]
    return {
        "sweep_dir": options.sweep_dir,
        "vary": list(options.vary),
        "samples": options.samples,
        "sweep_seed": options.sweep_seed,
        "total": len(entries),
        **{status: ends.count(status) for status in ("finished", "failed", "stopped")},
        "objective": objective[0],
        "direction": objective[1],
        "note": note,
        "runs": list(entries),
        "summary": rows,
        "best": _best(rows[0], options.sweep_dir) if rows[0]["objective"] else None,
    }


def _best(row: Mapping[str, Any], sweep_dir: str) -> dict[str, Any]:
    """Return what is best, with the command that makes it again."""
    words = ["towers", "train", f"--flagfile={sweep_dir}/{row['runs'][0]}.cfg"]
    return {
        **{name: row[name] for name in ("flags", "runs", "objective", "accuracy") if name in row},
        "command": shlex.join([*words, f"--train_dir={os.path.normpath(sweep_dir)}-best"]),
    }


def line_of(entry: Mapping[str, Any], place: int, total: int) -> str:
    """Return the line that tells how a run ended."""
    head = f"run {place} of {total} {entry['name']}:"
    if entry["status"] == "finished":
        name, _ = objective_of(entry["result"])
        value = _figure(figure(entry["result"], name)) or "unknown"
        return f"{head} {short(name)} {value} ({entry['seconds']:.0f} s)"
    return f"{head} {entry['status']} ({entry['seconds']:.0f} s), {entry['error']}"


def closing_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what a sweep says at its end."""
    lines = []
    if result["finished"]:
        lines += ["", *table_lines(result["summary"], result["objective"]), ""]
        lines.append(
            f"{short(result['objective'])}: {_where(result['objective'])}, of the moving average "
            "where there is one; mean over n seeds"
        )
        lines += [result["note"]] if result["note"] else []
    for entry in result["runs"]:
        if entry["status"] == "failed":
            lines.append(f"failed      {entry['name']}: {entry['error']} ({entry['log']})")
    if best := result["best"]:
        what = describe(best["flags"]) or "as the flags are"
        value = f"{short(result['objective'])} {best['objective']['mean']:.4f}"
        lines.append(f"best        {what}: {value}")
        lines.append(f"  {best['command']}")
    if result["total"] > result["finished"] + result["failed"]:
        lines.append(
            f"stopped     {result['finished']} of {result['total']} runs are finished; the same "
            "command goes on"
        )
    return lines


def table_lines(rows: Sequence[Mapping[str, Any]], objective: str = "test_accuracy") -> list[str]:
    """Return the table of `summarise` for a person."""
    names = list(rows[0]["flags"])
    header = [*names, short(objective), "std", "min", "max", "n", "examples/s", "failed"]
    lines = []
    for row in rows:
        found, rate = row["objective"] or {}, row["examples_per_second"] or {}
        lines.append(
            [text_of(row["flags"][name]) for name in names]
            + [_figure(found.get(key)) for key in ("mean", "std", "min", "max")]
            + [row["finished"], _figure(rate.get("mean"), 1), row["failed"]]
        )
    return table(header, lines)


def _where(objective: str) -> str:
    test = objective.startswith("test_")
    return "on the test set" if test else "on the validation data"


def _figure(value: float | None, digits: int = 4) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
