"""Checks in a run whether its towers compute what one device computes."""

import dataclasses

from towers.errors import RunError
from towers.monitoring.monitor import Monitor
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.run import manifest
from towers.training.run.setup import RunContext


@dataclasses.dataclass
class ExactnessChecks:
    """Makes the checks of a run's builder that are due, says and records what they found."""

    run: RunContext
    monitor: Monitor  # prints lines; does not count the time of checks
    preemption: PreemptionHandler  # handles signals meanwhile
    num_recorded: int = 0  # of functions that have passed

    def after_step(self, step: int) -> None:
        """Make the checks that are due after so many steps, unless a signal has come.

        Raises:
            RunError: towers differ from one device, and `--on_inexact` is not "warn".
        """
        if self.preemption():
            return
        checks = self.run.builder.checks
        with self.monitor.pause(), self.preemption.check(step):
            checks.after_step(step)
        if found := found_on_towers(self.run):
            raise found
        for line in self.run.take_diagnostics():
            self.monitor.say(f"warning     {line}")
        if len(checks.passed) != self.num_recorded:
            self.num_recorded = len(checks.passed)
            manifest.write_passed(self.run.folder, checks.passed)


def found_on_towers(run: RunContext) -> RunError | None:
    """Return the error if `--on_inexact=one_device` was set and a difference was found later."""
    if run.due.on_inexact != "one_device" or not run.builder.checks.inexact:
        return None
    found = run.builder.checks.inexact[0]
    return RunError(f"{found}. The same command with --num_towers=1 resumes exactly")
