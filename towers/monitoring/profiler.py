"""The profile that --profile_steps=100:110 asks for; TensorBoard's page Profile shows it.

A call of the train loop ends at any step for which `due` is true.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from towers.monitoring.monitor import Monitor, tensorboard_command


@dataclasses.dataclass
class Profiler:
    """Profiles calls of a train loop, within a `with` block."""

    train_dir: Path  # folder of the run
    plan: tuple[int, int] | None  # first and last step; None: no profile, or it was made
    monitor: Monitor  # prints lines; does not count the time of starting and writing a profile

    _running: bool = False

    def __enter__(self) -> "Profiler":
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop a running profile."""
        self.stop()
        if self.plan:
            first, last = self.plan
            self.monitor.say(
                f"profile     --profile_steps={first}:{last}: the run made none of these steps"
            )

    def due(self, step: int) -> bool:
        """Return whether a call of the train loop must end after `step` steps."""
        return step in (self.plan or ())

    @contextlib.contextmanager
    def call(self, step: int, num_steps: int) -> Iterator[None]:
        """Profile the block, a call of the train loop, if it is due; the page shows it as one step.

        Args:
            step: number of steps before the call.
            num_steps: number of steps in it.
        """
        if self.plan and self.plan[0] <= step < self.plan[1] and not self._running:
            with self.monitor.pause():
                tf.test.experimental.sync_devices()  # else it shows kernels of the step before
                tf.profiler.experimental.start(str(self.train_dir / "train"))
                self._running = True
        with tf.profiler.experimental.Trace("train", step_num=step, _r=1):
            yield
        if self._running and step + num_steps >= self.plan[1]:
            self.stop()

    def stop(self) -> None:
        """Stop a running profile, and write it."""
        if not self._running:
            return
        self._running, self.plan = False, None
        with self.monitor.pause():
            tf.test.experimental.sync_devices()
            tf.profiler.experimental.stop()
        self.monitor.say(
            f"profile     {tensorboard_command(str(self.train_dir))} shows it on the Profile page "
            "(needs the package tensorboard-plugin-profile)"
        )
