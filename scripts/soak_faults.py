"""The faults of scripts/soak: each one starts a run, disturbs it, and checks how it ends.

A fault is called with a run that was not started yet and with the round's own random numbers.
Afterwards nothing disturbs the run any more, and the same command is to bring it to its end.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.soak_run import (
    KINDS,
    PIPELINES,
    SAVED_STEPS,
    STEPS,
    STOP_SECONDS,
    STOPPED,
    TOWERS,
    Run,
    Wrong,
    any_moment,
)

_DISK_BYTES = 4 * 2**20
_FULL_BYTES = 8000  # of a file, without a disk of its own: more than a log, less than a checkpoint
_NO_SPACE = "No space left", "File too large"  # what the system says of the two


def killed(run: Run, chance: random.Random) -> None:
    """Kill it at some moment."""
    run.start()
    any_moment(run, chance)
    run.kill(0)


def killed_in_save(run: Run, chance: random.Random) -> None:
    """Kill it twice while it writes a checkpoint."""
    for first in (0, STEPS // 2):
        run.start()
        run.until_saved(first + chance.randrange(0, STEPS // 2, SAVED_STEPS))
        run.until_saving()
        run.kill(0)


def terminated(run: Run, chance: random.Random) -> None:
    """Send SIGTERM, as schedulers do."""
    _stop(run, chance, signal.SIGTERM)


def interrupted(run: Run, chance: random.Random) -> None:
    """Send SIGINT, as Ctrl-C does."""
    _stop(run, chance, signal.SIGINT)


def hung_up(run: Run, chance: random.Random) -> None:
    """Send SIGHUP, as a lost connection does."""
    _stop(run, chance, signal.SIGHUP)


def _stop(run: Run, chance: random.Random, number: int) -> None:
    run.start()
    any_moment(run, chance)
    run.tell(number)
    run.end(STOPPED, 0, seconds=STOP_SECONDS)


def stopped_twice(run: Run, chance: random.Random) -> None:
    """Send two signals in a row: the second may end it at once."""
    run.start()
    any_moment(run, chance)
    first, second = chance.choices([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], k=2)
    run.tell(first)
    time.sleep(chance.choice([0, 0.1, 1.5]))
    run.tell(second)
    run.end(STOPPED, 0, 128 + second, seconds=STOP_SECONDS)


def disk_full(run: Run, chance: random.Random) -> None:
    """Let the disk be full for a while: the run says so, trains on, and saves the next time."""
    own_disk(run)
    run.start()
    run.until_saved(chance.randrange(0, STEPS // 2, SAVED_STEPS))
    # Before the first step, where the run's first files are written, it ends with a line.
    run.wait(lambda: "watch it" in run.printed())
    with full_disk(run):
        run.wait(lambda: any(word in run.printed() for word in _NO_SPACE))
    run.end(0)


def disk_full_to_the_end(run: Run, chance: random.Random) -> None:
    """Let the disk be full until the run ends, maybe from its start: it fails, with a message."""
    own_disk(run)
    run.start()
    first = chance.choice([None, 0, STEPS // 2])
    run.until_heard() if first is None else run.until_saved(first)
    with full_disk(run):
        run.end(1)


def damaged(run: Run, chance: random.Random) -> None:
    """Damage the newest checkpoint: the run is to name it, and resume from an older one."""
    run.start()
    run.until_saved(chance.randrange(2 * SAVED_STEPS, STEPS, SAVED_STEPS))
    run.kill()
    (run.train_dir / "result.json").unlink(missing_ok=True)
    prefix = run.train_dir / f"checkpoints/ckpt-{run.steps()[-1]}"
    files = sorted(prefix.parent.glob(f"{prefix.name}.*"))  # data, index
    damage(chance.choice(files), chance)
    counts = prefix.with_suffix(".index").exists()  # without its index it is none
    run.start()
    run.end(0)
    if counts and prefix.name not in run.printed():
        raise Wrong(f"{prefix.name} is damaged, and the run does not name it")


def damage(path: Path, chance: random.Random) -> None:
    """Delete a file, cut it, or flip one of its bits."""
    content = bytearray(path.read_bytes())
    way = chance.choice(["delete", "cut", "flip"])
    if way == "delete":
        path.unlink()
        return
    place = chance.randrange(len(content))
    if way == "cut":
        del content[place:]
    else:
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def blocked(run: Run, chance: random.Random) -> None:
    """Give it no input any more, then ask it to stop: what it has done is to be saved."""
    run.start()
    run.until_saved(chance.randrange(0, STEPS - SAVED_STEPS, SAVED_STEPS))
    run.block.touch()
    time.sleep(chance.uniform(0.5, 3))
    run.tell(chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
    run.end(STOPPED, 0, seconds=STOP_SECONDS)
    run.block.unlink()


def folder_gone(run: Run, chance: random.Random) -> None:
    """Rename its folder, or delete it, while it trains."""
    run.start()
    run.until_saved(chance.randrange(0, STEPS, SAVED_STEPS))
    if chance.random() < 0.5:
        run.train_dir.rename(run.folder / "renamed")
    else:
        shutil.rmtree(run.train_dir, ignore_errors=True)
    run.end(0, 1)
    if str(run.train_dir) not in run.printed():
        raise Wrong("its folder is gone, and the run does not name it")


def other_towers(run: Run, chance: random.Random) -> None:
    """Stop it, and resume it with another number of towers."""
    run.start()
    run.until_saved(chance.randrange(0, STEPS // 2, SAVED_STEPS))
    run.tell(signal.SIGTERM)
    run.end(STOPPED, seconds=STOP_SECONDS)
    run.flags["num_towers"] = chance.choice([1, TOWERS + 1])


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    f.__name__: f
    for f in (
        killed, killed_in_save, terminated, interrupted, hung_up, stopped_twice,
        disk_full, disk_full_to_the_end, damaged, blocked, folder_gone, other_towers,
    )
}  # fmt: skip


def kinds_of(fault: str) -> list[str]:
    """Return the kinds of runs that a fault is for: float16 rounds too much to be compared."""
    if fault == "blocked":
        return list(PIPELINES)
    return [k for k in KINDS if (fault, k) != ("other_towers", "mixed_float16")]


def own_disk(run: Run) -> None:
    """Let the run's folder be a small disk of its own, where this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "soak", str(run.folder)]
    if subprocess.run(command, capture_output=True).returncode == 0:
        run.stack.callback(subprocess.run, ["umount", "--lazy", str(run.folder)], check=True)


@contextlib.contextmanager
def full_disk(run: Run) -> Iterator[None]:
    """Leave no space on the run's own disk; without one, let its files grow no further."""
    if not os.path.ismount(run.folder):
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, -1))
        yield
        if run.process.poll() is None:
            resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (-1, -1))
        return
    filler = run.folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    filler.unlink()
