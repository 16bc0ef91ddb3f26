"""Encoded images that each machine reads itself, from its own copies of the program's files.

    files = remote_files.find(split, devices, batch_size=128)   # None: a machine has no such files
    for rows, draws in files.train_batches(128, seed=1): ...    # the machines begin to read
    example = files.example(rows)                               # in a step: once for each batch

A machine computes the order of examples itself, a pure function of seed and step, and reads ahead.
The program sends each step's row numbers, and the machine compares them with its own.

Before the start fingerprints of some 256 images are compared, spread over the training set, with
the first and the last of each TFRecord file. A missing file is found when it is read at the latest.
"""

import functools
import itertools
import posixpath
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from towers.builder.device_types import HOST, PROGRAM, machine_of
from towers.builder.sharding import DeviceResidentBatch, slices_of
from towers.data.encoded_images import EncodedSplit
from towers.data.pipeline import Split, Structure, prefetched, shuffled_rows
from towers.devices import remote
from towers.errors import InputError

_NUM_COMPARED = 256  # images
# Errors of a record that differs there; others mean that the machine is lost.
_DIFFERENT_FILE = (
    tf.errors.DataLossError, tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError,
)  # fmt: skip
_numbers = itertools.count()  # of iterators: each has a unique name on its machine


class RemoteReader:
    """A split that other machines read, in batches of one size."""

    def __init__(self, split: EncodedSplit, names: Sequence[str], batch_size: int, num_rounds: int):
        """Assign the slices of a batch to machines.

        Args:
            split: the examples.
            names: the towers' devices.
            batch_size: examples in a batch.
            num_rounds: number of slices that each tower gets.
        """
        self._split, self._slices = split, slices_of(batch_size, len(names), num_rounds)
        slices: dict[str, list[tuple[int, int]]] = {}
        for part, name in zip(self._slices, itertools.cycle(names)):
            slices.setdefault(machine_of(name), []).append(part)
        self._readers = [_Reader(split, *each) for each in slices.items()]

    def __str__(self) -> str:
        """Return the line that the start of a run prints."""
        return f"read by the {remote.MACHINES} from {self._split.source.files()[0]}"

    def train_batches(
        self, batch_size: int, *, seed: int, step: int = 0, examples: int = 0
    ) -> tf.data.Dataset:
        """Return `IndexedSplit.train_rows`; the machines begin to read.

        Args:
            batch_size: that of the reader.
            seed: of the order and the draws.
            step: number of the first batch.
            examples: number of examples before it.
        """
        for reader in self._readers:
            reader.start(batch_size, seed, examples)
        return self._split.train_rows(batch_size, seed=seed, step=step, examples=examples)

    def example(self, rows: tf.Tensor) -> Structure:
        """Return the next batch, which has these rows; its images are on the machines."""
        parts = {}
        for reader in self._readers:
            parts |= reader.next(rows)
        with tf.device(HOST):
            parts = {part: parts[part] for part in self._slices}  # in the order of the batch
            return _RemoteBatch(parts, rows), self._split.labels(rows)


def find(
    split: Split, names: Sequence[str], batch_size: int, num_rounds: int = 1
) -> RemoteReader | None:
    """Return a reader for the machines of these devices; None if one lacks the files.

    Args:
        split: the training set; None is returned unless it is of encoded images.
        names: device of each tower; None is returned if one is on this machine.
        batch_size: the global batch.
        num_rounds: parts in which a batch is computed, one after the other.

    Raises:
        InputError: a file on a machine differs.
    """
    machines = list(dict.fromkeys(map(machine_of, names)))
    if not isinstance(split, EncodedSplit) or not all(machines):
        return None
    source = split.source
    rows = source.sample_rows(_NUM_COMPARED)
    here = _fingerprints(split, f"{PROGRAM}{HOST}", "")(tf.constant(rows))
    for machine in machines:
        folder = remote.folder_of(machine)
        there = _fingerprints(split, f"{machine}{HOST}", folder)
        try:
            fingerprints = there(tf.constant(rows))
        except tf.errors.NotFoundError:
            return None
        except _DIFFERENT_FILE:  # one of them; which?
            fingerprints = tf.concat([_fingerprint_or_zeros(there, row) for row in rows], axis=0)
        different = np.flatnonzero((fingerprints != here).numpy().any(axis=1))
        if different.size:
            name = posixpath.join(folder, source.name(int(rows[different[0]])))
            raise InputError(
                f"{name} is another one on {remote.name_of(machine)} than here: copy the data "
                f"there, or let the program send them, from a --data_dir that {remote.MACHINES} do "
                "not have"
            )
    return RemoteReader(split, names, batch_size, num_rounds)


class _Reader:
    """Reads the slices, (start, size), of each batch on one machine."""

    def __init__(self, split: EncodedSplit, machine: str, slices: Sequence[tuple[int, int]]):
        self._split, self._machine, self._slices = split, machine, slices
        spans = [np.arange(start, start + size) for start, size in slices]
        self._places = np.concatenate(spans).astype(np.int64)
        image = split.spec[0]
        self._spec = {
            "output_types": [tf.int64, image.dtype],
            "output_shapes": [[len(self._places)], [len(self._places), *image.shape]],
        }
        self._name = f"towers_data_{next(_numbers)}"

    def start(self, batch_size: int, seed: int, examples: int) -> None:
        """Begin to read after this number of examples."""
        size, places = self._split.size, self._places

        @tf.function(autograph=False)
        def make() -> None:
            with tf.device(f"{self._machine}{HOST}"):
                batches = shuffled_rows(batch_size, size, seed, examples)
                rows = batches.map(lambda rows: tf.gather(rows, places))
                where = remote.folder_of(self._machine), remote.name_of(self._machine)
                images = self._split.read_there(rows, len(places), *where)
                variant = tf.data.experimental.to_variant(prefetched(images))
                tf.raw_ops.MakeIterator(dataset=variant, iterator=self._iterator())

        make.get_concrete_function()()

    def next(self, rows: tf.Tensor) -> dict[tuple[int, int], tf.Tensor]:
        """Return {slice: its images} of the next batch, which has these rows."""
        with tf.device(HOST):
            expected = tf.gather(rows, self._places)
        with tf.device(f"{self._machine}{HOST}"):
            rows_read, images = tf.raw_ops.IteratorGetNext(iterator=self._iterator(), **self._spec)
            same = tf.debugging.Assert(
                tf.reduce_all(rows_read == expected),
                [f"a {remote.MACHINE}'s order is not the program's"],
            )
            with tf.control_dependencies([same]):
                parts = tf.split(images, [size for _, size in self._slices])
                return dict(zip(self._slices, parts, strict=True))

    def _iterator(self) -> tf.Tensor:
        # By name: TensorFlow crashes if a function returns a resource of another machine.
        return tf.raw_ops.IteratorV2(shared_name=self._name, container="", **self._spec)


class _RemoteBatch(DeviceResidentBatch):
    """The images of a batch as slices, {(start, size): images}, each on its tower's machine."""

    def __init__(self, parts: dict[tuple[int, int], tf.Tensor], rows: tf.Tensor):
        first = next(iter(parts.values()))
        self._parts, self.rows, self.dtype = parts, rows, first.dtype
        self.shape = rows.shape.concatenate(first.shape[1:])

    @functools.cached_property
    def whole(self) -> tf.Tensor:
        with tf.device(HOST):
            return tf.concat(list(self._parts.values()), axis=0)

    def of_tower(self, tower: int, start: int, size: int) -> tf.Tensor:
        part = self._parts.get((start, size))
        return self.whole[start : start + size] if part is None else part


def _fingerprints(split: EncodedSplit, device: str, folder: str) -> Callable:
    # A function from rows to fingerprints of their images on a device, uint8 [n, 8].
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)])
    def fingerprints(rows: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            read = split.source.reader(folder).read
            return tf.fingerprint(tf.map_fn(read, rows, fn_output_signature=tf.string))

    return fingerprints.get_concrete_function()


def _fingerprint_or_zeros(fingerprints: Callable, row: int) -> tf.Tensor:
    try:
        return fingerprints(tf.constant([row]))
    except _DIFFERENT_FILE:
        return tf.zeros([1, 8], tf.uint8)
