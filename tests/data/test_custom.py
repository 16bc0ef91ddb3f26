"""`--dataset=module:function`: the user's own data."""

import numpy as np
import pytest
import tensorflow as tf

from tests.data.tiny_cifar10 import everything
from towers import data
from towers.errors import InputError

IMAGES = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
LABELS = np.array([0, 2, 1, 2])
HALF = (IMAGES, LABELS)


def examples(images=IMAGES, labels=LABELS):
    return tf.data.Dataset.from_tensor_slices((images, labels))


def unsized(dataset):
    return dataset.filter(lambda *_: True)


def shapeless():
    return unsized(examples()).map(
        lambda image, label: (tf.py_function(abs, [image], tf.uint8), label)
    )


@pytest.mark.parametrize(
    "half",
    [
        HALF,
        list(HALF),
        (IMAGES, LABELS.astype(np.uint8)),
        (IMAGES, LABELS[:, None]),
        (IMAGES.tolist(), LABELS.tolist()),
        (IMAGES.astype(np.int64), LABELS),
        (tf.constant(IMAGES), tf.constant(LABELS)),
        examples(),
        (examples(), 4),
        (unsized(examples()), np.int64(4)),
        examples(labels=LABELS[:, None].astype(np.uint8)),
    ],
    ids=str,
)
def test_every_form_is_the_same_data(load, half):
    loaded = load((half, HALF))
    assert (loaded.name, loaded.num_classes, loaded.image_shape) == ("mine:load", 3, (5, 6, 3))
    assert loaded.class_names == ("0", "1", "2")
    for split in (loaded.train, loaded.test):
        assert split.size == 4
        images, labels = everything(split)
        np.testing.assert_array_equal(images, IMAGES)
        np.testing.assert_array_equal(labels, LABELS)
        assert (images.dtype, labels.dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("wrap", [tuple, lambda half: examples(*half)])
def test_float_images_become_float32(load, dtype, wrap):
    half = wrap((IMAGES.astype(dtype) - 100, LABELS))
    for split in (load((half, half)).train, load([half, half, 3]).test):
        images, _ = everything(split)
        assert images.dtype == np.float32
        np.testing.assert_array_equal(images, IMAGES.astype(np.float32) - 100)


def test_the_number_of_classes_is_the_given_one_or_that_of_both_halves(load):
    few, many = (IMAGES, [0, 1, 0, 1]), (IMAGES, [0, 5, 0, 1])
    assert load((few, many)).num_classes == 6
    assert load((examples(*many), few)).num_classes == 6
    assert load((few, many, 9)).num_classes == 9
    assert load((few, many, np.int32(9))).class_names == tuple("012345678")


def test_a_module_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "data_of_the_user.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    half = np.zeros((3, 4, 4, 1), 'uint8'), [0, 1, 1]\n"
        "    return half, half\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert data.load("data_of_the_user:load").image_shape == (4, 4, 1)


def test_what_the_function_raises_is_left_alone(mine):
    def load():
        raise KeyError("my own fault")

    mine.load = load
    with pytest.raises(KeyError, match="my own fault"):
        data.load("mine:load")


# What is said where the data cannot be used


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("no_such_module:load", "there is no module no_such_module in the current folder"),
        ("json:laods", "json has no function laods; did you mean json:loads?"),
        ("json:loads", "is called without arguments, but there is a missing a required argument"),
    ],
)
def test_a_name_that_leads_nowhere(dataset, message):
    with pytest.raises(InputError, match=f"^--dataset={dataset}") as error:
        data.load(dataset)
    assert message in str(error.value)


WRONG = {
    "nothing": (None, "mine:load returned NoneType; return (train, test) or (train, test, num_cl"),
    "images only": ((IMAGES, IMAGES), "mine:load: train is ndarray uint8 (4, 5, 6, 3); return ("),
    "a dict": ((HALF, {"images": IMAGES}), "mine:load: test is dict; return ("),
    "lengths": ((HALF, (IMAGES, LABELS[:3])), "one integer for each of the 4 images"),
    "no channels": (((IMAGES[..., 0], LABELS), HALF), "add a channel axis, images[..., None]"),
    "ragged": ((([[1], [1, 2]], [0, 1]), HALF), "train images are ((int), (int, int)), not an a"),
    "text": (((["a", "b"], [0, 1]), HALF), "(2,); return numbers"),
    "ints beyond a byte": (((IMAGES.astype(int) * 256, LABELS), HALF), "int64 from 0 to 65280; "),
    "no examples": (((IMAGES[:0], LABELS[:0]), HALF), "images are [0, 5, 6, 3]; return 1 or more"),
    "float labels": (((IMAGES, LABELS / 1), HALF), "labels are ndarray float64 (4,); return one"),
    "one-hot labels": (((IMAGES, np.eye(3)[LABELS]), HALF), "labels.argmax(axis=1)"),
    "negative label": ((HALF, (IMAGES, [0, 1, -1, 0])), "test label 2 (counted from 0) is -1; al"),
    "label beyond the classes": ((HALF, HALF, 2), "train label 1 (counted from 0) is 2; allowed"),
    "classes 0": ((HALF, HALF, 0), "num_classes is 0; return 1 or more"),
    "classes float": ((HALF, HALF, 3.0), "num_classes is 3.0; return 1 or more"),
    "other shape": ((HALF, (IMAGES[:, 1:], LABELS)), "make them alike"),
    "other type": ((HALF, (IMAGES / 255, LABELS)), "make them alike"),
    "an image that is not finite": (
        ((np.where(IMAGES == 200, np.nan, IMAGES), LABELS), HALF),
        "train image 2 (counted from 0) has a NaN or an infinity",
    ),
    "no size": ((unsized(examples()), HALF), "does not know its size, the size given is None"),
    "endless": ((examples().repeat(), HALF), "train dataset is endless"),
    "another size": ((HALF, (examples(), 5)), "test dataset has 4 examples, the size given is 5"),
    "counted": ((HALF, (unsized(examples()), 5)), "test dataset has 4 examples but size is 5"),
    "size 0": ((HALF, (unsized(examples()), 0)), "the size given is 0; return (dataset.take(size)"),
    "size a string": ((HALF, (unsized(examples()), "4")), "the size given is 4"),
    "batched": ((examples().batch(2), HALF), "(None, 5, 6, 3), TensorSpec int64 (None,)); give si"),
    "of an unknown shape": ((shapeless(), HALF), "uint8 <unknown>, TensorSpec int64 ()); give si"),
    "dataset of dicts": (
        (tf.data.Dataset.from_tensor_slices({"image": IMAGES, "label": LABELS}), HALF),
        "train dataset gives dict; give single examples",
    ),
    "dataset of ints": ((examples(IMAGES.astype(int)), HALF), "(TensorSpec int64 (5, 6, 3), Tens"),
    "dataset of one-hot labels": (
        (examples(labels=np.eye(3, dtype=int)[LABELS]), HALF),
        "TensorSpec int64 (3,)); give single examples",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_used_is_said_in_one_line(load, wrong):
    result, message = WRONG[wrong]
    with pytest.raises(InputError, match="^mine:load") as error:
        load(result)
    assert message in str(error.value) and "\n" not in str(error.value)


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
