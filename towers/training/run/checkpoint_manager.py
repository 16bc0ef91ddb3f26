"""The checkpoints of a run, written in a thread beside training."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from towers import files
from towers.builder.device_names import are_remote
from towers.errors import InputError, RunError, reason
from towers.options.functions import may_be_same_object
from towers.training.run import checkpoint
from towers.training.run.checkpoint import Snapshot
from towers.training.run.place import Place

_REMEDY = (
    "choose another --train_dir, or --overwrite, which moves the old run aside; --init_from loads "
    "the weights of a run"
)


@dataclasses.dataclass(eq=False)
class CheckpointManager:
    """Manages the checkpoints of one run: TensorFlow checkpoints `ckpt-STEP` in one folder.

    `tf.train.CheckpointManager` lists them in a file; here the folder itself is the list, which
    neither a crash nor a damaged file can make wrong.
    """

    directory: Path  # made when the first is written
    variables: Mapping[str, tf.Variable]  # to save and restore, by name
    # Options that identify the run, saved with the variables. A checkpoint with others is refused:
    # two models may have the same variables.
    identity: Mapping[str, Any]
    keep: int = 3  # number of the newest checkpoints that are kept
    best: int | None = None  # a step whose checkpoint is kept beside the newest
    say: Callable[[str], None] = print
    place: Callable[[], Mapping[str, Any]] = dict  # returns the place of the run, saved with them

    def __post_init__(self) -> None:
        """Write nothing yet."""
        self.is_remote = are_remote(v.device for v in self.variables.values())  # if any is
        self.restored_place = Place()
        self._whole: set[int] = set()  # steps whose checkpoint this process has read or written
        self._best_written: int | None = None
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()

    def snapshot(self) -> Snapshot:
        """Return the current values of all variables; may be called from any thread.

        Host variables are not copied: TensorFlow copies on write, so later steps leave these alone.
        """
        with tf.device("/cpu:0"):
            return {name: _value_of(variable) for name, variable in self.variables.items()}

    def save(self, step: int) -> None:
        """Write the checkpoint of `step` in a thread, once the previous one is written.

        If it cannot be written, `say` prints a warning, and the next save tries again.

        Raises:
            RunError: the folder was renamed or deleted.
        """
        self.close()
        if self.begun and not self.directory.is_dir():
            raise RunError(
                f"{self.directory} was renamed or deleted during training; move it back, and the "
                "same command resumes from its last checkpoint"
            )
        snapshot, place = self.snapshot(), self.place()

        def write() -> None:
            try:
                self._write_or_raise(step, snapshot, place)
            except RunError as error:
                self.say(f"warning     {error}; training continues and will try again")

        thread = threading.Thread(target=write, name="checkpoint")
        thread.start()
        self._thread = thread  # only now: a signal's thread may join it at any time

    def save_now(self, step: int, snapshot: Snapshot | None = None) -> None:
        """Write a checkpoint, and wait until it is written.

        Args:
            step: of the checkpoint.
            snapshot: values of the variables after that step; None: their current values.

        Raises:
            RunError: the folder cannot be written, or the disk is full.
        """
        self.close()
        snapshot = self.snapshot() if snapshot is None else snapshot
        self._write_or_raise(step, snapshot, self.place())

    def close(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._thread:
            self._thread.join()

    def has(self, step: int) -> bool:
        """Return whether this process has read or written the checkpoint of `step`."""
        self.close()
        return step in self._whole

    def restore(self, warn: Callable[[str], None] = print, wanted: int | None = None) -> int | None:
        """Assign the newest checkpoint, see `read_newest`; return its step, None without one.

        Raises:
            InputError: the checkpoint has other variables than this run, or all are damaged.
        """

        def read(prefix: str, reader: Any) -> tuple[dict[str, Any], Place]:
            self._compare(prefix, reader)
            keys, place = (
                checkpoint.keys_of(reader),
                checkpoint.identity_of(reader).get("place", {}),
            )
            return {name: reader.get_tensor(keys[name]) for name in self.variables}, Place(**place)

        if newest := checkpoint.read_newest(self.directory, read, warn, wanted):
            step, (values, self.restored_place) = newest
            self._whole.add(step)
            for name, variable in self.variables.items():
                variable.assign(values[name])
            return step
        steps = dict(checkpoint.find(self.directory))
        if any([*steps, *checkpoint.without_index(self.directory)]):  # step 0 is written again
            raise InputError(
                f"no checkpoint in {self.directory} can be read; start again with --overwrite, "
                "which moves them aside"
            )
        return None

    def _write_or_raise(self, step: int, snapshot: Snapshot, place: Mapping[str, Any]) -> None:
        with self._writing:
            try:
                if not self.begun:
                    self.directory.mkdir(parents=True, exist_ok=True)
                identity = {**self.identity, "place": place}
                checkpoint.write(self.directory, step, snapshot, identity)
                self._whole.add(step)
                self._prune(step)
            except Exception as error:  # of many classes
                line = f"{self.directory}/ckpt-{step} cannot be written: {reason(error)}"
                raise RunError(line) from None

    @property
    def begun(self) -> bool:
        """Whether a checkpoint was restored or written."""
        return bool(self._whole)

    def _prune(self, step: int) -> None:
        """Delete checkpoints that are older than `step`, except those to keep."""
        directory = self.directory
        checkpoints = {n: Path(prefix) for n, prefix in checkpoint.find(directory) if n <= step}
        if self.best in dict(checkpoint.find(directory)):
            self._best_written = self.best  # until then, the previous best is kept
        recent = list(checkpoints)[-self.keep :]
        for number in checkpoints.keys() - {*recent, self._best_written}:
            checkpoints[number].with_suffix(".index").unlink()  # first: an index means a whole one
            for path in directory.glob(f"{checkpoints[number].name}.data-*"):
                path.unlink()
        lines = [f'model_checkpoint_path: "ckpt-{recent[-1]}"']  # for tf.train.latest_checkpoint
        lines += [f'all_model_checkpoint_paths: "ckpt-{number}"' for number in recent]
        with contextlib.suppress(RunError):  # only TensorFlow reads the file
            files.write_text(directory / "checkpoint", "\n".join(lines) + "\n")

    def _compare(self, prefix: str, reader: Any) -> None:
        """Raise InputError with the first difference unless the checkpoint is of this run."""
        saved_identity = checkpoint.identity_of(reader)
        for name, value in self.identity.items():
            there = saved_identity.get(name, value)
            if there != value and not may_be_same_object(there, value):
                raise InputError(
                    f"{prefix} belongs to another run: --{name}={there} there and --{name}={value} "
                    f"here; {_REMEDY}"
                )
        saved = checkpoint.described(reader)
        ours = checkpoint.kinds_of(self.variables)
        if differs := checkpoint.first_difference(ours, saved):
            raise InputError(
                f"{prefix} belongs to another model or optimizer: {differs}; {_REMEDY}"
            )


def _value_of(variable: tf.Variable) -> tf.Tensor:
    """Return a variable's value on the host; `tf.identity` takes four times as long."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    is_here = value.device.startswith("/job:localhost") and "/device:CPU:" in value.device
    return value if is_here else tf.identity(value)
