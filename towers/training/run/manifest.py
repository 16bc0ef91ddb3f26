"""`train_dir/manifest.json`: what a run was made from.

    format           1
    time, step       of the start, UTC; step 0, unless the manifest was lost
    folder           where the command was typed
    flags            in force, by name
    versions         of Python, packages, the CUDA build and the driver, and the processor's name
    code             {"model": sha256 of the model function's file, null without a file}
    data             {"train": "test":} kind, sha256 and size, see `towers.data.Split.checksum`
    task             arguments of the model function, see `task_of`
    passed           keys of the functions that towers compute as one device does; they are not
                     checked again, here or in other runs of the same sweep
    overwrite        null, or the sha256 of the flags with which --overwrite began the run
    sessions         one for each start: the same parts, from time to data; the first never changes
    final            null until the run ends; then step, weights: the sha256 of the model's
                     variables, and state: that of all master variables, slots and averages too

Two runs with equal `final.weights` have equal weights. A damaged manifest is written again.
"""

import dataclasses
import hashlib
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from towers import files
from towers.data import Data
from towers.data.pipeline import digest
from towers.devices import host
from towers.errors import InputError
from towers.formatting import first_of
from towers.options.flags import MANIFEST as NAME
from towers.options.flags import digest_of
from towers.options.run import Options
from towers.training.run.setup import RunContext

_FORMAT = 1
_PARTS = {"flags": {}, "versions": {}, "code": {}, "data": {str: {}}}
_SCHEMA = {
    "format": int,
    **_PARTS,
    "task": {"num_classes": int, "class_names": [str], "augment": str, "spec": list},
    "sessions": [_PARTS],
}
_NAMES = {  # of parts, for people
    "code.model": "the file of the model function (code.model)",
    "data.train": "the training set (data.train)",
    "data.validation": "the validation set (data.validation)",
    "data.test": "the test set (data.test)",
}


def extended(run: RunContext, recorded: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a run's manifest before its next step, and warnings of differences.

    Args:
        run: built, its variables restored.
        recorded: the manifest of the run that is continued; {}: it is a new run.
    """
    now = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "step": run.steps_done(),
        "folder": str(Path.cwd()),
        "flags": dataclasses.asdict(run.options),
        "versions": host.versions() | {"processor": host.processor()},
        "code": run.code,
        "data": data_record(run),
    }
    lines = differences(now, recorded)
    if not recorded:
        begun = digest_of(run.given) if run.given.overwrite else None
        recorded = {"format": _FORMAT, **now, "task": task_of(run.data, run.options)}
        recorded |= {"overwrite": begun, "sessions": []}
    return recorded | {"sessions": [*recorded["sessions"], now], "final": None}, lines


def finish(variables: Mapping[str, tf.Variable]) -> dict[str, Any]:
    """Return "final" of the manifest of a run that ends; see `TrainState.variables`."""
    model = {name: v for name, v in variables.items() if name.startswith("model/")}
    hashes = {"weights": _hash(model), "state": _hash(variables)}
    return {"step": int(variables["step"].numpy()), **hashes}


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest of a run, {} if it is missing or damaged; the latter prints a line."""
    manifest = files.read_json(folder / NAME, _SCHEMA)
    if manifest and not _is_whole(manifest):
        files.warn_damaged(folder / NAME)
        return {}
    return manifest


def _is_whole(manifest: Mapping[str, Any]) -> bool:
    if manifest["format"] != _FORMAT or not manifest.get("sessions"):
        return False
    task = manifest["task"]
    try:
        x, *_ = map(spec_of, task["spec"])
        shape = task["image_shape"]
        is_of_x = shape is None or shape == x.shape.as_list() and len(shape) == 3
    except Exception:  # of many kinds
        return False
    return is_of_x and len(task["class_names"]) == task["num_classes"]


def passed(folder: Path) -> set[str]:
    """Return the keys of functions that passed a check in a run, or in a run of the same sweep."""
    in_sweep = (folder.parent / "sweep.json").exists()
    paths = folder.parent.glob(f"*/{NAME}") if in_sweep else [folder / NAME]
    return {
        key for path in paths for key in files.read_json(path, {"passed": [str]}).get("passed", ())
    }


def write_passed(folder: Path, keys: Collection[str]) -> None:
    """Set the keys that have passed in a run, or before it, in its manifest, see `passed`."""
    files.update_json(folder / NAME, passed=sorted(keys))


def data_record(run: RunContext) -> dict[str, dict[str, Any]]:
    """Return {name of a split: its checksum}, see above."""
    return {name: split.checksum() for name, split in run.splits().items()}


def differences(
    now: Mapping[str, Any], before: Mapping[str, Any], when: str = "at the run's start"
) -> list[str]:
    """Return a line for each part that may change results and that differs.

    Args:
        now: the record of a session, or some parts of it.
        before: the record of the first start; {}: unknown, which gives no line.
        when: words that say when the record was made.
    """
    new, old = _compared(now), _compared(before)
    return [
        f"{_NAMES.get(name, name)} differs: {_shorten(value)} now, {_shorten(old[name])} {when}"
        for name, value in new.items()
        if name in old and value != old[name]
    ]


def _compared(record: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: value} of the parts that may change results; the number of towers does not."""
    splits = record.get("data", {}).items()
    data = {
        name: split.get("sha256") or f"{split.get('examples')} examples" for name, split in splits
    }
    parts = {part: record.get(part, {}) for part in ("versions", "code")} | {"data": data}
    found = {f"{part}.{name}": x for part, values in parts.items() for name, x in values.items()}
    return {name: str(value) for name, value in found.items() if value is not None}


def _shorten(text: str) -> str:
    return f"{text[:12]}..." if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", text) else text


def _hash(variables: Mapping[str, tf.Variable]) -> str:
    hasher = hashlib.sha256()
    for name, variable in sorted(variables.items()):
        hasher.update(f"{name} {digest(variable.numpy())};".encode())
    return hasher.hexdigest()


def task_of(data: Data, options: Options) -> dict[str, Any]:
    """Return what builds a model without its data, see `model.build_model`."""
    return {
        "num_classes": data.num_classes,
        "class_names": list(data.class_names),
        "image_shape": data.image_shape and list(data.image_shape),
        "augment": options.augment.partition(",")[0],  # which is all that evaluation uses
        "spec": tf.nest.map_structure(lambda s: f"{s.dtype.name}{s.shape.as_list()}", data.spec),
    }


def spec_of(recorded: Any) -> Any:
    """Return the structure of `tf.TensorSpec`s that a task's `spec` records."""
    if isinstance(recorded, str):
        dtype, shape = re.fullmatch(r"(\w+)\[(.*)\]", recorded).groups()
        sizes = [None if size == "None" else int(size) for size in shape.split(", ") if size]
        return tf.TensorSpec(sizes, dtype)
    if isinstance(recorded, dict):
        return {name: spec_of(part) for name, part in recorded.items()}
    return [spec_of(part) for part in recorded]


def check_data(
    data: Data,
    options: Options,
    task: Mapping[str, Any],
    number: bool = False,
    trains: bool = False,
) -> None:
    """Check that data have the classes, and to train on the image shape, of a run.

    Args:
        data: the data.
        options: of the run.
        task: of the run's manifest.
        number: whether the number of classes has to be the same, too.
        trains: whether the run is to be resumed.

    Raises:
        InputError: they have others; these are named.
    """
    now, then = list(data.class_names), task.get("class_names", list(data.class_names))
    shape, shape_then = data.image_shape, task.get("image_shape")
    problem = ""
    if now[: len(then)] != then[: len(now)] or (number and len(now) != len(then)):
        named = {"new": sorted({*now} - {*then}), "missing": sorted({*then} - {*now})}
        changes = [f"{word}: {first_of(names)}" for word, names in named.items() if names]
        order = "; ".join(changes) or "in another order"
        problem = f"other classes than the training data ({order}); give data with the same"
    elif trains and shape and shape_then and list(shape) != shape_then:
        here, there = ("x".join(map(str, each)) for each in (shape, shape_then))
        size = there.rpartition("x")[0]
        problem = f"images of {here}, but the run was trained on {there}; type --image_size={size}"
    if problem:
        raise InputError(
            f"--dataset={options.dataset} has {problem}, or train in another --train_dir with "
            f"--init_from={options.train_dir}, which loads the weights that fit"
        )
