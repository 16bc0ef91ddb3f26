"""Stands in for `towers train` where a sweep is tested: --model says how it ends.

Each start adds a line to `started` beside the run's folder. `waits` tells a pipe, $READY, that it
is there, and then waits for SIGTERM; the next start finds that it was saved, and finishes.
"""

import os
import signal
import sys
from pathlib import Path

from towers import files
from towers.options import flags


def main():
    options = flags.parse(sys.argv[1:])
    folder = Path(options.train_dir)
    with open(folder.parent / "started", "a") as started:
        started.write(f"{folder.name}\n")
    if options.model == "refused":
        print("towers: --model=refused: no", file=sys.stderr)
        return 2
    folder.mkdir(exist_ok=True)
    files.write_text(folder / "flags.cfg", options.to_flagfile())
    print(f"new run     {folder}, 20 steps")
    print("2026-01-01 00:00:00: step 9, examples 90, loss = 1.0", flush=True)
    if options.model == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.model == "crashed":
        raise RuntimeError("out of luck")
    if options.model == "nothing":
        return 0
    if options.model == "waits" and not (folder / "saved").exists():
        with files.Lock() as lock:
            lock.take(folder)
            return wait(folder)
    accuracy = options.learning_rate + options.seed / 100
    result = {"steps": 20, "test_accuracy": accuracy, "test_accuracy_ema": None}
    result |= {"test_loss": 1.0, "train_loss": 1.0, "examples_per_second": 100.0 * options.seed}
    files.write_json(folder / "result.json", result)
    return 0


def wait(folder):
    """Wait for SIGTERM, and be saved then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with open(os.environ["READY"], "w") as ready:
        ready.write(f"{folder.name}\n")
    signal.sigwait([signal.SIGTERM])
    (folder / "saved").touch()
    return 75


if __name__ == "__main__":
    sys.exit(main())
