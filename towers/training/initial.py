"""`--init_from`: the weights that a new run begins with, of another run or of a file of Keras'.

Weights are known by their place in the model, as "layers/dense/vars/0" in a file: so one that only
got another head finds them. Or by the names of layer and weight, as with a backbone inside of a
larger model. Whichever way finds more is taken; shapes must be the same.

Seeds of random draws stay those of the new run.
"""

import collections
import io
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from towers import files, tf_private
from towers.errors import InputError
from towers.text import first_line
from towers.training.loading import read_weights
from towers.training.masters import Masters

Pair = tuple[keras.Variable, np.ndarray | None]
_NAMED = 10  # weights of each kind


class Keyed(NamedTuple):
    """A weight, or its value: where it is ("" is not known), and its layer's and its own name."""

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
    if path.is_dir():
        what, found = _of_run(path)
        ours = [Keyed(v.path, _last_two(v.path), v) for v in masters.model.weights]
    else:
        what, found = str(path), _of_file(path)
        weights = {id(v) for v in masters.model.weights}
        places = tf_private.places_in_file(masters.model)
        ours = [Keyed(*place) for place in places if id(place[2]) in weights]
    pairs = max(_match(ours, found, "path"), _match(ours, found, "name"), key=_num_fitting)
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
    for variable, there in pairs:
        if _fits(variable, there):
            variable.assign(there.astype(variable.dtype))
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


def _fits(variable: keras.Variable, value: np.ndarray | None) -> bool:
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


def _of_file(path: Path) -> list[Keyed]:
    """Return the weights in a file of Keras'."""
    import h5py  # Keras brings it

    try:
        content: Any = path
        if zipfile.is_zipfile(path):  # FILE.keras
            with zipfile.ZipFile(path) as archive:
                content = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(content) as file:
            legacy = "layer_names" in file.attrs or "model_weights" in file
            return _without_seeds((_of_legacy if legacy else _of_weights)(file))
    except FileNotFoundError:
        raise InputError(f"--init_from={path}: there is no such file or folder") from None
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"--init_from={path} is no file of Keras' weights (.keras, .weights.h5, .h5): "
            f"{first_line(error)}"
        ) from None


def _of_weights(file: Any) -> Iterator[Keyed]:
    """Yield what `save_weights` wrote: layers/dense/vars/0, "dense" in an attribute of vars."""
    places: list[str] = []
    file.visit(places.append)
    for place in places:
        group, _, number = place.rpartition("/")
        if os.path.basename(group) == "vars" and not place.startswith("optimizer/"):
            layer = file[group].attrs.get("name", "")
            yield Keyed(place, f"{layer}/{number}", np.asarray(file[place]))


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
                yield Keyed("", f"{layer}/{number[layer]}", np.asarray(group[name]))
                number[layer] += 1


def _without_seeds(found: Iterable[Keyed]) -> list[Keyed]:
    return [k for k in found if "seed_generator" not in f"{k.path} {k.name}"]


def _last_two(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)
