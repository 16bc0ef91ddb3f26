"""Checks the user's own data and makes a data set of them: `--dataset=module:function`.

    def load():  # in my_data.py; --dataset=my_data:load
        return (train_x, train_y), (test_x, test_y)

README.md lists all forms of a result and of a split.
"""

import dataclasses
import numbers
from collections.abc import Mapping

import tensorflow as tf

from towers.data import arrays
from towers.data.pipeline import ArraySplit, Data, data_of, is_label
from towers.data.tfdata_splits import DatasetSplit
from towers.errors import InputError
from towers.options.functions import call_without_arguments

_UserSplit = ArraySplit | DatasetSplit
_NAMES = ("train", "validation", "test")
_ALLOWED_RESULT = (
    "return (train, test), (train, test, num_classes), (train, validation, test) or a dict of "
    'these, {"train": ..., "test": ...}'
)
_ALLOWED_SPLIT = (
    "return (train, test), each (x, y), (x, y, sample_weight) or (x,) of arrays or dicts and "
    "tuples of them, a tf.data.Dataset, or (tf.data.Dataset, size)"
)
# Limits of the number of classes that a largest label implies: a wrong label would add outputs for
# all numbers below it. There may be few examples of many classes.
_FEW_CLASSES, _MANY_CLASSES = 1000, 100_000
_MAX_CLASSES = 1_000_000  # that a user may set


def load(dataset: str) -> Data:
    """Call the user's function, "module:function", and check its result, see `data_set`.

    Raises:
        InputError: there is no such module or function, or its result is invalid. Errors of the
            function itself are passed on.
    """
    result = call_without_arguments("dataset", dataset)
    if isinstance(result, dict):
        if not {"train"} <= set(result) <= set(_NAMES):
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
) -> Data:
    """Return a data set of the user's splits.

    Arrays are checked at once, the examples of a `tf.data.Dataset` when they are read: an
    invalid label or value raises `tf.errors.InvalidArgumentError` then.

    Args:
        name: the value of --dataset.
        user_splits: "train", and optionally "test" and "validation". Without "test" a tenth of the
            training examples is held out, and a note says so.
        num_classes: number of classes; None: the largest label + 1, up to a limit, above which
            targets are numbers.

    Raises:
        InputError: a split is invalid, or the splits have different types or shapes.
    """
    splits = {split: _user_split(f"{name}: {split}", v) for split, v in user_splits.items()}
    for split, other in splits.items():
        if other.spec != splits["train"].spec:
            raise InputError(
                f"{name}: {split} is {arrays.format_spec(other.spec)}, but train is "
                f"{arrays.format_spec(splits['train'].spec)}; return the same types and shapes"
            )
    num_classes, notes = _num_classes(name, splits, num_classes)
    for split, each in splits.items():
        splits[split] = each.checked(f"{name}: {split}", num_classes)
    class_names = tuple(map(str, range(num_classes)))
    data = data_of(name, splits, num_classes=num_classes, class_names=class_names)
    return dataclasses.replace(data, notes=(*data.notes, *notes))


def _num_classes(
    name: str, splits: Mapping[str, _UserSplit], num_classes: object
) -> tuple[int, list[str]]:
    # Returns the number of classes, 0 if targets are none, and notes on the labels.
    spec = splits["train"].spec
    labels = len(spec) > 1 and is_label(spec[1])
    if num_classes is not None:
        if not isinstance(num_classes, numbers.Integral) or not 1 <= num_classes <= _MAX_CLASSES:
            allowed = f"an integer from 1 to {_MAX_CLASSES:,}"
            raise InputError(f"{name}: num_classes is {num_classes!r}; return {allowed}")
        if not labels:
            raise InputError(
                f"{name}: num_classes is {num_classes}, but y is not one integer for each example; "
                "leave it out"
            )
        return int(num_classes), []
    if not labels:
        return 0, []
    ranges = [each.label_range(f"{name}: {split}") for split, each in splits.items()]
    least, largest = min(least for least, _ in ranges), max(largest for _, largest in ranges)
    num_examples = sum(split.size for split in splits.values())
    if largest >= min(max(num_examples, _FEW_CLASSES), _MANY_CLASSES):
        return 0, []
    note = f"note        class 0 has no example: labels begin at {least}; use y - {least} if that "
    return largest + 1, [f"{note}is the first class"] * (least > 0)


def _user_split(name: str, value: object) -> _UserSplit:
    if isinstance(value, tf.data.Dataset):
        return _of_dataset(name, value)
    if not isinstance(value, tuple | list) or len(value) not in (1, 2, 3):
        raise InputError(f"{name} is {arrays.describe(value)}; {_ALLOWED_SPLIT}")
    if isinstance(value[0], tf.data.Dataset) and len(value) == 2:
        return _of_dataset(name, *value)
    return ArraySplit(*arrays.as_arrays(name, value))


def _of_dataset(name: str, dataset: tf.data.Dataset, size: object = None) -> DatasetSplit:
    leaves = tf.nest.flatten(dataset.element_spec)
    if all(isinstance(leaf, tf.TensorSpec) and leaf.shape[:1] == [None] for leaf in leaves):
        dataset, size = _unbatched(name, dataset, size)
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (1, 2, 3):
        raise InputError(
            f"{name} dataset yields {arrays.describe(spec)}; return single examples: (x, y), "
            "(x, y, sample_weight) or (x,)"
        )
    for path, leaf in arrays.leaves(spec):
        if not (isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()):
            raise InputError(
                f"{name} dataset yields {path} as {arrays.describe(leaf)}; return single examples "
                "of one known shape: use dataset.unbatch(), padding or tf.ensure_shape (for ragged "
                "tensors x.to_tensor(), for sparse ones tf.sparse.to_dense(x))"
            )
    x, y, *_ = (*spec, None)
    image = isinstance(x, tf.TensorSpec) and x.shape.rank == 3 and x.dtype.is_integer
    if image and x.dtype != tf.uint8 and is_label(y):
        element = f"x as {arrays.describe(x)}"
        raise InputError(f"{name} dataset yields {element}; return images as uint8 or float")
    known = int(dataset.cardinality())
    num = known if size is None else size
    unlike = known not in (num, tf.data.UNKNOWN_CARDINALITY)
    if unlike or not isinstance(num, numbers.Integral) or num < 1:
        says = {-1: "is endless", -2: "does not know its size"}
        raise InputError(
            f"{name} dataset {says.get(known, f'has {known} examples')}, and the given size is "
            f"{size!r}; return (dataset.take(size), size), with at least 1 example"
        )
    return DatasetSplit(dataset, int(num))


def _unbatched(name: str, batches: tf.data.Dataset, size: object) -> tuple[tf.data.Dataset, object]:
    # Returns the single examples of batches, and their number, which one pass counts.
    if size is None:
        if batches.cardinality() < 0:
            raise InputError(
                f"{name} dataset yields batches, and their number is unknown; return "
                "(dataset.unbatch(), size), where size is the number of examples"
            )
        first = batches.map(lambda *example: tf.shape(tf.nest.flatten(example)[0])[0])
        size = int(first.reduce(tf.constant(0, tf.int32), tf.add))
    return batches.unbatch(), size
