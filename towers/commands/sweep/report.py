"""The report of a sweep: a line for each run, the table, the content of sweep.json.

Runs are compared by their objective, that of the moving average of the weights where there is one,
averaged over runs that differ only in their seed. Combinations with a failed run are ranked last.
"""

import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from towers.commands.sweep.options import SweepOptions, describe
from towers.formatting import table
from towers.monitoring import results
from towers.monitoring.results import Objective, averaged_number, metric_name
from towers.options.run import text_of


def document(options: SweepOptions, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of sweep.json, which --json prints.

    Args:
        options: options of the sweep.
        entries: a dict for each run, as `command.run` makes them.
    """
    objective, note = results.common_objective([e["result"] for e in entries if e["result"]])
    rows, best = _summary(entries, objective), None
    if rows[0]["objective"]:
        folder = options.sweep_dir
        words = ["towers", "train", f"--flagfile={folder}/{rows[0]['runs'][0]}.cfg"]
        words.append(f"--train_dir={os.path.normpath(folder)}-best")
        best = {name: rows[0][name] for name in ("flags", "runs", "objective")}
        best["command"] = shlex.join(words)
    ends = [entry["status"] for entry in entries]
    return {
        "sweep_dir": options.sweep_dir,
        "total": len(entries),
        **{status: ends.count(status) for status in ("finished", "failed", "stopped")},
        "objective": objective[0],
        "direction": objective[1],
        "note": note,
        "runs": list(entries),
        "summary": rows,
        "best": best,
    }


def _summary(entries: Sequence[Mapping[str, Any]], objective: Objective) -> list[dict[str, Any]]:
    """Return a row for each combination of what is varied except the seed, best first.

    A row has "flags", "runs": names, "finished": n, "failed": n, and the "objective": {"mean",
    "std"}, None where no run has it; "std" is that of the sample, None for one run.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(describe(entry["flags"] | {"seed": 0}), []).append(entry)
    (name, direction), rows = objective, []
    for group in groups.values():
        finished = [entry["result"] for entry in group if entry["status"] == "finished"]
        known = [v for result in finished if (v := averaged_number(result, name)) is not None]
        std = statistics.stdev(known) if len(known) > 1 else None
        rows.append(
            {
                "flags": {flag: v for flag, v in group[0]["flags"].items() if flag != "seed"},
                "runs": [entry["name"] for entry in group],
                "finished": len(finished),
                "failed": sum(entry["status"] == "failed" for entry in group),
                "objective": {"mean": statistics.fmean(known), "std": std} if known else None,
            }
        )

    def rank(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        mean = row["objective"]["mean"] if row["objective"] else 0.0
        return not row["objective"], row["failed"] > 0, -mean if direction == "max" else mean

    return sorted(rows, key=rank)


def line_of(entry: Mapping[str, Any], place: int, total: int) -> str:
    """Return the line that says how a run ended.

    Args:
        entry: see `document`.
        place: number of the run, from 1.
        total: number of all runs.
    """
    head = f"run {place} of {total} {entry['name']}:"
    if entry["status"] == "finished":
        name, _ = results.objective_of(entry["result"])
        value = _digits(averaged_number(entry["result"], name)) or "unknown"
        return f"{head} {metric_name(name)} {value} ({entry['seconds']:.0f} s)"
    end = f"{entry['status']} ({entry['seconds']:.0f} s), {entry['error']}"
    return f"{head} {end} ({entry['log']})"


def closing_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the last lines of a sweep; `result` is its `document`."""
    objective, lines = metric_name(result["objective"]), []
    if result["finished"]:
        test = result["objective"].startswith("test_")
        where = "on the test set" if test else "on the validation data"
        note = f"{objective}: {where}, of the moving average where there is one; mean over n seeds"
        names, rows = list(result["summary"][0]["flags"]), []
        for row in result["summary"]:
            cells = [text_of(row["flags"][name]) for name in names]
            cells += [_digits((row["objective"] or {}).get(key)) for key in ("mean", "std")]
            rows.append([*cells, row["finished"], row["failed"]])
        lines += ["", *table([*names, objective, "std", "n", "failed"], rows), "", note]
        lines += [result["note"]] if result["note"] else []
    if best := result["best"]:
        flags = describe(best["flags"]) or "as the flags are"
        lines.append(f"best        {flags}: {objective} {best['objective']['mean']:.4f}")
        lines.append(f"  {best['command']}")
    if result["total"] > result["finished"] + result["failed"]:
        done = f"{result['finished']} of {result['total']} runs are finished"
        lines.append(f"stopped     {done}; the same command goes on")
    return lines


def _digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
