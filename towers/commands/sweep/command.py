"""Sweeps: a run for each combination of flags, each a process of its own, and which is best.

    sweep_dir/NAME          folder of a run, as `towers train` makes it
    sweep_dir/NAME.cfg      its flags
    sweep_dir/NAME.log      what it printed
    sweep_dir/sweep.json    all results, the table, the best

What is finished is known from the runs' own folders, so that a sweep can be stopped in any way: if
it is killed, its runs save and end by themselves, and the same command goes on.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from towers import files
from towers.commands.sweep import report as sweep_report
from towers.commands.sweep.combinations import PlannedRun, plan
from towers.commands.sweep.gpus import deal, on_cpu
from towers.commands.sweep.options import SweepOptions
from towers.commands.sweep.processes import (
    POLL_SECONDS,
    Child,
    StopRequest,
    how_it_ended,
    lock,
    wait_for_orphans,
)
from towers.devices import nvml
from towers.errors import InputError
from towers.options import flags
from towers.options.run import Options

PROGRAM = (sys.executable, "-m", "towers", "train")
STOPPED = 75  # exit code of a run that saved
# What a run may go on with as the user likes: it changes no result, and hardly the speed.
_FREE = frozenset(
    "train_dir overwrite json data_dir visible_gpus per_process_gpu_memory_fraction "
    "gpu_memory_limit_mib allow_growth allow_soft_placement placement log_device_placement "
    "log_every_steps evaluate_every_epochs checkpoint_every_steps keep_checkpoints "
    "histogram_every_epochs profile_steps max_event_mib".split()
)


def sweep(
    options: SweepOptions,
    say: Callable[[str], None] = print,
    program: Sequence[str] = PROGRAM,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Make all runs that are not finished, and compare them.

    Args:
        options: base flags, what is varied, and where.
        say: takes the lines that tell what happens.
        program: the command that trains; a flagfile and flags are added.
        clock: returns seconds.

    Returns:
        What sweep.json holds; "failed" and "stopped" count runs, and "interrupted" tells whether
        a signal ended it.

    Raises:
        InputError: the options cannot be had; nothing was written.
        RunError: the folder cannot be written.
    """
    runs = plan(options)
    folder = Path(options.sweep_dir)
    _check_folder(folder)
    places = deal(runs, options.parallel, nvml.gpus(), os.environ)
    for run in runs:
        _check_same(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--sweep_dir={folder}: {error.strerror}") from None
    with lock(folder / ".lock", f"--sweep_dir={folder}"), StopRequest() as stop:
        wait_for_orphans([_log_of(folder, run) for run in runs], say, lambda: stop.times > 0)
        work = _Sweep(options, runs, say, program, clock)
        work.announce()
        with contextlib.closing(work):
            work.make_runs(places, stop)
        result = work.write()
    unfinished = result["total"] - result["finished"] - result["failed"]
    for line in sweep_report.closing_lines(result):
        say(line)
    if unfinished:
        say(
            f"stopped     {result['finished']} of {result['total']} runs are finished; the same "
            "command goes on"
        )
    return result | {"interrupted": stop.times > 0 and unfinished > 0}


class _Sweep:
    """The runs of a sweep, those that are going, and what is known of all."""

    def __init__(
        self,
        options: SweepOptions,
        runs: Sequence[PlannedRun],
        say: Callable[[str], None],
        program: Sequence[str],
        clock: Callable[[], float],
    ):
        self._options, self._runs, self._program, self._clock = options, runs, program, clock
        self._folder = Path(options.sweep_dir)
        self._say = say
        before = {entry["name"]: entry for entry in sweep_report.noted_runs(self._folder)}
        self._entries = {run.name: self._entry(run, before.get(run.name, {})) for run in runs}
        self._children: list[tuple[PlannedRun, Child, list[int]]] = []
        done = self._count("finished")
        self._bar = tqdm(
            total=len(runs), initial=done, disable=not sys.stderr.isatty(), smoothing=0,
            bar_format="{percentage:3.0f}%|{bar}| {n:.2f} of {total} runs [{elapsed}<{remaining}]",
        )  # fmt: skip

    def announce(self) -> None:
        """Say what is to be done, and write what does not wait for the first run's end."""
        from towers.commands.sweep.hparams import (
            sweep_hparams,
        )  # TensorBoard's modules take a while

        done = self._count("finished")
        begun = f", {done} of them finished before" if done else ""
        self._say(f"sweep       {self._folder}: {len(self._runs)} runs{begun}")
        self._say(f"watch it    towers tensorboard --train_dir={self._folder}")
        others = {path.name for path in self._folder.iterdir() if files.is_run(path)}
        if others := others - self._entries.keys():
            self._say(
                f"kept        {len(others)} runs in {self._folder} that are not of this sweep"
            )
        sweep_hparams(self._folder, list(self._runs[0].flags))
        self.write()

    def make_runs(self, places: Sequence[list[int]], stop: StopRequest) -> None:
        """Make the runs that are not finished, as many at a time as there are places."""
        waiting = [r for r in self._runs if self._entries[r.name]["status"] != "finished"]
        free = list(places)
        while self._children or (waiting and not stop.times):
            while waiting and free and not stop.times:
                self._start(waiting.pop(0), free.pop(0))
            for run, child, place in list(self._children):
                child.stop(stop.times)
                code = child.poll()
                child.follow()
                if code is not None:
                    self._children.remove((run, child, place))
                    free.append(place)
                    self._end(run, child, code, asked=stop.times > 0)
            self._move_bar()
            time.sleep(POLL_SECONDS)

    def write(self) -> dict[str, Any]:
        """Write sweep.json as things stand; return what it holds."""
        entries = list(self._entries.values())
        result = sweep_report.document(self._options, self._runs, entries)
        files.write_json(self._folder / "sweep.json", result)
        return result

    def close(self) -> None:
        """End the bar, and let save what still runs: that is so after an error alone."""
        self._bar.close()
        for _, child, _ in self._children:
            child.stop(1)
        for _, child, _ in self._children:
            child.close()

    def _entry(self, run: PlannedRun, before: dict[str, Any]) -> dict[str, Any]:
        """Return what is known of a run before it is started."""
        result = _result_of(run)
        return {
            "name": run.name,
            "flags": dict(run.flags),
            "status": "finished" if result else "waiting",
            "exit_code": 0 if result else None,
            "seconds": sweep_report.number(before, "seconds") or 0.0,
            "result": result,
            "error": None,
            "train_dir": run.options.train_dir,
            "log": str(_log_of(self._folder, run)),
        }

    def _start(self, run: PlannedRun, place: list[int]) -> None:
        """Start a run on the GPUs of a place."""
        flagfile = Path(sweep_report.flagfile_of(self._folder, run.name))
        files.write_text(flagfile, run.options.to_flagfile())
        command = [*self._program, f"--flagfile={flagfile}"]
        if place and not on_cpu(run.options):
            command.append(f"--visible_gpus={','.join(map(str, place))}")
        child = Child(command, _log_of(self._folder, run), self._clock)
        self._children.append((run, child, place))
        self._entries[run.name]["status"] = "running"

    def _end(self, run: PlannedRun, child: Child, code: int, asked: bool) -> None:
        """Note how a run ended, and say so."""
        entry, result = self._entries[run.name], _result_of(run)
        entry |= {"exit_code": code, "seconds": entry["seconds"] + child.seconds()}
        if code == 0 and result:
            entry |= {"status": "finished", "result": result}
        elif code == STOPPED or (asked and code != 1 and code != 2):
            entry |= {"status": "stopped", "error": "the same command goes on"}
        else:
            entry |= {"status": "failed", "error": f"{how_it_ended(code)}: {child.last_line()}"}
        child.close()
        self.write()
        number = self._runs.index(run) + 1
        self._bar.clear()
        self._say(sweep_report.line_of(entry, number, len(self._runs)))

    def _count(self, status: str) -> int:
        return sum(entry["status"] == status for entry in self._entries.values())

    def _move_bar(self) -> None:
        """Show the runs that have ended, and what those that are going have done."""
        ended = self._count("finished") + self._count("failed") + self._count("stopped")
        self._bar.n = ended + sum(child.fraction for _, child, _ in self._children)
        self._bar.refresh()


def _log_of(folder: Path, run: PlannedRun) -> Path:
    return folder / f"{run.name}.log"


def _result_of(run: PlannedRun) -> dict[str, Any] | None:
    """Return the result of a run that is finished."""
    result = files.read_json(Path(run.options.train_dir) / "result.json")
    return result if "steps" in result and sweep_report.accuracy(result) is not None else None


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be that of a sweep.

    Raises:
        InputError: one line.
    """
    given = f"--sweep_dir={folder}"
    try:
        existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
        if not existing.is_dir():
            raise InputError(f"{given}: {existing} is a file; name a folder")
        if files.is_run(folder):
            raise InputError(f"{given} is the folder of a run; name another, or one in which it is")
    except OSError as error:
        raise InputError(f"{given}: {error.strerror}") from None
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{given}: no permission to write in {existing}")


def _check_same(run: PlannedRun) -> None:
    """Refuse to go on with a run that was begun as another experiment.

    Raises:
        InputError: a flag that changes results was another one; the line has both values.
    """
    path = Path(run.options.train_dir) / "flags.cfg"
    if not path.exists():
        return
    before = flags.parse([f"--flagfile={path}"])
    for field in dataclasses.fields(Options):
        old, new = getattr(before, field.name), getattr(run.options, field.name)
        chosen = field.name == "variables" and new == "auto"  # what the run's own trial chose
        if old != new and field.name not in _FREE and not chosen:
            text = sweep_report.text_of
            raise InputError(
                f"--{field.name}={text(new)}: the run {path.parent} was made with "
                f"--{field.name}={text(old)}: name another --sweep_dir, or give "
                f"--{field.name}={text(old)} again"
            )
