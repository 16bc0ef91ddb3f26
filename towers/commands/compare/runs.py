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
from towers.commands.sweep.report import accuracy, noted_runs, number
from towers.errors import InputError
from towers.monitoring.curves import Curves, read_curves

_OF_ONE_RUN = ("train_dir", "overwrite", "json", "visible_gpus")
_ROUNDING = 1e-6  # event files hold 32 bits: 0.9 is a little less there


@dataclasses.dataclass(frozen=True)
class Compared:
    """A run that is compared.

    Attributes:
        name: that tells it from the others.
        folder: of the run.
        status: "finished", "unfinished" or "empty", which has no curves.
        flags: {flag: value} of flags.cfg, as text.
        result: of result.json, {} if it is not finished.
        curves: of training and evaluation.
    """

    name: str
    folder: Path
    status: str
    flags: dict[str, str]
    result: dict[str, Any]
    curves: Curves


def find_runs(names: Sequence[str]) -> list[Path]:
    """Return the folders of the runs that are meant; a folder of runs stands for all of them.

    Raises:
        InputError: a folder holds no run.
    """
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
    runs = [path for path in folder.iterdir() if path.is_dir() and files.is_run(path)]

    def natural(path: Path) -> list[tuple[float, str]]:
        parts = re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?|\D", path.name)
        return [(float(p), "") if p[0].isdigit() else (math.inf, p) for p in parts]

    return sorted(runs, key=natural)


def read_run(folder: Path, name: str) -> Compared:
    """Return what the folder of a run tells; what is not there is empty."""
    flags = read_flags(folder / "flags.cfg")
    result = files.read_json(folder / "result.json")
    size = flags.get("batch_size", "")
    curves = read_curves(
        folder, int(size) if size.isdecimal() else 1, flags.get("tensorboard_x") == "examples"
    )
    examples = number(result, "examples") or 0
    if len(curves.examples) and curves.examples[-1] > examples * (1 + _ROUNDING):
        result = {}  # of before the run went on
    steps = curves.loss.x
    status = "finished" if accuracy(result) is not None else "unfinished"
    if status == "unfinished" and not len(steps) and not len(curves.accuracy.x):
        status = "empty"
    return Compared(name, folder, status, flags, result, curves)


def read_flags(path: Path) -> dict[str, str]:
    """Return {flag: value} of a flagfile that a run wrote, as text: of whatever version."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    pairs = [line[2:].partition("=") for line in lines if line.startswith("--")]
    return {name: value for name, _, value in pairs if name not in _OF_ONE_RUN}


def differing_flags(runs: Sequence[Compared]) -> list[str]:
    """Return the names of the flags that are not the same in all runs that have any."""
    known = [run.flags for run in runs if run.flags]
    names = list(dict.fromkeys(name for flags in known for name in flags))
    return [name for name in names if len({flags.get(name) for flags in known}) > 1]


def common_accuracy(runs: Sequence[Compared]) -> float | None:
    """Return the highest accuracy that all runs reached which were evaluated at all."""
    highest = [run.curves.accuracy.values.max() for run in runs if len(run.curves.accuracy.values)]
    return math.floor(min(highest) * 1e4) / 1e4 if highest else None


def metrics_of(run: Compared) -> dict[str, float | None]:
    """Return the last known metrics of a run: of its result, else of its curves."""
    curves, result = run.curves, run.result
    examples = float(curves.examples[-1]) if len(curves.examples) > 1 else None
    last_accuracy = float(curves.accuracy.values[-1]) if len(curves.accuracy.values) else None
    last_loss = float(curves.loss.values[-1]) if len(curves.loss.values) else None
    final = accuracy(result)
    at = number(result, "examples") or examples
    seconds = curves.seconds_at(at) if at else None
    return {
        "steps": number(result, "steps"),
        "examples": at,
        "epochs": curves.epochs_at(at) if at else None,
        "accuracy": last_accuracy if final is None else final,
        "test_loss": number(result, "test_loss"),
        "train_loss": number(result, "train_loss") or last_loss,
        "examples_per_second": number(result, "examples_per_second")
        or (at / seconds if seconds else None),
        "seconds": seconds,
    }


def to_accuracy(run: Compared, target: float) -> dict[str, float | None] | None:
    """Return when an evaluation first gave that accuracy, None if none did.

    Returns:
        {"seconds": of training, "examples", "steps", "epochs"}; None where it is not known.
    """
    reached = np.flatnonzero(run.curves.accuracy.values >= target - _ROUNDING)
    if not len(reached):
        return None
    first = reached[0]
    examples = float(run.curves.accuracy.examples[first])
    size = run.flags.get("batch_size", "")
    by_examples = run.flags.get("tensorboard_x") == "examples"
    steps = float(run.curves.accuracy.x[first])
    if by_examples:
        steps = examples / int(size) if size.isdecimal() and int(size) else None
    return {
        "seconds": run.curves.seconds_at(examples),
        "examples": round(examples),
        "steps": None if steps is None else round(steps),
        "epochs": run.curves.epochs_at(examples),
    }


def failures(names: Sequence[str]) -> dict[str, str]:
    """Return {name: error} of the runs that failed, as the sweeps among the folders noted it."""
    return {
        run["name"]: str(run.get("error"))
        for name in names
        for run in noted_runs(Path(name))
        if run.get("status") == "failed"
    }
