"""What only GPUs can show of towers: one command, the most telling checks first.

    python scripts/gpu_check.py            # on all visible GPUs
    python scripts/gpu_check.py --dry=8    # on 8 CPU devices that go a GPU's ways: a rehearsal
    python scripts/gpu_check.py --list     # the checks, what each decides, and its time limit

Each check is a process of its own with a time limit, so that one that hangs or crashes costs the
others nothing. What it finds is kept at once, a line each, in FOLDER/results.jsonl, and all that
it prints in FOLDER/NAME.log. A second call goes on with the checks that have no result yet. Exit
code: 0 none failed, 1 a check failed, 2 bad input, 3 there is no GPU.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

from scripts.gpu_checks import Check, Gpus, Skipped, checks_for  # noqa: E402
from towers.builder import device_types  # noqa: E402
from towers.devices import nvml, self_test  # noqa: E402

EXIT_FAILED, EXIT_USAGE, EXIT_NO_GPU, EXIT_SKIPPED = 1, 2, 3, 4
OK, FAILED, HANGS, SKIPPED = "ok", "FAILED", "HANGS", "skipped"
RESULTS = "results.jsonl"
LAST_WORDS_SECONDS = 20  # of a process that is to say where it hangs
ENVIRONMENT = {
    # Newer GPUs than TensorFlow's build compile its kernels first, for minutes: once is enough.
    "CUDA_CACHE_MAXSIZE": str(4 * 2**30),
    # The log of a check has all that TensorFlow and NCCL say.
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    "PYTHONUNBUFFERED": "1",
}


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return what earlier calls have kept, without a line that was not written to its end."""
    rows = []
    if (path := folder / RESULTS).exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def keep(folder: Path, **row: Any) -> None:
    """Append a row to the results, and wait until it is on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RESULTS).open("ab+") as file:
        file.seek(-min(1, file.tell()), os.SEEK_END)
        after_a_torn_line = file.read() not in (b"", b"\n")
        file.write((b"\n" * after_a_torn_line) + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def outcomes(folder: Path) -> dict[str, str]:
    """Return {check: its last status} of those that have come to an end."""
    return {row["check"]: row["status"] for row in read_results(folder) if "status" in row}


# ---------------------------------------------------------------------------- All checks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks that have no result yet; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", type=int, default=0, help="CPU devices in place of GPUs")
    parser.add_argument("--folder", help="of the results; default: gpu_check, or gpu_check_dry_N")
    parser.add_argument("--only", help="names between commas: run these, even once more")
    parser.add_argument("--list", action="store_true", help="the checks, and run none")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    folder = Path(flags.folder or (f"gpu_check_dry_{flags.dry}" if flags.dry else "gpu_check"))
    if flags.child:
        name, number = flags.child.split(":")
        return run_here(name, Gpus(int(number), bool(flags.dry), folder.resolve()))
    machine = machine_of(flags.dry)
    if isinstance(machine, str):
        print(machine)
        return EXIT_FAILED
    number = len(machine["gpus"])
    if not number and not flags.list:
        if driver := nvml.gpus():
            print(f"TensorFlow sees none of {', '.join(map(str, driver))}: towers doctor says why")
            return EXIT_FAILED
        print("no GPU here; --dry=2 tries all this on CPU devices")
        return EXIT_NO_GPU
    gpus = Gpus(number or 1, bool(flags.dry), folder.resolve())
    checks = checks_for(gpus)
    if flags.list:
        for check in checks:
            print(f"{check.name:44} {gpus.limit(check):5.0f} s  {check.decides}")
        return 0
    wanted = flags.only.split(",") if flags.only else []
    if unknown := sorted(set(wanted) - {check.name for check in checks}):
        print(f"--only={flags.only}: there is no check {unknown[0]}; --list shows all")
        return EXIT_USAGE
    known = next((row["machine"] for row in read_results(folder) if "machine" in row), None)
    if known not in (None, machine):
        print(f"{folder} holds results of other GPUs or versions: name another --folder")
        return EXIT_USAGE
    if known is None:
        keep(folder, machine=machine)
    print(*(f"{name:14}{value}" for name, value in machine.items()), sep="\n")
    for number in (signal.SIGTERM, signal.SIGINT):  # an exception ends the check under way, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    done = outcomes(folder)
    rest = [c for c in checks if (c.name in wanted if wanted else c.name not in done)]
    if len(rest) < len(checks):
        print(f"{len(rest)} of {len(checks)} checks are to be made")
    for check in rest:
        run_apart(check, gpus)
    return summary([outcomes(folder)[c.name] for c in (rest if wanted else checks)], folder)


def machine_of(num_dry: int) -> dict[str, Any] | str:
    """Return what results depend on, without starting a GPU; or how TensorFlow failed."""
    gpus = [f"CPU device {number}" for number in range(num_dry)]
    machine = {"gpus": gpus, "tensorflow": tf.__version__}
    if num_dry:
        return machine
    start = self_test.run_probe([])
    if isinstance(start, str):
        return f"TensorFlow's process {start}"
    build = {name: start["build"].get(name) for name in ("cuda_version", "cudnn_version")}
    gpus = [" ".join(map(str, gpu)) for gpu in start["gpus"]]
    return machine | {"gpus": gpus, "driver": nvml.driver_version(), **build}


def run_apart(check: Check, gpus: Gpus) -> None:
    """Run a check in a process of its own, and keep how it ended.

    This process must not start TensorFlow: it would take the memory of all GPUs.
    """
    log, limit = gpus.folder / f"{check.name}.log", gpus.limit(check)
    command = [sys.executable, __file__, f"--child={check.name}:{gpus.number}"]
    command += [f"--folder={gpus.folder}", f"--dry={gpus.number * gpus.dry}"]
    stand_ins = {device_types.SWITCH: "1"} if gpus.dry else {}
    began, status = time.monotonic(), None
    with log.open("ab") as out:
        pipes = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        process = subprocess.Popen(
            command, **pipes, cwd=ROOT, env=os.environ | ENVIRONMENT | stand_ins,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            status = HANGS
            os.killpg(process.pid, signal.SIGABRT)  # which prints where each thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    of_code = {0: OK, EXIT_SKIPPED: SKIPPED}
    status = status or of_code.get(process.returncode, FAILED)
    rows = [row for row in read_results(gpus.folder) if row.get("check") == check.name]
    detail = rows[-1]["found"] if rows else None
    if status == HANGS:
        detail = f"no end within {limit:.0f} s; {log.name} says where it was"
    elif status == FAILED:
        detail = f"exit code {process.returncode}: {last_line(log)}; all of it in {log.name}"
    seconds = round(time.monotonic() - began, 1)
    ended = dict(status=status, seconds=seconds, towers=commit(), found=detail)
    keep(gpus.folder, check=check.name, **ended)
    print(f"{status:8}{seconds:7.1f} s  {check.name:44} {json.dumps(detail)[:200]}", flush=True)


def commit() -> str:
    """Return the version of the checkout, which may change between two calls."""
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(FileNotFoundError):  # there may be no git
        return subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    return ""


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else "without a word"


def summary(statuses: Sequence[str], folder: Path) -> int:
    """Print how many checks passed; return the exit code."""
    counts = [f"{statuses.count(status)} {status}" for status in (OK, FAILED, HANGS, SKIPPED)]
    print(f"{', '.join(counts)}; all of it in {folder}")
    return EXIT_FAILED if {FAILED, HANGS} & set(statuses) else 0


# ---------------------------------------------------------------------------- One check


def run_here(name: str, gpus: Gpus) -> int:
    """Run a check in this process, and keep what it finds as it comes; return the exit code."""
    [check] = [check for check in checks_for(gpus) if check.name == name]
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Should the other process be killed, this one ends by itself.
    signal.alarm(int(gpus.limit(check) + 2 * LAST_WORDS_SECONDS))
    try:
        for result in check.run(gpus):
            keep(gpus.folder, check=name, found=result)
    except Skipped as reason:
        keep(gpus.folder, check=name, found=str(reason))
        return EXIT_SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
