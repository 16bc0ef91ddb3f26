"""Results of runs, and the objective by which they are ranked.

A run's objective is the metric that counts, such as "test_accuracy" or "validation_auc", with its
direction, "max" or "min".
"""

import sys
from collections.abc import Mapping
from typing import Any

from towers.errors import InputError

Objective = tuple[str, str]  # metric of result.json, "max" or "min"


def number(result: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a result, None if it is not finite or absent.

    Args:
        result: content of result.json.
        name: its name there, such as "test_accuracy".
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
    return str(result.get("objective", "test_accuracy")), result.get("direction", "max")


def parse_monitor(monitor: str, known: Mapping[str, str | None]) -> Objective:
    """Return the metric that selects the best evaluation, and "max" or "min".

    Args:
        monitor: --monitor, such as "auc" or "val_auc"; "max:" or "min:" may precede it; "" for the
            accuracy, else the first metric whose direction is known, else the loss.
        known: {metric: its direction, None if unknown}.

    Raises:
        InputError: the metric does not exist, or its direction is unknown.
    """
    if not monitor:
        candidates = [name for name in known if name != "loss" and known[name]]
        rest = "loss" if "loss" in known else next(iter(known))
        name = "accuracy" if "accuracy" in candidates else next(iter(candidates), rest)
        return name, known[name] or "min"
    direction, _, name = monitor.rpartition(":")
    name = name.removeprefix("val_")
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
