"""The checkpoints of a run, written beside its training.

checkpoints.save(step)      # begins to write the values of now
checkpoints.save_now(step)  # and returns when they are on the disk
checkpoints.restore()
"""

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from towers import files
from towers.builder.kinds import are_remote
from towers.errors import InputError, RunError
from towers.options.given import is_named_now
from towers.text import first_line, reason
from towers.training import checkpoint
from towers.training.checkpoint import Snapshot

Found = TypeVar("Found")
_REMEDY = "choose another --train_dir, or --overwrite, which moves the old run aside"
_NO_SPACE = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]


class Checkpoints:
    """The checkpoints of one run, as TensorFlow checkpoints `ckpt-STEP` in one folder.

    `tf.train.CheckpointManager` keeps its list in a file and would write a counter of its own; here
    the folder itself is the list, which a crash or a damaged file cannot bring out of step.

    Attributes:
        best: a step whose checkpoint is kept beside the newest.
        home: the folder of the run, once it is there.
        say: is given a line when a checkpoint could not be written beside training.
        is_remote: whether any of the variables lies on another machine.
    """

    def __init__(
        self,
        directory: Path,
        variables: Mapping[str, tf.Variable],
        identity: Mapping[str, str],
        keep: int = 3,
        exact: bool = True,
        remedy: str = "start anew with --overwrite, which keeps them beside",
    ):
        """Set what is saved and restored; write nothing yet.

        `identity` are options that say what run this is. They are saved, too, and a checkpoint with
        others is refused: two models may have the same variables. `keep` of the newest checkpoints
        are kept; `exact` refuses one that holds other variables beside these. `remedy` is what to
        do if none can be read.
        """
        self.directory, self.remedy = Path(directory), remedy
        self.is_remote = are_remote(v.device for v in variables.values())
        self.variables, self.identity = dict(variables), dict(identity)
        self.keep, self.exact = keep, exact
        self.best: int | None = None
        self._best_there: int | None = None  # the last of these that was written
        self.home: files.Home | None = None
        self.say: Callable[[str], None] = print
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()
        self._elsewhere: Path | None = None  # where a run was saved that has lost its folder

    def snapshot(self) -> Snapshot:
        """Return the values of all variables as they are now; from any thread, in milliseconds.

        On the host nothing is copied: a step that changes a variable leaves this value alone.
        """
        with tf.device("/cpu:0"):
            return {name: _value_of(variable) for name, variable in self.variables.items()}

    def save(self, step: int) -> None:
        """Begin to write the variables of now as the checkpoint of `step`.

        The one before is waited for. What cannot be written is told in a line, and the next save
        tries again.
        """
        self.close()
        arguments = step, self.snapshot()
        self._thread = threading.Thread(target=self._save, args=arguments, name="checkpoint")
        self._thread.start()

    def save_now(self, step: int, snapshot: Snapshot | None = None) -> None:
        """Write a snapshot, by default of now, as the checkpoint of `step`; it is there then.

        Raises:
            RunError: the folder cannot be written, or the disk is full.
        """
        self.close()
        self._write(step, self.snapshot() if snapshot is None else snapshot)

    def close(self) -> None:
        """Wait until nothing is being written, whatever came of it."""
        if self._thread:
            self._thread.join()

    def has(self, step: int) -> bool:
        """Tell whether the checkpoint of `step` is there."""
        self.close()
        return step in dict(checkpoint.find(self.directory))

    def _save(self, step: int, snapshot: Snapshot) -> None:
        """Write a snapshot in a thread of its own."""
        try:
            self._write(step, snapshot, at_end=False)
        except RunError as error:
            self.say(f"warning     {error}; training goes on, and the next save tries again")

    def _write(self, step: int, snapshot: Snapshot, at_end: bool = True) -> None:
        """Write a snapshot where it belongs; if that cannot be, somewhere else, and raise.

        Where there is no space now, there may be some at the next save.
        """
        with self._writing:
            try:
                self._put(self.directory, step, snapshot)
            except Exception as error:  # TensorFlow has classes of its own
                line = f"{self.directory}/ckpt-{step} cannot be written: {reason(error)}"
                if self.home and (at_end or not any(map(line.__contains__, _NO_SPACE))):
                    line += self._put_elsewhere(step, snapshot)
                raise RunError(line) from None

    def _put(self, directory: Path, step: int, snapshot: Snapshot) -> None:
        if self.home and directory == self.directory:
            self.home.check()
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint.write(directory, step, snapshot, self.identity)
        self._keep_newest(directory, step)

    def _put_elsewhere(self, step: int, snapshot: Snapshot) -> str:
        """Write a run that can go on beside its folder, or among temporary files; say where."""
        folder = self.home.folder.absolute()
        places = (folder.parent, f"{folder.name}.saved."), (None, "towers.saved.")
        for parent, prefix in places:
            new = None
            try:
                new = self._elsewhere or Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
                self.home.copy_to(new)
                self._put(new / "checkpoints", step, snapshot)
            except (OSError, RunError, tf.errors.OpError):
                if new and new != self._elsewhere:
                    shutil.rmtree(new, ignore_errors=True)
                continue
            self._elsewhere = new
            return f"; it is saved in {new}, where --train_dir={new} goes on"
        return ""

    def restore(self, warn: Callable[[str], None] = print, wanted: int | None = None) -> int | None:
        """Assign what the newest checkpoint that can be read holds; return its step, or None.

        With `wanted` that of this step is read first.

        Raises:
            InputError: the checkpoint holds other variables than this run has, or all are damaged.
        """

        def read(prefix: str, reader: Any) -> dict[str, Any]:
            self._compare(prefix, reader)
            keys = checkpoint.keys_of(reader)
            return {name: reader.get_tensor(keys[name]) for name in self.variables}

        found = self.newest(read, warn, wanted)
        if found is None:
            return None
        step, values = found
        for name, variable in self.variables.items():
            variable.assign(values[name])
        return step

    def newest(
        self,
        read: Callable[[str, Any], Found],
        warn: Callable[[str], None] = print,
        wanted: int | None = None,
    ) -> tuple[int, Found] | None:
        """Return the step of the newest checkpoint that can be read, and what `read` finds there.

        `read` is given its path and a reader. None: there is no checkpoint.

        Raises:
            InputError: `read` raised it, or all are damaged.
        """
        found = checkpoint.find(self.directory)
        lost = checkpoint.without_index(self.directory)
        for line in lost.values():
            warn(line)
        if wanted is not None and wanted not in dict(found):
            warn(f"{self.directory}/ckpt-{wanted}, which is the best, is not there: passed over")
        for step, prefix in sorted(found, key=lambda pair: (pair[0] == wanted, pair[0]))[::-1]:
            try:
                with checkpoint.open_reader(prefix) as reader:
                    return step, read(prefix, reader)
            except InputError:
                raise
            except Exception as error:  # of many kinds: a short file gives an IndexError
                warn(f"{prefix} cannot be read and is passed over: {first_line(error)}")
        num = len(dict(found) | lost)
        if num and max(dict(found) | lost) > 0:  # that of step 0 is made again
            none_of = f"none of the {num} checkpoints in {self.directory} can be read"
            raise InputError(f"{none_of}: {self.remedy}")
        return None

    def _keep_newest(self, directory: Path, step: int) -> None:
        """Delete the oldest up to `step`; newer ones, which could not be read, do not count."""
        found = checkpoint.find(directory)
        prefixes = [Path(prefix) for number, prefix in found if number <= step]
        if self.best in dict(found):  # until then, the one before is the best that is there
            self._best_there = self.best
        best = [Path(prefix) for number, prefix in found if number == self._best_there]
        kept = prefixes[-self.keep :]
        if not kept:
            raise FileNotFoundError(errno.ENOENT, "it was renamed or deleted meanwhile")
        old = [prefix for prefix in prefixes[: -self.keep] if prefix not in best]
        for prefix in old:
            prefix.with_name(f"{prefix.name}.index").unlink()  # first: an index means a whole one
            for path in directory.glob(f"{prefix.name}.data-*"):
                path.unlink()
        lines = [f'model_checkpoint_path: "{kept[-1].name}"']  # for tf.train.latest_checkpoint
        lines += [f'all_model_checkpoint_paths: "{prefix.name}"' for prefix in kept]
        with contextlib.suppress(RunError):  # nothing here needs it
            files.write_text(directory / "checkpoint", "\n".join(lines) + "\n")

    def _compare(self, prefix: str, reader: Any) -> None:
        """Raise InputError, naming the first difference, unless `prefix` is of this run."""
        saved_identity = checkpoint.identity_of(reader)
        for name, value in self.identity.items():
            there = saved_identity.get(name, value)
            if there != value and not is_named_now(there, value):
                raise InputError(
                    f"{prefix} is of another run: --{name}={there} there and --{name}={value} "
                    f"here; {_REMEDY}"
                )
        saved = checkpoint.described(reader)
        ours = {name: f"{v.dtype.name}{v.shape.as_list()}" for name, v in self.variables.items()}
        for name in [*ours, *(saved if self.exact else ())]:
            here, there = ours.get(name, "absent"), saved.get(name, "absent")
            if here != there:
                raise InputError(
                    f"{prefix} is of another model or optimizer: {name} is {there} there and "
                    f"{here} here; {_REMEDY}"
                )


def _value_of(variable: tf.Variable) -> tf.Tensor:
    """Return a variable's value on the host; the op takes a quarter of the time of `identity`."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    is_here = value.device.startswith("/job:localhost") and "/device:CPU:" in value.device
    return value if is_here else tf.identity(value)
