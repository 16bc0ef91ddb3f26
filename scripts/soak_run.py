"""One run of scripts/soak: starts its command again and again, and checks how each start ends."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.tensorboard_server import read_scalars

ROOT = Path(__file__).resolve().parent.parent
_MODELS, BLOCK = "scripts.soak_models", "SOAK_BLOCK"
MOMENTUM, ADAM = {"learning_rate": 0.005}, {"learning_rate": 0.001, "optimizer": "adam"}
DROPOUT, BATCH_NORM = {"model_args": "dropout=0.3"}, {"model_args": "batch_norm=true"}
KINDS = {  # {name: the flags that differ from those of all}
    "dropout": MOMENTUM | DROPOUT,
    "batch_norm": MOMENTUM | BATCH_NORM | {"clip_global_norm": 1},
    "averages": ADAM | {"ema_decay": 0.9},
    "tf_data": {"model": f"{_MODELS}:compiled", "dataset": f"{_MODELS}:pipeline"},
    "generator": MOMENTUM | {"dataset": f"{_MODELS}:generator"},
    "accumulation": MOMENTUM | DROPOUT | {"accumulate_steps": 2},
    "mixed_float16": MOMENTUM | {"dtype": "mixed_float16"},
    "replicated": MOMENTUM | DROPOUT | {"variables": "replicated"},
}
PIPELINES = "tf_data", "generator"
STEPS, SAVED_STEPS, TOWERS = 900, 30, 2
OF_ALL = {
    "model": f"{_MODELS}:net", "dataset": f"{_MODELS}:images", "augment": "standardize",
    "batch_size": 8,
    "num_towers": TOWERS, "max_steps": STEPS, "checkpoint_every_steps": SAVED_STEPS,
    "evaluate_every_epochs": 20, "log_every_steps": 100,
}  # fmt: skip

STOPPED = 75
RUN_SECONDS, STOP_SECONDS = 120, 15  # a machine may be busy; more is a hang
_POLL_SECONDS = 0.001
_TIMED = "speed", "second", "memory"  # curves of what a clock or the system says
_STARTS = 3  # that a run may need when nothing disturbs it any more


class Wrong(Exception):
    """A run did what no page of towers says."""


class Run:
    """A run in a folder of its own, which also holds what each start printed: `1.out`, `1.err`.

    Attributes:
        folder: in which its train_dir lies; a disk of its own may be mounted there.
        train_dir: of the run.
        command, flags: of its next start.
        block: while this file is there, a run that reads a pipeline gets no input.
        slowest: most seconds that it took to end after it was told to.
        stack: what is to be closed at the end of the block.
    """

    def __init__(self, kind: str, folder: Path):
        """Start nothing yet."""
        self.folder, self.train_dir = folder / "disk", folder / "disk/run"
        self.command = [sys.executable, "-m", "towers", "train"]
        self.flags = OF_ALL | KINDS[kind] | {"train_dir": str(self.train_dir)}
        self.block, self._logs = folder / "block", folder
        self.slowest, self.starts = 0.0, 0
        self.process: subprocess.Popen | None = None
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        """Take a new folder."""
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Leave no process behind, and close the stack; after an error a disk is kept, too."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if kind and os.path.ismount(self.folder):
            shutil.copytree(self.folder, self.folder.with_name("disk_kept"))
        self.stack.close()

    def start(self) -> None:
        """Start the command."""
        self.starts += 1
        self._there = set(self._checkpoints())
        flags = [f"--{name}={value}" for name, value in self.flags.items()]
        environment = {n: v for n, v in os.environ.items() if n != "TF_CPP_MIN_LOG_LEVEL"}
        with self._log("out").open("wb") as out, self._log("err").open("wb") as err:
            self.process = subprocess.Popen(
                [*self.command, *flags], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=environment | {"PYTHONPATH": str(ROOT), BLOCK: str(self.block)},
            )  # fmt: skip

    def printed(self) -> str:
        """Return all that the last start has printed, results first."""
        return self._log("out").read_text() + self._log("err").read_text()

    def _log(self, name: str) -> Path:
        return self._logs / f"{self.starts}.{name}"

    # Moments.

    def wait(self, condition: Callable[[], object], seconds: float = RUN_SECONDS) -> bool:
        """Wait until `condition()` is true; return False if the process ended before."""
        start = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() - start > seconds:
                raise Wrong(f"waited {seconds} s for nothing")
            time.sleep(_POLL_SECONDS)
        return True

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint."""
        names = self.train_dir.glob("checkpoints/ckpt-*.index")
        return sorted(int(re.search(r"\d+", path.name)[0]) for path in names)

    def until_saved(self, step: int) -> bool:
        """Wait for a checkpoint of that step or a later one."""
        return self.wait(lambda: max(self.steps(), default=-1) >= step)

    def until_saving(self) -> bool:
        """Wait for a file that is being written among the checkpoints, since the start."""
        return self.wait(lambda: any(map(_is_temporary, set(self._checkpoints()) - self._there)))

    def until_heard(self) -> bool:
        """Wait until Python code of towers hears signals; before, the system answers them."""
        return self.wait(self._hears)

    def _hears(self) -> bool:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
            return bool(caught >> (signal.SIGTERM - 1) & 1)
        return False

    def _checkpoints(self) -> list[str]:
        with contextlib.suppress(OSError):
            return os.listdir(self.train_dir / "checkpoints")
        return []

    # Ends.

    def end(self, *codes: int, seconds: float = RUN_SECONDS) -> int:
        """Wait for the end, and check it: the exit code, a line of towers' own, no traceback."""
        start = time.monotonic()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Wrong(f"start {self.starts} did not end within {seconds} s") from None
        if seconds == STOP_SECONDS:
            self.slowest = max(self.slowest, time.monotonic() - start)
        errors = self._log("err").read_text()
        if code not in codes:
            raise Wrong(f"start {self.starts} ended with {code}, not {codes}: {_last(errors)}")
        if "Traceback" in errors:
            raise Wrong(f"start {self.starts} shows a traceback: {_last(errors)}")
        if code > 0 and not _last(errors).startswith("towers: "):
            raise Wrong(f"start {self.starts} ended with {code} and no line: {_last(errors)!r}")
        saved = re.search(r"step (\d+).* saved", _last(errors))
        if code == STOPPED and saved and int(saved[1]) not in self.steps():
            raise Wrong(f"start {self.starts} says {_last(errors)!r}, but there is none")
        return code

    def tell(self, number: int) -> None:
        """Send a signal, if there is still somebody to hear it."""
        self.process.send_signal(number)

    def kill(self, *codes: int) -> None:
        """End it by SIGKILL, if it has not come to one of these ends before."""
        self.tell(signal.SIGKILL)
        self.end(-signal.SIGKILL, *codes)

    def finish(self) -> None:
        """Repeat the same command until the run has its result."""
        for _ in range(_STARTS):
            if (self.train_dir / "result.json").exists():
                return
            newest = max(self.steps(), default=0)
            self.start()
            self.end(0)
            begun = re.search(r"^continuing .* at step (\d+) of ", self.printed(), re.MULTILINE)
            if int(begun[1] if begun else 0) < newest:  # more, if a kill came in a renaming
                raise Wrong(f"start {self.starts} did not resume from step {newest}")
        if not (self.train_dir / "result.json").exists():
            raise Wrong(f"{_STARTS} starts brought no result")

    def final(self) -> dict:
        """Return the sums of weights and state that the run ended with; check what it leaves."""
        left = sorted(filter(_is_temporary, self._checkpoints()))
        if left:
            raise Wrong(f"checkpoints/ still has {', '.join(left)}")
        if self.steps()[-1] != STEPS:
            raise Wrong(f"the last checkpoint is of step {self.steps()[-1]}, not {STEPS}")
        sums = json.loads((self.train_dir / "manifest.json").read_text())["final"]
        return {name: sums[name] for name in ("step", "weights", "state")}

    def curves(self) -> dict[tuple[str, int, str], float]:
        """Return the points of the run, but for what a clock or the system says."""
        folders = {path.parent for path in self.train_dir.rglob("events.*")}
        return {
            (folder.relative_to(self.train_dir).as_posix(), step, tag): value
            for folder in folders
            for step, values in read_scalars(folder).items()
            for tag, value in values.items()
            if not any(word in tag for word in _TIMED)
        }


def any_moment(run: Run, chance: random.Random) -> None:
    """Wait for a moment between the import and the final write of a run that was just started."""
    where = chance.choice(["start", "training", "training", "saving", "end"])
    run.until_heard()
    if where == "start":
        time.sleep(chance.uniform(0, 6))
    elif where == "end":
        run.until_saved(STEPS)
        time.sleep(chance.uniform(0, 0.2))
    else:
        run.until_saved(chance.randrange(0, STEPS, SAVED_STEPS))
        if where == "saving":
            run.until_saving()
        else:
            time.sleep(chance.uniform(0, 0.1))


def _is_temporary(name: str) -> bool:
    return not re.fullmatch(r"checkpoint|ckpt-\d+\.(index|data-\d+-of-\d+)", name)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1]
