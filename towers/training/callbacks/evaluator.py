"""Evaluations during a run and at its end: metrics, pictures and the best checkpoint."""

import contextlib
import dataclasses
from collections.abc import Iterator

from towers.monitoring.monitor import Monitor
from towers.training.callbacks.best_checkpoint import BestTracker
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.callbacks.user_callbacks import Callbacks, figures
from towers.training.run.prepare_run import PreparedRun
from towers.training.step.evaluation import Evaluation
from towers.training.step.train_state import restore_after


@dataclasses.dataclass
class Evaluator:
    """Evaluates a run and shows the results.

    During the run it uses the validation data if there are any; the test set is for the end.
    """

    prepared: PreparedRun
    monitor: Monitor  # writes curves and lines
    best: BestTracker
    preemption: PreemptionHandler  # whether to stop
    callbacks: Callbacks  # the user's, whose hooks are called

    def __post_init__(self) -> None:
        """Prepare evaluations; the first one compiles their function."""
        self._run = self.prepared.run
        self._last, self._last_step = None, None
        self._part = "validation" if self._run.data.validation else "test"
        self._evaluate = self._run.task.make_evaluator(self._run.splits()[self._part])

    def evaluate(self, step: int) -> bool:
        """Evaluate after `step` updates; return whether that is the best so far."""
        run, monitor = self._run, self.monitor
        with self.preemption.evaluation(step):
            self.callbacks.call("on_test_begin")
            self._last, self._last_step = self._evaluate(self.preemption), step
            self.callbacks.call("on_test_end", figures(self._last))
            for line in run.take_diagnostics():  # of `test_step`, which is traced here
                monitor.say(f"warning     {line}")
            if self._last is None:
                return False
            monitor.eval_point(step, self._last.metrics, self._part)
            name, _ = run.task.objective()
            value = self._last.metrics.get(f"{name}_ema")
            value = self._last.metrics.get(name) if value is None else value
            is_best = self.best.add(step, self.prepared.timetable.examples(step), value)
            if is_best and run.options.keep_best:
                self.prepared.checkpoints.best = step
            return is_best

    def invalidate(self) -> None:
        """Forget the last result: the weights have changed since."""
        self._last_step = None

    def result_at(self, step: int) -> Evaluation | None:
        """Return the evaluation of `step`, or None."""
        return self._last if self._last_step == step else None

    def stops_early(self) -> bool:
        """Return whether the run ends early."""
        return self.best.is_over() or self.callbacks.stopped()

    def stop_reason(self) -> str:
        """Return why the run ends early."""
        if self.callbacks.stopped():
            return "a callback has set stop_training"
        name, _ = self._run.task.objective()
        epochs = self._run.options.early_stopping_epochs
        return f"{name} was best at step {self.best.step}, {epochs:g} epochs ago or more"

    def evaluate_at_end(self, step: int) -> dict[str, Evaluation] | None:
        """Return {split name: evaluation} of the final weights: the best ones if they are kept.

        Returns None if a signal stopped the evaluation.
        """
        with self.preemption.evaluation(step):
            if self._last_step != step:
                self.evaluate(step)
            if self._last is None:
                return None
            self.best.write()
            evaluations = {self._part: self._last}
            with self._best_weights(step) as are_others:
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
        if best not in (None, step) and not checkpoints.has(best):
            checkpoints.say(f"warning     the checkpoint of step {best}, the best, is not there")
            best = None
        if best in (None, step):
            yield False
            return
        with restore_after(train_state.variables().values()):
            checkpoints.restore(wanted=best)
            train_state.set_copies()
            yield True
        train_state.set_copies()
