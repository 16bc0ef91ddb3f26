"""What only a GPU can show of towers: training, speed, copies, collectives, memory options.

    python scripts/gpu_check.py

Each check runs in a process of its own, since memory options are per process; the most telling come
first, and what does not fit into --minutes is left out. A single GPU is split into two logical ones
where a check needs two. What was found stands in gpu_check.json, too: seconds of a step in each
setting, copies in a step, counted and foretold. Exit code: 0 none failed, 1 a check failed, 3 there
is no GPU. With --kind=cpu logical CPUs take the part of GPUs in the checks that know no memory.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

from scripts import gpu_steps  # noqa: E402
from scripts.gpu_checks import FIND, MEMORY_CHECKS, TOWER_CHECKS, find  # noqa: E402
from scripts.gpu_steps import Setting, Skipped  # noqa: E402
from towers.builder import kinds  # noqa: E402
from towers.devices import nvml  # noqa: E402

EXIT_FAILED, EXIT_NO_GPU, EXIT_SKIPPED = 1, 3, 4
TIMEOUT_SECONDS = 180  # of one check
LEAST_SECONDS = 15  # which a check takes, TensorFlow's start included
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
OUT_OF_TIME = "out of time"


def names_of_checks(kind: str, num_gpus: int) -> list[str]:
    """Return what can be checked on so many devices of a kind, in order; settings as JSON."""
    steps = [json.dumps(dataclasses.asdict(setting)) for setting in gpu_steps.settings(num_gpus)]
    first, *others = TOWER_CHECKS
    telling = len(gpu_steps.MODELS)  # the default of each model
    memory_checks = MEMORY_CHECKS if kind == "gpu" else ()
    return [first, *steps[:telling], *others, *memory_checks, *steps[telling:]]


def check(name: str, kind: str) -> Any:
    """Make a check in this process, and return what it found."""
    if name.startswith("{"):
        return gpu_steps.measure(Setting(**json.loads(name)), kind)
    alone = {FIND: find, **MEMORY_CHECKS}.get(name)
    return alone() if alone else TOWER_CHECKS[name](kind)


def run_check(name: str, kind: str, seconds: float = TIMEOUT_SECONDS) -> tuple[str, Any]:
    """Run a check in a process of its own; return OK, FAILED or SKIPPED, and what it found.

    This process must not start TensorFlow: it would take the memory of all GPUs.
    """
    command = [sys.executable, __file__, f"--kind={kind}", f"--only={name}"]
    stand_in = {kinds.SWITCH: "1"} if kind == "cpu" else {}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=min(seconds, TIMEOUT_SECONDS),
            env=os.environ | stand_in,
        )
    except subprocess.TimeoutExpired:
        if seconds < TIMEOUT_SECONDS:
            return SKIPPED, OUT_OF_TIME
        # XLA may compile a large model for minutes: no fault.
        status = SKIPPED if name.startswith("{") else FAILED
        return status, f"no answer within {TIMEOUT_SECONDS} s"
    if done.returncode in (0, EXIT_SKIPPED):
        return SKIPPED if done.returncode else OK, json.loads(done.stdout.splitlines()[-1])
    lines = done.stderr.strip().splitlines() or ["no output"]
    return FAILED, f"{lines[-1][:300]} (exit code {done.returncode})"


def run_all(
    names: Sequence[str], kind: str, end: float, run: Callable, note: Callable[[dict], None]
) -> list[dict[str, Any]]:
    """Run checks one after the other until `time.monotonic()` is `end`; print and note each."""
    rows = []
    for name in names:
        began = time.monotonic()
        left = end - began
        status, found = SKIPPED, OUT_OF_TIME
        if left >= LEAST_SECONDS:
            status, found = run(name, kind, left)
        seconds = round(time.monotonic() - began, 1)
        title, detail = name, found
        if name.startswith("{"):
            title = f"a step of {Setting(**json.loads(name))}"
            detail = gpu_steps.in_words(found) if status == OK else found
        rows.append(dict(name=title, status=status, found=found, seconds=seconds))
        note(rows[-1])
        if found != OUT_OF_TIME:
            print(f"{status:8}{title:64}{detail}", flush=True)
    if late := sum(row["found"] == OUT_OF_TIME for row in rows):
        print(f"{SKIPPED:8}{late} more: {OUT_OF_TIME}")
    return rows


def main(argv: Sequence[str] | None = None, run: Callable = run_check) -> int:
    """Run all checks, print the table and write the JSON; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("gpu", "cpu"), default="gpu", help="of the towers")
    parser.add_argument("--only", help="one check, in this process, as JSON")
    parser.add_argument("--minutes", type=float, default=10, help="that all checks may take")
    parser.add_argument("--json_file", default="gpu_check.json", help="takes all that was found")
    flags = parser.parse_args(argv)
    if flags.only:
        try:
            print(json.dumps(check(flags.only, flags.kind)))
        except Skipped as reason:
            print(json.dumps(str(reason)))
            return EXIT_SKIPPED
        return 0
    end = time.monotonic() + 60 * flags.minutes
    result: dict[str, Any] = {"kind": flags.kind, "tensorflow": tf.__version__}
    num_gpus = 2
    if flags.kind == "gpu":
        status, found = run(FIND, flags.kind, TIMEOUT_SECONDS)
        if status != OK:
            print(found)
            return EXIT_FAILED
        if not found:
            print("no GPU here")
            return EXIT_NO_GPU
        num_gpus = len(found)
        result |= {"gpus": found, "driver": nvml.driver_version(), "cuda": cuda_of_build()}
        print(*found, f"TensorFlow {tf.__version__}, driver {result['driver']}", sep="\n")
    result["checks"] = []

    def note(row: dict[str, Any]) -> None:  # at once: what was found is not lost
        result["checks"].append(row)
        Path(flags.json_file).write_text(json.dumps(result, indent=1), encoding="utf-8")

    print(f"{flags.minutes:g} minutes at most; copies of a step: up, down and between GPUs")
    names = names_of_checks(flags.kind, num_gpus)
    rows = run_all(names, flags.kind, end, run, note)
    counts = {status: sum(row["status"] == status for row in rows) for status in (OK, SKIPPED)}
    failed = len(rows) - sum(counts.values())
    print(
        f"{counts[OK]} passed, {failed} failed, {counts[SKIPPED]} skipped; all in {flags.json_file}"
    )
    return EXIT_FAILED if failed else 0


def cuda_of_build() -> dict[str, Any]:
    """Return the versions that TensorFlow was built with."""
    build = tf.sysconfig.get_build_info()
    return {name: build.get(name) for name in ("cuda_version", "cudnn_version")}


if __name__ == "__main__":
    sys.exit(main())
