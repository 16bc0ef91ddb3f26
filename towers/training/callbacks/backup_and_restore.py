"""Resumes a `fit` that was killed, in the middle of an epoch and bit for bit.

    model.fit(x, y, epochs=10, callbacks=[towers.callbacks.ExactResume("saved", every_steps=500)])

State is saved between the `on_train_batch_begin` callbacks and the step, and restored at the same
place of the same batch, so the other callbacks do not matter. Keras still counts the batches that
were trained on before; their steps are skipped.
"""

import dataclasses
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import files, tf_internals
from towers.errors import InputError, RunError
from towers.training.callbacks.saved_attributes import pack, unpack, unsaved_note
from towers.training.run import checkpoint
from towers.training.run.checkpoint_manager import CheckpointManager

_NUM_KEPT = 2  # the older one is read if the newest is damaged


class ExactResume(keras.callbacks.Callback):
    """Saves the state of `fit`, and resumes from it when the same `fit` is called again.

    The same call in a new process ends with the weights and the History of an uninterrupted `fit`,
    in plain Keras and over towers: bit for bit on CPUs, and on GPUs after
    `towers.devices.configure(deterministic=True)`. Saved are weights, optimizer, metrics, Keras'
    seeds, the random states of Python and NumPy, epoch, batch, History, and the position in the
    data. Of arrays and `tf.data` that is the iterator's state; batches made in Python, as by
    `keras.utils.PyDataset`, are read again from the beginning of the epoch and dropped.

    Limits: with `shuffle="batch"` the order within a batch differs. TensorFlow does not resume
    exactly where a shuffled dataset is repeated and a pass has just ended: shuffle after `repeat`.
    The generators of `tf.random` are not saved, nor is the state of other callbacks unless they are
    in `also`. Callbacks see the epoch's earlier batches again, with the logs of the last one. Put
    this callback last, after those that change weights when training ends. A fit that has ended is
    not repeated, but goes on with more `epochs`: to start anew, name another folder.
    """

    def __init__(
        self,
        directory: str | Path,
        every_steps: int = 0,
        every_epochs: int = 1,
        also: Sequence[Any] = (),
    ):
        """Set where and when to save.

        Args:
            directory: of this fit alone; made if it is not there.
            every_steps: steps between saves within an epoch; 0: none.
            every_epochs: epochs between saves; 0: only as `every_steps` says.
            also: callbacks, such as EarlyStopping and ReduceLROnPlateau, or other objects whose
                public attributes are saved, see `saved_attributes`. A PyDataset that shuffles its
                own indices in `on_epoch_end` has to be one of them.

        Raises:
            InputError: an argument is out of range.
        """
        super().__init__()
        for name, value in {"every_steps": every_steps, "every_epochs": every_epochs}.items():
            if value < 0:
                raise InputError(f"{name}={value} must be at least 0")
        self.directory, self.also = Path(directory), list(also)
        remedy = "delete them to begin anew"
        self._checkpoints = CheckpointManager(self.directory, {}, {}, _NUM_KEPT, remedy=remedy)
        self.every_steps, self.every_epochs = every_steps, every_epochs

    def on_train_begin(self, logs: Any = None) -> None:
        """Read the newest checkpoint, and let Keras begin at its epoch."""
        files.check_train_dir(self.directory, overwrite=False, flag="directory")
        self._step = _own_step(self.model.train_function)
        self._epoch, self._first_epoch, self._batch = 0, None, 0
        self._num_steps, self._saved_at = 0, 0  # steps of the fit, and those by the last save
        self._logs: dict[str, Any] = {}
        self._iterator, self._is_long_pass = None, False
        self._positions: dict[str, bytes | None] = {}
        checkpoint.tidy(self.directory)
        newest = self._checkpoints.newest(_read, lambda line: warnings.warn(line, stacklevel=2))
        self._saved = newest[1] if newest else None
        vars(self.model).pop("_towers_resume_at", None)
        if self._saved is None:
            return
        about, ended = self._saved.about, self._saved.about["ended"]
        tf_internals.begin_at_epoch(self.model, self.params["epochs"] if ended else about["epoch"])
        if ended or about["epoch"] >= self.params["epochs"]:
            print(f"ExactResume: {self.directory} holds a fit that has ended; it is not repeated")
            self._restore()
        else:
            print(f"ExactResume: goes on at epoch {about['epoch'] + 1}, batch {about['batch']}")
            steps = [about.get("steps"), self.params.get("steps")]
            if None not in steps and steps[0] != steps[1]:
                warnings.warn(
                    f"ExactResume: an epoch has {steps[1]} steps, and had {steps[0]} when it was "
                    "saved: for other data or another batch size name another folder",
                    stacklevel=2,
                )
            vars(self.model)["_towers_resume_at"] = about["batch"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the random state: data that are made in Python depend on it.

        Args:
            epoch: its number, from 0.
            logs: Keras' figures of the epoch so far.
        """
        tf_internals.begin_at_epoch(self.model, None)  # else the next fit would begin there, too
        self._epoch = epoch
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        if self._saved is not None:
            _set_random_state(self._saved.about["random_at_epoch"])
            unpack(self._saved.arrays["also"], self.also)
        self._random_at_epoch = _random_state()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Replace the step for one call only: an interrupted fit must not stay changed.

        Args:
            batch: its number in the epoch, from 0.
            logs: Keras' figures; unused.
        """
        self._batch = batch
        self._step = _own_step(self.model.train_function)
        self.model.train_function = self._step_or_skip

    def on_train_end(self, logs: Any = None) -> None:
        """Save the end, from which a call with more epochs goes on."""
        if self._first_epoch is not None:
            self._random_at_epoch, ended = _random_state(), bool(self.model.stop_training)
            if self._iterator is not None and not ended:
                goes_on = self._is_long_pass
                data = self._iterator if goes_on else tf_internals.next_pass(self._iterator)
                self._positions["position"] = self._iterator_state(data)
            self._save(self._epoch + 1, 0, ended)
        tf_internals.begin_at_epoch(self.model, None)

    def _step_or_skip(self, iterator: Any) -> Any:
        """Make the step or skip it; save or restore the state before it."""
        self.model.train_function = self._step
        if self._saved is not None:
            batch, arrays = self._saved.about["batch"], self._saved.arrays
            if self._batch == 0 and (batch or "position" in arrays):
                self._step(iterator)  # creates the variables; its numbers are overwritten
            if self._batch < batch:
                return self._saved.about["logs"]
            self._restore_at(iterator)
        elif self._is_due():
            self._positions["position"] = self._iterator_state(iterator)
            self._save(self._epoch, self._batch)
        if self._batch == 0:
            self._is_long_pass = iterator is self._iterator
            if self.every_steps and not self._is_long_pass:
                self._positions["start"] = self._iterator_state(iterator)
        self._iterator = iterator
        self._num_steps += self.model.steps_per_execution
        self._logs = self._step(iterator)
        return self._logs

    def _is_due(self) -> bool:
        epochs = 0 if self._batch else self._epoch - self._first_epoch
        if epochs and self.every_epochs and epochs % self.every_epochs == 0:
            return True
        return 0 < self.every_steps <= self._num_steps - self._saved_at

    def _iterator_state(self, iterator: Any) -> bytes | None:
        try:
            return tf_internals.iterator_state(iterator)
        except tf.errors.FailedPreconditionError as error:  # "PyFunc is stateful."
            reason = error.message.rpartition("}}")[2].partition(".")[0].strip()
            if self._is_long_pass:
                reason = "one pass over the data takes several epochs"
            if not reason.startswith(("PyFunc", "EagerPyFunc")):
                warnings.warn(
                    f"ExactResume cannot tell where these data are ({reason}): a fit that is "
                    "killed will read them again from the epoch's beginning, perhaps others",
                    stacklevel=2,
                )
            return None

    def _restore_at(self, iterator: Any) -> None:
        saved, position = self._saved, self._saved.arrays.get("position")
        self._restore()
        if position is not None:
            tf_internals.set_iterator_state(iterator, position.tobytes())
            if saved.about["batch"] and "start" in saved.arrays:
                # At the end of a pass, `position` does not say how often it was shuffled: a dataset
                # that is shuffled anew for each pass counts them for all its iterators.
                self._positions["start"] = saved.arrays["start"].tobytes()
                again = tf_internals.next_pass(iterator)
                tf_internals.set_iterator_state(again, self._positions["start"])
                next(again, None)
            _set_random_state(saved.about["random"])
        elif saved.about["batch"]:
            for _ in range(saved.about["batch"] - self.model.steps_per_execution):
                next(iterator)

    def _restore(self) -> None:
        """Restore everything but the position in the data."""
        about, history = self._saved.about, self.model.history
        variables, arrays = self._variables(about["batch"] > 0), self._saved.arrays
        groups = "model/", "optimizer/", "metrics/"
        of_model = {name: array for name, array in arrays.items() if name.startswith(groups)}
        kinds = checkpoint.kinds_of(variables), checkpoint.kinds_of(of_model)
        if differs := checkpoint.first_difference(*kinds):
            raise InputError(
                f"{self.directory} is of another fit: {differs}; name another folder, or build "
                "the model before fit"
            )
        for name, variable in variables.items():
            variable.assign(arrays[name])
        if unsaved := unpack(arrays["also"], self.also):
            warnings.warn(unsaved_note(unsaved), stacklevel=2)
        history.epoch, history.history = about["epochs"], about["history"]
        if about["batch"] == 0:
            self.model.reset_metrics()
        self._num_steps = self._saved_at = int(arrays["step"])
        self._saved = None
        vars(self.model).pop("_towers_resume_at", None)

    def _variables(self, within_epoch: bool) -> dict[str, Any]:
        """Return {name in the file: variable}, within an epoch those of metrics, too."""
        model = self.model
        if model.built and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        metrics = {id(v): v for v in model.metrics_variables}
        model_variables = [v for v in model.variables if id(v) not in metrics]
        groups = {"model": model_variables, "optimizer": model.optimizer.variables}
        if within_epoch:
            groups["metrics"] = list(metrics.values())
        return {f"{name}/{i}": v for name, group in groups.items() for i, v in enumerate(group)}

    def _save(self, epoch: int, batch: int, ended: bool = False) -> None:
        variables = self._variables(batch > 0)
        arrays = {name: keras.ops.convert_to_numpy(v) for name, v in variables.items()}
        for name, position in self._positions.items():
            if position is not None and not ended:
                arrays[name] = np.frombuffer(position, np.uint8)
        about = {
            "epoch": epoch,
            "batch": batch,
            "ended": ended,
            "logs": tf.nest.map_structure(float, self._logs),
            "history": self.model.history.history,
            "epochs": self.model.history.epoch,
            "steps": self.params.get("steps"),
            "random": _random_state(),
            "random_at_epoch": _random_state() if ended else self._random_at_epoch,
        }
        arrays["also"] = pack(self.also)
        self._saved_at = self._num_steps
        self._checkpoints.identity = about
        arrays["step"] = np.int64(self._num_steps)
        try:
            self._checkpoints.save_now(self._num_steps, arrays)
        except RunError as error:
            if ended or epoch == self.params["epochs"]:
                raise
            warnings.warn(f"{error}; the fit goes on, and the next save tries again", stacklevel=2)


@dataclasses.dataclass(frozen=True)
class _FitState:
    arrays: dict[str, np.ndarray]
    about: dict[str, Any]


def _read(prefix: str, reader: Any) -> _FitState:
    about = checkpoint.identity_of(reader)
    if "epoch" not in about:
        raise InputError(f"{prefix} is of a run of `towers train`: name another folder for a fit")
    arrays = checkpoint.values_of(reader)
    if "also" not in arrays:
        raise InputError(f"{prefix} is of an older towers: go on with that, or delete it")
    return _FitState(arrays, about)


def is_skipped(model: keras.Model, batch: int) -> bool:
    """Return whether a batch's step is skipped: it was made before the fit was killed.

    Args:
        model: the model of the fit.
        batch: index of the batch in its epoch.
    """
    return batch < vars(model).get("_towers_resume_at", 0)


def _own_step(step: Callable) -> Callable:
    """Return a model's own step; a fit that was interrupted may have left it replaced."""
    while isinstance(getattr(step, "__self__", None), ExactResume):
        step = step.__self__._step
    return step


def _random_state() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [random.getstate(), [kind, keys.tolist(), *rest]]


def _set_random_state(state: Sequence[Any]) -> None:
    (version, keys, gauss), of_numpy = state
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(of_numpy))
