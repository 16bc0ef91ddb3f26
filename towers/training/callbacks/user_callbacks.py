"""Keras callbacks in the loop of a run, from `--callbacks=module:function`.

Hooks are called where `fit` calls them, except those of an evaluation's batches. With callbacks
each call of TensorFlow makes one step. The state of callbacks is not saved.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.errors import InputError
from towers.options.triggers import Timetable
from towers.training.run.place import END, Place
from towers.training.run.setup import RunContext
from towers.training.step.evaluation import Evaluation
from towers.training.step.train_state import restore_after

_K = keras.callbacks
_SET_RATE = _K.LearningRateScheduler | _K.ReduceLROnPlateau


def checked(made: Sequence[Any], run: RunContext) -> list[_K.Callback]:
    """Return the callbacks that the functions of `--callbacks` have made, each one or a list.

    The run is the one that will call them, see `Callbacks`.

    Raises:
        InputError: one is none, sets the learning rate, as the schedule does, or monitors no
            metric.
    """
    callbacks: list[_K.Callback] = []
    for each in made:
        callbacks += each if isinstance(each, list | tuple) else [each]
    for callback in callbacks:
        kind = type(callback).__name__
        if not isinstance(callback, _K.Callback) or isinstance(callback, _K.BackupAndRestore):
            raise InputError(
                f"--callbacks: a function returned {str(callback)[:60]}; return a list of "
                "keras.callbacks.Callback, without BackupAndRestore (runs resume without it)"
            )
        if run.task.rate_is_set and isinstance(callback, _SET_RATE):
            raise InputError(
                f"--callbacks: {kind} sets the learning rate, but so does --schedule; return a "
                "compiled model from --model, with its own optimizer"
            )
        if getattr(callback, "mode", None) == "auto":
            metric = callback.monitor.removeprefix("val_")
            if metric not in run.directions and getattr(callback, "save_best_only", True):
                names = ", ".join(run.directions)
                raise InputError(
                    f"--callbacks: {kind} monitors {callback.monitor}; allowed are {names}, also "
                    "with val_"
                )
    return callbacks


@dataclasses.dataclass
class Callbacks:
    """Calls the hooks of a run's Keras callbacks. False if there are none."""

    callbacks: Sequence[_K.Callback]
    run: RunContext  # whose model they see
    timetable: Timetable
    place: Place  # holds the figures of the epoch so far

    def __post_init__(self) -> None:
        """Set the model and the parameters of the callbacks; after the end none is called."""
        timetable, self._model = self.timetable, self.run.train_state.model
        self._step = timetable.first_step
        self.callbacks = [] if self.place.stage == END else list(self.callbacks)
        epochs = self._position(timetable.last_step - 1)[0] + 1
        steps = math.ceil(timetable.train_size / timetable.batch_size)
        given = dict(model=self._model, epochs=epochs, steps=steps, verbose=0)
        self._list = _K.CallbackList(self.callbacks, **given)
        self._model.stop_training = self.place.is_stopped(
            self.run.due.callbacks, timetable.last_step
        )
        if self:  # experiment trackers read the learning rate there
            optimizer = next(iter(self.run.train_state.optimizers), None)
            vars(self._model).setdefault("optimizer", optimizer)

    def __bool__(self) -> bool:
        """Return whether there are callbacks."""
        return bool(self.callbacks)

    def stopped(self) -> bool:
        """Return whether a callback has set `stop_training`."""
        return self._model.stop_training

    def begin_run(self) -> list[str]:
        """Call on_train_begin; after a resume also on_epoch_begin, and return notes.

        The variables keep the values of the checkpoint, since these hooks changed them before.
        """
        resumes, train_state = bool(self) and self._step > 0, self.run.train_state
        for logger in (c for c in self.callbacks if resumes and isinstance(c, _K.CSVLogger)):
            logger.append = True  # or it would delete its rows
        with restore_after(train_state.variables().values() if resumes else ()):
            self.call("on_train_begin")
            if resumes and (self._position(self._step)[1] or self.place.epoch_begin is not None):
                self._begin_epoch()
        train_state.set_copies()
        notes = ["note        callbacks start from scratch after a resume"] if resumes else []
        for callback in self.callbacks:
            watched = str(getattr(callback, "monitor", ""))
            if not watched.startswith("val_") or not getattr(callback, "save_best_only", True):
                continue
            who = f"note        {type(callback).__name__} monitors {watched}"
            if not self.run.due.evaluate_every_epochs:
                notes.append(f"{who}, but --evaluate_every_epochs=0 makes no evaluation: type 1")
            elif not self.run.data.validation:
                notes.append(f"{who} on the test set; --validation_fraction=0.1 sets apart others")
        return notes

    def begin_step(self) -> None:
        """Call on_train_batch_begin, and before it on_epoch_begin if an epoch begins."""
        if self.place.epoch_begin is None:
            self._begin_epoch()
        self.call("on_train_batch_begin", self._position(self._step)[1])

    def end_step(self, values: Mapping[str, tf.Tensor]) -> None:
        """Call on_train_batch_end with the scalars of the last step, see `Task.step_names`."""
        if self:
            logs = {"loss": float(values["loss"]) + float(values["penalty"])}
            of_batch = [name for name in values if name.startswith("batch/")]
            logs |= {name.removeprefix("batch/"): float(values[name]) for name in of_batch}
            sums = self.place.sums
            self.place.sums = {name: sums.get(name, 0.0) + value for name, value in logs.items()}
            self._step += 1
            self.call("on_train_batch_end", self._position(self._step - 1)[1], logs)

    def at_end_of_epoch(self) -> bool:
        """Return whether on_epoch_end is due: an epoch ends, or the run in the middle of one."""
        is_whole = self._position(self._step)[1] == 0 or self._step == self.timetable.last_step
        return bool(self) and self.place.epoch_begin is not None and is_whole

    def end_epoch(self, evaluation: Evaluation | None) -> bool:
        """Call on_epoch_end; return whether weights changed.

        The logs have the means of the epoch's steps and, as val_..., those of the evaluation.
        """
        begin = self.place.epoch_begin
        logs = {name: value / (self._step - begin) for name, value in self.place.sums.items()}
        self.place.logs = logs | {f"val_{n}": value for n, value in figures(evaluation).items()}
        epoch, _ = self._position(begin)
        changed = self._changes_weights("on_epoch_end", epoch, dict(self.place.logs))
        self.place.epoch_begin = None
        return changed

    def end_run(self) -> bool:
        """Call on_train_end; return whether weights changed."""
        changed = bool(self) and self._changes_weights("on_train_end", dict(self.place.logs))
        self.callbacks = []  # none is called in later evaluations
        return changed

    def _begin_epoch(self) -> None:
        if self.place.epoch_begin is None:
            self.place.sums, self.place.epoch_begin = {}, self._step
        self.call("on_epoch_begin", self._position(self.place.epoch_begin)[0])

    def _position(self, step: int) -> tuple[int, int]:
        """Return the epoch after `step` steps, and how many steps of it are done."""
        epoch, examples = divmod(self.timetable.examples(step), self.timetable.train_size)
        return epoch, examples // self.timetable.batch_size

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks; copy the weights it assigns to all towers."""
        if self:
            getattr(self._list, hook)(*args)
            self.run.train_state.set_copies()

    def _changes_weights(self, hook: str, *args: Any) -> bool:
        before = self._model.get_weights()
        self.call(hook, *args)
        return not all(map(np.array_equal, before, self._model.get_weights()))


def figures(evaluation: Evaluation | None) -> dict[str, float]:
    """Return the values of the metrics of an evaluation, {} without one."""
    return {n: v for n, v in (evaluation.metrics if evaluation else {}).items() if v is not None}
