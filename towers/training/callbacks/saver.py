"""Saves a run when a checkpoint is due, with the place that it has reached."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from towers.devices.shown_names import shown_name
from towers.errors import InputError, RunError
from towers.monitoring.monitor import Monitor
from towers.training.callbacks.exactness import found_on_towers
from towers.training.callbacks.nonfinite import NonFiniteMonitor, NotFinite
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.callbacks.user_callbacks import Callbacks
from towers.training.run.place import STEP
from towers.training.run.prepare_run import PreparedRun

_SAVE_SECONDS = 300.0  # the most that a killed run has to make again, whatever its steps take


@dataclasses.dataclass
class Saver:
    """Saves a run after steps, if its weights are finite."""

    prepared: PreparedRun
    monitor: Monitor  # prints lines, and knows the speed
    preemption: PreemptionHandler
    callbacks: Callbacks

    def __post_init__(self) -> None:
        """Save the place with all checkpoints from now on."""
        self.place = self.prepared.restored.place
        self._due = self.prepared.run.due
        self.unsaved = False  # whether the newest checkpoint lacks anything
        self._finite_check = NonFiniteMonitor(self.prepared.run, self.monitor.say)
        self._is_due, self._saved_at = False, time.monotonic()
        self._values: Mapping[str, Any] = {}
        self.prepared.checkpoints.place = self._current_place

    def after_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Note that steps were made, see `Monitor.after_step`; raise NotFinite as `save` does."""
        timetable, every = self.prepared.timetable, self._due.checkpoint_every_steps
        by_clock = every > 0 and time.monotonic() - self._saved_at > _SAVE_SECONDS
        self._is_due = timetable.saves(step) or by_clock or step == timetable.last_step
        now = self._is_due or timetable.logs(step) or timetable.evaluates(step)
        self._finite_check.check(values, step, now)
        self._values, self.place.stage, self.unsaved = values, STEP, True

    def save_if_due(self, step: int) -> None:
        """Save after `step` steps if a checkpoint is due, or these are all steps."""
        if self._is_due:
            self.save(step, now=step == self.prepared.timetable.last_step)

    def save(self, step: int, now: bool = False) -> None:
        """Save a checkpoint; raise if a step or weight is not finite.

        Copies of the weights that have drifted apart, as on unlike GPUs, are set to the saved
        values: the run continues as one that is resumed from this checkpoint.

        Args:
            step: of the checkpoint.
            now: wait until it is written; otherwise a thread writes it.
        """
        with self.monitor.pause():
            if drifted := self.prepared.run.train_state.make_copies_equal():
                name, device, other = map(shown_name, drifted)
                self.monitor.say(
                    f"warning     copies of {name} on {device} and {other} differ at step {step}; "
                    f"all towers use that of {device} from here; type --variables=cpu (a single "
                    "copy) or --deterministic"
                )
            self._finite_check.check_weights(step)
            checkpoints = self.prepared.checkpoints
            with self.preemption.save(step):
                (checkpoints.save_now if now else checkpoints.save)(step)
        self.unsaved, self._saved_at = False, time.monotonic()

    def _current_place(self) -> dict[str, Any]:
        place = self.place
        place.planned_steps = self.prepared.timetable.last_step
        place.stopped_by = self._due.callbacks if self.callbacks.stopped() else ""
        if self._values:
            place.train_loss = float(self._values["loss"])
        place.examples_per_second = self.monitor.examples_per_second() or place.examples_per_second
        return dataclasses.asdict(place)

    @contextlib.contextmanager
    def saved_if_it_fails(self) -> Iterator[None]:
        """Save the last finished step if an error other than a non-finite step ends the block."""
        try:
            yield
        except NotFinite:
            raise
        except Exception as error:
            run, checkpoints = self.prepared.run, self.prepared.checkpoints
            preemption = self.preemption
            step, snapshot = preemption.backup or (run.steps_done(), None)
            if preemption.backup or preemption.consistent:
                with contextlib.suppress(RunError):  # the first error is the one to report
                    preemption.save_snapshot(step, snapshot or checkpoints.snapshot())
            if checkpoints.has(step):
                with contextlib.suppress(OSError):  # of the terminal
                    self.monitor.say(f"saved       step {step}: the same command resumes there")
            if isinstance(error, InputError) and (inexact := found_on_towers(run)):
                raise inexact from error
            raise
