"""The place that a run has reached; each checkpoint holds it, and the same command continues there.

After a step a run passes these stages, in this order:

    "step"   the update is made
    "epoch"  what was due after it is done: evaluation, best checkpoint, on_epoch_end
    "end"    the run ends here: its weights are final (`use_ema`), and on_train_end was called

Then follow the evaluations for result.json, whose existence marks the run as finished. A stage that
was interrupted is made again, from the state in which it began.
"""

import dataclasses
from collections.abc import Mapping

STEP, EPOCH, END = "step", "epoch", "end"
_NUMBER = float | int | None
SCHEMA = {  # of a place in a checkpoint
    "stage": str | None,
    "planned_steps": int | None,
    "stopped_by": str | None,
    "train_loss": _NUMBER,
    "examples_per_second": _NUMBER,
    "epoch_begin": int | None,
    "sums": {str: float | int},
    "logs": {str: float | int},
}


@dataclasses.dataclass
class Place:
    """The stage of a run at its step, and what its end needs to know of steps before."""

    stage: str = EPOCH  # the last one that is complete; at step 0 nothing is due
    planned_steps: int = 0  # at which the run was to end
    stopped_by: str = ""  # the `--callbacks` of which one has set `stop_training`
    train_loss: float | None = None  # of the last step
    examples_per_second: float | None = None
    epoch_begin: int | None = None  # step of the last on_epoch_begin, None after on_epoch_end
    sums: Mapping[str, float] = dataclasses.field(default_factory=dict)  # over the epoch's steps
    logs: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the last epoch

    def is_stopped(self, callbacks: str, last_step: int) -> bool:
        """Return whether a callback ended the run: with others, or for more steps, it continues.

        Args:
            callbacks: `--callbacks` of now.
            last_step: up to which it is to train.
        """
        same = self.stopped_by == callbacks and self.planned_steps == last_step
        return bool(self.stopped_by) and same
