"""What the results of runs say, as result.json and sweep.json hold them.

A run's objective is the metric that says which of several is best: "test_accuracy" or
"validation_auc", with its direction, "max" or "min". Results without one are of classifiers.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towers import files

Objective = tuple[str, str]  # metric of result.json, "max" or "min"


_KINDS = {  # of what others than people read
    "steps": int, "examples": int, "num_towers": int, "batch_size": int, "devices": list,
    "objective": str, "direction": str, "train_dir": str,
}  # fmt: skip
_OF_NOTED = {"name": str, "status": str, "seconds": int | float, "flags": dict}


def read_result(folder: Path) -> dict[str, Any]:
    """Return what result.json of a run holds, {} if it is absent or damaged."""
    path = folder / "result.json"
    found = files.read_json(path)
    simple = (isinstance(v, str | int | float | None) or _are_texts(v) for v in found.values())
    if _are_of(_KINDS, found) and all(simple) and found.get("direction", "max") in ("max", "min"):
        return found
    files.damaged(path)
    return {}


def _are_of(kinds: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return all(isinstance(found[name], kind) for name, kind in kinds.items() if name in found)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def number(result: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a result, None if it is no finite number."""
    value = result.get(name)
    known = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return value if known else None


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
    path = folder / "sweep.json"
    found = files.read_json(path).get("runs", [])
    if isinstance(found, list) and all(map(_is_noted, found)):
        return found
    files.damaged(path)
    return []


def _is_noted(run: Any) -> bool:
    return isinstance(run, dict) and {"name", "status"} <= run.keys() and _are_of(_OF_NOTED, run)
