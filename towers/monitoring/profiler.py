"""The profile that --profile_steps=100:110 asks for; TensorBoard's page Profile shows it.

A call of the train loop is made between `begin` and `end`, within `trace`, and ends at any step for
which `due` is true. An error is printed and does not stop the run.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from towers.formatting import first_line
from towers.monitoring.monitor import tensorboard_command


@dataclasses.dataclass
class Profiler:
    """Starts and stops a profile between calls of a train loop."""

    train_dir: Path  # folder of the run
    plan: tuple[int, int] | None  # first and last step; None: no profile, or it was made
    say: Callable[[str], None]  # prints a line

    _running: bool = False

    def __enter__(self) -> "Profiler":
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop a running profile."""
        self.stop()
        if self.plan:
            first, last = self.plan
            self.say(f"profile     --profile_steps={first}:{last}: none of these steps was made")

    def due(self, step: int) -> bool:
        """Return whether a call of the train loop must end after `step` steps."""
        return step in (self.plan or ())

    def begin(self, step: int) -> None:
        """Start the profile if it is due after `step` steps; call it just before the next call."""
        if self._running or not self.plan or not self.plan[0] <= step < self.plan[1]:
            return
        try:
            tf.test.experimental.sync_devices()  # else it shows kernels of the step before
            tf.profiler.experimental.start(str(self.train_dir / "train"))
            self._running = True
        except Exception as error:  # a profile must not stop the run
            self._tell_failure(error)

    def trace(self, step: int) -> contextlib.AbstractContextManager:
        """Return a context for the call at `step`, which the page shows as a step."""
        return tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def end(self, step: int) -> None:
        """Stop the profile if it ends after `step` steps; call it just after a call."""
        if self._running and step >= self.plan[1]:
            self.stop()

    def stop(self) -> None:
        """Stop a running profile, and write it."""
        if not self._running:
            return
        self._running = False
        try:
            try:
                tf.test.experimental.sync_devices()
            finally:
                tf.profiler.experimental.stop()
            self.plan = None
            self.say(
                f"profile     {tensorboard_command(str(self.train_dir))} shows it on its page "
                "Profile, which needs the package tensorboard-plugin-profile"
            )
        except Exception as error:  # a profile must not stop the run
            self._tell_failure(error)

    def _tell_failure(self, error: Exception) -> None:
        first, last = self.plan
        self.plan = None
        self.say(f"profile     none of steps {first} to {last}: {first_line(error, 300)}")
