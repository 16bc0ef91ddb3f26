"""Sweeps: a run for each combination of flags, each a process of its own, and which is best.

    sweep_dir/NAME          folder of a run, as `towers train` makes it
    sweep_dir/NAME.cfg      its flags
    sweep_dir/NAME.log      what it printed
    sweep_dir/sweep.json    all results, the table, the best

What is finished is known from the runs' own folders, so that a sweep can be stopped in any way: if
it is killed, its runs save and end by themselves, and the same command goes on.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from towers import files
from towers.commands.sweep import report
from towers.commands.sweep.child import Child
from towers.commands.sweep.combinations import PlannedRun, plan
from towers.commands.sweep.gpus import deal, on_cpu
from towers.commands.sweep.options import SweepOptions
from towers.devices import nvml
from towers.errors import InputError
from towers.monitoring.results import accuracy, noted_runs
from towers.options import flags
from towers.options.run import names_that_affect, text_of
from towers.training.stop import StopRequest

PROGRAM = (sys.executable, "-m", "towers", "train")
POLL_SECONDS = 0.1
STOPPED = 75  # exit code of a run that saved


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

    Raises:
        InputError: the options cannot be had; nothing was written.
        RunError: the folder cannot be written.
    """
    runs = plan(options)
    folder = Path(options.sweep_dir)
    places = deal(runs, options.parallel, nvml.gpus(), os.environ)
    for planned in runs:
        _check_same(planned)
    _make_folder(folder)
    with files.Lock() as lock, StopRequest() as stop:
        lock.take(folder, "--sweep_dir")
        with contextlib.closing(_Sweep(options, runs, say)) as work:
            work.announce()
            work.make_runs(places, stop, program)
            result = work.write()
    for line in report.closing_lines(result):
        say(line)
    unfinished = result["total"] > result["finished"] + result["failed"]
    return result | {"interrupted": stop() and unfinished}


class _Sweep:
    """The runs of a sweep, those that are going, and what is known of all."""

    def __init__(
        self, options: SweepOptions, runs: Sequence[PlannedRun], say: Callable[[str], None]
    ):
        self._options, self._runs, self._say = options, runs, say
        self._folder = Path(options.sweep_dir)
        seconds = {entry["name"]: entry["seconds"] for entry in noted_runs(self._folder)}
        self._entries = {run.name: self._entry(run, seconds.get(run.name, 0.0)) for run in runs}
        self._waiting = [r for r in runs if self._entries[r.name]["status"] == "waiting"]
        self._going: list[Child] = []
        self._done = len(runs) - len(self._waiting)
        self._bar = tqdm(total=len(runs), initial=self._done, unit="run", disable=None)

    def _entry(self, run: PlannedRun, seconds: float) -> dict[str, Any]:
        """Return what is known of a run before it is started."""
        result = _result_of(run)
        return {
            "name": run.name,
            "flags": dict(run.flags),
            "status": "finished" if result else "waiting",
            "exit_code": 0 if result else None,
            "seconds": seconds,
            "result": result,
            "error": None,
            "train_dir": run.options.train_dir,
            "log": str(self._folder / f"{run.name}.log"),
        }

    def announce(self) -> None:
        """Say what is to be done, and write what does not wait for the first run's end."""
        from towers.commands.sweep.hparams import sweep_hparams  # takes a while, by TensorBoard

        begun = f", {self._done} of them finished before" if self._done else ""
        self._say(f"sweep       {self._folder}: {len(self._runs)} runs{begun}")
        self._say(f"watch it    towers tensorboard --train_dir={self._folder}")
        others = {path.name for path in self._folder.iterdir() if files.is_run(path)}
        if others := others - self._entries.keys():
            self._say(f"kept        {len(others)} runs that are not of this sweep")
        sweep_hparams(self._folder, list(self._runs[0].flags))
        self.write()

    def make_runs(
        self, places: Sequence[list[int]], stop: Callable[[], bool], program: Sequence[str]
    ) -> None:
        """Make the runs that are not finished, as many at a time as there are places."""
        free, passed_on = list(places), False
        while self._going or (self._waiting and not stop()):
            while self._waiting and free and not stop():
                self._start(self._waiting.pop(0), free.pop(0), program)
            if stop() and not passed_on:
                self._terminate()
                passed_on = True
            for child in [child for child in self._going if child.poll() is not None]:
                self._going.remove(child)
                free.append(child.place)
                self._end(child, asked=stop())
            self._bar.refresh()
            time.sleep(POLL_SECONDS)

    def _start(self, run: PlannedRun, place: list[int], program: Sequence[str]) -> None:
        flagfile = self._folder / f"{run.name}.cfg"
        files.write_text(flagfile, run.options.to_flagfile())
        command = [*program, f"--flagfile={flagfile}"]
        if place and not on_cpu(run.options):
            command.append(f"--visible_gpus={','.join(map(str, place))}")
        self._going.append(Child(run, place, command, Path(self._entries[run.name]["log"])))
        self._entries[run.name]["status"] = "running"

    def _end(self, child: Child, asked: bool) -> None:
        """Note how a run ended, and say so."""
        entry, result = self._entries[child.run.name], _result_of(child.run)
        entry["exit_code"] = code = child.returncode
        entry["seconds"] += time.monotonic() - child.started
        if code == 0 and result:
            entry |= {"status": "finished", "result": result}
        elif code == STOPPED or (asked and code not in (1, 2)):
            entry |= {"status": "stopped", "error": "the same command goes on"}
        else:
            entry |= {"status": "failed", "error": child.how_it_ended()}
        self.write()
        self._bar.clear()
        self._say(report.line_of(entry, self._runs.index(child.run) + 1, len(self._runs)))
        self._bar.update()

    def _terminate(self) -> None:
        """Send SIGTERM to what runs: at the first it saves and ends, at a second it ends."""
        for child in self._going:
            child.terminate()

    def write(self) -> dict[str, Any]:
        """Write sweep.json as things stand; return what it holds."""
        result = report.document(self._options, self._runs, list(self._entries.values()))
        files.write_json(self._folder / "sweep.json", result)
        return result

    def close(self) -> None:
        """End the bar, and let save what still runs: that is so after an error alone."""
        self._bar.close()
        self._terminate()
        for child in self._going:
            child.wait()


def _result_of(run: PlannedRun) -> dict[str, Any] | None:
    """Return the result of a run that is finished."""
    result = files.read_json(Path(run.options.train_dir) / "result.json")
    return result if "steps" in result and accuracy(result) is not None else None


def _make_folder(folder: Path) -> None:
    """Make the folder of a sweep; an InputError refuses one that cannot be it."""
    given = f"--sweep_dir={folder}"
    try:
        if files.is_run(folder):
            raise InputError(f"{given} is the folder of a run; name another, or one in which it is")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{given}: {error.strerror}; name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{given}: no permission to write there; name another folder")


def _check_same(run: PlannedRun) -> None:
    """Refuse by an InputError to go on with a run that was begun as another experiment."""
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
