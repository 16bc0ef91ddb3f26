"""What the results of runs say, as result.json and sweep.json hold them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towers import files


def number(result: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a result, None if it is no finite number."""
    value = result.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def accuracy(result: Mapping[str, Any]) -> float | None:
    """Return the test accuracy of a run: of the moving average if there is one."""
    averaged = number(result, "test_accuracy_ema")
    return number(result, "test_accuracy") if averaged is None else averaged


def noted_runs(folder: Path) -> list[dict[str, Any]]:
    """Return what sweep.json of a folder says of each run, [] for a folder of no sweep."""
    return files.read_json(folder / "sweep.json").get("runs", [])
