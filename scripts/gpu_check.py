"""Asks a GPU what only a GPU can answer about towers, the most telling question first.

    python scripts/gpu_check.py             # all questions, in at most 12 minutes on one GPU
    python scripts/gpu_check.py --only=4,6  # these again

Each check is a process with a time limit, so a check that hangs or crashes does not stop the
others. Each result is written at once as a line of FOLDER/results.jsonl; the full output is in
FOLDER/NAME.log. A second call resumes with the checks that have no result yet. Exit code: 0 no
check failed, 1 a check failed, 2 bad input, 3 there is no GPU.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

from scripts.gpu_checks import ON_ONE, ON_SEVERAL, SIMULATED, CannotAsk, Check  # noqa: E402
from towers.devices import nvml, self_test  # noqa: E402

EXIT_FAILED, EXIT_USAGE, EXIT_NO_GPU, EXIT_CANNOT = 1, 2, 3, 4
OK, FAILED, HANGS, CANNOT = "ok", "FAILED", "HANGS", "cannot be asked here"
RESULTS = "results.jsonl"
LAST_WORDS_SECONDS = 5  # in which a process that hangs prints where
SLOWNESS = 5 if SIMULATED else 1
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of earlier calls, without a line that was not written to its end."""
    rows = []
    if (path := folder / RESULTS).exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def keep(folder: Path, **row: Any) -> None:
    """Append a row to the results, perhaps behind a torn line; wait until it is on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(row)}")
        file.flush()
        os.fsync(file.fileno())


def outcomes(folder: Path) -> dict[str, str]:
    """Return {check: its last status} of the checks that have ended."""
    return {row["check"]: row["status"] for row in read_results(folder) if "status" in row}


# ---------------------------------------------------------------------------- All checks


def help_text() -> str:
    """Return the list of questions with their seconds."""
    lines = ["questions, with the seconds that each takes at most:"]
    for number, question in enumerate((*ON_ONE, *ON_SEVERAL), 1):
        if number == len(ON_ONE) + 1:
            lines += [f"  {sum(q.seconds for q in ON_ONE):7} s in all", "with several GPUs also:"]
        lines.append(f"{number:4} {question.seconds:4} s  {question.asks}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks that have no result yet; return the exit code."""
    end = time.monotonic()
    raw = argparse.RawDescriptionHelpFormatter
    texts = dict(description=__doc__, epilog=help_text(), formatter_class=raw)
    parser = argparse.ArgumentParser(**texts)
    parser.add_argument("--folder", default="gpu_check", help="where results are written")
    parser.add_argument("--only", default="", help="numbers of questions to ask (again)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    folder = Path(flags.folder).resolve()
    if flags.child:
        return run_here(flags.child, folder)
    machine = machine_here()
    if isinstance(machine, str):
        print(machine)
        return EXIT_FAILED
    if not machine["gpus"]:
        if driver := nvml.gpus():
            print(f"TensorFlow sees none of {', '.join(map(str, driver))}: towers doctor says why")
            return EXIT_FAILED
        print("no GPU found")
        return EXIT_NO_GPU
    several = len(machine["gpus"]) > 1
    questions = dict(enumerate(ON_ONE + ON_SEVERAL if several else ON_ONE, 1))
    wanted = [number.strip() for number in flags.only.split(",") if number.strip()]
    if unknown := [number for number in wanted if number not in map(str, questions)]:
        print(f"--only={flags.only}: there is no question {unknown[0]} here; --help lists them")
        return EXIT_USAGE
    known = next((row["machine"] for row in read_results(folder) if "machine" in row), None)
    if known not in (None, machine):
        print(f"{folder} holds results of other GPUs or versions: name another --folder")
        return EXIT_USAGE
    if known is None:
        keep(folder, machine=machine)
    print(*(f"{name:11} {value}" for name, value in machine.items()), sep="\n")
    if new := self_test.compiling(nvml.gpus()):
        print(f"{self_test.compiling_note(new)}; if checks hang, run towers doctor, then ask again")
    for number in (signal.SIGTERM, signal.SIGINT):  # an exception ends the running check, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    done, asked = {} if wanted else outcomes(folder), []
    for number, question in questions.items():
        if wanted and str(number) not in wanted:
            continue
        print(f"{number}. {question.asks}", flush=True)
        for check in question.checks:
            asked.append(check.name)
            if check.name not in done:
                end += check.seconds * SLOWNESS  # the time that others left over adds up
                run_apart(check, folder, end)
    statuses = Counter(outcomes(folder)[name] for name in asked)
    counts = [f"{statuses[status]} {status}" for status in (OK, FAILED, HANGS, CANNOT)]
    print(f"{', '.join(counts)}; all results are in {folder}")
    return EXIT_FAILED if statuses[FAILED] or statuses[HANGS] else 0


def machine_here() -> dict[str, Any] | str:
    """Return the properties that results depend on, without starting a GPU; or an error."""
    start = self_test.run_probe([])
    if isinstance(start, str):
        return f"TensorFlow's process {start}"
    machine = {"gpus": start["gpus"], "driver": nvml.driver_version()}
    return machine | {"tensorflow": tf.__version__, "build": start["build"]}


def command_of(check: Check, folder: Path) -> list[str]:
    """Return the command that runs a check in a process of its own."""
    return [sys.executable, __file__, f"--child={check.name}", f"--folder={folder}"]


def run_apart(check: Check, folder: Path, end: float) -> None:
    """Run a check in its own process until `end`, on the monotonic clock; keep how it ended.

    This process must not start TensorFlow, which would take the memory of all GPUs.
    """
    log = folder / f"{check.name}.log"
    began, hangs, before = time.monotonic(), False, len(read_results(folder))
    limit = max(end - LAST_WORDS_SECONDS - began, 1)
    with log.open("ab") as out:
        process = subprocess.Popen(
            command_of(check, folder), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            cwd=ROOT, env=os.environ | ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            hangs = True
            process.send_signal(signal.SIGABRT)  # which prints where each thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, detail = round(time.monotonic() - began, 1), None
    status = {0: OK, EXIT_CANNOT: CANNOT}.get(process.returncode, FAILED)
    if hangs:
        status, detail = HANGS, f"no end within {limit:.0f} s; see {log.name}"
    elif status != OK:
        detail = last_line(log)
        if status == FAILED:
            detail = f"exit code {process.returncode}: {detail}; all of it in {log.name}"
    found = [row["found"] for row in read_results(folder)[before:]]
    keep(folder, check=check.name, status=status, seconds=seconds, detail=detail)
    print(f"   {check.name}: {status}, {seconds:.1f} s", *[f": {detail}"] * bool(detail), sep="")
    print(*(f"      {json.dumps(each)[:600]}\n" for each in found), sep="", end="", flush=True)


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else "without a message"


# ---------------------------------------------------------------------------- One check


def run_here(name: str, folder: Path) -> int:
    """Run a check in this process, and keep each result at once; return the exit code."""
    [check] = [c for question in ON_ONE + ON_SEVERAL for c in question.checks if c.name == name]
    signal.alarm(720 * SLOWNESS)  # ends this process if nobody is left to do it
    try:
        for result in check.run():
            keep(folder, check=name, found=result)
    except CannotAsk as reason:
        print(reason, flush=True)
        return EXIT_CANNOT
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
