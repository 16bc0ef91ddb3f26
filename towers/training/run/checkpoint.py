"""Reads and writes TensorFlow checkpoints, which load with any number of towers.

A checkpoint is written under a temporary name and flushed, its index is read, and then its files
are renamed, the index last: so one with an index is complete. On the way their names end in ".new",
so that a process that is killed while it replaces a checkpoint loses neither the old nor the new.
TensorFlow's readers take a path for a glob pattern, in which `[0.1]` means one character; they are
given a path without such characters.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from towers import files
from towers.errors import InputError, first_line
from towers.training.run.place import SCHEMA

Found = TypeVar("Found")
Snapshot = Mapping[str, tf.Tensor]  # values of variables, by name
_KEY_ENDING = "/.ATTRIBUTES/VARIABLE_VALUE"
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # its key
_FILE_KINDS = "data-00000-of-00001", "index"  # of a checkpoint, in the order of their renaming


def find(directory: Path) -> list[tuple[int, str]]:
    """Return (step, path prefix) of the checkpoints in `directory`, oldest first."""
    steps = sorted(int(match[1]) for match in _matches(directory, r"ckpt-(\d+)\.index"))
    return [(step, str(Path(directory) / f"ckpt-{step}")) for step in steps]


def _matches(directory: Path, pattern: str) -> list[re.Match]:
    names = sorted(path.name for path in Path(directory).glob("*"))
    return [match for name in names if (match := re.fullmatch(pattern, name))]


def without_index(directory: Path) -> list[int]:
    """Return the steps whose data are newer than all checkpoints, but whose index was deleted."""
    # A run may be writing one meanwhile: what is looked for first is named last.
    steps = {int(match[1]) for match in _matches(directory, r"ckpt-(\d+)\.data-[\w-]+")}
    begun = {int(match[1]) for match in _matches(directory, r"ckpt-(\d+)\.index\.new")}
    newest = max(dict(find(directory)), default=-1)
    return sorted(step for step in steps - begun if step > newest)


def tidy(directory: Path) -> None:
    """Finish or delete what killed processes left; the caller holds the lock."""
    with contextlib.suppress(OSError):
        for match in _matches(directory, r"ckpt-(\d+)\.index\.new"):
            _publish(directory, int(match[1]))
        there = {*dict(find(directory)), *without_index(directory)}
        for match in _matches(directory, r"ckpt-(\d+)\.data-\d+-of-\d+(\.new)?"):
            if match[2] or int(match[1]) not in there:
                Path(directory, match[0]).unlink()
    files.clear_leftovers(Path(directory))


def _publish(folder: str | Path, step: int) -> None:
    """Give the files of a new checkpoint their names; after a kill, those that lack it."""
    for kind in _FILE_KINDS:
        path = Path(folder, f"ckpt-{step}.{kind}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}.new", path)


def read_newest(
    directory: Path,
    read: Callable[[str, Any], Found],
    warn: Callable[[str], object] | None,
    wanted: int | None = None,
) -> tuple[int, Found] | None:
    """Return (step, read(prefix, reader)) of the newest readable checkpoint, or None.

    Args:
        directory: of the checkpoints.
        read: takes a checkpoint's path prefix and TensorFlow's reader of it.
        warn: called with a message for each damaged checkpoint; None: raise InputError.
        wanted: step that is tried first.

    Raises:
        InputError: `read` raised it, or one is missing or damaged and `warn` is None.
    """

    def pass_over(line: str) -> None:
        if warn is None:
            raise InputError(
                f"{line}; towers train with this --train_dir repeats its steps; in Python, "
                "towers.load(..., step=...) loads an older one"
            )
        warn(f"{line}: skipped")

    checkpoints = dict(find(directory))
    for step in without_index(directory) if wanted is None else []:
        pass_over(f"{directory}/ckpt-{step}.index is missing")
    if wanted is not None and wanted not in checkpoints:
        pass_over(f"{directory}/ckpt-{wanted} is missing")
    for step in sorted(checkpoints, key=lambda step: (step == wanted, step), reverse=True):
        try:
            with open_reader(checkpoints[step]) as reader:
                return step, read(checkpoints[step], reader)
        except InputError:
            raise
        except Exception as error:  # of many kinds: a short file gives an IndexError
            if step not in dict(find(directory)):  # a run that trains meanwhile removed it
                return read_newest(directory, read, warn, wanted)
            pass_over(f"{checkpoints[step]} cannot be read ({first_line(error)})")
    return None


def _object_graph(names: Sequence[str], keys: Sequence[str]) -> bytes:
    """Return the object graph of `Checkpoint(variables={name: variable}, identity=...)`.

    `tf.train.Checkpoint.write` would read variables while it writes, not before.
    """
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    root, of_group = graph.nodes.add(), graph.nodes.add()
    root.children.add(node_id=1, local_name="variables")
    root.children.add(node_id=2, local_name="identity")
    for key in (_key_of("identity"), *keys):
        graph.nodes.add().attributes.add(name="VARIABLE_VALUE", checkpoint_key=key)
    for number, name in enumerate(names, 3):
        of_group.children.add(node_id=number, local_name=name)
    for node in graph.nodes:
        node.has_checkpoint_values.value = True
    return graph.SerializeToString()


def write(directory: Path, step: int, values: Snapshot, identity: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically.

    Args:
        directory: of the checkpoints; must exist.
        step: of the checkpoint.
        values: of variables, by name.
        identity: saved with them as JSON, see `identity_of`.

    Raises:
        OSError, tf.errors.OpError: the folder cannot be written, or the disk is full.
    """
    named = {_key_of("variables", name): value for name, value in values.items()}
    graph = _object_graph(list(values), list(named))
    text = json.dumps(dict(identity), default=lambda value: np.asarray(value).tolist())
    named |= {_key_of("identity"): text, _OBJECT_GRAPH: graph}
    temporary = f".ckpt-{step}.{os.getpid()}"
    with _literal_path(directory) as folder, tf.device("/cpu:0"):
        try:
            tf.raw_ops.SaveV2(
                prefix=f"{folder}/{temporary}",
                tensor_names=list(named),
                shape_and_slices=[""] * len(named),
                tensors=[tf.convert_to_tensor(value) for value in named.values()],
            )
            for kind in _FILE_KINDS:
                files.flush(f"{folder}/{temporary}.{kind}")
            there = tf.train.load_checkpoint(f"{folder}/{temporary}").get_variable_to_shape_map()
            if there.keys() != named.keys():
                raise OSError(errno.EIO, "the file does not hold what was written")
            for kind in _FILE_KINDS:
                os.rename(f"{folder}/{temporary}.{kind}", f"{folder}/ckpt-{step}.{kind}.new")
            _publish(folder, step)
        except BaseException:
            for path in Path(folder).glob(f"{temporary}.*"):
                path.unlink()
            raise
        with contextlib.suppress(OSError):  # not every file system can flush a folder
            files.flush(folder)


@contextlib.contextmanager
def open_reader(prefix: str) -> Iterator[Any]:
    """Yield TensorFlow's reader of a checkpoint; raise an error of any kind if it is damaged."""
    path = Path(prefix)
    for kind in _FILE_KINDS:
        if not Path(f"{prefix}.{kind}").is_file():  # a pipe would block
            raise FileNotFoundError(f"there is no file {path.name}.{kind}")
    with _literal_path(path.parent) as folder:
        reader = tf.train.load_checkpoint(f"{folder}/{path.name}")
        if reader.has_tensor(_OBJECT_GRAPH):
            reader.get_tensor(_OBJECT_GRAPH)  # tf.train.Checkpoint needs it
        yield reader


@contextlib.contextmanager
def _literal_path(folder: Path) -> Iterator[str]:
    """Yield a short path of the folder without glob characters."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _key_of(*path: str) -> str:
    """Return TensorFlow's key of a variable; it escapes "/" as ".S", and "." as ".."."""
    return "/".join(part.replace(".", "..").replace("/", ".S") for part in path) + _KEY_ENDING


def identity_of(reader: Any) -> dict[str, Any]:
    """Return the `identity` of a checkpoint."""
    return files.parse_json(reader.get_tensor(_key_of("identity")), {"place": SCHEMA})


def described(reader: Any) -> dict[str, str]:
    """Return {name: "float32[4, 3]"} of the variables in a checkpoint."""
    dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    return {name: f"{dtypes[key].name}{shapes[key]}" for name, key in keys_of(reader).items()}


def kinds_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: "float32[4, 3]"} of variables or arrays."""
    return {n: f"{tf.as_dtype(v.dtype).name}{list(v.shape)}" for n, v in values.items()}


def first_difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Return the first difference, "NAME is DTYPE[SHAPE] there and absent here", or None.

    Args:
        here: {name: "DTYPE[SHAPE]" or "[SHAPE]"} of this program's variables.
        there: the same of the checkpoint.
    """
    for name in [*here, *there]:
        spec_here, spec_there = here.get(name, "absent"), there.get(name, "absent")
        if spec_here != spec_there:
            return f"{name} is {spec_there} there and {spec_here} here"
    return None


def keys_of(reader: Any) -> dict[str, str]:
    """Return {name of a variable: its key in the checkpoint}."""
    keys = {}
    for key in sorted(reader.get_variable_to_shape_map()):
        if match := re.fullmatch(f"variables/(.*){_KEY_ENDING}", key):
            keys[re.sub(r"\.(\.|S)", lambda m: "/" if m[1] == "S" else ".", match[1])] = key
    return keys
