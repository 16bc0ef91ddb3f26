"""Checkpoints of the master variables: they load with any number of towers."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf

from towers import files
from towers.errors import InputError, RunError

_REMEDY = "choose another --train_dir, or --overwrite, which moves the old run aside"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


class Checkpoints:
    """The checkpoints of one run, as TensorFlow checkpoints `ckpt-STEP` in one folder."""

    def __init__(
        self,
        directory: Path,
        variables: Mapping[str, tf.Variable],
        identity: Mapping[str, str],
        keep: int = 3,
        exact: bool = True,
    ):
        """Set what is saved and restored; write nothing yet.

        Args:
            directory: of the checkpoints.
            variables: by name.
            identity: options that say what run this is. They are saved, too, and a checkpoint with
                others is refused: two models may have the same variables.
            keep: how many of the newest checkpoints are kept.
            exact: refuse a checkpoint that holds other variables beside these.
        """
        self.directory = Path(directory)
        self.variables = dict(variables)
        self.identity = dict(identity)
        self.keep, self.exact = keep, exact
        self._checkpoint = tf.train.Checkpoint(
            variables=self.variables, identity=tf.Variable(json.dumps(self.identity))
        )

    def save(self, step: int) -> str:
        """Write the variables as the checkpoint of `step`; return its path.

        TensorFlow writes the `.index` file last, by renaming: a checkpoint with an index is whole.

        Raises:
            RunError: the folder cannot be written, or the disk is full.
        """
        prefix = str(self.directory / f"ckpt-{step}")
        try:
            self._checkpoint.write(prefix)
            self._keep_newest(step)
        except (tf.errors.OpError, OSError) as error:
            raise RunError(f"{prefix} cannot be written: {_first_line(error)}") from None
        return prefix

    def restore(self, warn: Callable[[str], None] = print) -> int | None:
        """Read the newest checkpoint that can be read.

        Args:
            warn: gets a line for each newer one that is damaged.

        Returns:
            Its step, or None if the folder holds no checkpoint.

        Raises:
            InputError: the checkpoint holds other variables than this run has, or all are damaged.
        """
        found = find(self.directory)
        for step, prefix in reversed(found):
            try:
                self._compare(prefix)
                status = self._checkpoint.read(prefix).expect_partial()
                status.assert_existing_objects_matched()
                return step
            except InputError:
                raise
            except Exception as error:  # of many kinds: a short file gives an IndexError
                warn(f"{prefix} cannot be read and is passed over: {_first_line(error)}")
        if found:
            raise InputError(
                f"none of the {len(found)} checkpoints in {self.directory} can be read: "
                "start anew with --overwrite, which keeps them beside"
            )
        return None

    def _keep_newest(self, step: int) -> None:
        """Delete the oldest up to `step`; newer ones, which could not be read, do not count."""
        prefixes = [Path(prefix) for number, prefix in find(self.directory) if number <= step]
        old, kept = prefixes[: -self.keep], prefixes[-self.keep :]
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
            if there != value:
                raise InputError(
                    f"{prefix} is of another run: --{name}={there} there and --{name}={value} "
                    f"here; {_REMEDY}"
                )
        saved = stored_variables(prefix)
        ours = {name: (v.shape.as_list(), v.dtype.name) for name, v in self.variables.items()}
        for name in [*ours, *(saved if self.exact else ())]:
            if ours.get(name) != saved.get(name):
                raise InputError(
                    f"{prefix} is of another model or optimizer: {name} is "
                    f"{_describe(saved.get(name))} there and {_describe(ours.get(name))} here; "
                    f"{_REMEDY}"
                )


def find(directory: Path) -> list[tuple[int, str]]:
    """Return (step, path prefix) of the checkpoints in `directory`, oldest first."""
    matches = [re.fullmatch(r"ckpt-(\d+)\.index", p.name) for p in Path(directory).glob("*.index")]
    steps = sorted(int(match[1]) for match in matches if match)
    return [(step, str(Path(directory) / f"ckpt-{step}")) for step in steps]


def stored_variables(prefix: str) -> dict[str, tuple[list[int], str]]:
    """Return {name: (shape, dtype)} of the variables in a checkpoint."""
    reader = tf.train.load_checkpoint(prefix)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    return {
        _unescape(key.removeprefix("variables/").removesuffix(_SUFFIX)): (
            shapes[key],
            dtypes[key].name,
        )
        for key in shapes
        if key.startswith("variables/") and key.endswith(_SUFFIX)
    }


def _unescape(key: str) -> str:
    """Undo TensorFlow's escaping of names in checkpoint keys."""
    return re.sub(r"\.(\.|S)", lambda match: {".": ".", "S": "/"}[match[1]], key)


def _describe(kind: tuple[list[int], str] | None) -> str:
    return "absent" if kind is None else f"{kind[1]}{kind[0]}"


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without the names of TensorFlow's nodes."""
    lines = re.sub(r"\{\{.*?\}\} *", "", str(error)).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
