"""`--dataset=module:function`: the user's own data."""

import numpy as np
import pytest
import tensorflow as tf

from towers import data
from towers.errors import InputError

IMAGES = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
LABELS = np.array([0, 2, 1, 2])
HALF = (IMAGES, LABELS)


def examples(images=IMAGES, labels=LABELS):
    return tf.data.Dataset.from_tensor_slices((images, labels))


def unsized(dataset):
    return dataset.filter(lambda *_: True)


def everything(split):
    images, labels, weights = next(iter(split.eval_batches(split.size)))
    assert weights.numpy().all()
    return images.numpy(), labels.numpy()


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


def test_the_caller_s_arrays_are_copied(load):
    images = IMAGES.copy()
    loaded = load(((images, LABELS), HALF))
    images[:] = 0
    np.testing.assert_array_equal(everything(loaded.train)[0], IMAGES)


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
    "one half": ((HALF,), "returned ((ndarray uint8 (4, 5, 6, 3), ndarray int64 (4,)))"),
    "five": ((HALF, 1, 2, 3, 4), "returned ((ndarray uint8 (4, 5, 6, 3), ndarray int64 (4,)), int"),
    "images only": ((IMAGES, IMAGES), "mine:load: train is ndarray uint8 (4, 5, 6, 3); return ("),
    "three arrays": (((IMAGES, LABELS, LABELS), HALF), "train is (ndarray uint8 (4, 5, 6, 3), nd"),
    "a dict": ((HALF, {"images": IMAGES}), "mine:load: test is dict; return ("),
    "lengths": ((HALF, (IMAGES, LABELS[:3])), "test has 4 images but 3 labels"),
    "no channels": (((IMAGES[..., 0], LABELS), HALF), "add a channel axis, images[..., None]"),
    "flat": (((IMAGES.reshape(4, -1), LABELS), HALF), "train images are [4, 90]; return 1 or more"),
    "ragged": ((([[1], [1, 2]], [0, 1]), HALF), "train images are ((int), (int, int)), not an a"),
    "text": (((["a", "b"], [0, 1]), HALF), "(2,); return numbers"),
    "bool images": (((IMAGES > 3, LABELS), HALF), "ndarray bool (4, 5, 6, 3); return numbers"),
    "ints beyond a byte": (((IMAGES.astype(int) * 256, LABELS), HALF), "int64 from 0 to 65280; "),
    "negative ints": (((IMAGES.astype(np.int16) - 1, LABELS), HALF), "int16 from -1 to 254; retu"),
    "no examples": (((IMAGES[:0], LABELS[:0]), HALF), "images are [0, 5, 6, 3]; return 1 or more"),
    "no pixels": (((IMAGES[:, :0], LABELS), HALF), "images are [4, 0, 6, 3]; return 1 or more"),
    "float labels": (((IMAGES, LABELS / 1), HALF), "labels are ndarray float64 (4,); return inte"),
    "one-hot labels": (((IMAGES, np.eye(3)[LABELS]), HALF), "labels.argmax(axis=1)"),
    "label axes": (((IMAGES, LABELS[:, None, None]), HALF), "int64 (4, 1, 1); return integers, ["),
    "negative label": ((HALF, (IMAGES, [0, 1, -1, 0])), "test label 2 (counted from 0) is -1; al"),
    "label beyond int32": ((HALF, (IMAGES, [0, 1, 2, 2**31])), "label 3 (counted from 0) is 21474"),
    "label beyond the classes": (
        (HALF, HALF, 2),
        "train label 1 (counted from 0) is 2; allow",
    ),
    "classes 0": ((HALF, HALF, 0), "num_classes is 0; return a whole number, 1 or more"),
    "classes float": ((HALF, HALF, 3.0), "num_classes is 3.0; return a whole number, 1 or more"),
    "classes bool": ((HALF, HALF, True), "num_classes is True; return a whole number, 1 or more"),
    "other shape": ((HALF, (IMAGES[:, 1:], LABELS)), "uint8 [5, 6, 3] but test images uint8 [4, 6"),
    "other type": ((HALF, (IMAGES / 255, LABELS)), "uint8 [5, 6, 3] but test images float32 [5, 6"),
    "no size": ((unsized(examples()), HALF), "does not know its size; return (dataset, size)"),
    "endless": ((examples().repeat(), HALF), "train dataset is endless; return dataset.take(size)"),
    "endless with size": (((examples().repeat(), 4), HALF), "train dataset is endless"),
    "another size": ((HALF, (examples(), 5)), "test dataset has 4 examples but size is 5"),
    "counted": ((HALF, (unsized(examples()), 5)), "test dataset has 4 examples but size is 5"),
    "size 0": ((HALF, (unsized(examples()), 0)), "test size is 0; return a whole number, 1 or mo"),
    "empty": ((HALF, examples().take(0)), "test size is 0; return a whole number, 1 or more"),
    "size a string": ((HALF, (examples(), "4")), "test size is '4'; return a whole number, 1 or"),
    "batched": ((examples().batch(2), HALF), "(None, 5, 6, 3); give single ones, [H, W, C], by d"),
    "dataset without channels": ((examples(IMAGES[..., 0]), HALF), "(5, 6); give single ones, [H"),
    "dataset of images": (
        (tf.data.Dataset.from_tensor_slices(IMAGES), HALF),
        "give (image, label)",
    ),
    "dataset of dicts": (
        (tf.data.Dataset.from_tensor_slices({"image": IMAGES, "label": LABELS}), HALF),
        "train dataset gives dict; give (image, label) pairs",
    ),
    "dataset of ints": ((examples(IMAGES.astype(int)), HALF), "are int64; give uint8 or float32"),
    "dataset of float labels": ((examples(labels=LABELS / 1), HALF), "are float64 (); give one in"),
    "dataset of one-hot labels": (
        (examples(labels=np.eye(3, dtype=int)[LABELS]), HALF),
        "labels are int64 (3,); give one integer each",
    ),
    "dataset of negative labels": ((examples(labels=LABELS - 1), HALF), "labels go down to -1; "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_used_is_said_in_one_line(load, wrong):
    result, message = WRONG[wrong]
    with pytest.raises(InputError, match="^mine:load") as error:
        load(result)
    assert message in str(error.value) and "\n" not in str(error.value)


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
    assert f"images have shape {shown}; " in str(error.value)
    assert "tf.ensure_shape" in str(error.value)


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
