"""`--init_from`: initial weights from another run or a Keras file.

Keras' `load_weights` reads a file and skips layers that do not fit. The weights of a run are
matched by their path in the model and by shape. Seeds stay those of the new run.
"""

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from towers.errors import InputError
from towers.formatting import first_line, first_of
from towers.training.load import averages_in, read_weights
from towers.training.step.train_state import TrainState, by_unique_name, restore_after, variables_of

_MOST_NAMES = 10  # weights that the line names


def init_from(train_state: TrainState, source: str) -> str:
    """Initialize a model's weights, frozen ones too, and their averages from a source.

    Args:
        train_state: of a run before its first step.
        source: the folder of a run, whose averages are preferred, or a Keras file.

    Returns:
        A line that says how many weights were loaded, and names those that were not.

    Raises:
        InputError: the source cannot be read, or has no weight of this model.
    """
    path, model = Path(source).expanduser(), train_state.model
    description, values = _from_run(path, model) if path.is_dir() else _from_file(path, train_state)
    pairs = list(zip(model.weights, values, strict=True))
    missing = [variable.path for variable, value in pairs if value is None]
    loaded = len(pairs) - len(missing)
    if not loaded:
        raise InputError(
            f"--init_from={source} has no weight of this model, which needs "
            f"{first_of(missing, _MOST_NAMES)}"
        )
    for variable, value in pairs:
        if value is not None:
            variable.assign(value)
    for variable, average in train_state.averages:
        average.assign(variable.value)
    train_state.set_copies()
    line = f"init_from   {description}: {loaded} of {len(pairs)} weights"
    return f"{line}; not loaded: {first_of(missing, _MOST_NAMES)}" if missing else line


def _from_run(folder: Path, model: keras.Model) -> tuple[str, list[Any]]:
    """Return a description of a run's checkpoint, and the value of each weight, None if absent."""
    try:
        step, values = read_weights(folder)
    except InputError as error:
        raise InputError(str(error).replace("--train_dir", "--init_from", 1)) from None
    averages = averages_in(values)
    names = by_unique_name((f"model/{v.path}", v) for v in variables_of(model))
    shapes = {n: tuple(v.shape) for n, v in names.items()}
    fitting = {id(names[n]): x for n, x in (values | averages).items() if shapes.get(n) == x.shape}
    description = f"{folder}, its {'averages' if averages else 'weights'} at step {step}"
    return description, [fitting.get(id(v)) for v in model.weights]


def _from_file(path: Path, train_state: TrainState) -> tuple[str, list[Any]]:
    """Return the file's name, and the value of each weight, None if Keras loads none."""
    model = train_state.model
    marks = [_mark(v.numpy()) for v in model.weights]  # which Keras leaves where it loads nothing
    try:
        with warnings.catch_warnings(), restore_after(train_state.variables().values()):
            warnings.simplefilter("ignore")  # Keras warns of each layer that it skips
            for variable, mark in zip(model.weights, marks, strict=True):
                variable.assign(mark)
            model.load_weights(path, skip_mismatch=True)
            found = [v.numpy() for v in model.weights]
    except FileNotFoundError:
        raise InputError(f"--init_from={path}: there is no such file or folder") from None
    except Exception as error:  # Keras, HDF5 and zipfile raise many kinds for a damaged file
        raise InputError(
            f"--init_from={path} is no file of Keras' weights (.keras, .weights.h5, .h5): "
            f"{first_line(error)}"
        ) from None
    pairs = zip(found, marks, strict=True)
    return str(path), [None if x.tobytes() == mark.tobytes() else x for x, mark in pairs]


def _mark(value: np.ndarray) -> np.ndarray:
    """Return a value of that kind which no file has: NaN, or integers of another value."""
    if value.dtype.kind in "iu":
        return value + 1
    return np.full_like(value, 1 if value.dtype.kind == "b" else np.nan)
