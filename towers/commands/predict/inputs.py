"""Finds the user's files, and reads their examples."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.data import npz
from towers.data.folder import ENDINGS as IMAGES
from towers.data.folder import images_below, read_image
from towers.errors import InputError
from towers.formatting import reason_of
from towers.training.load import TrainedModel


class InputFile(NamedTuple):
    """A file with `size` examples; `read(row)` returns one, arrays in the structure of x."""

    file: str
    size: int
    read: Callable[[int], Any]
    note: str = ""  # on an image that was resized


def find(names: Sequence[str], trained: TrainedModel) -> list[InputFile]:
    """Return the files; each is read once, so that damage is found early.

    Args:
        names: files, and folders, which stand for all images below them.
        trained: the model that is to take the examples.

    Raises:
        InputError: a file does not exist, is damaged, or does not fit the model.
    """
    paths = []
    for name in names:
        if not os.path.exists(name):
            raise InputError(f"{name}: there is no such file or folder")
        found = images_below(name) if os.path.isdir(name) else [name]
        if not found:
            raise InputError(f"{name} has no images ({', '.join(IMAGES)})")
        paths += found
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda path: _part(path, trained), paths))


def _part(path: str, trained: TrainedModel) -> InputFile:
    ending, spec = os.path.splitext(path)[1].lower(), trained.spec()[0]
    if ending in IMAGES:
        return _image(path, trained)
    if ending == ".npz":
        return _arrays(path, _named_arrays(path, spec), spec)
    if ending != ".npy":
        raise InputError(f"{path}: {', '.join(IMAGES)}, .npy and .npz are read, and no other files")
    if tf.nest.is_nested(spec):
        raise InputError(f"{path} is one array; name a .npz file: {_takes(spec)}")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises many kinds for damaged files
        raise InputError(f"{path} cannot be read: {reason_of(error)}") from None
    return _arrays(path, [array], spec)


def _image(path: str, trained: TrainedModel) -> InputFile:
    spec, channels = trained.spec()[0], (trained.task["image_shape"] or [0])[-1]
    if channels not in (1, 3, 4) or spec.dtype != tf.uint8:
        raise InputError(f"{path} is an image; name a .npy file: {_takes(spec)}")
    size, found = tuple(spec.shape[:2]), read_image(path, channels=channels).shape[:2]
    resized = not trained.options.image_size and size != found
    note = "{}x{} resized to {}x{}".format(*found, *size) if resized else ""
    return InputFile(path, 1, lambda _: read_image(path, size, channels), note)


def _named_arrays(path: str, spec: Any) -> list[np.ndarray]:
    found, arrays = [], npz.read(path, path)
    for name in _leaf_names(spec):
        keys = [f"{x}.{name}".rstrip(".") for x in ("x", "x_test")]
        key = next((key for key in keys if key in arrays), None)
        if key is None:
            raise InputError(f"{path} has {', '.join(arrays)}, and no {keys[0]}: {_takes(spec)}")
        found.append(arrays[key])
    return found


def _arrays(path: str, arrays: Sequence[np.ndarray], spec: Any) -> InputFile:
    leaves = tf.nest.flatten(spec)
    for name, array, leaf in zip(_leaf_names(spec), arrays, leaves, strict=True):
        if leaf.dtype == tf.string:
            casts = array.dtype.kind in "SU"
        elif leaf.dtype == tf.float32 and array.dtype == np.uint8:  # may be 0..255 instead of 0..1
            casts = False
        else:
            casts = np.can_cast(array.dtype, leaf.dtype.as_numpy_dtype, "same_kind")
        if not (casts and array.ndim and leaf.shape.is_compatible_with(array.shape[1:])):
            is_now = f"{name} {array.dtype}{list(array.shape)}".strip()
            raise InputError(f"{path} is {is_now}: {_takes(spec)}")
    sizes = {len(array) for array in arrays}
    if len(sizes) > 1 or not sum(sizes):
        raise InputError(f"{path}: its arrays have {sorted(sizes)} rows; one number is needed")
    kinds = [None if leaf.dtype == tf.string else leaf.dtype.as_numpy_dtype for leaf in leaves]

    def read(row: int) -> Any:
        parts = [np.asarray(a[row], kind) for a, kind in zip(arrays, kinds, strict=True)]
        return tf.nest.pack_sequence_as(spec, parts)

    return InputFile(path, len(arrays[0]), read)


def _leaf_names(spec: Any) -> list[str]:
    # A name such as "a.b" for each tensor of a structure, "" for a single one.
    return [".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(spec)]


def _takes(spec: Any) -> str:
    leaves = zip(_leaf_names(spec), tf.nest.flatten(spec), strict=True)
    named = ", ".join(f"{n} {s.dtype.name}{s.shape.as_list()}".strip() for n, s in leaves)
    return f"this model takes {named} of each example"
