"""`train_dir/manifest.json`: what a run was made from, so that it can be made again.

    manifest.write(run, folder, restored)               # when the folder of a run is opened
    manifest.finish(folder, run.masters.variables())    # at the end of the run
    manifest.differences(manifest.read(one), manifest.read(other))

The file holds one object. What it says of the first start is never changed afterwards:

    format           1
    time             of the start, UTC
    step             that it started at, 0 unless the manifest was lost on the way
    command, folder  what was typed, and where
    flags            in force, by name
    versions         of Python, packages, the CUDA build and the driver
    git              {"folder": the repository of the current folder, "model": "dataset": "towers":
                     those of their code, if they lie in others}, each as `repository` says or null
    devices          for each tower: device, name, PCI bus id, number in nvidia-smi, memory
    host             name, processor, cores, memory
    environment      the variables of `towers.devices.host.ENVIRONMENT` that are set, no others
    data             {"train": "test":} kind, sha256 and size, see `towers.data.checksum`
    first_batch      {"sha256"} of images, labels and draws of step 0; null in a run that was older
    initial_weights  sha256 of the model's variables before step 0, or null

What goes on:

    sessions         a list, one for each start: time, step, command, folder, changed_flags (those
                     that differ from the first start's), versions, git, devices, host, environment,
                     data; and `final`, where the run had ended before it was continued
    final            null until the run ends; then time, step, weights: the sha256 of the model's
                     variables, and state: that of all master variables, slots and averages too

Two runs that give the same `final.weights` have the same weights, bit for bit. A part that cannot
be had is null; a manifest that is missing or damaged is written anew, and ends no run.
"""

import dataclasses
import datetime
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from towers import devices, files
from towers.data.checksum import digest
from towers.devices import host
from towers.monitoring.samples import Sampler
from towers.options.run import Options
from towers.training import repository
from towers.training.run import Run

NAME = "manifest.json"
_FORMAT = 1
# What is compared, by the last parts of the names, so that a warning means that numbers may differ:
# not the number of towers, which changes none, nor what only says where and when.
_COMPARED = {
    "versions": None,
    "git": ("commit", "diff"),
    "devices": None,  # their names alone
    "host": ("processor", "cores", "usable_cores"),
    "environment": None,
    "data": ("kind", "sha256", "examples", "shape"),
    "first_batch": ("sha256",),
    "initial_weights": None,
}
_MAY_BE_UNSET = ("environment",)  # elsewhere null means that it is not known
_ONLY_WHERE = (
    "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "XDG_CACHE_HOME"
)  # fmt: skip


def write(
    run: Run, folder: Path, restored: int | None, sampler: Sampler | None = None
) -> list[str]:
    """Write or extend the manifest of a run whose folder was just opened, before any step.

    Args:
        run: its variables as they were initialised or restored.
        folder: of the run; it exists.
        restored: the step of the checkpoint, None for a new run.
        sampler: which gives the first batch; None: one of its own.

    Returns:
        Lines that say on what else the run is continued than it was started on, to be printed.

    Raises:
        RunError: the file cannot be written.
    """
    lines: list[str] = []
    options, step = run.options, int(run.masters.step.numpy())
    now = _start(run, folder, step, lines)
    before = {} if restored is None else read(folder)
    flags = dataclasses.asdict(options)
    if before:
        lines += differences(now, before, ("now", "at the run's start"))
        start = before
        if before.get("final"):
            start["sessions"][-1]["final"] = before["final"]
    else:
        start = {"format": _FORMAT, **now, "flags": flags}
        start["first_batch"] = start["initial_weights"] = None
        if step == 0:
            start["first_batch"] = _known(
                lambda: _first_batch(sampler or Sampler(run.data.train, options, run.masters.step)),
                "first_batch",
                lines,
            )
            start["initial_weights"] = _known(
                lambda: weights_hash(run.masters.variables()), "initial_weights", lines
            )
        start["sessions"] = []
    first = start.get("flags")
    first = first if isinstance(first, dict) else {}
    now["changed_flags"] = {n: v for n, v in flags.items() if first.get(n) != v}
    start["sessions"].append(now)
    files.write_json(folder / NAME, start | {"final": None})
    return [f"warning     {line}" for line in lines]


def finish(folder: Path, variables: Mapping[str, tf.Variable]) -> None:
    """Write into the manifest of a run what it ended with.

    Args:
        folder: of the run.
        variables: its master variables, by `Masters.variables`.

    Raises:
        RunError: the file cannot be written.
    """
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
    whole = (
        isinstance(found, dict)
        and found.get("format") == _FORMAT
        and isinstance(sessions := found.get("sessions"), list)
        and sessions
        and all(isinstance(session, dict) for session in sessions)
    )
    return found if whole else {}


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], names: tuple[str, str] = ("here", "there")
) -> list[str]:
    """Return lines that say in what two manifests differ that may change numbers.

    Versions, git, the kinds of devices, processor, environment, data, first batch and initial
    weights are compared; flags and the number of towers are not, nor what one of the two does not
    know.

    Args:
        ours: a manifest, or as much of it as there is.
        theirs: the other.
        names: what the lines call the two.
    """
    lines = []
    for part, fields in _COMPARED.items():
        if ours.get(part) is None or theirs.get(part) is None:
            continue
        left, right = (dict(_leaves(part, manifest[part])) for manifest in (ours, theirs))
        for name in dict.fromkeys([*left, *right]):
            last = name.rpartition(".")[2]
            if last in _ONLY_WHERE or (fields and last not in fields):
                continue
            values = left.get(name), right.get(name)
            known = None not in values or part in _MAY_BE_UNSET
            if known and values[0] != values[1]:
                texts = [f"{_text(v)} {n}" for v, n in zip(values, names, strict=True)]
                lines.append(f"{name} differs: {', '.join(texts)}")
    return lines


def weights_hash(variables: Mapping[str, tf.Variable]) -> str:
    """Return the sha256 of the model's own variables, weights and statistics, by sorted name."""
    return _hash({name: v for name, v in variables.items() if name.startswith("model/")})


def _hash(variables: Mapping[str, tf.Variable]) -> str:
    found = hashlib.sha256()
    for name, variable in sorted(variables.items()):
        found.update(f"{name} {digest(variable.numpy())};".encode())
    return found.hexdigest()


def _start(run: Run, folder: Path, step: int, lines: list[str]) -> dict[str, Any]:
    """Return what is to be said of a start; a line for each part that cannot be had."""
    parts: dict[str, Callable[[], Any]] = {
        "command": host.command,
        "folder": lambda: str(Path.cwd()),
        "versions": host.versions,
        "git": lambda: _repositories(run.options, folder),
        "devices": lambda: _devices(run),
        "host": host.machine,
        "environment": host.environment,
        "data": lambda: {"train": run.data.train.checksum(), "test": run.data.test.checksum()},
    }
    found = {name: _known(function, name, lines) for name, function in parts.items()}
    return {"time": _time(), "step": step, **found}


def _known(function: Callable[[], Any], name: str, lines: list[str]) -> Any:
    """Return what the function returns; None and a line if it cannot."""
    try:
        return function()
    except Exception as error:  # whatever it is, it is no reason not to train
        reason = " ".join(str(error).split())[:200]
        lines.append(f"{NAME} does without {name}: {type(error).__name__}: {reason}")
        return None


def _devices(run: Run) -> list[dict[str, Any]]:
    """Return the device of each tower, without what changes from one minute to the next."""
    found = [dataclasses.asdict(device) for device in devices.describe(run.builder.devices)]
    return [{name: v for name, v in row.items() if name != "free_bytes"} for row in found]


def _repositories(options: Options, folder: Path) -> dict[str, Any]:
    """Return the state of each repository that code of the run comes from."""
    found = {"folder": repository.state(Path.cwd(), without=folder)}
    for role, place in _code(options):
        root = repository.root(place)
        if root and root not in [state["root"] for state in found.values() if state]:
            found[role] = repository.state(place, without=folder)
    return found


def _code(options: Options) -> Iterator[tuple[str, Path]]:
    """Yield where the model's code lies, and that of a data set of the user's, and our own."""
    for role, name in {"model": options.model, "dataset": options.dataset}.items():
        module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
        if file := getattr(module, "__file__", None):
            yield role, Path(file).resolve().parent
    yield "towers", Path(__file__).resolve().parents[1]


def _first_batch(sampler: Sampler) -> dict[str, Any]:
    """Return the checksum of what step 0 is given: a pure function of data, seed and batch size."""
    batch = sampler.batch(step=0, examples=0)
    arrays = {name: getattr(batch, name).numpy() for name in ("images", "labels", "draws")}
    each = {name: digest(array) for name, array in arrays.items()}
    return {"sha256": digest(*arrays.values()), **each}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ("git.folder.commit", "9f2c...") for everything in nested dictionaries.

    Of a list of dictionaries, as the devices are, come the different names.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, list) and any(isinstance(row, dict) for row in value):
        rows = [row for row in value if isinstance(row, dict)]
        yield name, " and ".join(sorted({str(row.get("name")) for row in rows}))
    else:
        yield name, value


def _text(value: Any) -> str:
    """Return a value for a line: of a checksum the beginning."""
    text = str(value)
    if value is None:
        return "not set"
    return f"{text[:12]}..." if len(text) in (40, 64) and text.isalnum() else text[:100]


def _time() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
