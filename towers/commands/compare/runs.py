"""The runs of a comparison: found, read, and what there is to say of each."""

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from towers import files
from towers.errors import InputError
from towers.monitoring.curves import Curves, read_curves
from towers.monitoring.results import accuracy, number
from towers.options.run import names_that_affect

_OF_ONE_RUN = (*names_that_affect("call"), "visible_gpus")  # which a sweep deals out
_ROUNDING = 1e-6  # event files hold 32 bits: 0.9 is a little less there


@dataclasses.dataclass(frozen=True)
class Compared:
    """A run that is compared."""

    name: str  # that tells it from the others
    folder: Path
    status: str  # "finished", "unfinished" or "empty", which has no curves
    flags: dict[str, str]  # of flags.cfg, as text
    result: dict[str, Any]  # of result.json, {} if it is not finished
    curves: Curves


def find_runs(names: Sequence[str]) -> list[Path]:
    """Return the folders of the runs that are meant; a folder of runs stands for all of them."""
    found: dict[str, Path] = {}
    for name in names:
        folder = Path(name)
        try:
            inside = [folder] if files.is_run(folder) else _runs_inside(folder)
        except OSError as error:
            raise InputError(f"{name}: {error.strerror}") from None
        if not inside:
            raise InputError(f"{name}: there is no run; name the folder of a run, or of a sweep")
        for run in inside:
            found.setdefault(os.path.realpath(run), run)
    return list(found.values())


def _runs_inside(folder: Path) -> list[Path]:
    """Return the runs in a folder, 2 after 1 and not after 10."""

    def natural(path: Path) -> list[tuple[float, str]]:
        parts = re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?|\D", path.name)
        return [(float(p), "") if p[0].isdigit() else (math.inf, p) for p in parts]

    return sorted(filter(files.is_run, folder.iterdir()), key=natural)


def read_run(folder: Path, name: str) -> Compared:
    """Return what the folder of a run tells; what is not there is empty."""
    path = folder / "flags.cfg"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = [line[2:].partition("=") for line in lines if line.startswith("--")]
    flags = {flag: value for flag, _, value in pairs if flag not in _OF_ONE_RUN}
    result = files.read_json(folder / "result.json")
    curves = read_curves(folder, _batch_size(flags), flags.get("tensorboard_x") == "examples")
    examples = number(result, "examples") or 0
    if len(curves.examples) and curves.examples[-1] > examples * (1 + _ROUNDING):
        result = {}  # of before the run went on
    status = "finished"
    if accuracy(result) is None:
        status = "unfinished" if len(curves.loss.x) or len(curves.accuracy.x) else "empty"
    return Compared(name, folder, status, flags, result, curves)


def _batch_size(flags: dict[str, str]) -> int:
    return int(flags.get("batch_size", 1))


def differing_flags(runs: Sequence[Compared]) -> list[str]:
    """Return the names of the flags that are not the same in all runs that have any."""
    known = [run.flags for run in runs if run.flags]
    names = dict.fromkeys(name for flags in known for name in flags)
    return [name for name in names if len({flags.get(name) for flags in known}) > 1]


def common_accuracy(runs: Sequence[Compared]) -> float | None:
    """Return the highest accuracy that all runs reached which were evaluated at all."""
    highest = [run.curves.accuracy.values.max() for run in runs if len(run.curves.accuracy.values)]
    return math.floor(min(highest) * 1e4) / 1e4 if highest else None


def metrics_of(run: Compared) -> dict[str, float | None]:
    """Return the last known metrics of a run: of its result, else of its curves."""
    curves, result = run.curves, run.result
    at = number(result, "examples") or (curves.examples[-1] if len(curves.examples) > 1 else None)
    seconds = curves.seconds_at(at) if at else None
    final = accuracy(result)
    return {
        "steps": number(result, "steps"),
        "examples": at,
        "epochs": curves.epochs_at(at) if at else None,
        "accuracy": _last(curves.accuracy.values) if final is None else final,
        "test_loss": number(result, "test_loss"),
        "train_loss": number(result, "train_loss") or _last(curves.loss.values),
        "examples_per_second": number(result, "examples_per_second")
        or (at / seconds if seconds else None),
        "seconds": seconds,
    }


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def to_accuracy(run: Compared, target: float) -> dict[str, float | None] | None:
    """Return when an evaluation first gave that accuracy, None if none did.

    It says {"seconds": of training, "examples", "steps", "epochs"}; None where it is not known.
    """
    curve = run.curves.accuracy
    reached = np.flatnonzero(curve.values >= target - _ROUNDING)
    if not len(reached):
        return None
    examples, x = float(curve.examples[reached[0]]), float(curve.x[reached[0]])
    by_examples = run.flags.get("tensorboard_x") == "examples"
    return {
        "seconds": run.curves.seconds_at(examples),
        "examples": round(examples),
        "steps": round(x / _batch_size(run.flags) if by_examples else x),
        "epochs": run.curves.epochs_at(examples),
    }
