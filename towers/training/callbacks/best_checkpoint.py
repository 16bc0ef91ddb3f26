"""The best evaluation of a run, for early stopping and for the checkpoint that is kept.

`train_dir/best.json` holds:

    monitor, direction     the metric, and "max" or "min"
    points                 [[step, examples, value], ...] of all evaluations, in order
    step                   of the best one, whose checkpoint is kept; null if none is
    data                   sha256 of the evaluated examples; null if it is not known
"""

import math
from pathlib import Path
from typing import Any

from towers import files
from towers.training.run.setup import RunContext

NAME = "best.json"
_SCHEMA = {"points": [(int, int, float | int | None)], "step": int | None}


class BestTracker:
    """Tracks the evaluations of a run and which of them is the best."""

    def __init__(self, run: RunContext):
        """Read the evaluations up to the step of a run; later ones are made again.

        Start from scratch if they are of other examples, or another metric.
        """
        due, evaluated = run.due, run.data.validation or run.data.test
        self._path = run.folder / NAME
        self._patience = due.early_stopping_epochs * run.data.train.size  # examples; 0: none
        self._keep = due.keep_best
        self._is_needed = bool(self._patience or self._keep)
        name, direction = run.monitored
        data = evaluated.checksum()["sha256"] if self._is_needed else None
        self._about = {"monitor": name, "direction": direction, "data": data}
        goes_on = self._is_needed and not run.options.overwrite
        content = _read(run.folder) if goes_on else {}
        same = all(content.get(name) == value for name, value in self._about.items())
        step = run.steps_done()
        self._points = [p for p in content.get("points", []) if same and p[0] <= step]

    def add(self, step: int, examples: int, value: float | None) -> bool:
        """Add an evaluation; return whether it is the best so far, the first of equal ones.

        Args:
            step: number of updates before it; one that is evaluated again is not added again.
            examples: number of examples seen by then.
            value: value of the metric, None if there is none.
        """
        if all(step != known for known, *_ in self._points):
            self._points.append([step, examples, value])
        return self.step == step

    @property
    def step(self) -> int | None:
        """The step of the best evaluation, None if none has a finite value."""
        sign = 1 if self._about["direction"] == "min" else -1
        points = [(v, step) for step, _, v in self._points if v is not None and abs(v) < math.inf]
        return min((sign * v, step) for v, step in points)[1] if points else None

    def is_over(self) -> bool:
        """Return whether the run has not improved for `patience` examples."""
        if not self._patience or not self._points:
            return False
        best = next((n for step, n, _ in self._points if step == self.step), self._points[0][1])
        return self._points[-1][1] - best >= self._patience

    def write(self) -> None:
        """Write best.json, if it is needed; the best checkpoint must have been written before."""
        if self._is_needed:
            found = {"points": self._points, "step": self.step if self._keep else None}
            files.write_json(self._path, self._about | found)


def step_of(folder: Path) -> int | None:
    """Return the step of a run's best checkpoint, None if the run keeps none."""
    return _read(folder).get("step")


def _read(folder: Path) -> dict[str, Any]:
    # Without it the best checkpoint would be deleted, or another one taken for it.
    return files.read_json(Path(folder, NAME), _SCHEMA, needed=True)
