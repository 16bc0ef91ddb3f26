"""Reads TFRecord files of `tf.train.Example`: `--dataset=tfrecord --data_dir=DIR`.

    DIR/train*.tfrecord*  DIR/test*.tfrecord* (or val*, which beside test* is a third split)

Names such as train-00000-of-00008 are also found.

Each record has an encoded image under "image/encoded", "image" or "image_raw", and a label, one
integer from 0 on, under "image/class/label" or "label".

The shuffle is over all records: each is read at its offset (`os.pread`), from the page cache as
fast as files are read from end to end. A spinning disk reads about 100 records a second.

A scan at the first use reads all records: it finds offsets and labels, and checks the checksums, so
that a wrong label is an error before the first step. The result is cached as long as the files keep
their sizes and times. In memory are 20 bytes a record.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from towers import files
from towers.data import encoded_images
from towers.data.arrays import MAX_LABEL
from towers.data.cache import cached_arrays
from towers.data.pipeline import Data, prefetched
from towers.data.registry import DATA_SETS, cache_dir
from towers.data.user_data import max_classes
from towers.errors import InputError

_EXPECTED = f"expected {DATA_SETS['tfrecord'].layout}"
_IMAGE_KEYS = ("image/encoded", "image", "image_raw")
_LABEL_KEYS = ("image/class/label", "label")
# A record is preceded by its length with a checksum, and followed by the data's checksum.
_BEFORE_BYTES, _FRAME_BYTES = 12, 16
_DAMAGED = "cannot be read, or is damaged or compressed; write it again, uncompressed"
_SCAN_BATCH = 64
_SLOW_BYTES = 2**30  # a scan of more is announced


def load(folder: str, size: encoded_images.Size | None, max_pixels: int) -> Data:
    """Find the records in DIR, to be read as uint8 `[H, W, 3]`; decode a few images.

    The largest training label gives the number of classes, "0", "1", ..., up to `max_classes`.

    Args:
        folder: DIR.
        size: (height, width) to which images are resized; None: all must have the same size.
        max_pixels: largest number of pixels of an image.

    Raises:
        InputError: files are missing, empty, compressed or damaged, a feature or a label is
            invalid, sizes differ and `size` is None, or a decoded image is damaged.
    """
    paths = {split: _paths(folder, split) for split in ("train", "test", "val")}
    splits = {"train": paths["train"], "test": paths["test"] or paths["val"]}
    if paths["test"] and paths["val"]:
        splits["validation"] = paths["val"]
    for split, of_split in splits.items():
        if not of_split:
            raise InputError(f"--data_dir={folder} has no {split}*.tfrecord*; {_EXPECTED}")
    keys = _keys(splits["train"][0])
    sources = {split: _Records(of_split, *keys) for split, of_split in splits.items()}
    train = sources["train"]
    num_classes, allowed = int(train.labels.max()) + 1, max_classes(len(train.labels))
    if num_classes > allowed:
        raise InputError(
            f"{train.name(int(np.argmax(train.labels)))} has label {num_classes - 1}, where labels "
            f"are 0..{allowed - 1} at most, by the number of records: mend it, or return (train, "
            "test, num_classes) from a function, --dataset=my_data:load"
        )
    for source in sources.values():
        if source.labels.max() >= num_classes:
            raise InputError(
                f"{source.name(int(np.argmax(source.labels)))} has label {source.labels.max()}, "
                f"but the training labels are 0..{num_classes - 1}"
            )
    class_names = list(map(str, range(num_classes)))
    return encoded_images.data_set("tfrecord", sources, class_names, size, max_pixels)


class _Records(encoded_images.Source):
    """The records of several files, one after the other."""

    def __init__(self, paths: Sequence[str], image_key: str, label_key: str):
        self._paths, self._image_key = paths, image_key
        places = _scan_all(paths, label_key)
        self._file, self.labels = places["number_of_file"], places["label"]
        self._start, self._length = places["start"], places["length"]
        if not len(self.labels):
            raise InputError(f"{paths[0]} and the like have no records; expected 1 or more")

    def read(self, row: int) -> bytes:
        with open(self._paths[self._file[row]], "rb", buffering=0) as file:
            record = os.pread(file.fileno(), self._length[row], self._start[row])
        features = tf.train.Example.FromString(record).features.feature
        return features[self._image_key].bytes_list.value[0]

    def name(self, row: int) -> str:
        number = row - np.searchsorted(self._file, self._file[row])
        return f"{self._paths[self._file[row]]}: record {number} (counted from 0)"

    def files(self) -> tuple[str, list[str]]:
        folder = os.path.dirname(self._paths[0])
        return folder, [os.path.basename(path) for path in self._paths]

    def reader(self, folder: str) -> encoded_images.Reader:
        paths = encoded_images.on_program_host([os.path.join(folder, path) for path in self._paths])
        feature = {self._image_key: tf.io.FixedLenFeature([], tf.string)}
        columns = self._file, self._start.astype(np.int64), self._length.astype(np.int64)
        file, start, length = map(encoded_images.on_program_host, columns)

        def path(row: tf.Tensor) -> tf.Tensor:
            return tf.gather(paths, tf.gather(file, row))

        def read(row: tf.Tensor) -> tf.Tensor:
            record = tf.raw_ops.TFRecordDatasetV2(
                filenames=path(row)[None],
                compression_type="",
                buffer_size=tf.gather(length, row) + _FRAME_BYTES,
                byte_offsets=tf.gather(start, row)[None] - _BEFORE_BYTES,
            )
            records = tf.data.experimental.from_variant(record, tf.TensorSpec([], tf.string))
            first = records.take(1).get_single_element()
            return tf.io.parse_single_example(first, feature)[self._image_key]

        return encoded_images.Reader(read, path)

    def sample_rows(self, num: int) -> np.ndarray:
        """See `encoded_images.Source.sample_rows`; with the first and last record of each file."""
        ends = np.flatnonzero(np.diff(self._file))
        return np.unique([*super().sample_rows(num), *ends, *(ends + 1)])


def _paths(folder: str, prefix: str) -> list[str]:
    names = sorted(os.listdir(folder))
    matching = [n for n in names if n.startswith(prefix) and (".tfrec" in n or "-of-" in n)]
    paths = [os.path.join(folder, name) for name in matching]
    try:
        for path in paths:
            files.check_is_file(path)
    except OSError as error:  # a link to nothing, or a file that went just now
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from None
    return paths


def _keys(path: str) -> list[str]:
    # The keys of the image and the label in a file's first record.
    with _readable_errors(path):
        next(itertools.islice(_starts(path), 1, 2), None)  # checks the length of the first
        first = next(tf.data.TFRecordDataset(path).take(1).as_numpy_iterator(), b"")
    try:
        features = tf.train.Example.FromString(first).features.feature
    except Exception:  # protobuf's own, of a module that is not public
        raise InputError(f"{path}: record 0 is no tf.train.Example; {_EXPECTED}") from None
    chosen = []
    for content, keys, kind in (
        ("encoded image", _IMAGE_KEYS, "bytes_list"),
        ("integer label", _LABEL_KEYS, "int64_list"),
    ):
        there = [k for k in keys if k in features and len(getattr(features[k], kind).value) == 1]
        if not there:
            raise InputError(
                f"{path} has no {content} under {', '.join(keys)}: its features are "
                f"{', '.join(sorted(features)) or 'none'}; write it under {keys[0]}"
            )
        chosen.append(there[0])
    return chosen


def _scan_all(paths: Sequence[str], label_key: str) -> Mapping[str, np.ndarray]:
    # File, start, length and label of each record, [N]; cached while no file changes.
    stats = [(os.path.abspath(path), os.stat(path)) for path in paths]
    about = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    digest = hashlib.sha256(json.dumps([about, label_key]).encode()).hexdigest()

    def make() -> dict[str, np.ndarray]:
        num_bytes = sum(size for _, size, _ in about)
        if num_bytes > _SLOW_BYTES:
            gib = f"{num_bytes / 2**30:.1f} GiB"
            print(f"reading {len(paths)} files of {gib} once, for their labels", file=sys.stderr)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            scans = list(pool.map(lambda path: _scan(path, label_key), paths))
        start, length, label = map(np.concatenate, zip(*scans, strict=True))
        sizes = [len(part[0]) for part in scans]
        file = np.repeat(np.arange(len(paths), dtype=np.int32), sizes)
        return {"number_of_file": file, "start": start, "length": length, "label": label}

    return cached_arrays(Path(cache_dir(), f"tfrecord-places-{digest[:32]}.npz"), make)


def _scan(path: str, label_key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # The start of each record's content, its length in bytes, and its label.
    feature = {label_key: tf.io.FixedLenFeature([], tf.int64)}
    records = tf.data.TFRecordDataset(path, buffer_size=2**20).batch(_SCAN_BATCH)
    records = records.map(lambda records: tf.io.parse_example(records, feature)[label_key])
    with _readable_errors(path):
        starts = np.append(np.fromiter(_starts(path), np.int64), os.path.getsize(path))
        labels = [np.zeros(0, np.int64), *prefetched(records).as_numpy_iterator()]
    labels = np.concatenate(labels)
    wrong = np.flatnonzero((labels < 0) | (labels > MAX_LABEL))
    if wrong.size:
        raise InputError(
            f"{path}: record {wrong[0]} (counted from 0) has label {labels[wrong[0]]}; labels are "
            "0, 1, 2, ..."
        )
    lengths = np.diff(starts) - _FRAME_BYTES
    return starts[:-1] + _BEFORE_BYTES, lengths.astype(np.int32), labels.astype(np.int32)


def _starts(path: str) -> Iterator[int]:
    """Yield the offset of each record of a file; raise InputError for a wrong length.

    TensorFlow allocates the length that a record has written, and crashes if that is too large.
    """
    start = 0
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        for number in itertools.count():
            if start == end:
                return
            yield start
            length = int.from_bytes(os.pread(file.fileno(), 8, start), "little")
            start += length + _FRAME_BYTES
            if start > end:
                which = f"record {number} (counted from 0), or one before,"
                raise InputError(f"{path}: {which} {_DAMAGED}")


@contextlib.contextmanager
def _readable_errors(path: str) -> Iterator[None]:
    try:
        yield
    except tf.errors.InvalidArgumentError:
        wrong = "has a record that is no tf.train.Example, or lacks the label of the first; write "
        raise InputError(f"{path} {wrong}all records alike") from None
    except (OSError, tf.errors.OpError) as error:
        place = re.search(r"record at (\d+)", str(error))  # in bytes
        record = ""
        if place:
            before = itertools.takewhile(lambda start: start <= int(place[1]), _starts(path))
            record = f": record {len(list(before)) - 1} (counted from 0)"
        raise InputError(f"{path}{record} {_DAMAGED}") from None
