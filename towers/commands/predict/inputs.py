"""Finds the user's files, and reads their examples."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.data import npz
from towers.data.folder import ENDINGS as IMAGES
from towers.data.folder import images_below, read_image
from towers.errors import InputError, reason
from towers.training.load import TrainedModel


class InputFile(NamedTuple):
    """A file with `size` examples; `read(row)` returns one."""

    file: str
    size: int
    read: Callable[[int], np.ndarray]


def find(names: Sequence[str], trained: TrainedModel) -> list[InputFile]:
    """Return the files; each is read once, so that damage is found early.

    Args:
        names: files, and folders, which stand for all images below them.
        trained: the model that is to take the examples.

    Raises:
        InputError: a file does not exist, is damaged, or does not fit the model.
    """
    if tf.nest.is_nested(trained.spec()[0]):
        raise InputError(
            "towers predict is for models with one input, but this one has several; in Python call "
            f"towers.load({trained.options.train_dir!r})"
        )
    paths = []
    for name in names:
        is_folder = os.path.isdir(name)
        if not (is_folder or os.path.isfile(name)):
            raise InputError(f"{name}: no such file or folder")
        found = images_below(name) if is_folder else [name]
        if not found:
            raise InputError(f"{name} has no images ({', '.join(IMAGES)})")
        paths += found
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda path: _part(path, trained), paths))


def _part(path: str, trained: TrainedModel) -> InputFile:
    ending, spec = os.path.splitext(path)[1].lower(), trained.spec()[0]
    takes = f"this model takes {spec.dtype.name}{spec.shape.as_list()} for each example"
    if ending in IMAGES:
        channels = (trained.task["image_shape"] or [0])[-1]
        if channels not in (1, 3, 4) or spec.dtype != tf.uint8:
            raise InputError(f"{path} is an image, but {takes}; name a .npy file")
        size = tuple(spec.shape[:2])
        read_image(path, size, channels)
        return InputFile(path, 1, lambda _: read_image(path, size, channels))
    if ending == ".npz":
        arrays = npz.read(path, path)
        array = arrays.get("x", arrays.get("x_test"))
        if array is None:
            raise InputError(f"{path} has {', '.join(arrays)}, but no x: {takes}")
    elif ending == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy raises many kinds for damaged files
            raise InputError(f"{path} cannot be read: {reason(error)}") from None
    else:
        raise InputError(f"{path}: only {', '.join(IMAGES)}, .npy and .npz files can be read")
    is_text = spec.dtype == tf.string
    kind = None if is_text else spec.dtype.as_numpy_dtype
    casts = array.dtype.kind in "SU" if is_text else np.can_cast(array.dtype, kind, "same_kind")
    if spec.dtype == tf.float32 and array.dtype == np.uint8:  # may be 0..255 instead of 0..1
        casts = False
    if casts and spec.dtype.is_integer and not np.can_cast(array.dtype, kind):  # it would wrap
        casts = np.array_equal(array, array.astype(kind))
    if not (casts and array.ndim and len(array) and spec.shape.is_compatible_with(array.shape[1:])):
        raise InputError(f"{path} is {array.dtype}{list(array.shape)}: {takes}")
    return InputFile(path, len(array), lambda row: np.asarray(array[row], kind))
