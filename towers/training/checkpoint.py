"""Checkpoints of the master variables: they load with any number of towers."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from towers import files
from towers.errors import InputError, RunError
from towers.options.given import is_named_now
from towers.text import first_line

_REMEDY = "choose another --train_dir, or --overwrite, which moves the old run aside"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


class Checkpoints:
    """The checkpoints of one run, as TensorFlow checkpoints `ckpt-STEP` in one folder.

    `tf.train.CheckpointManager` keeps its list in a file and would write a counter of its own; here
    the folder itself is the list, which a crash or a damaged file cannot bring out of step.
    """

    def __init__(
        self,
        directory: Path,
        variables: Mapping[str, tf.Variable],
        identity: Mapping[str, str],
        keep: int = 3,
        exact: bool = True,
    ):
        """Set what is saved and restored; write nothing yet.

        `identity` are options that say what run this is. They are saved, too, and a checkpoint with
        others is refused: two models may have the same variables. `keep` of the newest checkpoints
        are kept; `exact` refuses one that holds other variables beside these.
        """
        self.directory = Path(directory)
        self.variables, self.identity = dict(variables), dict(identity)
        self.keep, self.exact = keep, exact
        self.best: int | None = None  # a step whose checkpoint is kept beside the newest
        self._checkpoint = tf.train.Checkpoint(
            variables=self.variables, identity=tf.Variable(json.dumps(self.identity))
        )

    def save(self, step: int) -> None:
        """Write the variables as the checkpoint of `step`.

        TensorFlow writes the `.index` file last, by renaming: a checkpoint with an index is whole.

        Raises:
            RunError: the folder cannot be written, or the disk is full.
        """
        prefix = str(self.directory / f"ckpt-{step}")
        try:
            self._checkpoint.write(prefix)
            self._keep_newest(step)
        except (tf.errors.OpError, OSError) as error:
            raise RunError(f"{prefix} cannot be written: {first_line(error)}") from None

    def restore(self, warn: Callable[[str], None] = print, wanted: int | None = None) -> int | None:
        """Read the newest checkpoint that can be read; return its step, None if there is none.

        With `wanted` that of this step is read first.

        Raises:
            InputError: the checkpoint holds other variables than this run has, or all are damaged.
        """
        found = find(self.directory)
        for step, prefix in sorted(found, key=lambda pair: (pair[0] == wanted, pair[0]))[::-1]:
            try:
                self._compare(prefix)
                self._checkpoint.read(prefix).expect_partial().assert_existing_objects_matched()
                return step
            except InputError:
                raise
            except Exception as error:  # of many kinds: a short file gives an IndexError
                warn(f"{prefix} cannot be read and is passed over: {first_line(error)}")
        if found:
            raise InputError(
                f"none of the {len(found)} checkpoints in {self.directory} can be read: "
                "start anew with --overwrite, which keeps them beside"
            )
        return None

    def _keep_newest(self, step: int) -> None:
        """Delete the oldest up to `step`; newer ones, which could not be read, do not count."""
        found = find(self.directory)
        prefixes = [Path(prefix) for number, prefix in found if number <= step]
        best = [Path(prefix) for number, prefix in found if number == self.best]
        kept = prefixes[-self.keep :]
        old = [prefix for prefix in prefixes[: -self.keep] if prefix not in best]
        lines = [f'model_checkpoint_path: "{kept[-1].name}"']  # for tf.train.latest_checkpoint
        lines += [f'all_model_checkpoint_paths: "{prefix.name}"' for prefix in kept]
        files.write_text(self.directory / "checkpoint", "\n".join(lines) + "\n")
        for prefix in old:
            prefix.with_name(f"{prefix.name}.index").unlink()  # first: an index means a whole one
            for path in self.directory.glob(f"{prefix.name}.data-*"):
                path.unlink()

    def _compare(self, prefix: str) -> None:
        """Raise InputError, naming the first difference, unless `prefix` is of this run."""
        saved_identity = json.loads(tf.train.load_variable(prefix, f"identity{_SUFFIX}"))
        for name, value in self.identity.items():
            there = saved_identity.get(name, value)
            if there != value and not is_named_now(there, value):
                raise InputError(
                    f"{prefix} is of another run: --{name}={there} there and --{name}={value} "
                    f"here; {_REMEDY}"
                )
        saved = stored_variables(prefix)
        ours = {name: f"{v.dtype.name}{v.shape.as_list()}" for name, v in self.variables.items()}
        for name in [*ours, *(saved if self.exact else ())]:
            here, there = ours.get(name, "absent"), saved.get(name, "absent")
            if here != there:
                raise InputError(
                    f"{prefix} is of another model or optimizer: {name} is {there} there and "
                    f"{here} here; {_REMEDY}"
                )


def find(directory: Path) -> list[tuple[int, str]]:
    """Return (step, path prefix) of the checkpoints in `directory`, oldest first."""
    matches = [re.fullmatch(r"ckpt-(\d+)\.index", p.name) for p in Path(directory).glob("*.index")]
    steps = sorted(int(match[1]) for match in matches if match)
    return [(step, str(Path(directory) / f"ckpt-{step}")) for step in steps]


def stored_variables(prefix: str) -> dict[str, str]:
    """Return {name: "float32[4, 3]"} of the variables in a checkpoint."""
    reader = tf.train.load_checkpoint(prefix)
    dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    return {name: f"{dtypes[key].name}{shapes[key]}" for name, key in _keys(reader).items()}


def read(prefix: str, beginning: str) -> dict[str, np.ndarray]:
    """Return {name: value} of the variables whose names begin so, as "model/", without that."""
    reader = tf.train.load_checkpoint(prefix)
    return {
        name.removeprefix(beginning): reader.get_tensor(key)
        for name, key in _keys(reader).items()
        if name.startswith(beginning)
    }


def _keys(reader: Any) -> dict[str, str]:
    """Return {name of a variable: what the checkpoint has it under}."""
    found = {}
    for key in sorted(reader.get_variable_to_shape_map()):
        if match := re.fullmatch(f"variables/(.*){_SUFFIX}", key):
            # TensorFlow escapes "/" as ".S", and "." as ".."
            found[re.sub(r"\.(\.|S)", lambda m: "/" if m[1] == "S" else ".", match[1])] = key
    return found
