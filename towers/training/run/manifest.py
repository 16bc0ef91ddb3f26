"""`train_dir/manifest.json`: all that is needed to reproduce a run.

The file holds one object. Its record of the first start never changes:

    format           1
    time, step       of the start, UTC; step 0, unless the manifest was lost and written anew
    command, folder  what was typed, and where
    flags            in force, by name
    versions         of Python, packages, the CUDA build and the driver
    git              {"folder": "towers":} the repositories of the current folder and of towers:
                     root, commit, and diff, the sha256 of how tracked files differ from it, "clean"
                     if none does; null where git knows of none
    devices          for each tower: device, name, PCI bus id, number in nvidia-smi, memory
    host             name, processor, cores, memory
    environment      the variables that change numbers, see `towers.devices.host.environment`
    code             {"model": sha256 of the file that has the model function, null for one that a
                     program gave in place of a name}
    data             {"train": "test":} kind, sha256 and size, see `towers.data.Split.checksum`
    first_batch      {"sha256"} of the images, labels and draws of step 0; null if written later
    initial_weights  sha256 of the model's variables before step 0, or null
    task             the model's arguments: num_classes, class_names, image_shape,
                     augment, and spec: the tensors of one example, each as
                     "uint8[32, 32, 3]"
    sessions         one for each start: the same parts, from time to data
    final            null until the run ends; then time, step, weights: the sha256 of the model's
                     variables, and state: that of all master variables, slots and averages too

Two runs with the same `final.weights` have the same weights, bit for bit. A missing or damaged
manifest is written anew.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import inspect
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from towers import devices, files
from towers.data.pipeline import Data, digest
from towers.devices import host
from towers.errors import InputError
from towers.formatting import first_of
from towers.options.augmentation import parse
from towers.options.functions import load_function
from towers.options.inline_objects import PREFIX
from towers.options.run import Options
from towers.training.run.setup import RunContext

NAME = "manifest.json"
_FORMAT = 1
_NAMES = {  # of parts, for people
    "code.model": "the file of the model function (code.model)",
    "data.train.sha256": "the training set (data.train.sha256)",
    "data.validation.sha256": "the validation set (data.validation.sha256)",
    "data.test.sha256": "the test set (data.test.sha256)",
}
_ADVICE = {
    "data.test.sha256": "; of a test set that is held out of a file or folder that has changed the "
    "run was trained on some examples: keep test examples in one of their own"
}
_TASK_TYPES = {  # of a task's fields, beside its spec
    "num_classes": int | None, "class_names": list, "image_shape": list | None,
    "augment": str,
}  # fmt: skip
_SPEC = re.compile(r"(\w+)\[((?:None|\d{1,18})(?:, (?:None|\d{1,18}))*)?\]")
_GIT_SECONDS = 2.0  # timeout of a call: a run does not wait for a slow disk
# Parts that may change numbers; the number of towers, place and time do not.
_COMPARED = re.compile(
    r"versions\..*|git\..*\.(commit|diff)|host\.processor|code\..*|data\..*\.(kind|sha256|examples|shape)"
)


def write(run: RunContext, folder: Path, restored: int | None, batch: Any) -> list[str]:
    """Write or extend the manifest before a run's next step; return warnings of differences.

    Args:
        run: built, its variables restored.
        folder: of the run.
        restored: step of the restored checkpoint; None: it is a new run.
        batch: of the next step, (example, draws).
    """
    step = int(run.train_state.step.numpy())
    towers = [dataclasses.asdict(device) for device in devices.describe(run.builder.devices)]
    now = {
        "time": _time(),
        "step": step,
        "command": host.command(),
        "folder": str(Path.cwd()),
        "flags": dataclasses.asdict(run.options),
        "versions": host.versions(),
        "git": {"folder": repository(Path.cwd()), "towers": repository(Path(__file__).parent)},
        # free memory changes from minute to minute
        "devices": [{n: v for n, v in row.items() if n != "free_bytes"} for row in towers],
        "host": host.machine(),
        "environment": host.environment(),
        "code": code(run.options),
        "data": data_record(run),
    }
    manifest = {} if restored is None else read(folder)
    lines = differences(now, manifest)
    if not manifest:
        arrays = map(np.asarray, tf.nest.flatten(batch))
        manifest = {
            "format": _FORMAT,
            **now,
            "sessions": [],
            "first_batch": {"sha256": digest(*arrays)} if step == 0 else None,
            "initial_weights": weights_hash(run.train_state.variables()) if step == 0 else None,
        }
    manifest.setdefault("task", model_spec(run.data, run.options))  # older manifests have none
    manifest["sessions"].append(now)
    files.write_json(folder / NAME, manifest | {"final": None})
    return [f"warning     {line}" for line in lines]


def code(options: Options) -> dict[str, str | None]:
    """Return the checksum of the file that has the model function, see above.

    Changes in other files show in `git`, if they are in a repository.
    """
    checksum = None
    if not options.model.startswith(PREFIX):
        with contextlib.suppress(OSError, TypeError):  # it is not written in Python
            path = inspect.getsourcefile(inspect.unwrap(load_function("model", options.model)))
            checksum = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return {"model": checksum}


def data_record(run: RunContext) -> dict[str, dict[str, Any]]:
    """Return {name of a split: its checksum}, see above."""
    return {name: split.checksum() for name, split in run.splits().items()}


def model_spec(data: Data, options: Options) -> dict[str, Any]:
    """Return the properties of the data that are needed to build the model without them.

    Args:
        data: of the run.
        options: of the run, with `augment` resolved.
    """
    return {
        "num_classes": data.num_classes,
        "class_names": list(data.class_names),
        "image_shape": data.image_shape and list(data.image_shape),
        "augment": parse(options.augment).base,  # which is all that evaluation uses
        "spec": tf.nest.map_structure(
            lambda spec: f"{spec.dtype.name}{spec.shape.as_list()}", data.spec
        ),
    }


def finish(folder: Path, variables: Mapping[str, tf.Variable]) -> None:
    """Add "final" to the manifest.

    Args:
        folder: of the run.
        variables: see `TrainState.variables`.
    """
    final = {
        "time": _time(),
        "step": int(variables["step"].numpy()),
        "weights": weights_hash(variables),
        "state": _hash(variables),
    }
    files.write_json(folder / NAME, read(folder) | {"final": final})


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest of a run, {} if it is missing or damaged; the latter prints a line."""
    manifest = files.read_json(folder / NAME)
    sessions = manifest.get("sessions")
    if (
        manifest.get("format") == _FORMAT
        and isinstance(sessions, list)
        and all(isinstance(each, dict) for each in sessions or [0])
        and ("task" not in manifest or _is_task(manifest["task"]))  # older manifests have none
    ):
        return manifest
    if manifest:
        files.warn_damaged(folder / NAME)
    return {}


def _is_task(task: Any) -> bool:
    if not isinstance(task, dict) or not isinstance(spec := task.get("spec"), list) or not spec:
        return False
    specs = [_SPEC.fullmatch(leaf) for leaf in tf.nest.flatten(spec) if isinstance(leaf, str)]
    return (
        len(specs) == len(tf.nest.flatten(spec))
        and all(match and hasattr(tf.dtypes, match[1]) for match in specs)
        and all(n in task and isinstance(task[n], kind) for n, kind in _TASK_TYPES.items())
        and all(isinstance(size, int) for size in task["image_shape"] or ())
    )


def check_data(
    run: RunContext, task: Mapping[str, Any], number: bool = False, trains: bool = False
) -> None:
    """Check that data have the classes that a run was trained on.

    Args:
        run: with the data.
        task: of the run's manifest.
        number: whether their number has to be the same, too.
        trains: whether the run is to go on, which another --dataset does not let it do, nor
            images of another shape.

    Raises:
        InputError: others are in their places now; these are named.
    """
    if changes := data_changes(run, task, number):
        raise InputError(
            f"--dataset={run.options.dataset} has other {changes} than the run was trained on: "
            "give data of the same, or train with another --train_dir and "
            f"--init_from={run.options.train_dir}, which takes the weights that fit"
        )
    if trains and (change := image_shape_change(run, task)):
        height, width, _ = task["image_shape"]
        raise InputError(
            f"{change}: type --image_size={height}x{width}, or train in another "
            f"--train_dir, with --init_from={run.options.train_dir} for its weights"
        )


def data_changes(run: RunContext, task: Mapping[str, Any], number: bool) -> str:
    """Return "classes (new: a; missing: b)", or "" without changes.

    Args:
        run: see `check_data`.
        task: see `check_data`.
        number: see `check_data`.
    """
    now = list(run.data.class_names)
    then = task.get("class_names", now) or [str(i) for i in range(len(now))]
    pairs = zip(now, then, strict=False)
    if all(one == other for one, other in pairs) and (len(now) == len(then) or not number):
        return ""
    changes = {"new": set(now) - set(then), "missing": set(then) - set(now)}
    named = [f"{word}: {first_of(sorted(names))}" for word, names in changes.items() if names]
    return f"classes ({'; '.join(named) or 'in another order'})"


def image_shape_change(run: RunContext, task: Mapping[str, Any]) -> str:
    """Return in words how the shape of images is another than in training; "" if it is not.

    Args:
        run: see `check_data`.
        task: see `check_data`.
    """
    now, then = list(run.data.image_shape or ()), list(task.get("image_shape") or ())
    if not (now and then and now != then):
        return ""
    shapes = ["x".join(map(str, shape)) for shape in (now, then)]
    return (
        f"--dataset={run.options.dataset} has images of {shapes[0]}, and the run was trained "
        f"on {shapes[1]}"
    )


def differences(
    now: Mapping[str, Any], before: Mapping[str, Any], when: str = "at the run's start"
) -> list[str]:
    """Return a line for each part that `_COMPARED` matches and that differs; one for each split.

    Args:
        now: the record of a session, or some parts of it.
        before: the record of the first start; {}: unknown, which gives no line.
        when: words that say when the record was made.
    """
    new, old = (dict(_flatten("", manifest)) for manifest in (now, before))
    differing = [
        name
        for name in filter(_COMPARED.fullmatch, new)
        if None not in (new[name], old.get(name)) and new[name] != old[name]
    ]
    return [
        f"{_NAMES.get(name, name)} differs: {_shorten(new[name])} now, {_shorten(old[name])} {when}"
        f"{_ADVICE.get(name, '')}"
        for name in differing
        if name.endswith(".sha256") or f"{name.rpartition('.')[0]}.sha256" not in differing
    ]


def weights_hash(variables: Mapping[str, tf.Variable]) -> str:
    """Return the sha256 of the model's own variables, weights and statistics."""
    return _hash({name: v for name, v in variables.items() if name.startswith("model/")})


def _hash(variables: Mapping[str, tf.Variable]) -> str:
    hasher = hashlib.sha256()
    for name, variable in sorted(variables.items()):
        hasher.update(f"{name} {digest(variable.numpy())};".encode())
    return hasher.hexdigest()


def repository(folder: Path) -> dict[str, str] | None:
    """Return root, commit and diff of the git repository of a folder; None if git fails.

    Programs that are named in the repository's own configuration are not run.
    """
    off = ["-c", "core.fsmonitor=false"]

    def git(*arguments: str, check: bool = True) -> bytes:
        command = ["git", "--no-optional-locks", *off, "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=check)
        return done.stdout

    try:
        root, commit = git("rev-parse", "--show-toplevel", "HEAD").decode().splitlines()
        query = "config", "--local", "--includes", "--name-only", "--get-regexp"
        filters = git(*query, r"^filter\..*\.(clean|process|required)$", check=False).decode()
        off += [word for name in filters.splitlines() for word in ("-c", f"{name}=")]
        diff = git("diff", "--no-ext-diff", "--no-textconv", "--full-index", "HEAD")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return {
        "root": root,
        "commit": commit,
        "diff": hashlib.sha256(diff).hexdigest() if diff else "clean",
    }


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield pairs such as ("git.folder.commit", "9f2c...")."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}" if name else key, inner)
    else:
        yield name, value


def _shorten(value: Any) -> str:
    """Return a value as text, checksums shortened."""
    text = str(value)
    return f"{text[:12]}..." if len(text) in (40, 64) and text.isalnum() else text[:100]


def _time() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
