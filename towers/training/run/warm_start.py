"""`--init_from`: initial weights from another run or a Keras file.

Weights are matched by their path in the model, such as "layers/dense/vars/0" in a file, which suits
a model with another head; or by the names of layer and weight, which suits a backbone inside of a
larger model: whichever matches more. Shapes must be equal. Seeds stay those of the new run.
"""

import collections
import contextlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers import files, tf_internals
from towers.data import zip_sizes
from towers.errors import InputError
from towers.formatting import first_line, first_of
from towers.training.load import read_weights
from towers.training.step.train_state import TrainState

_MOST_NAMES = 10  # weights of each kind that a line names
_LONGEST_NAME = 1000  # of a layer, in characters
_SECONDS = 30.0  # timeout of the check of a file
_READ_STRUCTURE = """
import io, resource, sys
sys.path += sys.argv[2:]
import h5py
data = sys.stdin.buffer.read()
most = 2**31 + 2 * len(data)  # bytes: a text may be named many times
resource.setrlimit(resource.RLIMIT_AS, (most, most))
file = h5py.File(sys.argv[1] or io.BytesIO(data))
for found in file, file.get("model_weights"):
    dict(found.attrs if found else {})
file.visititems(lambda _, found: (dict(found.attrs), None)[1])  # None: go on
"""


class NamedWeight(NamedTuple):
    """A weight, or a value for one."""

    path: str  # in the model, "" if unknown
    name: str  # "layer/weight"
    value: Any  # a variable, an array, or a dataset of h5py


def init_from(train_state: TrainState, source: str) -> list[str]:
    """Initialize a model's weights, frozen ones too, and their averages from a source.

    Args:
        train_state: of a run before its first step.
        source: the folder of a run, whose averages are preferred, or a Keras file.

    Returns:
        The report: how many weights matched, and which did not.

    Raises:
        InputError: the source cannot be read, or has no weight of this model.
    """
    path = Path(source).expanduser()
    with contextlib.ExitStack() as opened:
        if path.is_dir():
            description, available = _read_run(path)
            ours = [NamedWeight(v.path, _short_name(v.path), v) for v in train_state.model.weights]
        else:
            description, available = str(path), opened.enter_context(_of_file(path))
            weights = {id(v) for v in train_state.model.weights}
            places = tf_internals.places_in_file(train_state.model)
            ours = [NamedWeight(*place) for place in places if id(place[2]) in weights]
        matched = [_match(ours, available, field) for field in ("path", "name")]
        pairs = max(matched, key=lambda pairs: sum(_fits(*pair) for pair in pairs))
        values = [(v, _array(there)) for v, there in pairs if _fits(v, there)]
    missing = [v.path for v, there in pairs if there is None]
    other = [
        f"{v.path} {list(v.shape)} here, {list(there.shape)} there"
        for v, there in pairs
        if there is not None and not _fits(v, there)
    ]
    if not values:
        known = first_of([k.path or k.name for k in available], _MOST_NAMES)
        examples = f"{known} there, {first_of(missing or other, _MOST_NAMES)}"
        raise InputError(f"--init_from={source} has no weight of this model: {examples} here")
    for variable, value in values:
        variable.assign(value.astype(variable.dtype))
    for variable, average in train_state.averages:
        average.assign(variable.value)
    train_state.set_copies()
    used = {id(there) for _, there in pairs}
    unused = [k.path or k.name for k in available if id(k.value) not in used]
    kinds = {"not there": missing, "of another shape": other, "of no use here": unused}
    return [
        f"init_from   {description}: {len(values)} of {len(pairs)} weights",
        *(
            f"  {kind} ({len(names)}): {first_of(names, _MOST_NAMES)}"
            for kind, names in kinds.items()
            if names
        ),
    ]


def _match(
    ours: Iterable[NamedWeight], available: Iterable[NamedWeight], field: str
) -> list[tuple[keras.Variable, Any]]:
    """Return each variable with the value of the same path or name, or None."""
    times = collections.Counter(getattr(k, field) for k in [*available, *ours])
    values = {getattr(k, field): k.value for k in available}
    # A name that two layers share is ambiguous.
    keys = ((k, getattr(k, field)) for k in ours)
    return [(k.value, values.get(key) if times[key] <= 2 else None) for k, key in keys]


def _fits(variable: keras.Variable, value: Any) -> bool:
    return value is not None and tuple(variable.shape) == value.shape


def _read_run(folder: Path) -> tuple[str, list[NamedWeight]]:
    """Return a description of a run's checkpoint, and its weights."""
    if not files.is_run(folder):
        raise InputError(
            f"--init_from={folder}: there is no run; name the folder of a run, or a file that ends "
            "in .keras, .weights.h5 or .h5"
        )
    try:
        weights = read_weights(folder)
    except InputError as error:
        raise InputError(str(error).replace("--train_dir", "--init_from", 1)) from None
    values = weights.model | weights.averages
    kind = "its averages" if weights.averages else "its weights"
    named = [NamedWeight(path, _short_name(path), value) for path, value in values.items()]
    return f"{folder}, {kind} at step {weights.step}", _without_seeds(named)


@contextlib.contextmanager
def _of_file(path: Path) -> Iterator[list[NamedWeight]]:
    """Yield the weights in a Keras file, which stays open in the block."""
    import h5py  # Keras brings it

    try:
        files.check_is_file(path)
        content: Any = path
        if zipfile.is_zipfile(path):  # FILE.keras
            content = io.BytesIO(zip_sizes.read(path, "model.weights.h5"))
        _check_readable(content)
        with h5py.File(content) as file:
            links: list[tuple[str, Any]] = []
            file.visititems_links(lambda *pair: links.append(pair))
            for place, link in links:
                if not isinstance(link, h5py.HardLink):
                    raise ValueError(f"{place} is a link, and weights must lie in the file itself")
            legacy = "layer_names" in file.attrs or "model_weights" in file
            places = [place for place, _ in links]
            yield _without_seeds(_read_legacy(file) if legacy else _read_weights(file, places))
    except FileNotFoundError:
        raise InputError(f"--init_from={path}: there is no such file or folder") from None
    except Exception as error:  # HDF5 and h5py raise many kinds for a damaged file
        raise InputError(
            f"--init_from={path} is no file of Keras' weights (.keras, .weights.h5, .h5): "
            f"{first_line(error)}"
        ) from None


def _check_readable(content: Any) -> None:
    """Read a file's structure in another process; raise ValueError if that fails.

    HDF5 hangs or crashes on some damaged files, which a thread could not survive.
    """
    import h5py

    folders = {os.path.dirname(os.path.dirname(m.__file__)) for m in (h5py, np)}
    path, data = ("", content.getvalue()) if isinstance(content, io.BytesIO) else (content, b"")
    command = [sys.executable, "-I", "-c", _READ_STRUCTURE, path, *folders]  # -I: isolated
    about = {"capture_output": True, "timeout": _SECONDS, "check": True}
    about["env"] = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # threads take memory
    try:
        subprocess.run(command, input=data, **about)
    except subprocess.TimeoutExpired:
        raise ValueError(f"HDF5 reads for longer than {_SECONDS:g} s") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").split("\n")
        reason = f"signal {-error.returncode}" if error.returncode < 0 else "".join(said[-2:])
        raise ValueError(f"HDF5 cannot read it: {reason}") from None


def _array(value: Any) -> np.ndarray:
    """Return the array of a value; raise ValueError for one that Keras would not write.

    External or compressed data may read other files, or unpack to more than the file's size.
    """
    if isinstance(value, np.ndarray):
        return value
    import h5py

    about = value.id.get_create_plist()
    if value.external or about.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT):
        raise ValueError(
            f"{value.name} is in pieces, compressed or in another file: load these weights with "
            "Keras, and save them with it"
        )
    if value.dtype == "V2" and value.attrs.get("dtype") == "bfloat16":  # NumPy knows none
        return np.asarray(value).view(tf.bfloat16.as_numpy_dtype)
    if value.dtype.kind not in "iufb":
        raise ValueError(f"{value.name} is {value.dtype}, and weights are numbers")
    return np.asarray(value)


def _read_weights(file: Any, places: Iterable[str]) -> Iterator[NamedWeight]:
    """Yield the weights of `save_weights`: layers/dense/vars/0, where vars is named "dense"."""
    for place in places:
        group, _, number = place.rpartition("/")
        if os.path.basename(group) == "vars" and not place.startswith("optimizer/"):
            layer = str(file[group].attrs.get("name", ""))[:_LONGEST_NAME]
            yield NamedWeight(place, f"{layer}/{number}", _as_dataset(file[place]))


def _read_legacy(file: Any) -> Iterator[NamedWeight]:
    """Yield the weights of a Keras 2 file: a group for each layer, with its weights' names.

    Weights are numbered: their order in a layer is the same in Keras 3, their names are not.
    """
    file = file.get("model_weights", file)
    for group in file.values():
        number: collections.Counter = collections.Counter()
        for key in sorted(key for key in group.attrs if key.startswith("weight_names")):
            for name in group.attrs[key]:  # a long list has several attributes
                name = name.decode() if isinstance(name, bytes) else str(name)
                layer = os.path.basename(os.path.dirname(name)) or os.path.basename(group.name)
                yield NamedWeight("", f"{layer}/{number[layer]}", _as_dataset(group[name]))
                number[layer] += 1


def _as_dataset(item: Any) -> Any:
    if getattr(item, "shape", None) is None:
        raise ValueError(f"{item.name} is no array")
    return item


def _without_seeds(weights: Iterable[NamedWeight]) -> list[NamedWeight]:
    return [k for k in weights if "seed_generator" not in f"{k.path} {k.name}"]


def _short_name(path: str) -> str:
    return "/".join(path.split("/")[-2:])
