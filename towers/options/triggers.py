"""When a run does what, as pure functions of the number of steps done."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction

from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class Timetable:
    """Steps at which something is due, in the part of a run that one process makes."""

    first_step: int  # steps done when it starts
    first_examples: int  # examples seen by then
    last_step: int  # steps done when it ends
    train_size: int  # examples of an epoch
    options: Options

    def examples(self, step: int) -> int:
        """Return the number of examples seen after `step` steps."""
        return self.first_examples + (step - self.first_step) * self.options.batch_size

    def epochs(self, step: int) -> float:
        """Return the number of epochs seen after `step` steps."""
        return self.examples(step) / self.train_size

    def x(self, step: int) -> int:
        """Return where a point of `step` updates stands in TensorBoard."""
        return self.examples(step) if self.options.tensorboard_x == "examples" else step

    def logs(self, step: int) -> bool:
        """Return whether the step that ends at `step` gets a line: the first, each n-th, the last.

        The line bears the number of updates before that step, `step` - 1.
        """
        return self.plots(step) or step == self.first_step + 1

    def plots(self, step: int) -> bool:
        """Return whether its line is a point of curves, as in a run that was never stopped."""
        return (step - 1) % self.options.log_every_steps == 0 or step == self.last_step

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
        """Return how many steps the next call makes: up to the next thing that is due.

        The first call makes one step, which gets a line: the time to it is known, and a run that
        cannot work says so early. No call goes beyond the last step, which gets one, too.

        Args:
            step: steps done.
            also: tells whether something else is due after so many steps.
        """
        due = (self.logs, self.saves, self.evaluates, self.draws_histograms, also)
        for n in range(1, self.options.steps_per_loop):
            if any(is_due(step + n) for is_due in due):
                return n
        return self.options.steps_per_loop

    def _passes(self, step: int, every_epochs: float) -> bool:
        # of the decimal that was typed: 1.1 * 10 in floats is more than 11, and one step late
        every = Fraction(str(every_epochs)) * self.train_size
        if not every or not 0 < step < self.last_step:
            return False
        return self.examples(step) // every > self.examples(step - 1) // every
