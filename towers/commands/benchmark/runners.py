"""Runners: processes that train in turn, a window at a time, and exchange lines of JSON.

A runner first prints {"ready": true, ...}, {"skipped": reason} or {"refused": reason}. For a line
"2.0" it trains two seconds and prints {"steps": 120, "seconds": 2.01}; "0.5 control" runs our
control. At the end of its input it prints {"peak_memory_mib": 812.5}.

Between its turns a runner sleeps on its standard input, so that a slow minute of the machine slows
all of them alike. TensorFlow is not needed here.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from towers.commands.benchmark.options import BenchmarkOptions
from towers.errors import InputError
from towers.formatting import count, process_end
from towers.options import search_path
from towers.options.augmentation import parse

WAIT_SECONDS = 900.0  # for importing, loading data, building and warming up; for a huge step
END_SECONDS = 30.0
WINDOW_SHARES = {"control": 0.5, "": 1.0}  # of a window's seconds, for each of our loops
PEER_OPTIONS = (
    "model dtype optimizer learning_rate momentum weight_decay ema_decay steps_per_loop seed"
)


class RunnerError(RuntimeError):
    """A runner crashed or hangs."""


class Runner:
    """A process that trains on request, in its own session, so that its children end with it.

    Methods raise RunnerError if the process fails.

    Attributes:
        ready: its first answer.
        windows: {loop: [seconds of a step in each window]}; loops are "" (training) and "control".
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        """Start the process in the current folder."""
        self.name = name
        self.ready: dict[str, Any] = {}
        self.windows: dict[str, list[float]] = {}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them all
        )

    def wait_ready(self) -> None:
        """Wait for the first answer and keep it as `ready`."""
        self.ready = self._answer({"ready", "skipped", "refused"}, WAIT_SECONDS)

    def train(self, seconds: float, part: str = "") -> None:
        """Run a window, and append its seconds per step to `windows`.

        Args:
            seconds: length of the window, at least.
            part: the loop to run: "" or "control".
        """
        with contextlib.suppress(BrokenPipeError):  # the missing answer says that it has ended
            print(seconds, part, file=self._process.stdin, flush=True)
        answer = self._answer({"steps"}, seconds + WAIT_SECONDS)
        self.windows.setdefault(part, []).append(answer["seconds"] / answer["steps"])

    def finish(self) -> float | None:
        """Close its input; return its peak memory in MiB, or None without an answer."""
        with contextlib.suppress(BrokenPipeError, RunnerError):
            self._process.stdin.close()
            return self._answer({"peak_memory_mib"}, END_SECONDS)["peak_memory_mib"]
        return None

    def close(self) -> None:
        """Kill the process and all that it has started."""
        with contextlib.suppress(BrokenPipeError), self._errors, self._process:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, keys: set[str], timeout_seconds: float) -> dict[str, Any]:
        """Return the next JSON object with one of the keys; skip lines that libraries print."""
        start = time.monotonic()
        timer = threading.Timer(timeout_seconds, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict) and keys & answer.keys():
                        return answer
            code = self._process.wait()
        finally:
            timer.cancel()
        if time.monotonic() - start >= timeout_seconds:
            raise RunnerError(f"no answer within {timeout_seconds:g} s")
        self._errors.seek(0)
        raise RunnerError(process_end(code, self._errors.read()))


@dataclasses.dataclass
class InterleavedRuns:
    """All runners of a benchmark. A RunnerError from a method is one of our own runners'."""

    options: BenchmarkOptions
    stack: contextlib.ExitStack  # which ends the processes
    say: Callable[[str], None]
    # Weak scaling, then strong; peers are compared with the last.
    own: list[Runner] = dataclasses.field(default_factory=list)
    peers: list[Runner] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # {peer: reason}
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def start_own(self, numbers: Sequence[int], images: str) -> None:
        """Start our runners.

        Args:
            numbers: numbers of towers.
            images: file to which the first runner writes the training set, or "".

        Raises:
            InputError: a runner refuses its options.
        """
        run = self.options.run
        plan = [(n, "weak", run.batch_size * n) for n in numbers if n > 1]
        plan += [(n, "strong", run.batch_size) for n in numbers]
        for num_towers, scaling, batch_size in reversed(plan):
            changes: dict[str, Any] = {"dataset": self.options.dataset}
            changes |= {"num_towers": num_towers, "batch_size": batch_size}
            if run.devices.strip().lower() == "cpu":
                changes["visible_gpus"] = run.visible_gpus or "none"  # left to others
            else:
                changes["devices"] = ",".join(run.devices.split(",")[:num_towers])
            run_options = dataclasses.asdict(dataclasses.replace(run, **changes))
            config = {"options": run_options, "export": "" if self.own else images}
            name = f"{count(num_towers, 'tower')}, {scaling}"
            self.say(f"starting    {name}, batch size {batch_size} ...")
            runner = self._start(name, ["-m", "towers.commands.benchmark.own_run"], config)
            if "refused" in runner.ready:
                raise InputError(runner.ready["refused"])
            runner.ready["scaling"] = scaling
            self.own.insert(0, runner)

    def start_peers(self, programs: Mapping[str, Path], images: str) -> None:
        """Start the peers, on the task of our last runner; one that fails or skips is noted.

        Args:
            programs: {peer: its program}.
            images: what was given to `start_own`.
        """
        run, ours = self.options.run, self.own[-1].ready
        config = {name: getattr(run, name) for name in PEER_OPTIONS.split()} | {
            "model_args": run.model_keywords(),
            "image_shape": ours["image_shape"],
            "num_classes": ours["num_classes"],
            "batch_size": ours["batch_size"],
            "num_devices": ours["num_towers"],
            "gpus": ours["devices"][0].startswith("/gpu"),
            "data": images,
            "augment": ours["augment"],
        }
        changes = {"fit": {"num_devices": 1}, "mirrored_own_layers": {"own_layers": True}}
        why = ""
        if images and not os.path.exists(images):
            why = f"--dataset={self.options.dataset} holds no images as bytes, with one class each"
        if parse(ours["augment"]).parts:
            why = f"--augment={ours['augment']} has parts that other programs do not do"
        for name, program in programs.items():
            if why:
                self.skipped[name] = why
                continue
            self.say(f"starting    {name} ...")
            try:
                runner = self._start(name, [str(program)], config | changes.get(name, {}))
            except RunnerError as error:
                self.failed[name] = str(error)
                continue
            if "ready" in runner.ready:
                self.peers.append(runner)
            else:
                self.skipped[name] = runner.ready["skipped"]

    def _start(self, name: str, program: Sequence[str], config: Mapping[str, Any]) -> Runner:
        environment = search_path.child_environment()
        if program[0] != "-m":
            del environment["PYTHONSAFEPATH"]  # it imports modules beside it
        run = self.options.run
        if not run.per_process_gpu_memory_fraction + run.gpu_memory_limit_mib:
            environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # all share the GPUs' memory
        runner = Runner(name, [sys.executable, *program, json.dumps(config)], environment)
        self.stack.callback(runner.close)
        runner.wait_ready()
        return runner

    def take_turns(self) -> None:
        """Run all windows in turn; a peer that fails is dropped."""
        windows, length = self.options.windows, self.options.seconds
        turns = [(runner, part) for runner in self.own for part in WINDOW_SHARES]
        turns += [(runner, "") for runner in self.peers]
        seconds = sum(length * WINDOW_SHARES[part] for _, part in turns)
        self.say(f"measuring   {windows} rounds of {seconds:.0f} s at least, a window each in turn")
        for window in range(windows):
            # Reverse every other window, so that no runner always follows the same one.
            for runner, part in turns[:: -1 if window % 2 else 1]:
                if runner.name in self.failed:
                    continue
                try:
                    runner.train(length * WINDOW_SHARES[part], part)
                except RunnerError as error:
                    if runner in self.own:
                        raise
                    self.failed[runner.name] = str(error)
                    self.peers.remove(runner)
            self.say(f"round       {window + 1}/{windows}")
