"""The halves of the user's own data, checked, as a data set.

A half is `(x, y)`, `(x, y, sample_weight)` or `(x,)` of arrays, see `towers.data.arrays`; or a
`tf.data.Dataset` of such examples, `(dataset, size)` where it does not know its size; or a
`keras.utils.PyDataset` of such batches.
"""

import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf

from towers.data import arrays
from towers.data.pipeline import ArraySplit, Data, Split, Structure, is_label, spec_of, stored_spec
from towers.data.streams import BatchSplit, DatasetSplit
from towers.errors import InputError

NAMES = ("train", "validation", "test")
ALLOWED = (
    "each half is (x, y), (x, y, sample_weight) or (x,), of arrays or of dicts and tuples of them, "
    "a tf.data.Dataset or (tf.data.Dataset, size), or a keras.utils.PyDataset"
)
_COUNT_BATCH = 1024
# What largest label makes integers classes, where nobody says how many there are: one wrong label
# would else be an output for each number below it. There may be a few examples of many classes.
_FEW_CLASSES, _MANY_CLASSES = 1000, 100_000
_MAX_CLASSES = 1_000_000  # that anybody may say
_HELD_OUT = 0.1
_REMEDIES = {
    tf.RaggedTensorSpec: "pad it to one length, by x.to_tensor(shape=[LENGTH])",
    tf.SparseTensorSpec: "make it dense, by tf.sparse.to_dense(x)",
}
_SINGLE = (
    "give single examples of one known shape, by dataset.unbatch(), padding or tf.ensure_shape"
)


class Half(Protocol):
    """What the user gave for train, validation or test."""

    name: str
    spec: Structure

    def largest_label(self) -> tuple[int, str]:
        """Return the largest label and what a person finds it by; `spec` has labels."""

    def num_examples(self) -> int:
        """Return how many examples there are."""

    def split(self, num_classes: int) -> Split:
        """Return the split; labels are to be below `num_classes`, unless that is 0."""


def data_set(
    name: str,
    given: Mapping[str, object],
    num_classes: object = None,
    class_names: Sequence[str] = (),
) -> Data:
    """Return a data set of the user's.

    Arrays are checked in full. The examples of a `tf.data.Dataset` or a `keras.utils.PyDataset` are
    checked as they are read: a label or a value that is not allowed raises
    `tf.errors.InvalidArgumentError` then.

    Args:
        name: of the data set, as --dataset gave it.
        given: "train", and "test" and "validation" where they are there. Without "test" a tenth of
            the training examples is held out, and a note says so.
        num_classes: how many classes labels may name; None: as many as there are, but no more than
            examples or 1000: else the targets are numbers, and `Data.no_classes` says why.
        class_names: their names; without them they are numbers.

    Raises:
        InputError: what is given is not data to train on, or the halves are not alike.
    """
    halves = {half: _half(f"{name}: {half}", value) for half, value in given.items()}
    train = halves["train"]
    for half in halves.values():
        _check_alike(train, half)
    num_classes, no_classes = _num_classes(name, list(halves.values()), num_classes)
    splits = {half: value.split(num_classes) for half, value in halves.items()}
    notes = ()
    if "test" not in splits:
        whole = splits["train"]
        splits["train"], splits["test"] = whole.held_out(_HELD_OUT)
        held = f"{splits['test'].size} of {whole.size} examples"
        notes = (f"test set    {held}, held out by chance: {name} has none of its own",)
    names = tuple(class_names) or tuple(map(str, range(num_classes)))
    return Data(
        name,
        splits["train"],
        splits["test"],
        num_classes,
        names,
        splits.get("validation"),
        notes,
        no_classes=no_classes,
    )


class _Arrays:
    def __init__(self, name: str, parts: Sequence[object]):
        self.name, self._example = name, arrays.examples(name, parts)
        self.spec = tf.nest.map_structure(spec_of, self._example)

    def largest_label(self) -> tuple[int, str]:
        row = int(np.argmax(self._example[1]))
        return int(self._example[1][row]), f"{self.name} y: row {row} (counted from 0)"

    def num_examples(self) -> int:
        return _length(self._example)

    def split(self, num_classes: int) -> ArraySplit:
        arrays.check_labels(self.name, self._example, num_classes)
        return ArraySplit(*self._example)


class _Dataset:
    """A `tf.data.Dataset` whose examples have the right types and a known number."""

    def __init__(self, name: str, dataset: tf.data.Dataset, size: object = None):
        self.name, self._dataset = name, dataset
        self.spec = stored_spec(_checked_spec(name, dataset.element_spec))
        known = int(dataset.cardinality())
        self._size = known if size is None else size
        unlike = known not in (self._size, tf.data.UNKNOWN_CARDINALITY)
        if unlike or not isinstance(self._size, numbers.Integral) or self._size < 1:
            says = {-1: "is endless", -2: "does not know its size"}
            raise InputError(
                f"{name} dataset {says.get(known, f'has {known} examples')}, the size given is "
                f"{size}; return (dataset.take(size), size), with 1 example or more"
            )

    def num_examples(self) -> int:
        return int(self._size)

    def largest_label(self) -> tuple[int, str]:
        """Read the dataset once; count it on the way."""
        labels = self._dataset.map(lambda *example: tf.reshape(tf.cast(example[1], tf.int64), []))
        found = np.concatenate(
            [np.zeros(0, np.int64), *labels.batch(_COUNT_BATCH).as_numpy_iterator()]
        )
        if len(found) != self._size:
            raise InputError(
                f"{self.name} dataset has {len(found)} examples but size is {self._size}"
            )
        wrong = np.flatnonzero((found < 0) | (found > arrays.MAX_LABEL))
        row = int(wrong[0]) if wrong.size else int(np.argmax(found))
        where = f"{self.name} dataset: example {row} (counted from 0)"
        if wrong.size:
            raise InputError(f"{where} has label {found[row]}; {arrays.CLASSES_ARE}")
        return int(found[row]), where

    def split(self, num_classes: int) -> DatasetSplit:
        def check(number, example):
            where = f"{self.name} dataset: example", number, "(counted from 0) has"
            checks = []
            for tensor in tf.nest.flatten(example):
                if tensor.dtype.is_floating:
                    finite = tf.reduce_all(tf.math.is_finite(tensor))
                    checks.append(tf.debugging.Assert(finite, [*where, "a NaN or an infinity"]))
            if num_classes:
                label = tf.cast(example[1], tf.int64)
                good = tf.reduce_all((label >= 0) & (label < num_classes))
                outside = f"which is outside of 0..{num_classes - 1}"
                checks.append(tf.debugging.Assert(good, [*where, "label", label, outside]))
            with tf.control_dependencies(checks):
                return tf.nest.map_structure(tf.identity, example)

        numbered = self._dataset.enumerate()
        checked = numbered.map(lambda number, example: check(number, example))
        return DatasetSplit(checked, int(self._size))


class _Batches:
    """A `keras.utils.PyDataset`. `on_epoch_end`, which may shuffle, is not called."""

    def __init__(self, name: str, dataset: keras.utils.PyDataset):
        self.name, self._dataset = name, dataset
        num = dataset.num_batches
        if num is None or num < 1:
            wrong = "is endless" if num is None else f"has {num} batches"
            raise InputError(f"{name} {type(dataset).__name__} {wrong}; return 1 batch or more")
        first = self._example(0)
        last = self._example(num - 1)
        self.spec = tf.nest.map_structure(spec_of, first)
        self._sizes = [_length(first)] * (num - 1) + [min(_length(first), _length(last))]
        self._check(num - 1, last)

    def num_examples(self) -> int:
        return sum(self._sizes)

    def largest_label(self) -> tuple[int, str]:
        found = [int(self._read(number)[1].max()) for number in range(len(self._sizes))]
        number = int(np.argmax(found))
        return found[number], self._batch(number)

    def split(self, num_classes: int) -> BatchSplit:
        read = functools.partial(self._read, num_classes=num_classes)
        return BatchSplit(read, self._sizes, self.spec, max(1, self._dataset.workers))

    def _read(self, number: int, num_classes: int = 0) -> Structure:
        example = self._example(number)
        self._check(number, example)
        arrays.check_labels(self._batch(number), example, num_classes)
        return example

    def _batch(self, number: int) -> str:
        return f"{self.name} batch {number}"

    def _example(self, number: int) -> Structure:
        try:
            batch = self._dataset[number]
        except BaseException as error:
            error.add_note(f"in {self._batch(number)}")
            raise
        parts = batch if isinstance(batch, tuple | list) and len(batch) in (1, 2, 3) else (batch,)
        return arrays.examples(self._batch(number), parts)

    def _check(self, number: int, example: Structure) -> None:
        spec, size = tf.nest.map_structure(spec_of, example), self._sizes[number]
        if spec != self.spec:
            raise InputError(
                f"{self._batch(number)} is of {arrays.text_of(spec)}, but batch 0 of "
                f"{arrays.text_of(self.spec)}; make them alike"
            )
        if _length(example) != size:
            raise InputError(
                f"{self._batch(number)} has {_length(example)} examples, but {size} are expected; "
                "make all batches as long as the first, the last one as long or shorter"
            )


def _half(name: str, half: object) -> Half:
    """Take up what the user gave for a half."""
    if isinstance(half, keras.utils.PyDataset):
        return _Batches(name, half)
    if isinstance(half, tf.data.Dataset):
        return _Dataset(name, half)
    if not isinstance(half, tuple | list) or len(half) not in (1, 2, 3):
        raise InputError(f"{name} is {arrays.describe(half)}; {ALLOWED}")
    if isinstance(half[0], tf.data.Dataset) and len(half) == 2:
        return _Dataset(name, *half)
    return _Arrays(name, half)


def _check_alike(first: Half, other: Half) -> None:
    """Refuse halves whose examples are not of the same types and shapes."""
    ours, theirs = dict(arrays.leaves(first.spec)), dict(arrays.leaves(other.spec))
    for leaf in [*ours, *theirs]:
        if ours.get(leaf) != theirs.get(leaf):
            texts = [
                f"{half.name} {_text(leaf, spec.get(leaf))}"
                for half, spec in ((first, ours), (other, theirs))
            ]
            raise InputError(f"{texts[0]}, but {texts[1]}; make them alike")


def _text(leaf: str, spec: tf.TensorSpec | None) -> str:
    return f"{leaf} is {list(spec.shape)} {spec.dtype.name}" if spec else f"has no {leaf}"


def _num_classes(name: str, halves: Sequence[Half], given: object) -> tuple[int, str]:
    """Return the number of classes, 0 where targets are none, and why whole numbers are none."""
    spec = halves[0].spec
    labels = len(spec) > 1 and is_label(spec[1])
    if given is not None:
        if not isinstance(given, numbers.Integral) or not 1 <= given <= _MAX_CLASSES:
            most = f", up to {_MAX_CLASSES:,}" if isinstance(given, numbers.Integral) else ""
            raise InputError(f"{name}: num_classes is {given!r}; return 1 or more{most}")
        if not labels:
            raise InputError(
                f"{name}: num_classes is {given}, but y is not one integer for each example; leave "
                "it out"
            )
        return int(given), ""
    if not labels:
        return 0, ""
    label, where = max(half.largest_label() for half in halves)
    allowed = max_classes(sum(half.num_examples() for half in halves))
    if label < allowed:
        return label + 1, ""
    return 0, (
        f"{where} has label {label}, where classes are 0..{allowed - 1} at most, by the number of "
        "examples: mend it, or return (train, test, num_classes) from a function, "
        "--dataset=my_data:load"
    )


def max_classes(num_examples: int) -> int:
    """Return how many classes so many examples may have where nobody says how many there are."""
    return min(max(num_examples, _FEW_CLASSES), _MANY_CLASSES)


def _length(example: Structure) -> int:
    return len(tf.nest.flatten(example)[0])


def _checked_spec(name: str, spec: object) -> Structure:
    """Refuse what a dataset of examples should not give."""
    if not isinstance(spec, tuple) or len(spec) not in (1, 2, 3):
        raise InputError(
            f"{name} dataset gives {arrays.describe(spec)}; give single examples, (x, y), (x, y, "
            "sample_weight) or (x,)"
        )
    for path, leaf in arrays.leaves(spec):
        known = isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
        if not known:
            remedy = _REMEDIES.get(type(leaf), _SINGLE)
            raise InputError(f"{name} dataset gives {path} as {arrays.describe(leaf)}; {remedy}")
    x, y, *_ = (*spec, None)
    image = isinstance(x, tf.TensorSpec) and x.shape.rank == 3 and x.dtype.is_integer
    if image and x.dtype != tf.uint8 and is_label(y):
        raise InputError(
            f"{name} dataset gives x as {arrays.describe(x)}; give images as uint8 or float"
        )
    return spec
