"""The user's files as batches of examples, each file checked before anything is printed."""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers import files
from towers.data import zipped
from towers.data.folder import ENDINGS as IMAGES
from towers.data.folder import images_below
from towers.data.headers import check_pixels
from towers.data.table import some
from towers.errors import InputError
from towers.text import is_number
from towers.training.loading import Trained

_KINDS = f"{', '.join(IMAGES)}, .npy, .npz and .csv"
_NUM_THREADS = os.cpu_count() or 1

Examples = Any  # arrays [n, ...] in the structure of a run's x


class Part(NamedTuple):
    """A file of `size` examples; `read(start, stop)` returns some of them."""

    file: str
    size: int
    read: Callable[[int, int], Examples]


def find(names: Sequence[str], trained: Trained) -> list[Part]:
    """Return the files that are meant, in their order; all of them are read once.

    Raises:
        InputError: a file cannot be read, or holds no examples of this model.
    """
    paths = [path for name in names for path in _files(name)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(lambda path: _part(path, trained), paths))


def batches(parts: Sequence[Part], batch_size: int) -> Iterator[tuple[list[tuple], Examples]]:
    """Yield [(file, number of the example in it)] and these examples, at most `batch_size`."""
    waiting: list[tuple[Part, int, int]] = []
    free = batch_size
    with ThreadPoolExecutor(_NUM_THREADS) as pool:

        def batch() -> tuple[list[tuple], Examples]:
            rows = [(part.file, row) for part, *span in waiting for row in range(*span)]
            found = list(pool.map(lambda piece: piece[0].read(*piece[1:]), waiting))
            return rows, tf.nest.map_structure(lambda *pieces: np.concatenate(pieces), *found)

        for part in parts:
            start = 0
            while start < part.size:
                stop = min(part.size, start + free)
                waiting.append((part, start, stop))
                free -= stop - start
                start = stop
                if not free:
                    yield batch()
                    waiting, free = [], batch_size
        if waiting:
            yield batch()


def _files(name: str) -> list[str]:
    """Return a file, or the images in a folder and those below, sorted."""
    if not os.path.isdir(name):
        if not os.path.exists(name):
            raise InputError(f"{name}: there is no such file or folder")
        return [name]

    found = images_below(name)
    if not found:
        raise InputError(f"{name} has no images ({', '.join(IMAGES)}); name files of another kind")
    return found


def _part(path: str, trained: Trained) -> Part:
    """Return a file, checked against what the model takes."""
    ending = os.path.splitext(path)[1].lower()
    kinds = {".npy": _npy, ".npz": _npz, ".csv": _csv} | dict.fromkeys(IMAGES, _image)
    if ending not in kinds:
        raise InputError(f"{path}: predicted are {_KINDS}, and folders of images")
    try:
        files.check_is_file(path)
        return kinds[ending](path, trained)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception:  # numpy, zipfile and csv raise many kinds of what is not what its name says
        raise InputError(f"{path} is damaged, or no {ending} file") from None


# Images.


def _image(path: str, trained: Trained) -> Part:
    spec, size = trained.spec()[0], trained.options.image_height_width()
    if not trained.task["image_shape"]:
        raise InputError(f"{path} is an image, and this model takes {_describe(spec)}")
    if spec.dtype != tf.uint8 or spec.shape[-1] not in (1, 3, 4):
        raise InputError(
            f"{path} has bytes, and this model was trained on {_describe(spec)}: name a .npy file "
            "with values on that scale"
        )

    def read(*_: int) -> np.ndarray:
        with open(path, "rb") as file, tf.device("/cpu:0"):
            try:
                content = file.read()
                check_pixels(path, content, trained.options.max_image_pixels)
                image = tf.io.decode_image(content, spec.shape[-1], expand_animations=False)
            except InputError:
                raise
            except (ValueError, tf.errors.OpError):
                raise InputError(f"{path} is damaged, or no PNG, JPEG, BMP or GIF") from None
            if size and image.shape != spec.shape:
                image = tf.image.resize(image, size, antialias=True)  # as in the run
                image = tf.cast(tf.round(image), tf.uint8)
        if image.shape != spec.shape:
            found, wanted = ("x".join(map(str, shape[:2])) for shape in (image.shape, spec.shape))
            files = trained.options.dataset in ("folder", "tfrecord")  # others are never resized
            raise InputError(
                f"{path} is {found} (height x width), and this model takes {wanted}: resize it"
                + (f", or train with --image_size={wanted}" if files else "")
            )
        return image.numpy()[None]

    read()
    return Part(path, 1, read)


# Arrays.


def _npy(path: str, trained: Trained) -> Part:
    spec = trained.spec()[0]
    if tf.nest.is_nested(spec):
        raise InputError(
            f"{path} is one array, and this model takes {_describe(spec)}: name a .npz file"
        )
    with open(path, "rb") as file:
        zipped.check_header(file, os.path.getsize(path), path)
    return _of_arrays(path, [np.load(path, mmap_mode="r", allow_pickle=False)], trained)


def _npz(path: str, trained: Trained) -> Part:
    spec = trained.spec()[0]
    with open(path, "rb") as file:
        zipped.check(file, path)
    with np.load(path, allow_pickle=False) as arrays:
        found, names = [], list(arrays)
        for place in _places(spec):
            known = [f"{x}{dot}{place}" for x in ("x", "x_test") for dot in "./" if place]
            known += [place] if place else ["x", "x_test"]
            key = next((key for key in known if key in names), None)
            if key is None:
                raise InputError(
                    f"{path} has {', '.join(names)}; {' or '.join(known)} is needed: this model "
                    f"takes {_describe(spec)}"
                )
            found.append(arrays[key])
    return _of_arrays(path, found, trained)


def _of_arrays(path: str, arrays: Sequence[np.ndarray], trained: Trained) -> Part:
    """Return arrays, in the order of the flat structure, as a part; check types and shapes."""
    spec = trained.spec()[0]
    for place, array, leaf in zip(_places(spec), arrays, tf.nest.flatten(spec), strict=True):
        what = f"{path}: {place}" if place else path
        text = leaf.dtype == tf.string
        kind = array.dtype.kind in "SUO" if text else _may_be(array.dtype, leaf.dtype)
        if not (kind and array.ndim and leaf.shape.is_compatible_with(array.shape[1:])):
            raise InputError(
                f"{what} is {array.dtype}{list(array.shape)}, and this model takes "
                f"{_describe(leaf)} of each example"
            )
    sizes = {len(array) for array in arrays}
    if len(sizes) > 1 or not sum(sizes):
        raise InputError(f"{path}: its arrays have {sorted(sizes)} rows; one number is needed")

    def read(start: int, stop: int) -> Examples:
        leaves = zip(arrays, tf.nest.flatten(spec), strict=True)
        cut = [
            np.asarray(array[start:stop], None if leaf.dtype == tf.string else leaf.dtype.name)
            for array, leaf in leaves
        ]
        return tf.nest.pack_sequence_as(spec, cut)

    return Part(path, len(arrays[0]), read)


def _may_be(given: np.dtype, taken: tf.DType) -> bool:
    """Tell whether numbers become what a model takes and stay what they are, but for rounding."""
    if taken.is_floating and taken.size == 4 and given == np.uint8:  # 0..255 for 0..1, perhaps
        return False
    return np.can_cast(given, taken.as_numpy_dtype, "same_kind")


# Tables.


def _csv(path: str, trained: Trained) -> Part:
    spec = trained.spec()[0]
    with open(path, encoding="utf-8-sig", newline="") as file:
        header, *lines = [line for line in csv.reader(file) if line] or [[]]
    names = [name.strip() for name in header]
    places = {name: i for i, name in enumerate(names)}
    targets = set(getattr(trained.options, "target", "").split(","))
    kept = [i for i, name in enumerate(names) if not name or name not in targets]
    if not lines or all(map(is_number, header)):
        raise InputError(f"{path}: a line of names is needed, and then one for each example")
    if tf.nest.is_nested(spec):
        missing = [place for place in _places(spec) if place not in places]
        if missing:
            raise InputError(f"{path} has no column {missing[0]}; it has {some(names)}")
        kept = [places[place] for place in _places(spec)]
        return _of_arrays(path, [_column(path, names, lines, i) for i in kept], trained)
    if columns := trained.task.get("columns"):  # a run of before does not know them
        categories = filter(None, getattr(trained.options, "categories", "").split(","))
        texts = {c: [n[len(c) + 1 :] for n in columns if n.startswith(f"{c}=")] for c in categories}
        apart = {f"{c}={text}" for c in texts for text in texts[c]}
        columns = [*texts, *(name for name in columns if name not in apart)]
        missing = [name for name in columns if name not in places]
        if missing:
            raise InputError(
                f"{path} has no column {missing[0]}; it has {some(names)}, and this model was "
                f"trained on {some(columns)}"
            )
        found = {}
        for name in columns:
            place = places[name]
            if name in texts:
                given = _texts(path, names, lines, place, texts[name])
                found |= {f"{name}={text}": given == text for text in texts[name]}
            else:
                found[name] = _column(path, names, lines, place)
        stacked = np.stack([found[n] for n in trained.task["columns"]], axis=1, dtype=np.float32)
        return _of_arrays(path, [stacked], trained)
    elif spec.shape.rank != 1 or spec.shape[0] not in (None, len(kept)):
        raise InputError(
            f"{path} has {len(kept)} columns, and this model takes {_describe(spec)} of each "
            "example, without its target"
        )
    features = [_column(path, names, lines, i) for i in kept]
    return _of_arrays(path, [np.stack(features, axis=1)], trained)


def _texts(
    path: str,
    names: Sequence[str],
    lines: Sequence[Sequence[str]],
    column: int,
    known: Sequence[str],
) -> np.ndarray:
    """Return the texts of a column of categories."""
    found = [line[column].strip() if len(line) == len(names) else None for line in lines]
    for row, text in enumerate(found):
        if text not in known:
            what = f"{len(lines[row])} cells" if text is None else f"{text!r} in column "
            what += "" if text is None else names[column]
            wanted = f"{len(names)} are" if text is None else f"one of {', '.join(known[:5])} is"
            raise InputError(f"{path}: example {row + 1} has {what}; {wanted} needed")
    return np.array(found)


def _column(
    path: str, names: Sequence[str], lines: Sequence[Sequence[str]], column: int
) -> np.ndarray:
    """Return the numbers of a column."""
    found = np.empty(len(lines), np.float32)
    for row, line in enumerate(lines):
        cell = line[column] if len(line) == len(names) else None
        if cell is None or not is_number(cell):
            what = f"{len(line)} cells" if cell is None else f"{cell!r} in column {names[column]}"
            wanted = f"{len(names)} are" if cell is None else "a number is"
            raise InputError(f"{path}: example {row + 1} has {what}; {wanted} needed")
        found[row] = float(cell)
    return found


# What a model takes.


def _places(spec: Any, place: str = "") -> list[str]:
    """Return the names of the tensors in a structure, "a" or "a.b"; "" if it is one alone."""
    if not tf.nest.is_nested(spec):
        return [place]
    items = sorted(spec.items()) if isinstance(spec, dict) else enumerate(spec)
    return [p for name, part in items for p in _places(part, f"{place}.{name}".lstrip("."))]


def _describe(spec: Any) -> str:
    leaves = zip(_places(spec), tf.nest.flatten(spec), strict=True)
    return ", ".join(f"{p} {s.dtype.name}{s.shape.as_list()}".strip() for p, s in leaves)
