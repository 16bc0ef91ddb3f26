"""The user's own data: `--dataset=module:function`.

The function takes no argument and returns the two halves, with the number of classes or without:

    def load():  # in my_data.py; --dataset=my_data:load
        return (train_images, train_labels), (test_images, test_labels)

A half is (images, labels), arrays or what numpy can make one of: images uint8 or float
`[N, H, W, C]`, labels integers `[N]` or `[N, 1]`. Or it is (dataset, size), a `tf.data.Dataset` of
single (image, label) examples; size may be left out where the dataset knows it (`cardinality`).
"""

from __future__ import annotations

import inspect
import numbers

import numpy as np
import tensorflow as tf

from towers.data.pipeline import ArraySplit, Data, DatasetSplit
from towers.errors import InputError
from towers.options.functions import load_function

_ALLOWED_RESULT = (
    "return (train, test) or (train, test, num_classes), where train and test are each "
    "(images, labels), (tf.data.Dataset, size) or a tf.data.Dataset"
)
_COUNT_BATCH = 1024
_MAX_LABEL = np.iinfo(np.int32).max - 1


def load(dataset: str) -> Data:
    """Call the user's function and check what it returns.

    Arrays are checked in full. The examples of a `tf.data.Dataset` are checked as they are read: a
    label or a value that is not allowed raises `tf.errors.InvalidArgumentError` then.

    Raises:
        InputError: the module or the function is not there, or what the function returned is not
            data to train on. What the function itself raises is left as it is.
    """
    function = load_function("dataset", dataset)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"--dataset={dataset} is called without arguments, but there is a {error}"
        ) from None
    result = function()
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        raise InputError(f"{dataset} returned {_describe(result)}; {_ALLOWED_RESULT}")
    train = _half(f"{dataset}: train", result[0])
    test = _half(f"{dataset}: test", result[1])
    if (train.image_shape, train.dtype) != (test.image_shape, test.dtype):
        raise InputError(
            f"{dataset}: train images are {train.dtype} {list(train.image_shape)} but test images "
            f"{test.dtype} {list(test.image_shape)}; make them alike"
        )
    if len(result) == 3:
        num_classes = _whole_number(f"{dataset}: num_classes", result[2])
    else:
        num_classes = 1 + max(train.max_label(), test.max_label())
    splits = train.split(num_classes), test.split(num_classes)
    names = tuple(map(str, range(num_classes)))
    return Data(dataset, *splits, num_classes, train.image_shape, names)


class _Arrays:
    """Images and labels as arrays, checked."""

    def __init__(self, name: str, images: object, labels: object):
        self._name = name
        self._images = _images(name, _array(f"{name} images", images))
        self._labels = _array(f"{name} labels", labels)
        if self._labels.shape[1:] == (1,):
            self._labels = self._labels[:, 0]
        if self._labels.ndim != 1 or self._labels.dtype.kind not in "iu":
            raise InputError(
                f"{name} labels are {_describe(self._labels)}; return integers, [N] or [N, 1] "
                "(labels.argmax(axis=1) of one-hot ones)"
            )
        if len(self._images) != len(self._labels):
            raise InputError(
                f"{name} has {len(self._images)} images but {len(self._labels)} labels; return one "
                "label for each image"
            )
        self._check_labels(_MAX_LABEL)
        self.image_shape, self.dtype = self._images.shape[1:], self._images.dtype.name

    def max_label(self) -> int:
        return int(self._labels.max())

    def split(self, num_classes: int) -> ArraySplit:
        self._check_labels(num_classes - 1)
        return ArraySplit(self._images, self._labels.astype(np.int32))

    def _check_labels(self, largest: int) -> None:
        wrong = np.flatnonzero((self._labels < 0) | (self._labels > largest))
        if wrong.size:
            raise InputError(
                f"{self._name} label {wrong[0]} (counted from 0) is {self._labels[wrong[0]]}; "
                f"allowed are 0..{largest}"
            )


class _Dataset:
    """A `tf.data.Dataset` whose examples have the right types and a known number."""

    def __init__(self, name: str, dataset: tf.data.Dataset, size: object = None):
        self._name, self._dataset = name, dataset
        self.image_shape, self.dtype = _check_spec(name, dataset.element_spec)
        known = int(dataset.cardinality())
        if known == tf.data.INFINITE_CARDINALITY:
            raise InputError(
                f"{name} dataset is endless; return dataset.take(size), without repeat"
            )
        if size is None and known == tf.data.UNKNOWN_CARDINALITY:
            raise InputError(f"{name} dataset does not know its size; return (dataset, size)")
        self._size = _whole_number(f"{name} size", known if size is None else size)
        if known not in (tf.data.UNKNOWN_CARDINALITY, self._size):
            raise InputError(f"{name} dataset has {known} examples but size is {self._size}")

    def max_label(self) -> int:
        """Read the dataset once; count it on the way."""
        labels = self._dataset.map(lambda image, label: tf.reshape(tf.cast(label, tf.int64), []))
        batches = list(labels.batch(_COUNT_BATCH).as_numpy_iterator())
        count = sum(map(len, batches))
        if count != self._size:
            raise InputError(f"{self._name} dataset has {count} examples but size is {self._size}")
        lowest = min(int(batch.min()) for batch in batches)
        if lowest < 0:
            raise InputError(f"{self._name} labels go down to {lowest}; labels are 0, 1, 2, ...")
        return max(int(batch.max()) for batch in batches)

    def split(self, num_classes: int) -> DatasetSplit:
        def check(image, label):
            message = f"{self._name} has a label outside 0..{num_classes - 1}:"
            good = tf.reduce_all((label >= 0) & (tf.cast(label, tf.int64) < num_classes))
            with tf.control_dependencies([tf.debugging.Assert(good, [message, label])]):
                label = tf.identity(label)
            if image.dtype.is_floating:
                image = tf.debugging.check_numerics(image, f"{self._name} has a bad image")
            return image, label

        return DatasetSplit(self._dataset.map(check), self._size)


def _half(name: str, half: object) -> _Arrays | _Dataset:
    """Take up what the function returned for train or test."""
    if isinstance(half, tf.data.Dataset):
        return _Dataset(name, half)
    if not isinstance(half, tuple | list) or len(half) != 2:
        raise InputError(f"{name} is {_describe(half)}; {_ALLOWED_RESULT}")
    kind = _Dataset if isinstance(half[0], tf.data.Dataset) else _Arrays
    return kind(name, *half)


def _array(name: str, value: object) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{name} are {_describe(value)}, not an array: {reason}") from None
    if array.dtype.kind not in "iuf":
        raise InputError(f"{name} are {_describe(array)}; return numbers")
    return array


def _images(name: str, images: np.ndarray) -> np.ndarray:
    """Check images; return them as uint8 or float32 `[N, H, W, C]`."""
    if images.ndim != 4 or 0 in images.shape:
        raise InputError(
            f"{name} images are {list(images.shape)}; return 1 or more, [N, H, W, C]"
            + "; add a channel axis, images[..., None]" * (images.ndim == 3)
        )
    if images.dtype.kind == "f":
        finite = np.isfinite(images).all(axis=(1, 2, 3))
        if not finite.all():
            index = int(np.argmin(finite))
            raise InputError(f"{name} image {index} (counted from 0) has a NaN or an infinity")
        return images.astype(np.float32, copy=False)
    if images.min() < 0 or images.max() > 255:
        raise InputError(
            f"{name} images are {images.dtype} from {images.min()} to {images.max()}; return "
            "uint8, or float32 for other ranges"
        )
    return images.astype(np.uint8, copy=False)


def _check_spec(name: str, spec: object) -> tuple[tuple[int, int, int], str]:
    """Return the image's shape and dtype of a dataset of (image, label) examples."""
    if not (
        isinstance(spec, tuple)
        and len(spec) == 2
        and all(isinstance(part, tf.TensorSpec) for part in spec)
    ):
        raise InputError(f"{name} dataset gives {_describe(spec)}; give (image, label) pairs")
    image, label = spec
    if not image.shape.is_fully_defined() or image.shape.rank != 3:
        raise InputError(
            f"{name} dataset's images have shape {image.shape}; give single ones, [H, W, C], by "
            "dataset.unbatch(), image[..., None] or tf.ensure_shape"
        )
    if image.dtype != tf.uint8 and not image.dtype.is_floating:
        raise InputError(f"{name} dataset's images are {image.dtype.name}; give uint8 or float32")
    if not label.dtype.is_integer or label.shape not in ([], [1]):
        raise InputError(
            f"{name} dataset's labels are {label.dtype.name} {label.shape}; give one integer each"
        )
    return tuple(image.shape), "uint8" if image.dtype == tf.uint8 else "float32"


def _whole_number(name: str, value: object) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}; return a whole number, 1 or more")
    return int(value)


def _describe(value: object) -> str:
    """Say what a value is, in a few words on one line."""
    if isinstance(value, tuple | list):
        items = ", ".join(map(_describe, value[:4]))
        return f"({items}{', ...' * (len(value) > 4)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {getattr(value.dtype, 'name', '')} {value.shape}"
    return type(value).__name__
