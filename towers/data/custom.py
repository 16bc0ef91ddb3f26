"""The user's own data: `--dataset=module:function`.

The function takes no argument and returns the two halves, with the number of classes or without:

    def load():  # in my_data.py; --dataset=my_data:load
        return (train_images, train_labels), (test_images, test_labels)

A half is (images, labels), arrays or what numpy can make one of: images uint8 or float
`[N, H, W, C]`, labels integers `[N]` or `[N, 1]`. Or it is (dataset, size), a `tf.data.Dataset` of
single (image, label) examples; size may be left out where the dataset knows it (`cardinality`).
"""

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
    if train.image != test.image:
        raise InputError(
            f"{dataset}: train images are {train.image} but test images {test.image}; make them "
            "alike"
        )
    num_classes = result[2] if len(result) == 3 else 1 + max(train.max_label(), test.max_label())
    if not isinstance(num_classes, numbers.Integral) or num_classes < 1:
        raise InputError(f"{dataset}: num_classes is {num_classes!r}; return 1 or more")
    splits = train.split(num_classes), test.split(num_classes)
    names = tuple(map(str, range(num_classes)))
    return Data(dataset, *splits, int(num_classes), tuple(train.image.shape), names)


class _Arrays:
    """Images and labels as arrays, checked."""

    def __init__(self, name: str, images: object, labels: object):
        self._name = name
        self._images = _images(name, _array(f"{name} images", images))
        self._labels = _array(f"{name} labels", labels)
        if self._labels.shape[1:] == (1,):
            self._labels = self._labels[:, 0]
        size = len(self._images)
        if self._labels.shape != (size,) or self._labels.dtype.kind not in "iu":
            raise InputError(
                f"{name} labels are {_describe(self._labels)}; return one integer for each of the "
                f"{size} images (labels.argmax(axis=1) of one-hot ones)"
            )
        self.image = tf.TensorSpec(self._images.shape[1:], self._images.dtype)

    def max_label(self) -> int:
        return int(self._labels.max())

    def split(self, num_classes: int) -> ArraySplit:
        wrong = np.flatnonzero((self._labels < 0) | (self._labels >= num_classes))
        if wrong.size:
            raise InputError(
                f"{self._name} label {wrong[0]} (counted from 0) is {self._labels[wrong[0]]}; "
                f"allowed are 0..{num_classes - 1}"
            )
        return ArraySplit(self._images, self._labels.astype(np.int32))


class _Dataset:
    """A `tf.data.Dataset` whose examples have the right types and a known number."""

    def __init__(self, name: str, dataset: tf.data.Dataset, size: object = None):
        self._name, self._dataset = name, dataset
        self.image = _image_spec(name, dataset.element_spec)
        known = int(dataset.cardinality())
        self._size = known if size is None else size
        unlike = known not in (self._size, tf.data.UNKNOWN_CARDINALITY)
        if unlike or not isinstance(self._size, numbers.Integral) or self._size < 1:
            says = {-1: "is endless", -2: "does not know its size"}
            raise InputError(
                f"{name} dataset {says.get(known, f'has {known} examples')}, the size given is "
                f"{size}; return (dataset.take(size), size), with 1 example or more"
            )

    def max_label(self) -> int:
        """Read the dataset once; count it on the way."""
        labels = self._dataset.map(lambda image, label: tf.reshape(tf.cast(label, tf.int64), []))
        batches = list(labels.batch(_COUNT_BATCH).as_numpy_iterator())
        count = sum(map(len, batches))
        if count != self._size:
            raise InputError(f"{self._name} dataset has {count} examples but size is {self._size}")
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


def _image_spec(name: str, spec: object) -> tf.TensorSpec:
    """Return what each image of a dataset of (image, label) examples will be."""
    pair = isinstance(spec, tuple) and len(spec) == 2
    if pair and all(isinstance(part, tf.TensorSpec) for part in spec):
        image, label = spec
        single = image.shape.rank == 3 and image.shape.is_fully_defined()
        if single and label.shape in ([], [1]) and label.dtype.is_integer:
            if image.dtype == tf.uint8 or image.dtype.is_floating:
                stored = tf.uint8 if image.dtype == tf.uint8 else tf.float32
                return tf.TensorSpec(image.shape, stored)
    raise InputError(
        f"{name} dataset gives {_describe(spec)}; give single examples: an image, uint8 or float "
        "[H, W, C], and its label, an integer (by dataset.unbatch(), image[..., None] or "
        "tf.ensure_shape)"
    )


def _describe(value: object) -> str:
    """Say what a value is, in a few words on one line."""
    if isinstance(value, tuple | list):
        items = ", ".join(map(_describe, value[:4]))
        return f"({items}{', ...' * (len(value) > 4)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {getattr(value.dtype, 'name', '')} {value.shape}"
    return type(value).__name__
