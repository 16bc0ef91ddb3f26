"""Sweeps: a run for each combination of flags, each a process of its own, and which is best.

    sweep_dir/NAME          folder of a run, as `towers train` makes it
    sweep_dir/NAME.cfg      its flags
    sweep_dir/NAME.log      what it printed
    sweep_dir/sweep.json    all results, the table, the best

The runs' own folders say which of them are finished, so a sweep may be stopped in any way. If it is
killed, its runs save and end by themselves.
"""

import contextlib
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from towers import files
from towers.commands.sweep.options import PlannedRun, SweepOptions, describe, plan
from towers.devices import cuda_visible_devices, nvml
from towers.errors import InputError
from towers.formatting import process_end, table
from towers.monitoring.results import averaged_number, objective_of
from towers.options import flags, search_path
from towers.options.run import Options, names_that_affect, text_of
from towers.signals import EXIT_STOPPED, StopRequest

PROGRAM = (sys.executable, "-m", "towers", "train")
# Linux sends a run SIGTERM when the thread that started it ends, as it does if the sweep is killed.
_END_WITH_SWEEP = ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()


def run(
    options: SweepOptions, say: Callable[[str], None] = print, program: Sequence[str] = PROGRAM
) -> dict[str, Any]:
    """Train all runs that are not finished, and compare them.

    Args:
        options: base flags, what to vary, and where.
        say: called with each line to print.
        program: the command that trains; a flagfile and flags are appended.

    Returns:
        The content of sweep.json, and "interrupted": whether a signal ended the sweep.
    """
    runs, folder = plan(options), Path(options.sweep_dir)
    places = assign_gpus(runs, options.parallel)
    for planned in runs:
        _check_same(planned)
    files.check_train_dir(folder, False, "--sweep_dir")
    folder.mkdir(parents=True, exist_ok=True)
    with files.Lock() as lock, StopRequest() as stop:
        lock.take(folder, "--sweep_dir")
        entries = [
            {
                "name": planned.name,
                "flags": dict(planned.flags),
                "status": "finished" if (result := _result_of(planned)) else "waiting",
                "seconds": 0.0,
                "result": result,
                "error": None,
                "log": str(folder / f"{planned.name}.log"),
            }
            for planned in runs
        ]
        waiting = [pair for pair in zip(runs, entries, strict=True) if not pair[1]["result"]]
        say(f"sweep       {folder}: {len(waiting)} of {len(runs)} runs are not finished")
        say(f"watch it    tensorboard --logdir={folder}")
        ending = threading.Event()
        with ThreadPoolExecutor(len(places)) as pool, contextlib.ExitStack() as stack:
            stack.callback(ending.set)  # if this fails, its runs save and end
            how = places, program, lambda: stop() or ending.is_set()
            futures = [pool.submit(_train, *pair, *how) for pair in waiting]
            for future in as_completed(futures):
                if entry := future.result():
                    files.write_json(folder / "sweep.json", compare(options.sweep_dir, entries))
                    why = f": {entry['error']} ({entry['log']})" if entry["error"] else ""
                    say(f"run {entry['name']}: {entry['status']} ({entry['seconds']:.0f} s){why}")
        result = compare(options.sweep_dir, entries)
        files.write_json(folder / "sweep.json", result)
    for line in closing_lines(result):
        say(line)
    return result | {
        "interrupted": stop() and result["total"] > result["finished"] + result["failed"]
    }


def assign_gpus(runs: Sequence[PlannedRun], parallel: int) -> list[list[str]]:
    """Return the GPUs for each of `parallel` runs; [] leaves a run those that it finds.

    All get the same number of GPUs, so that runs can be compared; a rest stays idle.

    Args:
        runs: all runs of the sweep.
        parallel: number of runs at a time.

    Raises:
        InputError: the GPUs do not suffice, do not exist, or are varied by --vary.
    """
    users = [run for run in runs if not _on_cpu(run.options)]
    driver, environ = nvml.gpus(), dict(os.environ)
    if parallel == 1 or not users or not driver:
        return [[]] * parallel
    if "visible_gpus" in users[0].flags:
        raise InputError("--vary=visible_gpus: --parallel deals GPUs out itself; leave one out")
    cuda_visible_devices.set_visible(users[0].options.gpu_options(), driver, environ)
    listed = cuda_visible_devices.listed_in(environ, driver)
    share = len(listed) // parallel
    needed = max([1, *(r.options.num_towers for r in users if r.options.devices in ("", "any"))])
    if listed and needed > share:
        raise InputError(
            f"--parallel={parallel} --num_towers={needed}: a run needs {needed} of the "
            f"{len(listed)} visible GPUs for itself and gets {share}: lower either, or type "
            "--devices=cpu"
        )
    return [[gpu.key for gpu in listed[i * share : (i + 1) * share]] for i in range(parallel)]


def _on_cpu(options: Options) -> bool:
    devices = options.devices.lower()
    return "cpu" in devices and "gpu" not in devices or options.visible_gpus.lower() == "none"


def _train(
    run: PlannedRun,
    entry: dict[str, Any],
    places: list[list[str]],
    program: Sequence[str],
    stopping: Callable[[], bool],
) -> dict[str, Any] | None:
    """Train a run in a process and complete its entry; return it, None if not begun."""
    if stopping():
        return None
    gpus, log, started = places.pop(0), Path(entry["log"]), time.monotonic()
    flagfile = log.with_name(f"{run.name}.cfg")
    files.write_text(flagfile, run.options.to_flagfile())
    command = [*_END_WITH_SWEEP, *program, f"--flagfile={flagfile}"]
    if gpus and not _on_cpu(run.options):
        command.append(f"--visible_gpus={','.join(gpus)}")
    entry["status"] = "running"
    with open(log, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=search_path.child_environment(),
            start_new_session=True,  # Ctrl-C reaches the sweep alone
        )
    while process.poll() is None and not stopping():
        time.sleep(0.1)
    process.terminate()  # one that still runs saves and ends
    code, result = process.wait(), _result_of(run)
    entry["seconds"] = time.monotonic() - started
    if code == 0 and result:
        entry |= {"status": "finished", "result": result}
    elif code == EXIT_STOPPED or (stopping() and code not in (1, 2)):
        entry |= {"status": "stopped", "error": "the same command continues it"}
    else:
        output = log.read_bytes()[begin:].decode(errors="replace")
        entry |= {"status": "failed", "error": process_end(code, output)}
    places.append(gpus)
    return entry


def _result_of(run: PlannedRun) -> dict[str, Any] | None:
    result = files.read_json(Path(run.options.train_dir, "result.json"))
    return result if "steps" in result else None


def _check_same(run: PlannedRun) -> None:
    """Raise InputError if the run was started as another experiment."""
    path = Path(run.options.train_dir) / "flags.cfg"
    if not path.exists():
        return
    before = flags.parse([f"--flagfile={path}"])
    for name in names_that_affect("result", "speed"):
        old, new = getattr(before, name), getattr(run.options, name)
        if old != new:
            raise InputError(
                f"--{name}={text_of(new)}: the run {path.parent} was made with "
                f"--{name}={text_of(old)}: name another --sweep_dir, or give that again"
            )


def compare(sweep_dir: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of sweep.json, which --json prints.

    Its "summary" has a row for each combination of what is varied except the seed, best first:
    "flags", "runs": names, "finished": n, "failed": n, and "objective", None if unknown: the mean
    of that of its runs, and of the moving average of the weights where there is one. Combinations
    with a failed run are last.

    Args:
        sweep_dir: folder of the sweep.
        entries: a dict for each run, as `run` makes them.
    """
    name, direction = objective_of(next((e["result"] for e in entries if e["result"]), {}))
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(describe(entry["flags"] | {"seed": 0}), []).append(entry)
    rows = []
    for group in groups.values():
        values = [averaged_number(entry["result"] or {}, name) for entry in group]
        known = [value for value in values if value is not None]
        row = {"flags": {flag: v for flag, v in group[0]["flags"].items() if flag != "seed"}}
        row |= {"runs": [entry["name"] for entry in group], **_ends(group)}
        rows.append(row | {"objective": statistics.fmean(known) if known else None})

    def rank(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        mean = row["objective"] or 0.0
        return row["objective"] is None, row["failed"] > 0, -mean if direction == "max" else mean

    rows.sort(key=rank)
    words = ["towers", "train", f"--flagfile={sweep_dir}/{rows[0]['runs'][0]}.cfg"]
    command = shlex.join([*words, f"--train_dir={os.path.normpath(sweep_dir)}-best"])
    return {
        "sweep_dir": sweep_dir,
        "total": len(entries),
        **_ends(entries, "stopped"),
        "objective": name,
        "direction": direction,
        "runs": list(entries),
        "summary": rows,
        "best": None if rows[0]["objective"] is None else rows[0] | {"command": command},
    }


def _ends(entries: Sequence[Mapping[str, Any]], *more: str) -> dict[str, int]:
    """Return {"finished", "failed" and more: how many runs have that status}."""
    found = [entry["status"] for entry in entries]
    return {status: found.count(status) for status in ("finished", "failed", *more)}


def closing_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the last lines of a sweep; `result` is what `compare` returns."""
    lines = []
    if best := result["best"]:
        names = list(best["flags"])
        rows = [
            [*(text_of(row["flags"][name]) for name in names)]
            + [row["objective"] and f"{row['objective']:.4f}", row["finished"], row["failed"]]
            for row in result["summary"]
        ]
        header = [*names, result["objective"].replace("_", " ", 1), "n", "failed"]
        lines = ["", *table(header, rows), ""]
        lines.append(f"best        {describe(best['flags']) or 'as the flags are'}")
        lines.append(f"  {best['command']}")
    if result["total"] > result["finished"] + result["failed"]:
        done = f"{result['finished']} of {result['total']} runs are finished"
        lines.append(f"stopped     {done}; the same command continues the sweep")
    return lines
