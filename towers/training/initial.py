"""`--init_from`: the weights that a new run begins with, of another run or of a file of Keras'.

Weights are known by their place in the model, as "layers/dense/vars/0" in a file: so one that only
got another head finds them. Or by the names of layer and weight, as with a backbone inside of a
larger model. Whichever way finds more is taken; shapes must be the same.

Seeds of random draws stay those of the new run.
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

from towers import files, tf_private
from towers.data import zipped
from towers.errors import InputError
from towers.text import first_line
from towers.training.loading import read_weights
from towers.training.masters import Masters

Pair = tuple[keras.Variable, Any]  # a weight, and what has its value: an array, or h5py's dataset
_NAMED = 10  # weights of each kind
_LONGEST_NAME = 1000  # of a layer, in characters
_SECONDS = 30.0  # that a look through a file may take
_LOOK_THROUGH = """
import io, resource, sys
sys.path += sys.argv[2:]
import h5py
data = sys.stdin.buffer.read()
most = 2**31 + 2 * len(data)  # bytes: a text may be named many times
resource.setrlimit(resource.RLIMIT_AS, (most, most))
file = h5py.File(sys.argv[1] or io.BytesIO(data))
for found in file, file.get("model_weights"):
    dict(found.attrs if found else {})
file.visititems(lambda _, found: (dict(found.attrs), None)[1])  # else it ends there
"""


class Keyed(NamedTuple):
    """A weight, or its value: where it is ("" is not known), and its layer's and its own name.

    Of a value in a file no more than its shape is read before it is wanted.
    """

    path: str
    name: str
    value: Any


def init_from(masters: Masters, source: str) -> list[str]:
    """Give the weights of a model, frozen ones too, and their averages the values of a source.

    Args:
        masters: of a run before its first step.
        source: the folder of a run, whose averages are taken if it has any, or a file of Keras'.

    Returns:
        Lines that say how many weights were found, and which were not.

    Raises:
        InputError: the source cannot be read, or has no weight of this model.
    """
    path = Path(source).expanduser()
    with contextlib.ExitStack() as opened:
        if path.is_dir():
            what, found = _of_run(path)
            ours = [Keyed(v.path, _last_two(v.path), v) for v in masters.model.weights]
        else:
            what, found = str(path), opened.enter_context(_of_file(path))
            weights = {id(v) for v in masters.model.weights}
            places = tf_private.places_in_file(masters.model)
            ours = [Keyed(*place) for place in places if id(place[2]) in weights]
        pairs = max(_match(ours, found, "path"), _match(ours, found, "name"), key=_num_fitting)
        values = [_array(there) for variable, there in pairs if _fits(variable, there)]
    missing = [v.path for v, there in pairs if there is None]
    other = [
        f"{v.path} {list(v.shape)} here, {list(there.shape)} there"
        for v, there in pairs
        if there is not None and not _fits(v, there)
    ]
    num_fitting = _num_fitting(pairs)
    if not num_fitting:
        examples = f"{_some([k.path or k.name for k in found])} there, {_some(missing or other)}"
        raise InputError(f"--init_from={source} has no weight of this model: {examples} here")
    fitting = [variable for variable, there in pairs if _fits(variable, there)]
    for variable, value in zip(fitting, values, strict=True):
        variable.assign(value.astype(variable.dtype))
    for variable, average in masters.averages:
        average.assign(variable.value)
    masters.set_copies()
    lines = [f"init_from   {what}: {num_fitting} of {len(pairs)} weights"]
    used = {id(there) for _, there in pairs}
    unused = [k.path or k.name for k in found if id(k.value) not in used]
    kinds = {"not there": missing, "of another shape": other, "of no use here": unused}
    return lines + [f"  {kind} ({len(n)}): {_some(n)}" for kind, n in kinds.items() if n]


def _match(ours: Iterable[Keyed], found: Iterable[Keyed], field: str) -> list[Pair]:
    """Return each variable with the value that has the same path, or name, there."""
    times = collections.Counter(getattr(k, field) for k in [*found, *ours])
    values = {getattr(k, field): k.value for k in found}
    keys = [getattr(k, field) for k in ours]
    # What two layers are called by tells nothing.
    there = [values.get(key) if times[key] <= 2 else None for key in keys]
    return [(k.value, value) for k, value in zip(ours, there, strict=True)]


def _fits(variable: keras.Variable, value: Any) -> bool:
    return value is not None and tuple(variable.shape) == value.shape


def _num_fitting(pairs: Iterable[Pair]) -> int:
    return sum(_fits(*pair) for pair in pairs)


def _of_run(folder: Path) -> tuple[str, list[Keyed]]:
    """Return the name and the weights of a run's checkpoint."""
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
    what = "its averages" if weights.averages else "its weights"
    found = [Keyed(path, _last_two(path), value) for path, value in values.items()]
    return f"{folder}, {what} at step {weights.step}", _without_seeds(found)


@contextlib.contextmanager
def _of_file(path: Path) -> Iterator[list[Keyed]]:
    """Yield the weights in a file of Keras', which can be read meanwhile."""
    import h5py  # Keras brings it

    try:
        files.check_is_file(path)
        content: Any = path
        if zipfile.is_zipfile(path):  # FILE.keras
            content = io.BytesIO(zipped.read(path, "model.weights.h5"))
        _look_through(content)
        with h5py.File(content) as file:
            links: list[tuple[str, Any]] = []
            file.visititems_links(lambda *found: links.append(found))
            for place, link in links:
                if not isinstance(link, h5py.HardLink):
                    raise ValueError(f"{place} is a link, and weights must lie in the file itself")
            legacy = "layer_names" in file.attrs or "model_weights" in file
            places = [place for place, _ in links]
            yield _without_seeds(_of_legacy(file) if legacy else _of_weights(file, places))
    except FileNotFoundError:
        raise InputError(f"--init_from={path}: there is no such file or folder") from None
    except Exception as error:  # of a damaged file HDF5 and h5py raise many kinds
        raise InputError(
            f"--init_from={path} is no file of Keras' weights (.keras, .weights.h5, .h5): "
            f"{first_line(error)}"
        ) from None


def _look_through(content: Any) -> None:
    """Let another process read what describes the weights; a ValueError if it does not get through.

    HDF5 goes in circles over some damaged files, and falls over others; no thread can end that.
    """
    import h5py

    folders = {os.path.dirname(os.path.dirname(m.__file__)) for m in (h5py, np)}
    path, data = ("", content.getvalue()) if isinstance(content, io.BytesIO) else (content, b"")
    command = [sys.executable, "-I", "-c", _LOOK_THROUGH, path, *folders]  # -I: not from here
    about = {"capture_output": True, "timeout": _SECONDS, "check": True}
    about["env"] = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # each takes room
    try:
        subprocess.run(command, input=data, **about)
    except subprocess.TimeoutExpired:
        raise ValueError(f"HDF5 reads for longer than {_SECONDS:g} s") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").split("\n")
        reason = f"signal {-error.returncode}" if error.returncode < 0 else "".join(said[-2:])
        raise ValueError(f"HDF5 cannot read it: {reason}") from None


def _array(value: Any) -> np.ndarray:
    """Return an array, or read one: of numbers, uncompressed and in the file itself.

    Others have their values elsewhere, or unpack to more than the file is: Keras writes none.
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


def _of_weights(file: Any, places: Iterable[str]) -> Iterator[Keyed]:
    """Yield what `save_weights` wrote: layers/dense/vars/0, "dense" in an attribute of vars."""
    for place in places:
        group, _, number = place.rpartition("/")
        if os.path.basename(group) == "vars" and not place.startswith("optimizer/"):
            layer = str(file[group].attrs.get("name", ""))[:_LONGEST_NAME]
            yield Keyed(place, f"{layer}/{number}", _dataset(file[place]))


def _of_legacy(file: Any) -> Iterator[Keyed]:
    """Yield the weights of Keras 2: a group for each layer, with the list of its weights' names.

    The names of weights have changed since, "depthwise_kernel" being "kernel" now. Their order in
    a layer has not.
    """
    file = file.get("model_weights", file)
    for group in file.values():
        number: collections.Counter = collections.Counter()
        for key in sorted(key for key in group.attrs if key.startswith("weight_names")):
            for name in group.attrs[key]:  # a long list has several attributes
                name = name.decode() if isinstance(name, bytes) else str(name)
                layer = os.path.basename(os.path.dirname(name)) or os.path.basename(group.name)
                yield Keyed("", f"{layer}/{number[layer]}", _dataset(group[name]))
                number[layer] += 1


def _dataset(found: Any) -> Any:
    """Return a dataset; a ValueError if it is none, or has no shape."""
    if getattr(found, "shape", None) is None:
        raise ValueError(f"{found.name} is no array")
    return found


def _without_seeds(found: Iterable[Keyed]) -> list[Keyed]:
    return [k for k in found if "seed_generator" not in f"{k.path} {k.name}"]


def _last_two(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)
