"""Results of runs, and the metric by which they are ranked.

Its name is "monitor" in result.json, such as "test_accuracy" or "validation_auc", and its direction
"max" or "min".
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towers import files
from towers.options.flags import RESULT

Monitored = tuple[str, str]  # a metric, and "max" or "min"
_SCHEMA = {"steps": int, "devices": [str], str: str | float | int | None}


def read(folder: str | Path) -> dict[str, Any]:
    """Return the result of a run, {} if it is not finished or, with a warning, damaged."""
    return files.read_json(Path(folder, RESULT), _SCHEMA)


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
    """Return a number like `number`, that of the weights' moving average if there is one."""
    averaged = number(result, f"{name}_ema")
    return number(result, name) if averaged is None else averaged


def monitored_by(result: Mapping[str, Any]) -> Monitored:
    """Return the metric that a run has monitored, and its direction."""
    return str(result.get("monitor", "test_accuracy")), result.get("direction", "max")
