"""Profiles on demand: --profile_steps=100:110, or the signal SIGUSR2 while a run trains.

A call of the train loop is made between `begin` and `end`, within `trace`, and ends at any step for
which `due` is true. TensorBoard's profile plugin shows the trace. An error is printed and does not
stop the run.
"""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from towers.formatting import first_line

NUM_STEPS = 10  # in a profile that a signal asks for


@dataclasses.dataclass
class Profiler:
    """Starts and stops profiles between calls of a train loop."""

    train_dir: Path  # folder of the run
    plan: tuple[int, int] | None  # first and last step of a profile that is still to be made
    last_step: int  # of the run
    say: Callable[[str], None]  # prints a line

    def __post_init__(self) -> None:
        """Start nothing."""
        self._folder = self.train_dir / "train"
        self._running, self._asked, self._step = None, False, 0

    def _say(self, line: str) -> None:
        self.say(f"profile     {line}")

    def __enter__(self) -> "Profiler":
        """Handle SIGUSR2, if this is the main thread."""
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR2, self._ask) or signal.SIG_DFL
            signal.siginterrupt(signal.SIGUSR2, False)  # do not interrupt reads and writes
        return self

    def __exit__(self, *_: object) -> None:
        """Stop a running profile, and restore the signal's handler."""
        self.stop()
        if self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)
        if self.plan:
            first, last = self.plan
            self._say(f"--profile_steps={first}:{last}: none of these steps was made")

    def due(self, step: int) -> bool:
        """Return whether a call of the train loop must end after `step` steps."""
        return step in (self._running or ()) or step in (self.plan or ())

    def begin(self, step: int) -> None:
        """Start a profile if one is due after `step` steps; call it just before the next call.

        A signal during a profile asks for another one after it.
        """
        self._step = step
        if self._running:
            return
        if self.plan and self.plan[0] <= step < self.plan[1]:
            (_, last), self.plan = self.plan, None
        elif self._asked:
            self._asked, last = False, step + NUM_STEPS
        else:
            return
        last = min(last, self.last_step)
        try:
            tf.test.experimental.sync_devices()  # else it shows kernels of the step before
            tf.profiler.experimental.start(str(self._folder))
            self._running = step, last
            self._say(f"of steps {step} to {last} has started")
        except Exception as error:  # a profile must not stop the run
            self._say(f"none of steps {step} to {last}: {first_line(error, 300)}")

    def trace(self, step: int) -> contextlib.AbstractContextManager:
        """Return a context for the call at `step`, which the plugin shows as a step."""
        return tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def end(self, step: int) -> None:
        """Stop the profile if it ends after `step` steps; call it just after a call."""
        self._step = step
        if self._running and step >= self._running[1]:
            self.stop()

    def stop(self) -> None:
        """Stop a running profile, and write its folder, named after its steps."""
        if self._running is None:
            return
        (first, _), self._running = self._running, None
        last, traces = self._step, self._folder / "plugins" / "profile"
        try:
            try:
                tf.test.experimental.sync_devices()
            finally:
                tf.profiler.experimental.stop(save=last > first)
            if last > first:
                trace = max(traces.glob("*/*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
                named = trace.parent.with_name(f"{trace.parent.name}_steps_{first}_{last}")
                self._say(f"steps {first} to {last}: {trace.parent.rename(named) / trace.name}")
        except Exception as error:  # a profile must not stop the run
            self._say(f"steps {first} to {last} failed: {first_line(error, 300)}")

    def _ask(self, *_: object) -> None:
        self._asked = True
