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
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from towers import files
from towers.commands.sweep import report
from towers.commands.sweep.options import PlannedRun, SweepOptions, plan
from towers.devices import cuda_visible_devices, nvml
from towers.errors import InputError
from towers.formatting import process_end
from towers.monitoring.results import read_result
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
    runs = plan(options)
    folder = Path(options.sweep_dir)
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

        def write() -> dict[str, Any]:
            result = report.document(options.sweep_dir, entries)
            files.write_json(folder / "sweep.json", result)
            return result

        ending = threading.Event()
        waiting = [pair for pair in zip(runs, entries, strict=True) if not pair[1]["result"]]
        say(f"sweep       {folder}: {len(waiting)} of {len(runs)} runs are not finished")
        say(f"watch it    tensorboard --logdir={folder}")
        with ThreadPoolExecutor(len(places)) as pool, contextlib.ExitStack() as stack:
            stack.callback(ending.set)  # if this fails, its runs save and end
            how = places, program, lambda: stop() or ending.is_set()
            futures = [pool.submit(_train, *pair, *how) for pair in waiting]
            for future in as_completed(futures):
                if entry := future.result():
                    write()
                    why = f": {entry['error']} ({entry['log']})" if entry["error"] else ""
                    say(f"run {entry['name']}: {entry['status']} ({entry['seconds']:.0f} s){why}")
        result = write()
    for line in report.closing_lines(result):
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
    if not users:
        return [[]] * parallel
    driver, environ = nvml.gpus(), dict(os.environ)
    if parallel > 1 and driver and "visible_gpus" in users[0].flags:
        raise InputError("--vary=visible_gpus: --parallel deals GPUs out itself; leave one out")
    cuda_visible_devices.set_visible(users[0].options.gpu_options(), driver, environ)
    listed = cuda_visible_devices.listed_in(environ, driver)
    if not listed:
        return [[]] * parallel
    share = len(listed) // parallel
    if share and any(gpu.mig is not None for gpu in listed):
        share = 1  # a process sees only one part of a GPU that MIG splits
    chosen = [run.options.num_towers for run in users if run.options.devices in ("", "any")]
    needed = max([1, *chosen])
    if needed > share:
        raise InputError(
            f"--parallel={parallel} --num_towers={needed}: a run needs {needed} of the "
            f"{len(listed)} visible GPUs for itself and gets {share}: lower either, or type "
            "--devices=cpu"
        )
    if parallel == 1:
        return [[]]
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
    result = read_result(Path(run.options.train_dir))
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
