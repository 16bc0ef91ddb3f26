"""Callbacks of Keras in the loop of a run: `--callbacks=module:function`.

    def callbacks():  # in my_callbacks.py
        return [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.EarlyStopping(patience=3)]

Their hooks are called as `fit` calls them, except those of an evaluation's batches. With callbacks
each call of TensorFlow makes only one step. Each checkpoint also has what they hold: if a run goes
on, EarlyStopping and ModelCheckpoint know what was best, and CSVLogger adds to its file.
"""

import csv
import dataclasses
import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import files
from towers.errors import InputError, RunError
from towers.options.functions import call_without_arguments
from towers.options.triggers import Timetable
from towers.training.callbacks.backup_and_restore import ExactResume
from towers.training.callbacks.saved_attributes import pack, unpack, unsaved_note
from towers.training.run.setup import RunContext
from towers.training.step.evaluation import Evaluation
from towers.training.step.task import Task
from towers.training.step.train_state import restore_after

_K = keras.callbacks
# These raise after the first epoch if they do not know the metric.
_MONITORS = _K.EarlyStopping | _K.ModelCheckpoint | _K.ReduceLROnPlateau
_SET_RATE = _K.LearningRateScheduler | _K.ReduceLROnPlateau


def load(names: str) -> list[_K.Callback]:
    """Return the callbacks of the functions in `names`, "module:function,module:other".

    Raises:
        InputError: a function returns something else, or a callback that resumes training.
    """
    callbacks: list[_K.Callback] = []
    for name in filter(None, names.split(",")):
        returned = call_without_arguments("callbacks", name)
        callbacks += returned if isinstance(returned, list | tuple) else [returned]
        for callback in callbacks:
            if not isinstance(callback, _K.Callback):
                what, needed = repr(callback)[:60], "keras.callbacks.Callback"
                if isinstance(callback, type):
                    what, needed = f"the class {callback.__name__}", f"{callback.__name__}(...)"
                in_list = "a list with " if callback is not returned else ""
                raise InputError(
                    f"--callbacks={name} returned {in_list}{what}; a list of {needed} is needed"
                )
            _check_hooks(name, callback)
            if isinstance(callback, _K.BackupAndRestore | ExactResume):
                raise InputError(
                    f"--callbacks={name}: a run goes on by itself where it was stopped: leave "
                    f"{type(callback).__name__} out"
                )
    return callbacks


def _check_hooks(name: str, callback: _K.Callback) -> None:
    """Raise InputError if a hook does not take the arguments that Keras calls it with."""
    for hook in filter(re.compile("on_.*_(begin|end)").fullmatch, dir(_K.Callback)):
        try:
            signature = inspect.signature(getattr(callback, hook))
        except ValueError:  # not written in Python
            continue
        try:
            if "batch" in hook:
                signature.bind(0, logs={})
            else:
                signature.bind(*([0] if "epoch" in hook else []), {})
        except TypeError as error:
            first = next((word for word in ("batch", "epoch") if word in hook), "")
            raise InputError(
                f"--callbacks={name}: {type(callback).__name__}.{hook} cannot be called as Keras "
                f"does, {error}: write def {hook}(self, {first and f'{first}, '}logs=None)"
            ) from None


def prepare(callbacks: Sequence[_K.Callback], task: Task, evaluates: bool) -> list[str]:
    """Set the `mode` of callbacks that is "auto": Keras knows only the metrics of a compiled model.

    Args:
        callbacks: of the run.
        task: the task of the run, whose metrics callbacks may monitor.
        evaluates: whether there are evaluations during the run.

    Returns:
        Notes for whoever uses what they write.

    Raises:
        InputError: there is no such metric, or one sets a learning rate that the schedule sets.
    """
    directions = task.metric_directions()
    of_training = [name.removeprefix("batch/") for name in task.step_names if "batch/" in name]
    known = ["loss", *of_training, *(f"val_{name}" for name in directions)]
    for callback in callbacks:
        kind = type(callback).__name__
        if task.rate_is_set and isinstance(callback, _SET_RATE):
            raise InputError(_sets_rate(kind))
        if getattr(callback, "mode", None) == "auto":
            metric = callback.monitor.removeprefix("val_")
            callback.mode = directions.get(metric) or "auto"
        if not isinstance(callback, _MONITORS) or not getattr(callback, "save_best_only", True):
            continue
        if callback.monitor not in known:
            close = difflib.get_close_matches(callback.monitor, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise InputError(
                f"--callbacks: there is no metric for {kind} of the name {callback.monitor}; {hint}"
            )
        if callback.monitor.startswith("val_") and not evaluates:
            raise InputError(
                f"--callbacks: {kind} monitors {callback.monitor}, and --evaluate_every_epochs=0 "
                "evaluates only at the end: type --evaluate_every_epochs=1"
            )
    stores = any(isinstance(c, _K.ModelCheckpoint) and not c.save_weights_only for c in callbacks)
    if not stores or task.options.augment == "off" or not task.data.image_shape:
        return []
    return [
        "note        the model in a file of ModelCheckpoint takes images as they are prepared "
        "here, that of towers export as they are stored"
    ]


class _EpochMeans:
    """The means of an epoch's steps; as what callbacks hold, they are saved.

    Attributes:
        sums: {name: sum over the steps so far}.
        num_steps: number of steps of the epoch that this run has made.
        epoch_size: number of examples of an epoch.
        evaluated: sha256 of the examples that are evaluated, if it is known.
    """

    def __init__(self, size: int, data: str | None):
        """Begin an epoch of so many examples."""
        self.epoch_size, self.evaluated = size, data
        self.sums: dict[str, float] = {}
        self.num_steps = 0

    def add(self, logs: Mapping[str, float]) -> None:
        """Add those of a step."""
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in logs.items()}
        self.num_steps += 1

    def means(self) -> dict[str, float]:
        """Return {name: mean}."""
        return {name: value / self.num_steps for name, value in self.sums.items()}


@dataclasses.dataclass
class Callbacks:
    """Calls the hooks of a run's Keras callbacks. False if there are none."""

    callbacks: Sequence[_K.Callback]  # as `prepare` leaves them
    run: RunContext  # whose model they see
    timetable: Timetable
    evaluated: str | None  # sha256 of the examples that are evaluated, if it is known

    def __post_init__(self) -> None:
        """Set the model and the parameters of the callbacks."""
        timetable, self._train_state = self.timetable, self.run.train_state
        self._model, self._training = self._train_state.model, False
        self._new_means = functools.partial(_EpochMeans, timetable.train_size, self.evaluated)
        self._means, self._in_epoch = self._new_means(), False
        self._last_logs: dict[str, float] = {}  # of an epoch
        self._before: np.ndarray | None = None  # the state before an on_epoch_end that is called
        self._list = None
        if not self.callbacks:
            return
        self._list = _K.CallbackList(
            list(self.callbacks),
            model=self._model,
            epochs=self._epoch(timetable.last_step - 1) + 1,
            steps=math.ceil(timetable.train_size / timetable.batch_size),
            verbose=0,
        )
        self._model.stop_training = False

    def __bool__(self) -> bool:
        """Return whether there are callbacks."""
        return self._list is not None

    def stopped(self) -> bool:
        """Return whether a callback has set `stop_training`."""
        return bool(self) and self._model.stop_training

    def stop_reason(self) -> str:
        """Return which callback has stopped training, as far as Keras knows."""
        stopped = (c for c in self._list.callbacks if getattr(c, "stopped_epoch", 0))
        return f"{next((type(c).__name__ for c in stopped), 'a callback')} has set stop_training"

    def state(self) -> np.ndarray:
        """Return what the callbacks hold, for a checkpoint."""
        if self._before is not None:
            return self._before
        return pack([self._means, *self._list.callbacks])

    def begin_run(self, step: int, state: np.ndarray | None) -> list[str]:
        """Call on_train_begin; if the run goes on, the callbacks then hold what they held.

        Args:
            step: number of updates so far.
            state: from `state`, of the restored checkpoint; None: there is none.

        Returns:
            Notes on what is not as it was.
        """
        if not self:
            return []
        notes, now, before = [], self._means, self._new_means()
        if state is not None:
            unpack(state, [before])
        if same_size := before.epoch_size == now.epoch_size:
            self._means = before
        else:
            notes.append(
                f"note        an epoch has {now.epoch_size} examples, and had {before.epoch_size}: "
                "callbacks see epochs counted anew, and no row of a CSVLogger is dropped"
            )
        loggers = [c for c in self._list.callbacks if isinstance(c, _K.CSVLogger)]
        for logger in loggers if step or state is not None else ():
            logger.append = True
            if same_size:
                _cut(logger, self._epoch(step - bool(self._means.num_steps)))
        if state is None:
            self._call("on_train_begin")
        else:  # the hooks have been called before: what they change is as it was saved
            with restore_after(self._train_state.variables().values()):
                self._call("on_train_begin")
                if self._means.num_steps:
                    self._call("on_epoch_begin", self._epoch(step - 1))
                    self._in_epoch = True
            self._train_state.set_copies()
            # A logger sees by its file whether there is a header.
            anew = loggers + self._of_other_data(before.evaluated, now.evaluated)
            if names := [type(c).__name__ for c in anew[len(loggers) :]]:
                notes.append(
                    f"note        what was best is of other examples than are evaluated now: "
                    f"{', '.join(names)} {'begins' if len(names) == 1 else 'begin'} anew"
                )
            others = [None if c in anew else c for c in self._list.callbacks]
            if unsaved := unpack(state, [self._means if same_size else None, *others]):
                notes.append(f"note        {unsaved_note(unsaved)}")
            self._means.evaluated = now.evaluated
        self._training = True
        return notes

    def _of_other_data(self, before: str | None, now: str | None) -> list[_K.Callback]:
        if None in (before, now) or before == now:
            return []
        monitoring = (c for c in self._list.callbacks if isinstance(c, _MONITORS))
        return [c for c in monitoring if c.monitor.startswith("val_")]

    def is_epoch_open(self, step: int) -> bool:
        """Return whether an epoch ends at `step` whose on_epoch_end is not in the saved state."""
        return bool(self) and self._means.num_steps > 0 and self._ends_epoch(step)

    def begin_step(self, step: int) -> None:
        """Call on_train_batch_begin, and before it on_epoch_begin if an epoch begins."""
        if self and not self._in_epoch:
            self._call("on_epoch_begin", self._epoch(step))
            self._in_epoch = True
        self._call("on_train_batch_begin", self._batch_index(step))

    def end_step(self, step: int, values: Mapping[str, tf.Tensor]) -> None:
        """Call on_train_batch_end.

        Args:
            step: number of updates so far.
            values: the scalars of the last step, see `Task.step_names`.
        """
        if self:
            logs = {"loss": float(values["loss"]) + float(values["penalty"])}
            of_batch = [name for name in values if name.startswith("batch/")]
            logs |= {name.removeprefix("batch/"): float(values[name]) for name in of_batch}
            self._means.add(logs)
            self._call("on_train_batch_end", self._batch_index(step - 1), logs)

    def end_epoch(self, step: int, evaluation: Evaluation | None) -> bool:
        """Call on_epoch_end if an epoch or the run ends; return whether weights changed.

        The logs have the means of the epoch's steps and, as val_..., those of the evaluation.

        Args:
            step: number of updates so far.
            evaluation: the evaluation after this step; None: there was none.
        """
        if not self.is_epoch_open(step):
            return False
        logs = self._means.means() | {f"val_{n}": v for n, v in _figures(evaluation).items()}
        self._last_logs = logs
        self._before = self.state()  # is saved if a hook fails: the epoch ends once more then
        changed = self._changes_weights("on_epoch_end", self._epoch(step - 1), logs)
        self._before, self._in_epoch = None, False
        if self._epoch(step) > self._epoch(step - 1):  # else a run of more epochs goes on in it
            self._means = self._new_means()
        return changed

    def end_run(self) -> bool:
        """Call on_train_end; return whether weights changed."""
        self._training = False
        return bool(self) and self._changes_weights("on_train_end", self._last_logs)

    def around(self, evaluate: Callable[..., Evaluation | None]) -> Callable:
        """Return `evaluate` with calls of on_test_begin and on_test_end while the run trains."""

        def evaluated(stop: Callable[[], bool]) -> Evaluation | None:
            if not self._training:
                return evaluate(stop)
            self._call("on_test_begin")
            evaluation = evaluate(stop)
            self._call("on_test_end", _figures(evaluation))
            return evaluation

        return evaluated if self else evaluate

    def _ends_epoch(self, step: int) -> bool:
        return self._epoch(step) > self._epoch(step - 1) or step == self.timetable.last_step

    def _epoch(self, step: int) -> int:
        return self.timetable.examples(step) // self.timetable.train_size

    def _batch_index(self, step: int) -> int:
        """Return how many steps of the current epoch precede step `step` of the run."""
        size, batch_size = self.timetable.train_size, self.timetable.batch_size
        return self.timetable.examples(step) % size // batch_size

    def _call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks; copy the weights it assigns to all towers."""
        if not self:
            return
        model, lent = vars(self._model), "optimizer" not in vars(self._model)
        if lent:  # experiment trackers read the learning rate there
            model["optimizer"] = next(iter(self._train_state.optimizers), None)
        before = self._rate()
        try:
            getattr(self._list, hook)(*args)
        finally:
            after = self._rate()
            if lent:
                del model["optimizer"]
        self._train_state.set_copies()
        if self.run.task.rate_is_set and after != before:
            raise RunError(_sets_rate(hook))

    def _changes_weights(self, hook: str, *args: Any) -> bool:
        before = self._model.get_weights()
        self._call(hook, *args)
        pairs = zip(before, self._model.get_weights(), strict=True)
        return not all(np.array_equal(one, other) for one, other in pairs)

    def _rate(self) -> float | None:
        optimizer = getattr(self._model, "optimizer", None)
        return None if optimizer is None else float(optimizer.learning_rate)


def _cut(logger: _K.CSVLogger, epoch: int) -> None:
    """Drop the rows of `epoch` and later ones, which the run makes again."""
    path = Path(logger.filename)
    if path.is_file():
        with path.open(newline="") as file:
            header, *rows = list(csv.reader(file, delimiter=logger.sep)) or [[]]
        kept = [row for row in rows if row and row[0].isdigit() and int(row[0]) < epoch]
        with files.replacing(path) as temporary, temporary.open("w", newline="") as file:
            csv.writer(file, delimiter=logger.sep).writerows([header, *kept] if kept else [])


def _sets_rate(who: str) -> str:
    return (
        f"--callbacks: {who} sets the learning rate, which --schedule does in each step: let "
        "--model return a compiled model, whose optimizer has its own, or leave it to --schedule"
    )


def _figures(evaluation: Evaluation | None) -> dict[str, float]:
    metrics = evaluation.metrics if evaluation else {}
    return {name: value for name, value in metrics.items() if value is not None}
