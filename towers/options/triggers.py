"""When a run logs, evaluates and saves, as pure functions of the number of steps done."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction

from towers.options.parts import DueOptions


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The steps at which something is due, in one process' part of a run."""

    first_step: int  # steps done at the start
    first_examples: int  # examples seen at the start
    last_step: int  # steps done at the end
    train_size: int  # examples of an epoch
    batch_size: int
    steps_per_loop: int
    options: DueOptions

    def examples(self, step: int) -> int:
        """Return the number of examples seen after `step` steps."""
        return self.first_examples + (step - self.first_step) * self.batch_size

    def epochs(self, step: int) -> float:
        """Return the number of epochs seen after `step` steps."""
        return self.examples(step) / self.train_size

    def logs(self, step: int) -> bool:
        """Return whether step `step` prints a line: the first, every n-th and the last do.

        The line shows the number of updates before that step, `step` - 1.
        """
        return self.plots(step) or step == self.first_step + 1

    def plots(self, step: int) -> bool:
        """Return whether step `step` is a point of the curves, as if the run had never stopped."""
        every = self.options.log_every_steps or min(100, max(self.last_step // 20, 1))
        return (step - 1) % every == 0 or step == self.last_step

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps, before the end."""
        every = self.options.checkpoint_every_steps
        return every > 0 and step % every == 0 and step < self.last_step

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation is due after `step` steps, before the end."""
        return self._passes(step, self.options.evaluate_every_epochs)

    def draws_histograms(self, step: int) -> bool:
        """Return whether histograms are due after `step` steps, before the end."""
        return self._passes(step, self.options.histogram_every_epochs)

    def num_steps(self, step: int, also: Callable[[int], bool] = lambda step: False) -> int:
        """Return how many steps the next call makes: up to the next step at which anything is due.

        The first call makes one step, so that a run that cannot work fails early. No call goes
        beyond the last step.

        Args:
            step: steps done.
            also: returns whether something else is due after a number of steps.
        """
        due = (self.logs, self.saves, self.evaluates, self.draws_histograms, also)
        for n in range(1, self.steps_per_loop):
            if any(is_due(step + n) for is_due in due):
                return n
        return self.steps_per_loop

    def _passes(self, step: int, every_epochs: float) -> bool:
        # Exact: in floats 1.1 * 10 is more than 11, which would be one step late.
        every = Fraction(str(every_epochs)) * self.train_size
        if not every or not 0 < step < self.last_step:
            return False
        return self.examples(step) // every > self.examples(step - 1) // every
