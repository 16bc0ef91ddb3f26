"""The report of a sweep: the table, and the content of sweep.json.

Runs are ranked by their objective, that of the moving average of the weights where there is one,
averaged over runs that differ only in their seed. Combinations with a failed run are ranked last.
"""

import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from towers.commands.sweep.options import describe
from towers.formatting import table
from towers.monitoring.results import averaged_number, objective_of
from towers.options.run import text_of


def document(sweep_dir: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of sweep.json, which --json prints.

    Its "summary" has a row for each combination of what is varied except the seed, best first:
    "flags", "runs": names, "finished": n, "failed": n, and "objective": the mean, None if unknown.

    Args:
        sweep_dir: folder of the sweep.
        entries: a dict for each run, as `command.run` makes them.
    """
    name, direction = objective_of(next((e["result"] for e in entries if e["result"]), {}))
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(describe(entry["flags"] | {"seed": 0}), []).append(entry)
    rows = []
    for group in groups.values():
        ends = [entry["status"] for entry in group]
        values = (averaged_number(entry["result"] or {}, name) for entry in group)
        known = [value for value in values if value is not None]
        rows.append(
            {
                "flags": {flag: v for flag, v in group[0]["flags"].items() if flag != "seed"},
                "runs": [entry["name"] for entry in group],
                "finished": ends.count("finished"),
                "failed": ends.count("failed"),
                "objective": statistics.fmean(known) if known else None,
            }
        )

    def rank(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        mean = row["objective"] or 0.0
        return row["objective"] is None, row["failed"] > 0, -mean if direction == "max" else mean

    best = min(rows, key=rank)
    words = ["towers", "train", f"--flagfile={sweep_dir}/{best['runs'][0]}.cfg"]
    command = shlex.join([*words, f"--train_dir={os.path.normpath(sweep_dir)}-best"])
    ends = [entry["status"] for entry in entries]
    return {
        "sweep_dir": sweep_dir,
        "total": len(entries),
        **{status: ends.count(status) for status in ("finished", "failed", "stopped")},
        "objective": name,
        "direction": direction,
        "runs": list(entries),
        "summary": sorted(rows, key=rank),
        "best": None if best["objective"] is None else best | {"command": command},
    }


def closing_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the last lines of a sweep; `result` is its `document`."""
    objective, lines = result["objective"].replace("_", " ", 1), []
    if best := result["best"]:
        names = list(best["flags"])
        rows = [
            [*(text_of(row["flags"][name]) for name in names)]
            + [row["objective"] and f"{row['objective']:.4f}", row["finished"], row["failed"]]
            for row in result["summary"]
        ]
        lines = ["", *table([*names, objective, "n", "failed"], rows), ""]
        lines.append(f"best        {describe(best['flags']) or 'as the flags are'}")
        lines.append(f"  {best['command']}")
    if result["total"] > result["finished"] + result["failed"]:
        done = f"{result['finished']} of {result['total']} runs are finished"
        lines.append(f"stopped     {done}; the same command continues the sweep")
    return lines
