"""Checks the user's own data and makes a data set of them: `--dataset=module:function`.

The function takes no argument and returns the splits, with or without the number of classes:

    def load():  # in my_data.py; --dataset=my_data:load
        return (train_x, train_y), (test_x, test_y)

It may also return `(train, validation, test)`, either tuple followed by the number of classes, or a
dict `{"train": ..., "validation": ..., "test": ...}`.

A split is `(x, y)`, `(x, y, sample_weight)` or `(x,)` of arrays, see `towers.data.arrays`; or a
`tf.data.Dataset` of such examples, as `(dataset, size)` if its size is unknown; or a
`keras.utils.PyDataset` of such batches.
"""

import functools
import numbers
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.data import arrays, pipeline
from towers.data.pipeline import ArraySplit, Data, Structure, is_label, spec_of, stored_spec
from towers.data.tfdata_splits import BatchSplit, DatasetSplit
from towers.errors import InputError
from towers.options.functions import call_without_arguments

_NAMES = ("train", "validation", "test")
_ALLOWED_RESULT = (
    "return (train, test), (train, test, num_classes), (train, validation, test) or a dict of "
    'these, {"train": ..., "test": ...}'
)
_ALLOWED_SPLIT = (
    "(train, test) is needed, each (x, y), (x, y, sample_weight) or (x,), of arrays or of dicts "
    "and tuples of them, a tf.data.Dataset or (tf.data.Dataset, size), or a keras.utils.PyDataset"
)
_COUNT_BATCH = 1024
# Limits of the number of classes that a largest label implies: a wrong label would add outputs for
# all numbers below it. There may be few examples of many classes.
_FEW_CLASSES, _MANY_CLASSES = 1000, 100_000
_MAX_CLASSES = 1_000_000  # that a user may set
_REMEDIES = {
    tf.RaggedTensorSpec: "pad it to one length, by x.to_tensor(shape=[LENGTH])",
    tf.SparseTensorSpec: "make it dense, by tf.sparse.to_dense(x)",
}
_SINGLE = (
    "give single examples of one known shape, by dataset.unbatch(), padding or tf.ensure_shape"
)


def load(dataset: str) -> Data:
    """Call the user's function, "module:function", and check its result, see `data_set`.

    Raises:
        InputError: there is no such module or function, or its result is invalid. Errors of the
            function itself are passed on.
    """
    result = call_without_arguments("dataset", dataset)
    if isinstance(result, dict):
        if not {"train", "test"} <= set(result) <= set(_NAMES):
            raise InputError(f"{dataset} returned a dict of {list(result)}; {_ALLOWED_RESULT}")
        return data_set(dataset, result)
    splits, num_classes = result, None
    if isinstance(result, tuple | list) and result and isinstance(result[-1], numbers.Number):
        *splits, num_classes = result
    if not isinstance(splits, tuple | list) or len(splits) not in (2, 3):
        raise InputError(f"{dataset} returned {arrays.describe(result)}; {_ALLOWED_RESULT}")
    names = _NAMES if len(splits) == 3 else ("train", "test")
    return data_set(dataset, dict(zip(names, splits, strict=True)), num_classes)


def data_set(
    name: str,
    user_splits: Mapping[str, object],
    num_classes: object = None,
    class_names: Sequence[str] = (),
) -> Data:
    """Return a data set of the user's splits.

    Arrays are checked at once, the examples of a `tf.data.Dataset` or a `keras.utils.PyDataset`
    when they are read: an invalid label or value raises `tf.errors.InvalidArgumentError` then.

    Args:
        name: the value of --dataset.
        user_splits: "train", and optionally "test" and "validation". Without "test" a tenth of the
            training examples is held out, and a note says so.
        num_classes: number of classes; None: the largest label + 1, up to `max_classes`, else
            targets are numbers, and `Data.no_classes` says why.
        class_names: their names, by default numbers.

    Raises:
        InputError: a split is invalid, or the splits have different types or shapes.
    """
    checked = {split: _user_split(f"{name}: {split}", v) for split, v in user_splits.items()}
    train = checked["train"]
    for other in checked.values():
        train_leaves, other_leaves = (dict(arrays.leaves(each.spec)) for each in (train, other))
        for leaf in [*train_leaves, *other_leaves]:
            if train_leaves.get(leaf) != other_leaves.get(leaf):
                texts = [
                    f"{each.name} {leaf} is {list(spec[leaf].shape)} {spec[leaf].dtype.name}"
                    if leaf in spec else f"{each.name} has no {leaf}"
                    for each, spec in ((train, train_leaves), (other, other_leaves))
                ]  # fmt: skip
                raise InputError(f"{texts[0]}, but {texts[1]}; make them alike")
    num_classes, no_classes = _num_classes(name, list(checked.values()), num_classes)
    splits = {split: each.split(num_classes) for split, each in checked.items()}
    held_out = pipeline.hold_out_test_set(name, splits)
    class_names = tuple(class_names) or tuple(map(str, range(num_classes)))
    about = dict(num_classes=num_classes, class_names=class_names, no_classes=no_classes)
    return Data(name, **splits, **about, **held_out)


def max_classes(num_examples: int) -> int:
    """Return the largest number of classes that the labels of `num_examples` may imply."""
    return min(max(num_examples, _FEW_CLASSES), _MANY_CLASSES)


def _num_classes(name: str, splits: Sequence["_UserSplit"], num_classes: object) -> tuple[int, str]:
    # Returns the number of classes, 0 if targets are none, and why integers are no classes, or "".
    spec = splits[0].spec
    labels = len(spec) > 1 and is_label(spec[1])
    if num_classes is not None:
        if not isinstance(num_classes, numbers.Integral) or not 1 <= num_classes <= _MAX_CLASSES:
            most = f", up to {_MAX_CLASSES:,}" if isinstance(num_classes, numbers.Integral) else ""
            raise InputError(f"{name}: num_classes is {num_classes!r}; return 1 or more{most}")
        if not labels:
            raise InputError(
                f"{name}: num_classes is {num_classes}, but y is not one integer for each example; "
                "leave it out"
            )
        return int(num_classes), ""
    if not labels:
        return 0, ""
    label, where = max(split.largest_label() for split in splits)
    allowed = max_classes(sum(split.size for split in splits))
    if label < allowed:
        return label + 1, ""
    return 0, (
        f"{where} has label {label}, where classes are 0..{allowed - 1} at most, by the number of "
        "examples: mend it, or return (train, test, num_classes) from a function, "
        "--dataset=my_data:load"
    )


def _user_split(name: str, value: object) -> "_UserSplit":
    if isinstance(value, keras.utils.PyDataset):
        return _Batches(name, value)
    if isinstance(value, tf.data.Dataset):
        return _Dataset(name, value)
    if not isinstance(value, tuple | list) or len(value) not in (1, 2, 3):
        raise InputError(f"{name} is {arrays.describe(value)}; {_ALLOWED_SPLIT}")
    if isinstance(value[0], tf.data.Dataset) and len(value) == 2:
        return _Dataset(name, *value)
    return _Arrays(name, value)


# Each kind of split has `name`, `spec` and `size`; `largest_label` returns a label and its place;
# `split` raises for a label of `num_classes` or more, unless that is 0.


class _Arrays:
    def __init__(self, name: str, parts: Sequence[object]):
        self.name, self._example = name, arrays.as_arrays(name, parts)
        self.spec = tf.nest.map_structure(spec_of, self._example)
        self.size = _num_rows(self._example)

    def largest_label(self) -> tuple[int, str]:
        row = int(np.argmax(self._example[1]))
        return int(self._example[1][row]), f"{self.name} y: row {row} (counted from 0)"

    def split(self, num_classes: int) -> ArraySplit:
        _check_labels(self.name, self._example, num_classes)
        return ArraySplit(*self._example)


class _Dataset:
    def __init__(self, name: str, dataset: tf.data.Dataset, size: object = None):
        self.name, self._dataset, spec = name, dataset, dataset.element_spec
        if not isinstance(spec, tuple) or len(spec) not in (1, 2, 3):
            raise InputError(
                f"{name} dataset gives {arrays.describe(spec)}; give single examples, (x, y), "
                "(x, y, sample_weight) or (x,)"
            )
        for path, leaf in arrays.leaves(spec):
            if not (isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()):
                element = f"{path} as {arrays.describe(leaf)}"
                remedy = _REMEDIES.get(type(leaf), _SINGLE)
                raise InputError(f"{name} dataset gives {element}; {remedy}")
        x, y, *_ = (*spec, None)
        image = isinstance(x, tf.TensorSpec) and x.shape.rank == 3 and x.dtype.is_integer
        if image and x.dtype != tf.uint8 and is_label(y):
            element = f"x as {arrays.describe(x)}"
            raise InputError(f"{name} dataset gives {element}; give images as uint8 or float")
        known = int(dataset.cardinality())
        num = known if size is None else size
        unlike = known not in (num, tf.data.UNKNOWN_CARDINALITY)
        if unlike or not isinstance(num, numbers.Integral) or num < 1:
            says = {-1: "is endless", -2: "does not know its size"}
            raise InputError(
                f"{name} dataset {says.get(known, f'has {known} examples')}, the size given is "
                f"{size!r}; return (dataset.take(size), size), with 1 example or more"
            )
        self.spec, self.size = stored_spec(spec), int(num)

    def largest_label(self) -> tuple[int, str]:
        labels = self._dataset.map(lambda *example: tf.reshape(tf.cast(example[1], tf.int64), []))
        batches = labels.batch(_COUNT_BATCH).as_numpy_iterator()
        values = np.concatenate([np.zeros(0, np.int64), *batches])
        if len(values) != self.size:
            raise InputError(
                f"{self.name} dataset has {len(values)} examples but size is {self.size}"
            )
        wrong = np.flatnonzero((values < 0) | (values > arrays.MAX_LABEL))
        row = int(wrong[0]) if wrong.size else int(np.argmax(values))
        where = f"{self.name} dataset: example {row} (counted from 0)"
        if wrong.size:
            raise InputError(f"{where} has label {values[row]}; {arrays.CLASSES_ARE}")
        return int(values[row]), where

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

        return DatasetSplit(self._dataset.enumerate().map(check), self.size)


class _Batches:
    """A `keras.utils.PyDataset`. `on_epoch_end`, which may shuffle, is not called."""

    def __init__(self, name: str, dataset: keras.utils.PyDataset):
        self.name, self._dataset = name, dataset
        num = dataset.num_batches
        if num is None or num < 1:
            wrong = "is endless" if num is None else f"has {num} batches"
            raise InputError(f"{name} {type(dataset).__name__} {wrong}; return 1 batch or more")
        first, last = self._example(0), self._example(num - 1)
        self.spec = tf.nest.map_structure(spec_of, first)
        size = _num_rows(first)
        self._sizes = [size] * (num - 1) + [min(size, _num_rows(last))]
        self.size = sum(self._sizes)
        self._check(num - 1, last)

    def largest_label(self) -> tuple[int, str]:
        largest = [int(self._read(number)[1].max()) for number in range(len(self._sizes))]
        number = int(np.argmax(largest))
        return largest[number], f"{self.name} batch {number}"

    def split(self, num_classes: int) -> BatchSplit:
        read = functools.partial(self._read, num_classes=num_classes)
        return BatchSplit(read, self._sizes, self.spec, max(1, self._dataset.workers))

    def _read(self, number: int, num_classes: int = 0) -> Structure:
        example = self._example(number)
        self._check(number, example)
        _check_labels(f"{self.name} batch {number}", example, num_classes)
        return example

    def _example(self, number: int) -> Structure:
        where = f"{self.name} batch {number}"
        try:
            batch = self._dataset[number]
        except BaseException as error:
            error.add_note(f"in {where}")
            raise
        parts = batch if isinstance(batch, tuple | list) and len(batch) in (1, 2, 3) else (batch,)
        return arrays.as_arrays(where, parts)

    def _check(self, number: int, example: Structure) -> None:
        spec, size = tf.nest.map_structure(spec_of, example), _num_rows(example)
        if spec != self.spec:
            raise InputError(
                f"{self.name} batch {number} is of {arrays.format_spec(spec)}, but batch 0 of "
                f"{arrays.format_spec(self.spec)}; make them alike"
            )
        if size != self._sizes[number]:
            raise InputError(
                f"{self.name} batch {number} has {size} examples, but {self._sizes[number]} are "
                "expected; make all batches as long as the first, the last one as long or shorter"
            )


_UserSplit = _Arrays | _Dataset | _Batches


def _num_rows(example: Structure) -> int:
    return len(tf.nest.flatten(example)[0])


def _check_labels(name: str, example: Structure, num_classes: int) -> None:
    wrong = np.flatnonzero(example[1] >= num_classes) if num_classes else ()
    if len(wrong):
        raise InputError(
            f"{name} y: row {wrong[0]} (counted from 0) is {example[1][wrong[0]]}; allowed are "
            f"0..{num_classes - 1}"
        )
