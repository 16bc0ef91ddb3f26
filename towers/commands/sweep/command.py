"""Sweeps: a run for each combination of flags, each a process of its own, and which is best.

    sweep_dir/NAME          folder of a run, as `towers train` makes it
    sweep_dir/NAME.cfg      its flags
    sweep_dir/NAME.log      what it printed
    sweep_dir/sweep.json    all results, the table, the best

What is finished is known from the runs' own folders, so that a sweep can be stopped in any way: if
it is killed, its runs save and end by themselves, and the same command goes on.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from towers import files
from towers.commands.sweep import report
from towers.commands.sweep.options import PlannedRun, SweepOptions, plan
from towers.devices import cuda_visible_devices, nvml
from towers.devices.nvml import DriverGpu
from towers.errors import InputError
from towers.monitoring.results import noted_runs, read_result
from towers.options import flags, search_path
from towers.options.run import Options, names_that_affect, text_of
from towers.signals import EXIT_STOPPED, StopRequest

PROGRAM = (sys.executable, "-m", "towers", "train")
POLL_SECONDS = 0.1
# Linux sends a run SIGTERM when the sweep ends, also when that is killed; without it a run goes on.
_END_WITH_SWEEP = ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()


def run(
    options: SweepOptions, say: Callable[[str], None] = print, program: Sequence[str] = PROGRAM
) -> dict[str, Any]:
    """Make all runs that are not finished, and compare them.

    Args:
        options: base flags, what is varied, and where.
        say: takes the lines that tell what happens.
        program: the command that trains; a flagfile and flags are added.

    Returns:
        What sweep.json holds, and "interrupted": whether a signal ended it.
    """
    runs = plan(options)
    folder = Path(options.sweep_dir)
    places = deal_gpus(runs, options.parallel, nvml.gpus(), os.environ)
    for planned in runs:
        _check_same(planned)
    _make_folder(folder)
    with files.Lock() as lock, StopRequest() as stop:
        lock.take(folder, "--sweep_dir")
        seconds = {entry["name"]: entry.get("seconds", 0.0) for entry in noted_runs(folder)}
        entries = [
            {
                "name": planned.name,
                "flags": dict(planned.flags),
                "status": "finished" if result else "waiting",
                "seconds": seconds.get(planned.name, 0.0),
                "result": result,
                "error": None,
                "train_dir": planned.options.train_dir,
                "log": str(folder / f"{planned.name}.log"),
            }
            for planned, result in zip(runs, map(_result_of, runs), strict=True)
        ]

        def write() -> dict[str, Any]:
            result = report.document(options, entries)
            files.write_json(folder / "sweep.json", result)
            return result

        def finish(child: _Child) -> None:
            going.remove(child)
            places.append(child.place)
            child.note_end(stopping=stop())
            write()
            say(report.line_of(child.entry, entries.index(child.entry) + 1, len(entries)))

        waiting = [pair for pair in zip(runs, entries, strict=True) if not pair[1]["result"]]
        done = len(runs) - len(waiting)
        begun = f", {done} of them finished before" if done else ""
        say(f"sweep       {folder}: {len(runs)} runs{begun}")
        say(f"watch it    towers tensorboard --train_dir={folder}")
        write()  # the runs read there what is varied
        going: list[_Child] = []
        while (going or waiting) and not stop():
            while waiting and places and not stop():
                going.append(_Child(*waiting.pop(0), places.pop(0), program))
            time.sleep(POLL_SECONDS)
            for child in [child for child in going if child.poll() is not None]:
                finish(child)
        for child in going:  # at the first SIGTERM a run saves and ends
            child.terminate()
        for child in list(going):
            child.wait()
            finish(child)
        result = write()
    for line in report.closing_lines(result):
        say(line)
    unfinished = result["total"] > result["finished"] + result["failed"]
    return result | {"interrupted": stop() and unfinished}


def deal_gpus(
    runs: Sequence[PlannedRun],
    parallel: int,
    driver: Sequence[DriverGpu],
    environ: Mapping[str, str],
) -> list[list[str]]:
    """Return the numbers, or names, of the GPUs of each of the `parallel` places for a run.

    Each place gets as many as any other, so that runs can be compared; what is left over stays
    idle. With one place, or without GPUs, nothing is dealt: [] leaves a run what it finds.
    """
    users = [run for run in runs if not _on_cpu(run.options)]
    if not users:
        return [[]] * parallel
    if parallel > 1 and driver and "visible_gpus" in users[0].flags:
        raise InputError("--vary=visible_gpus: --parallel deals GPUs out itself; leave one out")
    environ = dict(environ)
    cuda_visible_devices.set_visible(users[0].options.gpu_options(), driver, environ)
    listed = cuda_visible_devices.listed_in(environ, driver)
    gpus = [gpu.key for gpu in listed]
    if not gpus:
        return [[]] * parallel
    if parallel > len(gpus):
        raise InputError(
            f"--parallel={parallel}: there are {len(gpus)} visible GPUs, and each run needs its "
            f"own: type --parallel={len(gpus)}, or --devices=cpu"
        )
    in_parts = any(gpu.mig is not None for gpu in listed)  # of which a process sees one alone
    share = 1 if in_parts else len(gpus) // parallel
    needed = max(0 if run.options.devices else run.options.num_towers for run in users)
    if needed > share:
        remedy = "--num_towers=0" if parallel == 1 else f"--parallel={parallel - 1}"
        raise InputError(
            f"--num_towers={needed} needs {needed} GPUs, and a run gets {share} with "
            f"--parallel={parallel}: type {remedy}"
        )
    if parallel == 1:
        return [[]]
    return [gpus[place * share : (place + 1) * share] for place in range(parallel)]


def _on_cpu(options: Options) -> bool:
    devices = options.devices.lower()
    return "cpu" in devices and "gpu" not in devices or options.visible_gpus.lower() == "none"


class _Child(subprocess.Popen):
    """The process of a run on the GPUs of a place, whose output is added to its log."""

    def __init__(
        self, run: PlannedRun, entry: dict[str, Any], place: list[str], program: Sequence[str]
    ):
        self.run, self.entry, self.place = run, entry, place
        self.log, self.started = Path(entry["log"]), time.monotonic()
        flagfile = self.log.with_name(f"{run.name}.cfg")
        files.write_text(flagfile, run.options.to_flagfile())
        command = [*_END_WITH_SWEEP, *program, f"--flagfile={flagfile}"]
        if place and not _on_cpu(run.options):
            command.append(f"--visible_gpus={','.join(place)}")
        entry["status"] = "running"
        with open(self.log, "ab") as output:
            self.begin = output.tell()
            super().__init__(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=search_path.child_environment(),
                start_new_session=True,  # Ctrl-C reaches the sweep alone
            )

    def note_end(self, stopping: bool) -> None:
        """Write into the entry how the run ended: with our own error, else its last line."""
        code, result = self.returncode, _result_of(self.run)
        self.entry["seconds"] += time.monotonic() - self.started
        if code == 0 and result:
            self.entry |= {"status": "finished", "result": result}
        elif code == EXIT_STOPPED or (stopping and code not in (1, 2)):
            self.entry |= {"status": "stopped", "error": "the same command goes on"}
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            said = self.log.read_bytes()[self.begin :].decode(errors="replace")
            lines = [line.strip() for line in said.splitlines() if line.strip()]
            ours = [line.removeprefix("towers: ") for line in lines if line.startswith("towers: ")]
            last = (ours or lines or ["it said nothing"])[-1][:500]
            self.entry |= {"status": "failed", "error": f"{how}: {last}"}


def _result_of(run: PlannedRun) -> dict[str, Any] | None:
    result = read_result(Path(run.options.train_dir))
    return result if "steps" in result else None


def _make_folder(folder: Path) -> None:
    given = f"--sweep_dir={folder}"
    files.check_depth(folder, given)
    try:
        if files.is_run(folder):
            raise InputError(f"{given} is the folder of a run; name another, or one in which it is")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{given}: {error.strerror}; name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{given}: no permission to write there; name another folder")


def _check_same(run: PlannedRun) -> None:
    """Raise InputError if the run was begun as another experiment."""
    path = Path(run.options.train_dir) / "flags.cfg"
    if not path.exists():
        return
    before = flags.parse([f"--flagfile={path}"])
    for name in names_that_affect("result", "speed"):
        old, new = getattr(before, name), getattr(run.options, name)
        chosen = name == "variables" and new == "auto"  # what the run's own trial chose
        if old != new and not chosen:
            raise InputError(
                f"--{name}={text_of(new)}: the run {path.parent} was made with "
                f"--{name}={text_of(old)}: name another --sweep_dir, or give that again"
            )
