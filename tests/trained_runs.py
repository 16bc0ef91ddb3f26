"""Trained runs that tests look at, each made once for all processes of a session, and read only.

    def test_it_can_be_evaluated(trained):
        folder = trained("text")                     # the folder of a run
        copy = trained.copy("text", tmp_path / "a")  # one that the test may change

"classes" is a classifier that flags compile, with pictures, curves and four checkpoints; the others
are `tests.tasks`, compiled models with data of all structures.
"""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS = 9  # of a task
CLASSES_STEPS = 18  # two epochs of 60 examples in batches of 7


def flags(name: str) -> dict[str, Any]:
    """Return the options of a run, but for train_dir."""
    if name == "classes":
        return dict(
            model="tests.tiny:cnn", model_args="width=3", dataset="tests.tiny:images",
            augment="tutorial", num_towers=2, batch_size=7, num_epochs=2.0, optimizer="adamw",
            learning_rate=0.1, weight_decay=0.01, ema_decay=0.9,
            evaluate_every_epochs=0.5, log_every_steps=4, checkpoint_every_steps=6,
            histogram_every_epochs=1.0, keep_checkpoints=5, devices="cpu",
        )  # fmt: skip
    return dict(
        model=f"tests.tasks:{name}", dataset=f"tests.tasks:{name}_data", num_towers=2, batch_size=8,
        max_steps=STEPS, checkpoint_every_steps=4, log_every_steps=4,
        ema_decay=0.0 if name == "two" else 0.5,  # whose optimizer has averages of its own
    )  # fmt: skip


class Runs:
    """The runs of a session; called with a name, it returns the folder of that run."""

    def __init__(self, folder: Path):
        """Train nothing yet."""
        self._folder = folder
        self._stamps: dict[Path, dict] = {}

    def __call__(self, name: str) -> Path:
        """Return the folder of "classes" or of a task."""
        run = self._folder / name / "run"
        if run not in self._stamps:
            with _locked(run.parent):
                stamps = run.parent / "stamps.json"
                if not stamps.exists():
                    _train(run, flags(name))
                    stamps.write_text(json.dumps(_stamps(run)))
                self._stamps[run] = json.loads(stamps.read_text())
        return run

    def copy(self, name: str, to: Path) -> Path:
        """Return a copy of a run's folder, for a test that changes it."""
        return Path(shutil.copytree(self(name), to))

    def assert_unchanged(self) -> None:
        """Let the test fail that changed a run which others read."""
        for run, stamps in self._stamps.items():
            assert _stamps(run) == stamps, f"{run} is for all tests: change a copy of it"


def _train(run: Path, given: dict[str, Any]) -> None:
    from towers import Options
    from towers.training.train import train

    train(Options(train_dir=str(run), **given))


def _stamps(run: Path) -> dict[str, list[int]]:
    found = {str(path.relative_to(run)): path.stat() for path in [run, *run.rglob("*")]}
    return {name: [stat.st_mtime_ns, stat.st_size] for name, stat in found.items()}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no other process of the session into the block for that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
