"""A `fit` that was killed goes on in the middle of an epoch, as if nothing had happened.

    model.fit(x, y, epochs=10, callbacks=[towers.callbacks.ExactResume("saved", every_steps=500)])

State is saved at one place, between the callbacks of a batch's begin and its step, and is put back
at the same place of the same batch: so it does not matter what other callbacks do before or after.
Keras itself counts through the batches that were trained on before; their steps are left out.
"""

import dataclasses
import inspect
import json
import random
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_private
from towers.errors import InputError, RunError
from towers.training import checkpoint
from towers.training.saving import Checkpoints

_KEPT = 2  # of the newest: the older one is for a newest one that is damaged


class ExactResume(keras.callbacks.Callback):
    """Saves all that a `fit` needs to go on, and goes on from there when it is called again.

    The same call in a new process ends with the weights and the History of a `fit` that was never
    interrupted, in plain Keras and over towers: bit for bit on CPUs, and on GPUs with
    --deterministic, in a program `towers.devices.configure(deterministic=True)`. Saved are
    weights, optimizer, metrics, Keras' seeds, the random states of Python and NumPy, epoch and
    batch, History, and the position in the data: of arrays and `tf.data` by their iterator; what
    Python makes, as `keras.utils.PyDataset` does, is read again from the epoch's beginning, and
    dropped.

    With `shuffle="batch"` the order within a batch is another one. TensorFlow itself does not go on
    exactly where a shuffled dataset is repeated and a pass has just ended: shuffle after `repeat`.
    Not saved are `tf.random`'s own generators (where a model draws from them), and what other
    callbacks remember, unless they are named in `also`. Callbacks see the epoch's earlier batches
    again, with the logs of the last one. Put this one last, after those that change weights when
    training ends. A fit that has ended is not repeated: to begin anew, name another folder.
    """

    def __init__(
        self,
        directory: str | Path,
        every_steps: int = 0,
        every_epochs: int = 1,
        also: Sequence[Any] = (),
    ):
        """Set where and when.

        Args:
            directory: of this fit alone; made if it is not there.
            every_steps: save after so many steps, too; 0: not within an epoch.
            every_epochs: save when so many epochs are over; 0: only as `every_steps` says.
            also: callbacks, such as EarlyStopping and ReduceLROnPlateau, or other objects, whose
                public attributes are saved, too, if they are numbers, texts, arrays or lists of
                arrays, and are not named as an argument of its class. A PyDataset that shuffles
                its own indices in `on_epoch_end` has to be one of them.

        Raises:
            InputError: an argument is out of range.
        """
        super().__init__()
        for name, value in {"every_steps": every_steps, "every_epochs": every_epochs}.items():
            if value < 0:
                raise InputError(f"{name}={value} must be at least 0")
        self.directory, self.also = Path(directory), list(also)
        remedy = "delete them to begin anew"
        self._checkpoints = Checkpoints(self.directory, {}, {}, _KEPT, remedy=remedy)
        self.every_steps, self.every_epochs = every_steps, every_epochs

    def on_train_begin(self, logs: Any = None) -> None:
        """Find what there is to go on from, and let Keras begin at its epoch."""
        self._step = _plain(self.model.train_function)
        self._epoch, self._first_epoch, self._batch = 0, None, 0
        self._num_steps, self._num_since = 0, 0  # of the fit, and since the last save
        self._logs: dict[str, Any] = {}
        self._iterator, self._is_long_pass = None, False
        self._positions: dict[str, bytes | None] = {}
        self._saved = self._newest()
        vars(self.model).pop("_towers_resume_at", None)
        if self._saved is None:
            return
        about, ended = self._saved.about, self._saved.about["ended"]
        tf_private.begin_at_epoch(self.model, self.params["epochs"] if ended else about["epoch"])
        if ended or about["epoch"] >= self.params["epochs"]:
            print(f"ExactResume: {self.directory} holds a fit that has ended; it is not repeated")
            self._put()
        else:
            place = f"epoch {about['epoch'] + 1}, batch {about['batch']}"
            print(f"ExactResume: goes on at {place}")
            vars(self.model)["_towers_resume_at"] = about["batch"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the random state that an epoch begins with: Python's own data are made from it."""
        tf_private.begin_at_epoch(self.model, None)  # it would be that of the next fit, too
        self._epoch = epoch
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        if self._saved is not None:
            _set_random_state(self._saved.about["random_at_epoch"])
            self._saved.put_also(self.also)
        self._random_at_epoch = _random_state()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Take the place of the step for one call; nothing is left behind if the fit ends here."""
        self._batch = batch
        self._step = _plain(self.model.train_function)
        self.model.train_function = self._call

    def on_train_end(self, logs: Any = None) -> None:
        """Save the end."""
        if self._first_epoch is not None:
            self._save(self._epoch + 1, 0, ended=bool(self.model.stop_training))
        tf_private.begin_at_epoch(self.model, None)

    def _call(self, iterator: Any) -> Any:
        """Do what the step does, leave it out, or save and put back what it starts from."""
        self.model.train_function = self._step
        if self._saved is not None:
            batch, arrays = self._saved.about["batch"], self._saved.arrays
            if self._batch == 0 and (batch or "position" in arrays):
                self._step(iterator)  # makes what the first step makes; it does not count
            if self._batch < batch:
                return self._saved.about["logs"]
            self._go_on(iterator)
        elif self._is_due():
            self._positions["position"] = self._position_of(iterator)
            self._save(self._epoch, self._batch)
        if self._batch == 0:
            self._is_long_pass = iterator is self._iterator
            if self.every_steps and not self._is_long_pass:
                self._positions["start"] = self._position_of(iterator)
        self._iterator = iterator
        self._num_steps += self.model.steps_per_execution
        self._num_since += self.model.steps_per_execution
        self._logs = self._step(iterator)
        return self._logs

    def _is_due(self) -> bool:
        if self._batch == 0 and self._epoch > self._first_epoch:
            since = self._epoch - self._first_epoch
            if self.every_epochs and since % self.every_epochs == 0:
                return True
        return 0 < self.every_steps <= self._num_since

    def _position_of(self, iterator: Any) -> bytes | None:
        """Return where the data are, if their iterator can tell."""
        try:
            return tf_private.iterator_state(iterator)
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

    def _go_on(self, iterator: Any) -> None:
        """Put back all that was saved before this batch."""
        saved, position = self._saved, self._saved.arrays.get("position")
        self._put()
        if position is not None:
            tf_private.set_iterator_state(iterator, position.tobytes())
            if saved.about["batch"] and "start" in saved.arrays:
                # Where a pass is about to end, its place does not tell how often it was shuffled.
                self._positions["start"] = saved.arrays["start"].tobytes()
                tf_private.begin_pass_again(iterator, self._positions["start"])
            _set_random_state(saved.about["random"])
        elif saved.about["batch"]:
            for _ in range(saved.about["batch"] - self.model.steps_per_execution):
                next(iterator)

    def _put(self) -> None:
        """Put back what is in the process; what is saved from now on comes after it."""
        about, history = self._saved.about, self.model.history
        self._saved.put(self._variables(about["batch"] > 0), self.directory)
        self._saved.put_also(self.also)
        history.epoch, history.history = about["epochs"], about["history"]
        if about["batch"] == 0:
            self.model.reset_metrics()
        self._num_steps, self._num_since = self._saved.step, 0
        self._saved = None
        vars(self.model).pop("_towers_resume_at", None)

    def _variables(self, within_epoch: bool) -> dict[str, Any]:
        """Return {name in the file: variable}; metrics begin anew with each epoch."""
        model = self.model
        if model.built and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        metrics = {id(v): v for v in model.metrics_variables}
        own = [v for v in model.variables if id(v) not in metrics]
        groups = {"model": own, "optimizer": model.optimizer.variables}
        if within_epoch:
            groups["metrics"] = list(metrics.values())
        return {f"{name}/{i}": v for name, group in groups.items() for i, v in enumerate(group)}

    def _save(self, epoch: int, batch: int, ended: bool = False) -> None:
        arrays = {
            name: keras.ops.convert_to_numpy(variable)
            for name, variable in self._variables(batch > 0).items()
        }
        told = {name: p for name, p in self._positions.items() if p is not None and not ended}
        arrays |= {name: np.frombuffer(p, np.uint8) for name, p in told.items()}
        about = {
            "epoch": epoch,
            "batch": batch,
            "ended": ended,
            "logs": tf.nest.map_structure(float, self._logs),
            "history": self.model.history.history,
            "epochs": self.model.history.epoch,
            "random": _random_state(),
            "random_at_epoch": _random_state() if ended else self._random_at_epoch,
            "also": [],
        }
        for i, thing in enumerate(self.also):
            values, lists = _attributes_of(thing)
            about["also"].append([values, {name: len(own) for name, own in lists.items()}])
            for name, own in lists.items():
                arrays |= {f"also/{i}/{name}/{j}": array for j, array in enumerate(own)}
        self._num_since = 0
        self._checkpoints.identity = about
        step = np.int64(self._num_steps)
        try:
            self._checkpoints.save_now(self._num_steps, arrays | {"step": step})
        except RunError as error:
            if ended or epoch == self.params["epochs"]:
                raise
            warnings.warn(f"{error}; the fit goes on, and the next save tries again", stacklevel=2)

    def _newest(self) -> "_Saved | None":
        """Return the newest checkpoint that can be read."""
        checkpoint.tidy(self.directory)
        found = self._checkpoints.newest(_read, lambda line: warnings.warn(line, stacklevel=2))
        return found[1] if found else _of_before(self.directory)


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds."""

    step: int
    arrays: dict[str, np.ndarray]
    about: dict[str, Any]

    def put(self, variables: dict[str, Any], directory: Path) -> None:
        """Assign the variables, if they are those that were saved."""
        of_model = [n for n in self.arrays if n.startswith(("model/", "optimizer/", "metrics/"))]
        for name in dict.fromkeys([*of_model, *variables]):
            there = _kind(self.arrays[name]) if name in self.arrays else "absent"
            here = _kind(variables[name]) if name in variables else "absent"
            if there != here:
                raise InputError(
                    f"{directory} is of another fit: {name} is {there} there and {here} here; "
                    "name another folder, or build the model before fit"
                )
        for name, variable in variables.items():
            variable.assign(self.arrays[name])

    def put_also(self, things: Sequence[Any]) -> None:
        """Set what objects had as attributes."""
        for i, (thing, (values, lists)) in enumerate(zip(things, self.about["also"], strict=False)):
            for name, value in values.items():
                setattr(thing, name, value)
            for name, num in lists.items():
                own = [self.arrays[f"also/{i}/{name}/{j}"].copy() for j in range(num)]
                own = [np.char.decode(a.astype("S")) if a.dtype == object else a for a in own]
                is_list = isinstance(getattr(thing, name, None), list | None)
                setattr(thing, name, own if is_list else own[0])


def _read(prefix: str, reader: Any) -> _Saved:
    """Return what a checkpoint holds that is open."""
    about = checkpoint.identity_of(reader)
    if "epoch" not in about:
        raise InputError(f"{prefix} is of a run of `towers train`: name another folder for a fit")
    keys = checkpoint.keys_of(reader)
    arrays = {name: reader.get_tensor(key) for name, key in keys.items()}
    return _Saved(int(arrays["step"]), arrays, about)


def _of_before(directory: Path) -> _Saved | None:
    """Return what the newest file holds of a fit that was saved before there were checkpoints."""
    names = [re.fullmatch(r"epoch-(\d+)-batch-(\d+)\.npz", p.name) for p in directory.glob("*")]
    places = [(int(name[1]), int(name[2]), name[0]) for name in names if name]
    if not places:
        return None
    with np.load(directory / max(places)[-1]) as file:
        arrays = dict(file)
    about = json.loads(arrays.pop("about").tobytes())
    for name, kind in about["variables"].items():  # NumPy's files know no bfloat16
        arrays[name] = arrays[name].view(kind.partition("[")[0])
    return _Saved(0, arrays, about)


def is_resuming(model: keras.Model, batch: int) -> bool:
    """Tell whether the step of this batch does not count, having been made before."""
    return batch < vars(model).get("_towers_resume_at", 0)


def _plain(step: Callable) -> Callable:
    """Return a model's own step, which a fit that was interrupted may have left replaced."""
    while isinstance(getattr(step, "__self__", None), ExactResume):
        step = step.__self__._step
    return step


def _kind(variable: Any) -> str:
    return f"{keras.backend.standardize_dtype(variable.dtype)}{list(variable.shape)}"


def _attributes_of(thing: Any) -> tuple[dict[str, Any], dict[str, list[np.ndarray]]]:
    """Return public attributes that are no arguments: plain ones, and lists of arrays."""
    given = inspect.signature(type(thing)).parameters  # by the same call; it may keep them changed
    public = {n: v for n, v in vars(thing).items() if not n.startswith("_") and n not in given}
    plain = {n: v for n, v in public.items() if isinstance(v, bool | int | float | str | None)}
    numbers = {n: v.item() for n, v in public.items() if isinstance(v, np.generic)}
    lists = {n: [v] for n, v in public.items() if isinstance(v, np.ndarray)}
    for name, value in public.items():
        if isinstance(value, list) and value and all(isinstance(v, np.ndarray) for v in value):
            lists[name] = value
    return plain | numbers, lists


def _random_state() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [random.getstate(), [kind, keys.tolist(), *rest]]


def _set_random_state(state: Sequence[Any]) -> None:
    (version, keys, gauss), of_numpy = state
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(of_numpy))
