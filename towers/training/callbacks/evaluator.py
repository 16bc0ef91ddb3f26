"""Evaluations during a run and at its end, and the stages that follow them."""

import contextlib
import dataclasses
from collections.abc import Iterator

from towers.errors import RunError
from towers.monitoring.monitor import Monitor
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.callbacks.saver import Saver
from towers.training.callbacks.user_callbacks import Callbacks, figures
from towers.training.run.checkpoint import find
from towers.training.run.place import END, EPOCH
from towers.training.run.prepare_run import PreparedRun
from towers.training.step.evaluation import Evaluation
from towers.training.step.train_state import restore_after


@dataclasses.dataclass
class Evaluator:
    """Evaluates a run, shows the results and keeps the best checkpoint.

    During the run it uses the validation data if there are any; the test set is for the end.
    """

    prepared: PreparedRun
    monitor: Monitor  # writes curves and lines
    preemption: PreemptionHandler  # whether to stop
    callbacks: Callbacks  # the user's, whose hooks are called
    saver: Saver

    def __post_init__(self) -> None:
        """Prepare evaluations; the first one compiles their function."""
        self._run, self.best = self.prepared.run, self.prepared.restored.best
        self._keeps_best = self._run.due.keep_best
        self.prepared.checkpoints.best = self.best.step if self._keeps_best else None
        self._last: Evaluation | None = None  # of the current weights
        self._part = "validation" if self._run.data.validation else "test"
        self._evaluate = self._run.task.make_evaluator(self._run.splits()[self._part])

    def after_step(self, step: int) -> None:
        """Evaluate and call on_epoch_end if they are due after `step` steps.

        A signal may cut the evaluation short: the run then resumes with all of it.
        """
        timetable, callbacks, self._last = self.prepared.timetable, self.callbacks, None
        with self.monitor.pause():
            if timetable.evaluates(step) or (callbacks and step == timetable.last_step):
                self._last = self._evaluate_and_keep(step)
                if self._last is None:
                    return
            if callbacks.at_end_of_epoch():
                changed = callbacks.end_epoch(self._last)
                # During the run the best checkpoint keeps the weights that were evaluated.
                ends = step == timetable.last_step or self.stops_early()
                is_best = self.prepared.checkpoints.best == step
                self.saver.unsaved |= ends or not (changed and is_best)
                self._last = None if changed else self._last
        self.saver.place.stage = EPOCH

    def _evaluate_and_keep(self, step: int) -> Evaluation | None:
        """Evaluate after `step` steps; save the best weights so far. None if a signal came."""
        run, monitor, checkpoints = self._run, self.monitor, self.prepared.checkpoints
        with self.preemption.evaluation(step):
            self.callbacks.call("on_test_begin")
            evaluation = self._evaluate(self.preemption)
            self.callbacks.call("on_test_end", figures(evaluation))
        for line in run.take_diagnostics():  # of `test_step`, which is traced here
            monitor.say(f"warning     {line}")
        if evaluation is None:
            return None
        monitor.eval_point(step, evaluation.metrics, self._part)
        name, _ = run.monitored
        value = evaluation.metrics.get(f"{name}_ema")
        value = evaluation.metrics.get(name) if value is None else value
        is_best = self.best.add(step, self.prepared.timetable.examples(step), value)
        if is_best and self._keeps_best:
            checkpoints.best = step
            if self.saver.unsaved:
                self.saver.save(step)
            checkpoints.close()  # it must exist before best.json names it
        try:
            self.best.write()
        except RunError as error:
            monitor.say(f"warning     {error}; training continues and will try again")
        return evaluation

    def stops_early(self) -> bool:
        """Return whether the run ends early."""
        return self.best.is_over() or self.callbacks.stopped()

    def finish(self, step: int) -> None:
        """Make the weights final, as `use_ema` does, call on_train_end and save what changed."""
        if step < self.prepared.timetable.last_step:
            why = "a callback set stop_training"
            if not self.callbacks.stopped():
                name, _ = self._run.monitored
                epochs = self._run.due.early_stopping_epochs
                why = f"no better {name} since step {self.best.step}, for {epochs:g} epochs or more"
            self.monitor.say(f"stopping    early, at step {step}: {why}")
        changed, called = self._run.task.finish(), bool(self.callbacks)
        changed |= self.callbacks.end_run()
        self._last = None if changed else self._last
        self.saver.place.stage = END
        if changed or called:
            self.saver.save(step, now=True)

    def evaluate_at_end(self, step: int) -> dict[str, Evaluation] | None:
        """Return {split name: evaluation} of the final weights: the best ones if they are kept.

        Returns None if a signal stopped the evaluation.
        """
        last = self._last or self._evaluate_and_keep(step)
        if last is None:
            return None
        self.best.write()
        evaluations = {self._part: last}
        with self.preemption.evaluation(step), self._best_weights(step) as are_others:
            if are_others:
                evaluations[self._part] = self._evaluate(self.preemption)
            if "test" not in evaluations:
                evaluate = self._run.task.make_evaluator(self._run.data.test)
                evaluations["test"] = evaluate(self.preemption)
                if evaluations["test"]:
                    of = self.prepared.checkpoints.best if are_others else step
                    self.monitor.say_figures("test", of, evaluations["test"].metrics)
        return None if None in evaluations.values() else evaluations

    @contextlib.contextmanager
    def _best_weights(self, step: int) -> Iterator[bool]:
        """Use the best weights in the block; yield whether they are not those of `step`."""
        checkpoints, train_state = self.prepared.checkpoints, self._run.train_state
        best = checkpoints.best
        if best not in (None, step, *dict(find(checkpoints.directory))):
            checkpoints.say(f"warning     the best checkpoint, of step {best}, is missing")
            best = None
        if best in (None, step):
            yield False
            return
        with restore_after(train_state.variables().values()):
            checkpoints.restore(wanted=best)
            train_state.set_copies()
            yield True
        train_state.set_copies()
