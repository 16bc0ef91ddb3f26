"""Sweeps: a run for each combination of flags, each a process of its own, and which is best.

    sweep_dir/NAME          folder of a run, as `towers train` makes it
    sweep_dir/NAME.cfg      its flags
    sweep_dir/NAME.log      what it printed
    sweep_dir/sweep.json    all results, the table, the best

The runs' own folders say which of them are finished, so a sweep may be stopped in any way. If it is
killed, its runs save and end by themselves.
"""

import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from towers import files
from towers.commands.sweep.options import PlannedRun, SweepOptions, describe, plan
from towers.errors import InputError
from towers.formatting import process_end, table
from towers.monitoring import results
from towers.monitoring.results import averaged_number, monitored_by
from towers.options import code_trust, flags, search_path
from towers.options.run import Options, names_that_affect, text_of
from towers.signals import EXIT_STOPPED, StopRequest

_BAD_INPUT = 2  # exit code
PROGRAM = (sys.executable, "-m", "towers", "train")
# Linux sends a run SIGTERM when the process that started it ends, as it does if it is killed.
_END_WITH_SWEEP = ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()


def run(
    options: SweepOptions, say: Callable[[str], None] = print, program: Sequence[str] = PROGRAM
) -> dict[str, Any]:
    """Train all runs that are not finished, one after the other, and compare them.

    A flagfile is appended to `program`, the command that trains; for the rest see `flags.Verb`.

    Returns:
        The content of sweep.json, and "interrupted": whether a signal ended the sweep.
    """
    runs, folder = plan(options), Path(options.sweep_dir)
    for planned in runs:
        _check_same(planned)
    files.check_train_dir(folder, False, "--sweep_dir")
    folder.mkdir(parents=True, exist_ok=True)
    with files.Lock() as lock, StopRequest() as stop:
        lock.take(folder, "--sweep_dir")
        entries = [_entry(planned, folder) for planned in runs]
        waiting = [pair for pair in zip(runs, entries, strict=True) if not pair[1]["result"]]
        say(f"sweep       {folder}: {len(waiting)} of {len(runs)} runs to train")
        say(f"watch it    tensorboard --logdir={folder}")
        for planned, entry in waiting:
            if stop():
                break
            code = _train(planned, entry, program, stop)
            files.write_json(folder / "sweep.json", compare(options.sweep_dir, entries))
            why = f": {entry['error']} ({entry['log']})" if entry["error"] else ""
            say(f"run {entry['name']}: {entry['status']} ({entry['seconds']:.0f} s){why}")
            if code == _BAD_INPUT:  # the other runs would fail in the same way
                raise InputError(f"the run {entry['name']}: {entry['error']}")
        result = compare(options.sweep_dir, entries)
        files.write_json(folder / "sweep.json", result)
    for line in closing_lines(result):
        say(line)
    return result | {
        "interrupted": stop() and result["total"] > result["finished"] + result["failed"]
    }


def _entry(run: PlannedRun, folder: Path) -> dict[str, Any]:
    """Return what sweep.json says of a run that is finished, or waiting."""
    result = _result_of(run)
    return {
        "name": run.name,
        "flags": dict(run.flags),
        "status": "finished" if result else "waiting",
        "seconds": 0.0,
        "result": result,
        "error": None,
        "log": str(folder / f"{run.name}.log"),
    }


def _train(
    run: PlannedRun, entry: dict[str, Any], program: Sequence[str], stop: Callable[[], bool]
) -> int:
    """Train a run in a process of its own, and complete its entry; return the exit code."""
    log, started = Path(entry["log"]), time.monotonic()
    flagfile = log.with_name(f"{run.name}.cfg")
    files.write_text(flagfile, code_trust.signed(run.options.to_flagfile()))
    with open(log, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            [*_END_WITH_SWEEP, *program, f"--flagfile={flagfile}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=search_path.child_environment(),
            start_new_session=True,  # Ctrl-C reaches the sweep alone
        )
    while process.poll() is None and not stop():
        time.sleep(0.1)
    process.terminate()  # one that still runs saves and ends
    code, result = process.wait(), _result_of(run)
    entry["seconds"] = time.monotonic() - started
    if code == 0 and result:
        entry |= {"status": "finished", "result": result}
    elif code == EXIT_STOPPED or (stop() and code not in (1, 2)):
        entry |= {"status": "stopped", "error": "the same command resumes it"}
    else:
        output = log.read_bytes()[begin:].decode(errors="replace")
        entry |= {"status": "failed", "error": process_end(code, output)}
    return code


def _result_of(run: PlannedRun) -> dict[str, Any] | None:
    return results.read(run.options.train_dir) or None


def _check_same(run: PlannedRun) -> None:
    """Raise InputError if the run was started as another experiment."""
    path = Path(run.options.train_dir) / "flags.cfg"
    if not path.exists():
        return
    before = Options(**flags.read_flagfile(path))
    for name in names_that_affect("result", "speed"):
        old, new = getattr(before, name), getattr(run.options, name)
        if old != new:
            raise InputError(
                f"--{name}={text_of(new)}: the run {path.parent} was made with "
                f"--{name}={text_of(old)}; type that again, or name another --sweep_dir"
            )


def compare(sweep_dir: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of sweep.json, which --json prints.

    Its "summary" has a row for each combination of the varied flags except the seed, best first. A
    row has "flags", "runs" (names), the counts "finished" and "failed", and "mean": the mean of the
    monitored metric over its runs, or None. It is that of the moving average of the weights if
    there is one. Combinations with a failed run are last.

    Args:
        sweep_dir: folder of the sweep.
        entries: a dict for each run, as `run` makes them.
    """
    name, direction = monitored_by(next((e["result"] for e in entries if e["result"]), {}))
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(describe(entry["flags"] | {"seed": 0}), []).append(entry)
    rows = []
    for group in groups.values():
        values = [averaged_number(entry["result"] or {}, name) for entry in group]
        known = [value for value in values if value is not None]
        row = {"flags": {flag: v for flag, v in group[0]["flags"].items() if flag != "seed"}}
        row |= {"runs": [entry["name"] for entry in group], **_ends(group)}
        rows.append(row | {"mean": statistics.fmean(known) if known else None})

    def rank(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        mean = row["mean"] or 0.0
        return row["mean"] is None, row["failed"] > 0, -mean if direction == "max" else mean

    rows.sort(key=rank)
    words = ["towers", "train", f"--flagfile={sweep_dir}/{rows[0]['runs'][0]}.cfg"]
    command = shlex.join([*words, f"--train_dir={os.path.normpath(sweep_dir)}-best"])
    return {
        "sweep_dir": sweep_dir,
        "total": len(entries),
        **_ends(entries, "stopped"),
        "monitor": name,
        "direction": direction,
        "runs": list(entries),
        "summary": rows,
        "best": None if rows[0]["mean"] is None else rows[0] | {"command": command},
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
            + [row["mean"] and f"{row['mean']:.4f}", row["finished"], row["failed"]]
            for row in result["summary"]
        ]
        header = [*names, result["monitor"].replace("_", " ", 1), "runs", "failed"]
        lines = ["", *table(header, rows), ""]
        lines.append(f"best        {describe(best['flags']) or 'the flags as given'}")
        lines.append(f"  {best['command']}")
    if result["total"] > result["finished"] + result["failed"]:
        done = f"{result['finished']} of {result['total']} runs are finished"
        lines.append(f"stopped     {done}; the same command resumes the sweep")
    return lines
