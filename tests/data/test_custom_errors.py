"""What is said of the user's own data where it cannot be used: one line."""

import numpy as np
import pytest
import tensorflow as tf

from towers import data
from towers.errors import InputError

IMAGES = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
LABELS = np.array([0, 2, 1, 2])
HALF = (IMAGES, LABELS)
ALLOWED = (
    "; return (train, test) or (train, test, num_classes), where train and test are each "
    "(images, labels), (tf.data.Dataset, size) or a tf.data.Dataset"
)


def examples(images=IMAGES, labels=LABELS):
    return tf.data.Dataset.from_tensor_slices((images, labels))


NAMES = "allowed are shapes, cifar10, folder, tfrecord and module:function"


def unsized(dataset):
    return dataset.filter(lambda *_: True)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("", f"--dataset= is unknown; {NAMES}"),
        (
            "imagenet",
            f"--dataset=imagenet is unknown; {NAMES}",
        ),
        (
            "CIFAR-10",
            f"--dataset=CIFAR-10 is unknown; {NAMES}; did you mean cifar10?",
        ),
        (
            "shape",
            f"--dataset=shape is unknown; {NAMES}; did you mean shapes?",
        ),
        (
            "no_such_module:load",
            "--dataset=no_such_module:load: there is no module no_such_module in the current "
            "folder or the installed packages",
        ),
        (
            "json:laods",
            "--dataset=json:laods: json has no function laods; did you mean json:loads?",
        ),
        ("json:__name__", "--dataset=json:__name__: json has no function __name__"),
        (
            "json:loads",
            "--dataset=json:loads is called without arguments, but there is a missing a required "
            "argument: 's'",
        ),
    ],
)
def test_a_name_that_leads_nowhere(dataset, message):
    with pytest.raises(InputError) as error:
        data.load(dataset)
    assert str(error.value) == message


WRONG = {
    "nothing": (None, "mine:load returned NoneType" + ALLOWED),
    "one half": ((HALF,), "mine:load returned ((ndarray uint8 (4, 5, 6, 3), ndarray int64 (4,)))"),
    "four": ((HALF, HALF, 3, 4), "mine:load returned ((ndarray uint8"),
    "images only": (
        (IMAGES, IMAGES),
        "mine:load: train is ndarray uint8 (4, 5, 6, 3)" + ALLOWED,
    ),
    "three arrays": (
        ((IMAGES, LABELS, LABELS), HALF),
        "mine:load: train is (ndarray uint8 (4, 5, 6, 3), ndarray int64 (4,), ndarray int64 (4,))"
        + ALLOWED,
    ),
    "a dict": (
        (HALF, {"images": IMAGES, "labels": LABELS}),
        "mine:load: test is dict" + ALLOWED,
    ),
    "lengths": (
        (HALF, (IMAGES, LABELS[:3])),
        "mine:load: test has 4 images but 3 labels; return one label for each image",
    ),
    "no channels": (
        ((IMAGES[..., 0], LABELS), HALF),
        "mine:load: train images are [4, 5, 6]; expected [N, H, W, C]; add a channel axis, "
        "images[..., None]",
    ),
    "flat": (
        ((IMAGES.reshape(4, -1), LABELS), HALF),
        "mine:load: train images are [4, 90]; expected [N, H, W, C]",
    ),
    "ragged": (
        (([[1], [1, 2]], [0, 1]), HALF),
        "mine:load: train images are ((int), (int, int)), not an array: setting an array element",
    ),
    "text": (
        ((["a", "b"], [0, 1]), HALF),
        "mine:load: train images are <U1 [2]; return numbers",
    ),
    "bool images": (
        ((IMAGES > 3, LABELS), HALF),
        "mine:load: train images are bool [4, 5, 6, 3]; return numbers",
    ),
    "ints beyond a byte": (
        ((IMAGES.astype(int) * 256, LABELS), HALF),
        "mine:load: train images are int64 from 0 to 65280; return uint8, or float32 for other "
        "ranges",
    ),
    "negative ints": (
        ((IMAGES.astype(np.int16) - 1, LABELS), HALF),
        "mine:load: train images are int16 from -1 to 254; return uint8, or float32 for other "
        "ranges",
    ),
    "no examples": (
        ((IMAGES[:0], LABELS[:0]), HALF),
        "mine:load: train images are [0, 5, 6, 3]: empty; return 1 or more",
    ),
    "no pixels": (
        ((IMAGES[:, :0], LABELS), HALF),
        "mine:load: train images are [4, 0, 6, 3]: empty; return 1 or more",
    ),
    "float labels": (
        ((IMAGES, LABELS / 1), HALF),
        "mine:load: train labels are float64; return integers",
    ),
    "one-hot labels": (
        ((IMAGES, np.eye(3)[LABELS]), HALF),
        "mine:load: train labels are [4, 3]; allowed are [N] and [N, 1]; return "
        "labels.argmax(axis=1)",
    ),
    "label axes": (
        ((IMAGES, LABELS[:, None, None]), HALF),
        "mine:load: train labels are [4, 1, 1]; allowed are [N] and [N, 1]",
    ),
    "negative label": (
        (HALF, (IMAGES, [0, 1, -1, 0])),
        "mine:load: test label 2 (counted from 0) is -1; labels are 0, 1, 2, ...",
    ),
    "label beyond int32": (
        (HALF, (IMAGES, [0, 1, 2, 2**31])),
        "mine:load: test label 3 (counted from 0) is 2147483648; labels are 0, 1, 2, ...",
    ),
    "label beyond the classes": (
        (HALF, HALF, 2),
        "mine:load: train label 1 (counted from 0) is 2; with 2 classes, labels are 0..1",
    ),
    "classes 0": (
        (HALF, HALF, 0),
        "mine:load: num_classes is 0; return a whole number, 1 or more",
    ),
    "classes float": (
        (HALF, HALF, 3.0),
        "mine:load: num_classes is 3.0; return a whole number, 1 or more",
    ),
    "classes bool": (
        (HALF, HALF, True),
        "mine:load: num_classes is True; return a whole number, 1 or more",
    ),
    "other shape": (
        (HALF, (IMAGES[:, 1:], LABELS)),
        "mine:load: train images are uint8 [5, 6, 3] but test images uint8 [4, 6, 3]; make them "
        "alike",
    ),
    "other type": (
        (HALF, (IMAGES / 255, LABELS)),
        "mine:load: train images are uint8 [5, 6, 3] but test images float32 [5, 6, 3]; make them "
        "alike",
    ),
    "dataset without size": (
        (unsized(examples()), HALF),
        "mine:load: train dataset does not know its size; return (dataset, size)",
    ),
    "endless dataset": (
        (examples().repeat(), HALF),
        "mine:load: train dataset is endless; return dataset.take(size), without repeat",
    ),
    "endless dataset with size": (
        ((examples().repeat(), 4), HALF),
        "mine:load: train dataset is endless; return dataset.take(size), without repeat",
    ),
    "dataset of another size": (
        (HALF, (examples(), 5)),
        "mine:load: test dataset has 4 examples but size is 5",
    ),
    "counted dataset of another size": (
        (HALF, (unsized(examples()), 5)),
        "mine:load: test dataset has 4 examples but size is 5",
    ),
    "size 0": (
        (HALF, (unsized(examples()), 0)),
        "mine:load: test size is 0; return a whole number, 1 or more",
    ),
    "empty dataset": (
        (HALF, examples().take(0)),
        "mine:load: test dataset is empty; return 1 example or more",
    ),
    "size a string": (
        (HALF, (examples(), "4")),
        "mine:load: test size is '4'; return a whole number, 1 or more",
    ),
    "batched dataset": (
        (examples().batch(2), HALF),
        "mine:load: train images are [None, 5, 6, 3]; expected [H, W, C]; use dataset.unbatch()",
    ),
    "dataset without channels": (
        (examples(IMAGES[..., 0]), HALF),
        "mine:load: train images are [5, 6]; expected [H, W, C]; add a channel axis, "
        "images[..., None]",
    ),
    "dataset of images": (
        (tf.data.Dataset.from_tensor_slices(IMAGES), HALF),
        "mine:load: train dataset gives TensorSpec uint8 (5, 6, 3); give (image, label) pairs",
    ),
    "dataset of unknown images": (
        (unsized(tf.data.Dataset.from_generator(lambda: iter(()), tf.string)), HALF),
        "mine:load: train dataset gives TensorSpec string <unknown>; give (image, label) pairs",
    ),
    "dataset of dicts": (
        (tf.data.Dataset.from_tensor_slices({"image": IMAGES, "label": LABELS}), HALF),
        "mine:load: train dataset gives dict; give (image, label) pairs",
    ),
    "dataset of int images": (
        (examples(IMAGES.astype(int)), HALF),
        "mine:load: train dataset's images are int64; give uint8 or float32",
    ),
    "dataset of float labels": (
        (examples(labels=LABELS / 1), HALF),
        "mine:load: train dataset's labels are float64 (); give one integer each",
    ),
    "dataset of one-hot labels": (
        (examples(labels=np.eye(3, dtype=int)[LABELS]), HALF),
        "mine:load: train dataset's labels are int64 (3,); give one integer each",
    ),
    "dataset of negative labels": (
        (examples(labels=LABELS - 1), HALF),
        "mine:load: train labels go down to -1; labels are 0, 1, 2, ...",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_used_is_said_in_one_line(load, wrong):
    result, message = WRONG[wrong]
    with pytest.raises(InputError) as error:
        load(result)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_image_that_is_not_finite_is_named(load, value):
    images = IMAGES.astype(np.float64)
    images[2, 3, 1, 0] = value
    with pytest.raises(InputError) as error:
        load(((images, LABELS), HALF))
    message = "mine:load: train image 2 (counted from 0) has a NaN or an infinity"
    assert str(error.value) == message


@pytest.mark.parametrize(("shape", "shown"), [(None, "<unknown>"), ([None, 8, 3], "(None, 8, 3)")])
def test_a_dataset_whose_image_shape_is_not_fixed(load, shape, shown):
    spec = (tf.TensorSpec(shape, tf.uint8), tf.TensorSpec([], tf.int32))
    dataset = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)
    with pytest.raises(InputError) as error:
        load(((dataset, 4), HALF))
    assert str(error.value) == (
        f"mine:load: train dataset's images have shape {shown}; fix it with tf.ensure_shape"
    )


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES, LABELS, "mine:load: train has a label outside 0..1"),
        (IMAGES, LABELS - 1, "mine:load: train has a label outside 0..1"),
        (IMAGES * np.float32(np.nan), LABELS // 2, "mine:load: train has a bad image"),
    ],
)
def test_a_dataset_s_examples_are_checked_as_they_are_read(load, images, labels, message):
    good = images.astype(images.dtype), [0, 1, 0, 1]
    loaded = load(((examples(images, labels), 4), (np.nan_to_num(good[0]), good[1]), 2))
    for batches in (loaded.train.train_batches(4, seed=1), loaded.train.eval_batches(4)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            next(iter(batches))
