"""Checks in a run whether its towers compute what one device computes."""

import dataclasses

from towers.errors import RunError
from towers.monitoring.monitor import Monitor
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.run import manifest
from towers.training.run.prepare_run import PreparedRun


@dataclasses.dataclass
class ExactnessChecks:
    """Makes the checks of a run's builder that are due, says and records what they found."""

    prepared: PreparedRun
    monitor: Monitor  # prints lines; does not count the time of checks
    preemption: PreemptionHandler  # handles signals meanwhile

    def __post_init__(self) -> None:
        """Record nothing that is recorded already."""
        self._checks = self.prepared.run.builder.checks
        self._recorded: set[str] = set()

    def after_step(self, step: int) -> None:
        """Make the checks that are due after so many steps.

        Args:
            step: number of steps made.

        Raises:
            RunError: towers differ from one device, and `--on_inexact` is not "warn".
        """
        run = self.prepared.run
        with self.monitor.pause(), self.preemption.check(step):
            self._checks.after_step(step)
        if run.options.on_inexact == "one_device" and self._checks.inexact:
            found = "; ".join(self._checks.inexact)
            raise RunError(f"{found}; the same command with --num_towers=1 continues exactly")
        for line in run.take_diagnostics():
            self.monitor.say(f"warning     {line}")
        if self._checks.passed != self._recorded:
            self._recorded = set(self._checks.passed)
            manifest.write_passed(run.folder, self._recorded)
