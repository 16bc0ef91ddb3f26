"""What the results of runs say, as result.json and sweep.json hold them.

A run's objective is the metric that says which of several is best: "test_accuracy" or
"validation_auc", with its direction, "max" or "min". Results without one are of classifiers.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towers import files

Objective = tuple[str, str]  # metric of result.json, "max" or "min"


def number(result: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a result, None if it is no finite number."""
    value = result.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def figure(result: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a result: of the moving average of the weights if there is one."""
    averaged = number(result, f"{name}_ema")
    return number(result, name) if averaged is None else averaged


def objective_of(result: Mapping[str, Any]) -> Objective:
    """Return the objective of a run."""
    return result.get("objective", "test_accuracy"), result.get("direction", "max")


def common_objective(results: Sequence[Mapping[str, Any]]) -> tuple[Objective, str]:
    """Return by what runs are compared, and a line that says so if their objectives differ.

    Of several objectives it is the first one that all of them have, else the test loss.
    """
    found = list(dict.fromkeys(map(objective_of, results))) or [objective_of({})]
    if len(found) == 1:
        return found[0], ""
    known = [pair for pair in found if all(figure(r, pair[0]) is not None for r in results)]
    chosen = (known or [("test_loss", "min")])[0]
    names = ", ".join(name for name, _ in found)
    return chosen, f"the runs have different objectives, {names}: compared by {chosen[0]}"


def short(name: str) -> str:
    """Return a metric's name without the part of the data set that it is of."""
    return name.removeprefix("test_").removeprefix("validation_")


def noted_runs(folder: Path) -> list[dict[str, Any]]:
    """Return what sweep.json of a folder says of each run, [] for a folder of no sweep."""
    return files.read_json(folder / "sweep.json").get("runs", [])
