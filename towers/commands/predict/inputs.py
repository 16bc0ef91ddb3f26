"""Reads the user's files as batches of examples."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.data import encoded_images, npz
from towers.data.folder import ENDINGS as IMAGES
from towers.data.folder import images_below
from towers.errors import InputError
from towers.formatting import first_of
from towers.training.load import TrainedModel

_NUM_THREADS = os.cpu_count() or 1

Examples = Any  # arrays [n, ...] in the structure of a run's x


class InputFile(NamedTuple):
    """A file with `size` examples; `read(start, stop)` returns some of them."""

    file: str
    size: int
    read: Callable[[int, int], Examples]
    note: str = ""  # on an image that was resized


def find(
    names: Sequence[str], trained: TrainedModel, say: Callable[[str], object] = print
) -> list[InputFile]:
    """Return a part for each file; each is read once, so that damage is found early.

    Args:
        names: files, and folders, which stand for all images below them.
        trained: the model that is to take the examples.
        say: called with a line for each folder that has files of other kinds.

    Raises:
        InputError: a file does not exist, is damaged, or does not fit the model.
    """
    paths, notes = [], []
    for name in names:
        if not os.path.exists(name):
            raise InputError(f"{name}: there is no such file or folder")
        others: list[str] = []
        images = images_below(name, others) if os.path.isdir(name) else [name]
        if others:
            notes.append(f"note: {name}: not read {first_of(sorted(others), 3)}, of other endings")
        if not images:
            raise InputError(f"{name} has no images ({', '.join(IMAGES)})")
        paths += images
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        parts = list(pool.map(lambda path: _part(path, trained), paths))
    for note in notes:  # after whatever may be refused
        say(note)
    return parts


def batches(parts: Sequence[InputFile], batch_size: int) -> Iterator[tuple[list[tuple], Examples]]:
    """Yield [(file, index in the file)] and these examples, in order.

    Args:
        parts: the files.
        batch_size: examples at a time; the last batch may have fewer.
    """
    rows = ((part, index) for part in parts for index in range(part.size))

    def read(span: list[tuple[InputFile, int]]) -> Examples:
        (part, start), (_, last) = span[0], span[-1]
        return part.read(start, last + 1)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        while batch := list(itertools.islice(rows, batch_size)):
            spans = [list(span) for _, span in itertools.groupby(batch, key=lambda row: row[0])]
            arrays = tf.nest.map_structure(lambda *a: np.concatenate(a), *pool.map(read, spans))
            yield [(part.file, index) for part, index in batch], arrays


def _part(path: str, trained: TrainedModel) -> InputFile:
    ending = os.path.splitext(path)[1].lower()
    readers = {".npy": _npy_part, ".npz": _npz_part}
    readers |= dict.fromkeys(IMAGES, _image_part)
    if ending not in readers:
        raise InputError(
            f"{path}: predicted are {', '.join(IMAGES)}, .npy and .npz, and folders of images"
        )
    try:
        return readers[ending](path, trained)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # numpy raises many kinds for damaged files
        raise InputError(f"{path} {npz.fault(error, ending)}") from None


def _image_part(path: str, trained: TrainedModel) -> InputFile:
    spec, options = trained.spec()[0], trained.options
    channels = spec.shape[-1] if trained.task["image_shape"] else None
    if channels not in (1, 3, 4) or spec.dtype != tf.uint8:
        raise InputError(
            f"{path} is an image, and this model takes {_describe(spec)}: name a .npy file"
        )

    source = path, Path(path).read_bytes, channels

    def read(*_: int) -> np.ndarray:
        image = encoded_images.decoded(*source)
        if image.shape != spec.shape:
            with tf.device("/cpu:0"):
                image = encoded_images.resized(image, spec.shape[:2])
        return image.numpy()[None]

    height, width = encoded_images.decoded(*source).shape[:2]
    resized = not options.image_size and spec.shape[:2] != [height, width]
    note = f"{height}x{width} resized to {spec.shape[0]}x{spec.shape[1]}" if resized else ""
    return InputFile(path, 1, read, note)


def _npy_part(path: str, trained: TrainedModel) -> InputFile:
    spec = trained.spec()[0]
    if tf.nest.is_nested(spec):
        raise InputError(
            f"{path} is one array, and this model takes {_describe(spec)}: name a .npz file"
        )
    return _arrays_part(path, [np.load(path, mmap_mode="r", allow_pickle=False)], trained)


def _npz_part(path: str, trained: TrainedModel) -> InputFile:
    spec, leaves = trained.spec()[0], []
    with npz.opened(path, path) as arrays:
        for name in _leaf_names(spec):
            known = [f"{x}{dot}{name}" for x in ("x", "x_test") for dot in "./" if name]
            known += [name] if name else ["x", "x_test"]
            key = next((key for key in known if key in arrays.files), None)
            if key is None:
                raise InputError(
                    f"{path} has {', '.join(arrays.files)}; {' or '.join(known)} is needed: this "
                    f"model takes {_describe(spec)}"
                )
            leaves.append(arrays[key])
    return _arrays_part(path, leaves, trained)


def _arrays_part(path: str, arrays: Sequence[np.ndarray], trained: TrainedModel) -> InputFile:
    spec = trained.spec()[0]
    leaves = tf.nest.flatten(spec)
    for name, array, leaf in zip(_leaf_names(spec), arrays, leaves, strict=True):
        if leaf.dtype == tf.string:
            casts = array.dtype.kind in "SUO"
        elif leaf.dtype == tf.float32 and array.dtype == np.uint8:  # may be 0..255 instead of 0..1
            casts = False
        else:
            casts = np.can_cast(array.dtype, leaf.dtype.as_numpy_dtype, "same_kind")
        if not (casts and array.ndim and leaf.shape.is_compatible_with(array.shape[1:])):
            raise InputError(
                f"{path}{': ' * bool(name)}{name} is {array.dtype}{list(array.shape)}, and this "
                f"model takes {_describe(leaf)} of each example"
            )
    sizes = {len(array) for array in arrays}
    if len(sizes) > 1 or not sum(sizes):
        raise InputError(f"{path}: its arrays have {sorted(sizes)} rows; one number is needed")

    def read(start: int, stop: int) -> Examples:
        kinds = [None if leaf.dtype == tf.string else leaf.dtype.name for leaf in leaves]
        pairs = zip(arrays, kinds, strict=True)
        cut = [np.asarray(array[start:stop], kind) for array, kind in pairs]
        return tf.nest.pack_sequence_as(spec, cut)

    return InputFile(path, len(arrays[0]), read)


def _leaf_names(spec: Any) -> list[str]:
    """Return a name such as "a.b" for each tensor of a structure, "" for a single one."""
    return [".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(spec)]


def _describe(spec: Any) -> str:
    leaves = zip(_leaf_names(spec), tf.nest.flatten(spec), strict=True)
    return ", ".join(f"{n} {s.dtype.name}{s.shape.as_list()}".strip() for n, s in leaves)
