"""TFRecord files of `tf.train.Example`: `--dataset=tfrecord --data_dir=DIR`.

    DIR/train*.tfrecord*  DIR/test*.tfrecord* (or val*)    train-00000-of-00008 will do, too

Each record has an encoded image under "image/encoded", "image" or "image_raw", and a label, one
integer from 0 on, under "image/class/label" or "label".

The shuffle is over all records: each is read by its place (`os.pread`), from the page cache no
slower than files are read from end to end. A spinning disk gives about 100 records a second.

The places come from one scan of all records, at the first use. It reads them whole: that checks
their checksums, and finds every label, so that the number of classes is known and a wrong label is
refused before the first step. It is kept in the cache folder for as long as the files keep their
sizes and times. In memory are 16 bytes a record.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from towers import files
from towers.data import encoded
from towers.data.pipeline import Data, prefetched
from towers.data.registry import DATA_SETS, cache_dir
from towers.errors import InputError

_EXPECTED = f"expected {DATA_SETS['tfrecord'].layout}"
_IMAGE_KEYS = ("image/encoded", "image", "image_raw")
_LABEL_KEYS = ("image/class/label", "label")
# A record's own framing: length and its checksum before it, the data's checksum behind it.
_BEFORE_BYTES, _FRAME_BYTES = 12, 16
_SCAN_BATCH = 64
_SLOW_BYTES = 2**30  # a scan of more is announced
_MAX_LABEL = np.iinfo(np.int32).max - 1

Places = tuple[np.ndarray, np.ndarray]  # of one file: lengths in bytes and labels, each `[n]`


def load(folder: str, size: encoded.Size | None = None) -> Data:
    """Find the records in DIR; decode a few images. They become uint8 `[H, W, 3]`.

    There are as many classes as the largest training label says, named "0", "1", ...

    Raises:
        InputError: files are missing, empty, compressed or damaged, a feature or a label is not as
            it should be, sizes differ and `size` is None, or an image that is tried is damaged.
    """
    train_paths, test_paths = _paths(folder, "train"), _paths(folder, "test", "val")
    image_key, label_key = _keys(train_paths)
    places = _kept([*train_paths, *test_paths], label_key)
    train = _Records(train_paths, places[: len(train_paths)], image_key)
    test = _Records(test_paths, places[len(train_paths) :], image_key)
    largest = int(train.labels.max())
    if test.labels.max() > largest:
        raise InputError(
            f"{test.name(int(np.argmax(test.labels)))} has label {test.labels.max()}, but the "
            f"training labels are 0..{largest}"
        )
    return encoded.data_set("tfrecord", train, test, [str(i) for i in range(largest + 1)], size)


class _Records:
    """The records of several files, one after the other."""

    def __init__(self, paths: Sequence[str], places: Sequence[Places], image_key: str):
        self._paths, self._image_key = paths, image_key
        self._firsts = np.cumsum([0] + [len(labels) for _, labels in places])
        # Where the records begin, and the file's end: record i of a file is between i and i + 1.
        ends = [np.cumsum(lengths.astype(np.int64) + _FRAME_BYTES) for lengths, _ in places]
        self._bounds = [np.concatenate([[0], of_file]) for of_file in ends]
        self.labels = np.concatenate([labels for _, labels in places])
        if not len(self.labels):
            raise _no_records(paths)

    def read(self, row: int) -> bytes:
        path, number = self._find(row)
        start, end = self._bounds[path][number : number + 2].tolist()
        file = os.open(self._paths[path], os.O_RDONLY)
        try:
            return os.pread(file, end - start - _FRAME_BYTES, start + _BEFORE_BYTES)
        finally:
            os.close(file)

    def image_of(self, content: tf.Tensor) -> tf.Tensor:
        features = {self._image_key: tf.io.FixedLenFeature([], tf.string)}
        return tf.io.parse_single_example(content, features)[self._image_key]

    def name(self, row: int) -> str:
        path, number = self._find(row)
        return f"{self._paths[path]}: record {number} (counted from 0)"

    def files(self) -> tuple[str, list[str]]:
        folder = os.path.dirname(self._paths[0])
        return folder, [os.path.basename(path) for path in self._paths]

    def _find(self, row: int) -> tuple[int, int]:
        """Return the number of the file, and of the record in it."""
        path = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return path, row - int(self._firsts[path])


def _paths(folder: str, *prefixes: str) -> list[str]:
    """Return the files of a split, those of the first prefix that there are any of."""
    names = sorted(os.listdir(folder))
    for prefix in prefixes:
        found = [n for n in names if n.startswith(prefix) and (".tfrec" in n or "-of-" in n)]
        if found:
            return [os.path.join(folder, name) for name in found]
    raise InputError(f"--data_dir={folder} has no {prefixes[0]}*.tfrecord*; {_EXPECTED}")


def _keys(paths: Sequence[str]) -> tuple[str, str]:
    """Return the names under which the first record has its image and its label."""
    path, first = _first_record(paths)
    try:
        features = tf.train.Example.FromString(first).features.feature
    except Exception:  # protobuf's own, of a module that is not public
        raise InputError(f"{path}: record 0 is no tf.train.Example; {_EXPECTED}") from None
    found = []
    for what, keys, kind in (
        ("encoded image", _IMAGE_KEYS, "bytes_list"),
        ("integer label", _LABEL_KEYS, "int64_list"),
    ):
        there = [k for k in keys if k in features and len(getattr(features[k], kind).value) == 1]
        if not there:
            raise InputError(
                f"{path} has no {what} under {', '.join(keys)}: its features are "
                f"{', '.join(sorted(features)) or 'none'}; write it under {keys[0]}"
            )
        found.append(there[0])
    return tuple(found)


def _first_record(paths: Sequence[str]) -> tuple[str, bytes]:
    """Return the first record, and the file that it is in."""
    for path in paths:
        with _reading(path):
            for record in tf.data.TFRecordDataset(path).take(1).as_numpy_iterator():
                return path, record
    raise _no_records(paths)


def _no_records(paths: Sequence[str]) -> InputError:
    return InputError(f"{paths[0]} and the like have no records; expected 1 or more")


def _kept(paths: Sequence[str], label_key: str) -> list[Places]:
    """Return the places in each file: those of an earlier scan, if the files are unchanged."""
    stats = [(os.path.abspath(path), os.stat(path)) for path in paths]
    about = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    digest = hashlib.sha256(json.dumps([about, label_key]).encode()).hexdigest()
    kept = Path(cache_dir(), f"tfrecord-{digest[:32]}.npz")
    try:
        with open(kept, "rb") as file, np.load(file) as arrays:
            return [(arrays[f"lengths{i}"], arrays[f"labels{i}"]) for i in range(len(paths))]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # there is none, or it is damaged
    num_bytes = sum(size for _, size, _ in about)
    if num_bytes > _SLOW_BYTES:
        gib = f"{num_bytes / 2**30:.1f} GiB"
        print(f"reading {len(paths)} files of {gib} once, for their labels", file=sys.stderr)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        places = list(pool.map(lambda path: _scan(path, label_key), paths))
    arrays = {f"lengths{i}": lengths for i, (lengths, _) in enumerate(places)}
    arrays |= {f"labels{i}": labels for i, (_, labels) in enumerate(places)}
    with contextlib.suppress(OSError):  # then the next run scans again
        kept.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(kept) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)
    return places


def _scan(path: str, label_key: str) -> Places:
    """Read a file; return the length in bytes and the label of each record."""
    feature = {label_key: tf.io.FixedLenFeature([], tf.int64)}

    def look(records):
        return tf.strings.length(records), tf.io.parse_example(records, feature)[label_key]

    records = tf.data.TFRecordDataset(path, buffer_size=2**20).batch(_SCAN_BATCH).map(look)
    found = [(np.zeros(0, np.int32), np.zeros(0, np.int64))]  # of an empty file, too
    with _reading(path):
        found += prefetched(records).as_numpy_iterator()
    lengths, labels = map(np.concatenate, zip(*found, strict=True))
    wrong = np.flatnonzero((labels < 0) | (labels > _MAX_LABEL))
    if wrong.size:
        raise InputError(
            f"{path}: record {wrong[0]} (counted from 0) has label {labels[wrong[0]]}; labels are "
            "0, 1, 2, ..."
        )
    return lengths.astype(np.int32), labels.astype(np.int32)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Say which file TensorFlow cannot read, and why."""
    try:
        yield
    except tf.errors.InvalidArgumentError:
        wrong = "has a record that is no tf.train.Example, or lacks the label of the first; write "
        raise InputError(f"{path} {wrong}all records alike") from None
    except tf.errors.DataLossError:
        wrong = "is damaged, compressed, or no TFRecord file; write it again, uncompressed"
        raise InputError(f"{path} {wrong}") from None
    except tf.errors.OpError:
        wrong = "cannot be read; check that it is a file, and its permissions"
        raise InputError(f"{path} {wrong}") from None
