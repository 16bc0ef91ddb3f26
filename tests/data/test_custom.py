"""`--dataset=module:function`: the user's own data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.data.splits import all_of, assert_same, refusal

pytestmark = pytest.mark.unit

IMAGES = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
LABELS = np.array([0, 2, 1, 2])
HALF = (IMAGES, LABELS)
TEXTS = ["a few words", "zero at the end \0", "ä", "more"]
PADDED = np.array([[1, 2], [3, 0], [4, 5], [6, 0]])


def examples(images=IMAGES, labels=LABELS):
    return tf.data.Dataset.from_tensor_slices((images, labels))


def unsized(dataset=None):
    return (dataset or examples()).filter(lambda *_: True)


def shapeless():
    return unsized().map(lambda image, label: (tf.py_function(abs, [image], tf.uint8), label))


def graph(*values):
    return pytest.param(*values, marks=pytest.mark.graph)


@pytest.mark.parametrize(
    "half",
    [
        lambda: list(HALF),
        lambda: (IMAGES, LABELS[:, None].astype(np.uint8)),
        lambda: (IMAGES.astype(np.int64), LABELS),
        graph(examples),
        graph(lambda: (unsized(), np.int64(4))),
        graph(lambda: examples().batch(3)),
        graph(lambda: (unsized().batch(3), 4)),
        graph(lambda: examples(labels=LABELS[:, None].astype(np.uint8))),
    ],
)
def test_every_form_is_the_same_data(load, half):
    loaded = load((half(), HALF))
    assert (loaded.name, loaded.num_classes, loaded.image_shape) == ("mine:load", 3, (5, 6, 3))
    assert loaded.class_names == ("0", "1", "2")
    for split in (loaded.train, loaded.test):
        found = all_of(split)
        assert_same(found, HALF)
        assert [part.dtype for part in found] == [np.uint8, np.int32]


@pytest.mark.graph
def test_the_number_of_classes_is_the_given_one_or_that_of_both_halves(load):
    few, many = (IMAGES, [0, 1, 0, 1]), (IMAGES, [0, 5, 0, 1])
    assert load((few, many)).num_classes == 6
    assert load((examples(*many), few)).num_classes == 6
    assert load((few, many, 9)).num_classes == 9
    assert load((few, many, np.int32(9))).class_names == tuple("012345678")


# Data of any kind

ANY = {
    "regression": ((PADDED / 2, [[0.5], [1.5], [-1.0], [0.0]]), np.float32),
    "several labels": ((IMAGES, np.eye(3, dtype=np.int64)[LABELS]), np.int64),
    "masks": ((IMAGES, IMAGES[..., 0] > 3), np.bool_),
    "classes of pixels": ((IMAGES, IMAGES[..., 0] % 3), np.uint8),
}


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [(kind, tuple) for kind in ANY]
    + [graph(kind, lambda half: examples(*half)) for kind in ("regression", "masks")],
)
def test_targets_that_are_no_classes(load, kind, wrap):
    half, dtype = ANY[kind]
    loaded = load((wrap(half), half))
    assert (loaded.num_classes, loaded.class_names) == (0, ())
    for split in (loaded.train, loaded.test):
        _, y = all_of(split)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, half[1], strict=isinstance(half[1], np.ndarray))
    assert loaded.image_shape == ((5, 6, 3) if half[0] is IMAGES else None)


@pytest.mark.graph
def test_one_wrong_label_makes_no_classes(load):
    half = IMAGES, np.array([0, 1, 2_000_000_000, 1])
    for train in half, examples(*half):
        loaded = load((train, HALF))
        assert (loaded.num_classes, loaded.class_names) == (0, ())
    few, many = ((np.zeros([size, 1]), np.arange(size)) for size in (4, 1500))
    assert load((many, few)).num_classes == 1500  # a class for each example


def test_several_inputs_outputs_and_weights(load):
    half = (
        {"tokens": PADDED, "price": [1, 2.5, 3, 4], "text": TEXTS},
        (LABELS, {"mask": PADDED > 3}),
        (np.ones(4, int), {"mask": np.ones((4, 2))}),
    )
    loaded = load({"train": half, "test": half, "validation": half})
    assert loaded.num_classes == 0
    for split in (loaded.train, loaded.validation, loaded.test):
        x, y, weights = all_of(split)
        assert_same((x["tokens"], y), (PADDED, half[1]))
        assert x["price"].tolist() == [1, 2.5, 3, 4]
        assert {part.dtype.name for part in tf.nest.flatten(weights)} == {"float32"}
    several = [PADDED, PADDED / 2], LABELS  # a list of arrays, as in Keras
    assert_same(all_of(load((several, several)).train)[0][1], PADDED / 2)


@pytest.mark.graph
def test_examples_without_targets(load):
    only_x = examples().map(lambda x, y: (x,))
    for half in ((IMAGES,), (IMAGES, None), [IMAGES, None, None], only_x):
        loaded = load((half, (IMAGES,)))
        assert (loaded.num_classes, loaded.image_shape, len(loaded.spec)) == (0, (5, 6, 3), 1)
        assert_same(all_of(loaded.train)[0], IMAGES)


# What is said where the data cannot be used


def half_of(x, y=LABELS):
    return (x, y), HALF


ROW = "(counted from 0)"
NUMBERS = {"a": PADDED, "b": [PADDED, PADDED[:2]]}
BEYOND = {"a": [[1.0], [1e300], [0.0], [0.0]]}
NOT_FINITE = np.where(IMAGES == 200, np.nan, IMAGES)
WRONG = {
    "nothing": (None, "mine:load returned NoneType; return (train, test), (train, test, num_"),
    "a PyDataset": ((keras.utils.PyDataset(), HALF), "train is PyDataset; return (train, test)"),
    "another name": ({"train": HALF, "tset": HALF}, "a dict of ['train', 'tset']; return"),
    "weights": ((HALF, (*HALF, LABELS[:3])), "test x has 4 rows, but sample_weight has 3; return"),
    "lengths inside": (half_of(NUMBERS), "train x['a'] has 4 rows, but x['b'][1] has 2"),
    "ragged": (half_of([[1], [1, 2]], [0, 1]), "train x is ((int), (int, int)), not an array"),
    "text labels": (half_of(IMAGES, TEXTS), "y = np.unique(y, return_inverse=True)"),
    "ints beyond a byte": (half_of(IMAGES.astype(int) * 256), "int64 from 0 to 65280; "),
    "negative label": ((HALF, (IMAGES, [0, 1, -1, 0])), f"test y: row 2 {ROW} is -1; cl"),
    "label beyond the classes": ((HALF, HALF, 2), f"train y: row 1 {ROW} is 2; allowed a"),
    "other shape": (
        (HALF, (IMAGES[:, 1:], LABELS)),
        "mine:load: test is x [4, 6, 3] uint8, y [] int32, but train is x [5, 6, 3] uint8, y",
    ),
    "not finite": (half_of(NOT_FINITE), f"train x: row 2 {ROW} has a NaN, an infinity"),
    "beyond float32": (half_of(IMAGES, BEYOND), f"['a']: row 1 {ROW} has a NaN, an "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_used_is_said_in_one_line(load, wrong):
    result, message = WRONG[wrong]
    line = refusal(result, call=load)
    assert line.startswith("mine:load") and message in line


WRONG_DATASETS = {
    "label beyond int32": (
        lambda: examples(IMAGES, np.array([0, 1, 2**40, 0])),
        f"example 2 {ROW} has label 1099511627776; classes are 0, 1, 2",
    ),
    "no size": (unsized, "does not know its size, and the given size is None"),
    "endless": (lambda: examples().repeat(), "dataset is endless"),
    "another size": (lambda: (examples(), 5), "dataset has 4 examples, and the given size is 5"),
    "counted": (lambda: (unsized(), 5), "dataset has 4 examples, but size is 5"),
    "batches": (lambda: unsized().batch(3), "return (dataset.unbatch(), size)"),
    "of an unknown shape": (shapeless, "x as TensorSpec uint8 <unknown>; return single e"),
}


@pytest.mark.graph
def test_what_datasets_cannot_be_used_is_said_in_one_line(load):
    for make, message in WRONG_DATASETS.values():
        for half, halves_given in ("train", (make(), HALF)), ("test", (HALF, make())):
            line = refusal(halves_given, call=load)
            assert line.startswith(f"mine:load: {half} dataset") and message in line


@pytest.mark.graph
@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES, LABELS, r"\[1\] .* \[label\] \[2\] \[which is not in 0..1"),
        (IMAGES * np.float32(np.nan), LABELS // 2, r"\[0\] .* \[a NaN or an inf"),
    ],
)
def test_a_dataset_s_examples_are_checked_as_they_are_read(load, images, labels, message):
    good = np.nan_to_num(images), [0, 1, 0, 1]
    split = load(((examples(images, labels), 4), good, 2)).train
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"train dataset: example. {message}"):
        next(iter(split.eval_batches(4)))


def test_labels_that_begin_at_1_get_a_note(load):
    (note,) = load(((IMAGES, LABELS + 1), (IMAGES, LABELS + 1))).notes
    assert note.startswith("note ") and "class 0 has no example" in note and "y - 1" in note
    assert load((HALF, HALF)).notes == ()
