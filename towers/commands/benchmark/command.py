"""`towers benchmark`: the speed of a run on several numbers of towers, and how it scales.

Each number of towers is a process of its own (`own_run`). After warming up they take turns, window
by window, and sleep in between, so that a slow minute of the machine slows all of them alike.
"""

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towers import devices
from towers.commands.benchmark.options import BenchmarkOptions
from towers.devices import host
from towers.errors import InputError, RunError
from towers.formatting import count, markdown, process_end
from towers.options import search_path
from towers.options.fields import parse_tower_numbers

HEADER = "towers", "examples/s, median (range)", "of perfect scaling", "peak MiB"
Say = Callable[[str], None]


class Runner:
    """A process that trains on request, in its own session, so that its children end with it."""

    loops: Mapping[str, float] = {"control": 0.5, "": 1.0}  # with the share of a window's seconds
    windows: dict[str, list[float]]  # {loop: seconds of a step in each window}
    ready: Mapping[str, Any]  # its first answer

    def __init__(self, program: Sequence[str], config: Any, **environment: str):
        """Start Python with a program, its configuration as JSON, and variables of its own.

        Args:
            program: the arguments of Python.
            config: what the program reads as JSON, its last argument.
            **environment: variables of its own.
        """
        self.windows = {loop: [] for loop in self.loops}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, *program, json.dumps(config)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._errors, text=True, errors="replace",
            env=search_path.child_environment() | environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them all
        )  # fmt: skip

    def train(self, seconds: float, loop: str) -> None:
        """Run a window of a loop, see `loops`, at least so long, and keep its seconds per step."""
        with contextlib.suppress(BrokenPipeError):  # the missing answer says that it has ended
            print(seconds, loop, file=self._process.stdin, flush=True)
        answer = self.answer("steps")
        self.windows[loop].append(answer["seconds"] / answer["steps"])

    def answer(self, *keys: str) -> dict[str, Any]:
        """Return the next JSON object with one of the keys; raise RunError if the process ends."""
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a line that a library prints
                answer = json.loads(line)
                if isinstance(answer, dict) and set(keys) & answer.keys():
                    return answer
        self._errors.seek(0)
        how = process_end(self._process.wait(), self._errors.read())
        raise RunError(f"a process of the benchmark failed: {how}")

    def close(self) -> None:
        """Kill the process and all that it has started."""
        with contextlib.suppress(BrokenPipeError), self._errors, self._process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def run(options: BenchmarkOptions, say: Say = print) -> dict[str, Any]:
    """Measure the speed and the scaling of a run; see `flags.Verb`.

    Returns:
        "results", one for each number of towers; "ratios" {"2": 2 towers / their control}, medians
        of the windows; "machine"; "versions".
    """
    results, ratios, rows = [], {}, []
    with contextlib.ExitStack() as stack:
        runners = start(options, stack, say)
        take_turns(runners, options.windows, options.seconds, say)
    for row, windows in ((dict(runner.ready), runner.windows) for runner in runners):
        row["examples_per_second"] = ratio_of([row["batch_size"]] * options.windows, windows[""])
        results.append(row)
        number, ratio = str(row["num_towers"]), ratio_of(windows["control"], windows[""])
        ratios[number] = ratio["median"]
        cells = [number, spread(row["examples_per_second"]), spread(ratio, 2)]
        rows.append([*cells, f"{row['peak_memory_mib']:.0f}"])
    for line in [host.processor(), "", *markdown(HEADER, rows)]:
        say(line)
    machine = {"processor": host.processor(), "cores": os.cpu_count()}
    about = {"machine": machine, "versions": host.versions()}
    return {"results": results, "ratios": ratios} | about


def start(options: BenchmarkOptions, stack: contextlib.ExitStack, say: Say) -> list[Runner]:
    """Start a process for each number of towers, which the stack ends; see `run`."""
    given, growth, runners = options.run, {}, []
    if not given.per_process_gpu_memory_fraction + given.gpu_memory_limit_mib:
        growth = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # all processes share the GPUs' memory
    for number in parse_tower_numbers(options.num_towers) or _numbers(given.devices):
        say(f"starting    {count(number, 'tower')} ...")
        changes: dict[str, Any] = {"dataset": options.dataset, "num_towers": number, "check": "off"}
        if given.devices.strip().lower() == "cpu":
            changes["visible_gpus"] = given.visible_gpus or "none"  # left to others
        else:
            changes["devices"] = ",".join(given.devices.split(",")[:number])
        config = dataclasses.asdict(dataclasses.replace(given, **changes))
        runners.append(Runner(["-m", "towers.commands.benchmark.own_run"], config, **growth))
        stack.callback(runners[-1].close)
        runners[-1].ready = runners[-1].answer("refused", "num_towers")
        if why := runners[-1].ready.get("refused"):
            raise InputError(why)
    return runners


def take_turns(runners: Sequence[Runner], windows: int, seconds: float, say: Say) -> None:
    """Run windows of each runner, one after the other; see `BenchmarkOptions`."""
    turns = [(r, loop, seconds * share) for r in runners for loop, share in r.loops.items()]
    total = sum(length for *_, length in turns)
    say(f"measuring   {windows} rounds of at least {total:.0f} s")
    for window in range(windows):
        # Reverse every other window, so that no runner always follows the same one.
        for runner, loop, length in turns[:: -1 if window % 2 else 1]:
            runner.train(length, loop)
        say(f"round       {window + 1}/{windows}")


def _numbers(named: str) -> list[int]:
    """Return 1 and the number of GPUs or named devices; without GPUs 1, 2 and 4."""
    most = devices.most_towers(named)
    return sorted({1, most}) if most else [1, 2, 4]


def ratio_of(longer: Sequence[float], shorter: Sequence[float]) -> dict[str, float]:
    """Return median, min and max of longer / shorter, window by window; see `Runner`."""
    values = [a / b for a, b in zip(longer, shorter, strict=True)]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread(values: Mapping[str, float], digits: int = 0) -> str:
    """Return values, see `ratio_of`, in the form "102 (99 to 104)", with so many decimals."""
    low, middle, high = (f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"
