"""`train_dir/manifest.json`: what a run was made from, so that it can be made again.

The file holds one object. What it says of the first start is never changed afterwards:

    format           1
    time, step       of the start, UTC; 0 unless the manifest was lost on the way
    command, folder  what was typed, and where
    flags            in force, by name
    versions         of Python, packages, the CUDA build and the driver
    git              {"folder": the repository of the current folder, "model": "dataset": "towers":
                     those of their code, if they lie in others}, each as `repository` says or null
    devices          for each tower: device, name, PCI bus id, number in nvidia-smi, memory
    host             name, processor, cores, memory
    environment      the variables that change numbers, see `towers.devices.host.environment`
    data             {"train": "test":} kind, sha256 and size, see `towers.data.Split.checksum`
    first_batch      {"sha256"} of images, labels and draws of step 0; null in a run that was older
    initial_weights  sha256 of the model's variables before step 0, or null
    sessions         one for each start: of the above what may change, and changed_flags, those that
                     differ from the first start's; and final, where the run ended in between
    final            null until the run ends; then time, step, weights: the sha256 of the model's
                     variables, and state: that of all master variables, slots and averages too

Two runs that give the same `final.weights` have the same weights, bit for bit. A part that cannot
be had is null; a manifest that is missing or damaged is written anew, and ends no run.
"""

import dataclasses
import datetime
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from towers import devices, files
from towers.data.pipeline import digest
from towers.devices import host
from towers.options.run import Options
from towers.training import repository
from towers.training.run import Run

NAME = "manifest.json"
_FORMAT = 1
# What is compared, so that a warning means that numbers may differ: not the number of towers, which
# changes none, nor what only says where and when.
_COMPARED = re.compile(
    r"versions\..*|git\..*\.(commit|diff)|devices|host\.(processor|cores|usable_cores)"
    r"|environment\.(?!CUDA_DEVICE_ORDER|CUDA_VISIBLE|NVIDIA_VISIBLE|XDG_CACHE_HOME).*"
    r"|data\..*\.(kind|sha256|examples|shape)|first_batch\.sha256|initial_weights"
)


def write(
    run: Run, folder: Path, restored: int | None, batch: Sequence[tf.Tensor] | None
) -> list[str]:
    """Write or extend the manifest of a run whose folder was just opened, before any step.

    `restored` is the step of the checkpoint, None for a new run, and `batch` images, labels and
    draws of the next step. What is returned are lines that say on what else the run is continued
    than it was started on.
    """
    step = int(run.masters.step.numpy())
    found = {} if restored is None else read(folder)
    flags = dataclasses.asdict(run.options)
    now, lines = _known(
        {
            "command": host.command,
            "folder": lambda: str(Path.cwd()),
            "versions": host.versions,
            "git": lambda: _repositories(run.options, folder),
            "devices": lambda: _devices(run),
            "host": host.machine,
            "environment": host.environment,
            "data": lambda: {"train": run.data.train.checksum(), "test": run.data.test.checksum()},
        }
    )
    now = {"time": _time(), "step": step, **now}
    if found:
        lines += differences(now, found)
        if found.get("final"):
            found["sessions"][-1]["final"] = found["final"]
    else:
        found = {"format": _FORMAT, **now, "flags": flags}
        found |= {"first_batch": None, "initial_weights": None, "sessions": []}
        if step == 0:
            found["first_batch"] = _checksums(batch)
            found["initial_weights"] = weights_hash(run.masters.variables())
    now["changed_flags"] = {n: v for n, v in flags.items() if found["flags"].get(n) != v}
    found["sessions"].append(now)
    files.write_json(folder / NAME, found | {"final": None})
    return [f"warning     {line}" for line in lines]


def finish(folder: Path, variables: Mapping[str, tf.Variable]) -> None:
    """Write into the manifest of a run what it ended with, by `Masters.variables`."""
    final = {
        "time": _time(),
        "step": int(variables["step"].numpy()),
        "weights": weights_hash(variables),
        "state": _hash(variables),
    }
    files.write_json(folder / NAME, read(folder) | {"final": final})


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest of a run, {} if it is missing or damaged."""
    found = files.read_json(folder / NAME)
    sessions, flags = found.get("sessions"), found.get("flags")
    whole = isinstance(sessions, list) and sessions and isinstance(flags, dict)
    return found if whole and found.get("format") == _FORMAT else {}


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return lines that say in what two starts of a run differ, as far as both know it."""
    ours, theirs = (dict(_leaves("", manifest)) for manifest in (now, before))
    lines = []
    for name in filter(_COMPARED.fullmatch, dict.fromkeys([*ours, *theirs])):
        here, there = ours.get(name), theirs.get(name)
        known = None not in (here, there) or name.startswith("environment.")
        if known and here != there:
            text = f"{_text(here)} now, {_text(there)} at the run's start"
            lines.append(f"{name} differs: {text}")
    return lines


def weights_hash(variables: Mapping[str, tf.Variable]) -> str:
    """Return the sha256 of the model's own variables, weights and statistics, by sorted name."""
    return _hash({name: v for name, v in variables.items() if name.startswith("model/")})


def _hash(variables: Mapping[str, tf.Variable]) -> str:
    found = hashlib.sha256()
    for name, variable in sorted(variables.items()):
        found.update(f"{name} {digest(variable.numpy())};".encode())
    return found.hexdigest()


def _known(parts: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return what the functions return; None and a line for each that cannot."""
    found, lines = {}, []
    for name, function in parts.items():
        try:
            found[name] = function()
        except Exception as error:  # whatever it is, it is no reason not to train
            found[name], reason = None, " ".join(str(error).split())[:200]
            lines.append(f"{NAME} does without {name}: {type(error).__name__}: {reason}")
    return found, lines


def _devices(run: Run) -> list[dict[str, Any]]:
    """Return the device of each tower, without what changes from one minute to the next."""
    found = [dataclasses.asdict(device) for device in devices.describe(run.builder.devices)]
    return [{name: v for name, v in row.items() if name != "free_bytes"} for row in found]


def _repositories(options: Options, folder: Path) -> dict[str, Any]:
    """Return the state of each repository that code of the run comes from."""
    places = {"folder": Path.cwd()}
    for role, name in {"model": options.model, "dataset": options.dataset}.items():
        module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
        if file := getattr(module, "__file__", None):
            places[role] = Path(file).resolve().parent
    places["towers"] = Path(__file__).resolve().parents[1]
    found, roots = {}, set()
    for role, place in places.items():
        top = repository.root(place)
        if role == "folder" or top not in (None, *roots):
            found[role] = repository.state(place, without=folder)
        roots.add(top)
    return found


def _checksums(batch: Sequence[tf.Tensor] | None) -> dict[str, str] | None:
    """Return the checksums of what step 0 is given."""
    if batch is None:
        return None
    arrays = [tensor.numpy() for tensor in batch]
    each = zip(("images", "labels", "draws"), map(digest, arrays), strict=True)
    return {"sha256": digest(*arrays), **dict(each)}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ("git.folder.commit", "9f2c..."); of a list, as the devices are, the names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield name, " and ".join(sorted({str(row.get("name")) for row in value}))
    else:
        yield name, value


def _text(value: Any) -> str:
    """Return a value for a line: of a checksum the beginning."""
    text = "not set" if value is None else str(value)
    return f"{text[:12]}..." if len(text) in (40, 64) and text.isalnum() else text[:100]


def _time() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
