"""Evaluations of a run on the way and at its end: figures, pictures, and which was the best."""

import contextlib
from collections.abc import Iterator

from towers.monitoring.image_summaries import Gallery
from towers.monitoring.monitor import Monitor
from towers.training.callbacks.best import BestTracker
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.callbacks.user_callbacks import Callbacks
from towers.training.run.start import PreparedRun
from towers.training.step.evaluation import Evaluation
from towers.training.step.train_state import restore_after


class Evaluator:
    """Evaluates a run and shows what was found.

    On the way it takes validation data where there are any: the test set is for the end.
    """

    def __init__(
        self,
        begun: PreparedRun,
        monitor: Monitor,
        gallery: Gallery,
        best: BestTracker,
        watch: PreemptionHandler,
        callbacks: Callbacks,
    ):
        """Compile nothing yet."""
        self._begun, self._run, self._best = begun, begun.run, best
        self._monitor, self._gallery = monitor, gallery
        self._watch, self._callbacks = watch, callbacks
        self._last, self._last_step = None, None
        self._part = "validation" if self._run.data.validation else "test"
        evaluate = self._run.task.make_evaluator(self._run.splits()[self._part])
        self._evaluate = callbacks.around(evaluate)

    def at(self, step: int) -> bool:
        """Evaluate after `step` updates; return whether that is the best so far."""
        run, monitor = self._run, self._monitor
        with self._watch.evaluation(step):
            self._last, self._last_step = self._evaluate(self._watch), step
            if self._last is None:
                return False
            if not monitor.evaluated(step):  # a crash came between this and what follows
                self._gallery.show_training(step)
                if self._last.predictions:
                    self._gallery.show_evaluation(step, self._last.predictions)
            metrics, (name, _) = self._last.metrics, run.task.objective()
            monitor.eval_point(step, metrics, self._part)
            value = metrics.get(f"{name}_ema")
            value = metrics.get(name) if value is None else value
            is_best = self._best.add(step, self._begun.timetable.examples(step), value)
            if is_best and run.options.keep_best:
                self._begun.checkpoints.best = step
            return is_best

    def forget(self) -> None:
        """Evaluate anew at the end, although the step was evaluated: the weights have changed."""
        self._last_step = None

    def seen_at(self, step: int) -> Evaluation | None:
        """Return the evaluation after `step` updates, None if there was none."""
        return self._last if self._last_step == step else None

    def has_seen(self, step: int) -> bool:
        """Return whether the evaluation after `step` updates is on record, of whatever process."""
        needed = self._run.options.keep_best or self._run.options.early_stopping_epochs
        return self._monitor.evaluated(step) and (not needed or self._best.knows(step))

    def is_over(self) -> bool:
        """Return whether the run ends early."""
        return self._best.is_over() or self._callbacks.stopped()

    def why_over(self) -> str:
        """Return why the run ends early, for a line."""
        if self._callbacks.stopped():
            return "a callback has set stop_training"
        name, _ = self._run.task.objective()
        epochs = self._run.options.early_stopping_epochs
        return f"{name} was best at step {self._best.step}, {epochs:g} epochs ago or more"

    def at_end(self, step: int) -> dict[str, Evaluation] | None:
        """Evaluate the weights that the run ends with: the best ones, if these are kept.

        Returns:
            {part of the data set: its evaluation}, the test set among them; None if a signal came.
        """
        with self._watch.evaluation(step):
            if self._last_step != step:
                self.at(step)
            if self._last is None:
                return None
            self._best.write()
            found = {self._part: self._last}
            with self._best_weights(step) as are_others:
                if are_others:
                    found[self._part] = self._evaluate(self._watch)
                if "test" not in found:
                    found["test"] = self._run.task.make_evaluator(self._run.data.test)(self._watch)
                    if found["test"]:
                        self._monitor.say_figures("test", step, found["test"].metrics)
        return None if None in found.values() else found

    @contextlib.contextmanager
    def _best_weights(self, step: int) -> Iterator[bool]:
        """Restore the best checkpoint for the block; yield whether it is another than `step`'s."""
        checkpoints, masters = self._begun.checkpoints, self._run.masters
        best = checkpoints.best
        if best not in (None, step) and not checkpoints.has(best):
            checkpoints.say(f"warning     the checkpoint of step {best}, the best, is not there")
            best = None
        if best in (None, step):
            yield False
            return
        with restore_after(masters.variables().values()):
            checkpoints.restore(wanted=best)
            masters.set_copies()
            yield True
        masters.set_copies()
