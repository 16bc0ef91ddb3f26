"""Reads the results of runs from result.json and sweep.json.

A run's objective is the metric by which runs are ranked, such as "test_accuracy" or
"validation_auc", with its direction, "max" or "min". Results without one are of classifiers.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towers import files
from towers.errors import InputError

Objective = tuple[str, str]  # metric of result.json, "max" or "min"

_TYPES = {  # of values that programs read
    "steps": int, "examples": int, "num_towers": int, "batch_size": int, "devices": list,
    "objective": str, "direction": str, "train_dir": str, "planned_steps": int,
    "best_step": int | None,
}  # fmt: skip
_SWEEP_TYPES = {"name": str, "status": str, "seconds": int | float, "flags": dict}


def read_result(folder: Path) -> dict[str, Any]:
    """Return the content of a run's result.json, {} if it is absent or damaged."""

    def is_simple(value: Any) -> bool:
        texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return texts or isinstance(value, str | int | float | None)

    path = folder / "result.json"
    result = files.read_json(path)
    simple = all(map(is_simple, result.values()))
    if _are_of(_TYPES, result) and simple and result.get("direction", "max") in ("max", "min"):
        return result
    files.warn_damaged(path)
    return {}


def _are_of(types: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    return all(isinstance(content[name], kind) for name, kind in types.items() if name in content)


def number(result: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a result, None if it is not finite or absent.

    Args:
        result: content of result.json.
        name: its name there, as "test_accuracy".
    """
    value = result.get(name)
    known = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return value if known else None


def averaged_number(result: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a result, that of the weights' moving average if there is one.

    Args:
        result: content of result.json.
        name: its name there without "_ema".
    """
    averaged = number(result, f"{name}_ema")
    return number(result, name) if averaged is None else averaged


def objective_of(result: Mapping[str, Any]) -> Objective:
    """Return the objective of a run."""
    return result.get("objective", "test_accuracy"), result.get("direction", "max")


def common_objective(results: Sequence[Mapping[str, Any]]) -> tuple[Objective, str]:
    """Return the objective to compare runs by, and a note if their own objectives differ.

    It is the first of their objectives for which all runs have a value, else the test loss.
    """
    objectives = list(dict.fromkeys(map(objective_of, results))) or [objective_of({})]
    if len(objectives) == 1:
        return objectives[0], ""
    known = (o for o in objectives if all(averaged_number(r, o[0]) is not None for r in results))
    chosen = next(known, ("test_loss", "min"))
    names = ", ".join(name for name, _ in objectives)
    return chosen, f"the runs have different objectives, {names}: compared by {chosen[0]}"


def metric_name(name: str) -> str:
    """Return a metric's name without "test_" or "validation_"."""
    return name.removeprefix("test_").removeprefix("validation_")


def parse_monitor(monitor: str, known: Mapping[str, str | None]) -> Objective:
    """Return the metric that --monitor names, and its direction.

    Args:
        monitor: a metric such as "auc" or "val_auc"; "max:" or "min:" may precede it.
        known: {metric: its direction, None if unknown}.

    Raises:
        InputError: the metric does not exist, or its direction is unknown.
    """
    direction, _, name = monitor.rpartition(":")
    name = metric_name(name.removeprefix("val_"))
    name = {n.lower(): n for n in known}.get(name.lower(), name)  # Keras calls one AUC, or auc
    if direction not in ("", "max", "min") or name.removesuffix("_ema") not in known:
        raise InputError(
            f"--monitor={monitor}: allowed are {', '.join(known) or 'no metric yet'}, with max: or "
            "min: before it if need be"
        )
    direction = direction or known[name.removesuffix("_ema")]
    if direction is None:
        raise InputError(
            f"--monitor={name}: whether more of it is better is not known; type "
            f"--monitor=max:{name} or min:{name}"
        )
    return name, direction


def noted_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs in a folder's sweep.json, [] if there is none."""

    def is_run(run: Any) -> bool:
        known = isinstance(run, dict) and {"name", "status"} <= run.keys()
        return known and _are_of(_SWEEP_TYPES, run)

    path = folder / "sweep.json"
    runs = files.read_json(path).get("runs", [])
    if isinstance(runs, list) and all(map(is_run, runs)):
        return runs
    files.warn_damaged(path)
    return []
