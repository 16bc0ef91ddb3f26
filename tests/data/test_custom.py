"""`--dataset=module:function`: the user's own data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.data.tiny_cifar10 import everything
from towers import data
from towers.data import halves
from towers.errors import InputError

IMAGES = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
LABELS = np.array([0, 2, 1, 2])
HALF = (IMAGES, LABELS)
TEXTS = ["a few words", "zero at the end \0", "ä", "more"]
PADDED = np.array([[1, 2], [3, 0], [4, 5], [6, 0]])
RAGGED = tf.ragged.constant([[1, 2], [3], [4, 5], [6]])


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


# Data of any kind


def batch_of(split):
    """Return all examples of a split, and check that its spec says what they are."""
    batch, counted = next(iter(split.eval_batches(split.size)))
    assert counted.numpy().all()
    of_rows = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), batch)
    assert of_rows == split.spec
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), batch)


ANY = {
    "regression": ((PADDED / 2, [[0.5], [1.5], [-1.0], [0.0]]), np.float32, (4, 1)),
    "several labels": ((IMAGES, np.eye(3, dtype=np.int64)[LABELS]), np.int64, (4, 3)),
    "masks": ((IMAGES, IMAGES[..., 0] > 3), np.bool_, (4, 5, 6)),
    "classes of pixels": ((IMAGES, IMAGES[..., 0] % 3), np.uint8, (4, 5, 6)),
}


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("wrap", [tuple, lambda half: examples(*half)])
def test_targets_that_are_no_classes(load, kind, wrap):
    half, dtype, shape = ANY[kind]
    loaded = load((wrap(half), half))
    assert (loaded.num_classes, loaded.class_names) == (0, ())
    for split in (loaded.train, loaded.test):
        _, y = batch_of(split)
        assert (y.dtype, y.shape) == (dtype, shape)
        np.testing.assert_array_equal(y, half[1])
    assert loaded.image_shape == ((5, 6, 3) if half[0] is IMAGES else None)


class InBatches(keras.utils.PyDataset):
    """Two examples a batch."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    num_batches = 2

    def __getitem__(self, number):
        rows = slice(2 * number, 2 * number + 2)
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda *half: half, "train y: row 2 (counted from 0)"),
        (lambda *half: examples(*half), "train dataset: example 2 (counted from 0)"),
        (InBatches, "train batch 1"),
    ],
)
def test_one_wrong_label_makes_no_classes_and_is_named(load, wrap, where):
    half = IMAGES, np.array([0, 1, 2_000_000_000, 1])
    loaded = load((wrap(*half), HALF))
    assert (loaded.num_classes, loaded.class_names) == (0, ())
    assert f"{where} has label 2000000000, where classes are 0..999 at" in loaded.no_classes
    few, many = ((np.zeros([size, 1]), np.arange(size)) for size in (4, 1500))
    assert load((many, few)).num_classes == 1500  # a class for each example


def test_tables_and_texts_may_have_classes(load):
    loaded = load(((PADDED, LABELS), (PADDED, LABELS)))
    assert (loaded.num_classes, loaded.image_shape) == (3, None)
    x, y = batch_of(loaded.train)
    assert (x.dtype, y.dtype) == (np.int64, np.int32)
    loaded = load(((TEXTS, LABELS), (np.array(TEXTS), LABELS), 5))
    assert loaded.num_classes == 5
    assert batch_of(loaded.train)[0].tolist() == [text.encode() for text in TEXTS]


def test_several_inputs_outputs_and_weights(load):
    half = (
        {"tokens": PADDED, "price": [1, 2.5, 3, 4], "text": TEXTS},
        (LABELS, {"mask": PADDED > 3}),
        (np.ones(4, int), {"mask": np.ones((4, 2))}),
    )
    loaded = load({"train": half, "test": half, "validation": half})
    assert loaded.num_classes == 0
    for split in (loaded.train, loaded.validation, loaded.test):
        x, y, weights = batch_of(split)
        np.testing.assert_array_equal(x["tokens"], PADDED)
        np.testing.assert_array_equal(x["price"], [1, 2.5, 3, 4])
        np.testing.assert_array_equal(y[0], LABELS)
        np.testing.assert_array_equal(y[1]["mask"], PADDED > 3)
        assert {part.dtype.name for part in tf.nest.flatten(weights)} == {"float32"}


def test_a_list_of_arrays_is_several_as_in_keras_unless_it_is_the_rows_of_one(load):
    half = [PADDED, PADDED / 2], LABELS
    x, _ = batch_of(load((half, half)).train)
    np.testing.assert_array_equal(x[1], PADDED / 2)
    pairs = zip(IMAGES, LABELS, strict=True)
    for images, labels in [
        (list(IMAGES), LABELS),
        (IMAGES.tolist(), (0, 2, 1, 2)),
        zip(*pairs, strict=True),
    ]:
        x, y = batch_of(load(((images, labels), HALF)).train)
        np.testing.assert_array_equal(x, IMAGES)
        np.testing.assert_array_equal(y, LABELS)


def test_examples_without_targets(load):
    for half in (
        (IMAGES,),
        (IMAGES, None),
        [IMAGES, None, None],
        examples().map(lambda x, y: (x,)),
    ):
        loaded = load((half, (IMAGES,)))
        assert (loaded.num_classes, loaded.image_shape, len(loaded.spec)) == (0, (5, 6, 3), 1)
        np.testing.assert_array_equal(batch_of(loaded.train)[0], IMAGES)


@pytest.mark.parametrize(
    ("result", "sizes"),
    [
        ((HALF, (IMAGES[:1], LABELS[:1]), (IMAGES[:2], LABELS[:2])), (4, 1, 2)),
        ((HALF, (IMAGES[:1], [4]), (IMAGES[:2], LABELS[:2]), 5), (4, 1, 2)),
        ({"test": (IMAGES[:2], [4, 0]), "train": HALF}, (4, None, 2)),
    ],
)
def test_a_validation_half(load, result, sizes):
    loaded = load(result)
    splits = loaded.train, loaded.validation, loaded.test
    assert tuple(split and split.size for split in splits) == sizes
    assert loaded.num_classes == (3 if sizes[1] and len(result) == 3 else 5)


class Batches(keras.utils.PyDataset):
    """Eleven examples in batches of 4, 4 and 3."""

    def __init__(self, y=None, **changed):
        super().__init__(workers=2)
        self.y = np.arange(11) % 3 if y is None else y
        self.changed, self.read = changed, []

    def __len__(self):
        return 3

    def __getitem__(self, number):
        self.read.append(number)
        if f"batch_{number}" in self.changed:
            return self.changed[f"batch_{number}"]
        rows = slice(4 * number, min(4 * number + 4, 11))
        x = {"number": np.arange(11)[rows], "text": [f"row {i}" for i in range(11)[rows]]}
        return x, self.y[rows], np.ones(11)[rows]


def numbers_of(batches):
    return np.concatenate([example[0]["number"] for example, _ in batches]).tolist()


def test_a_py_dataset_is_read_by_number_and_batched_anew(load):
    loaded = load((Batches(), Batches()))
    split = loaded.train
    assert (split.size, loaded.num_classes) == (11, 3)
    assert numbers_of(split.eval_batches(5))[:11] == list(range(11))
    batch = batch_of(split)
    assert batch[0]["text"][10] == b"row 10" and batch[1].tolist() == (np.arange(11) % 3).tolist()
    order = numbers_of(split.train_batches(5, seed=1).take(22))
    epochs = np.array(order).reshape(10, 11)
    assert (np.sort(epochs) == range(11)).all() and len({tuple(epoch) for epoch in epochs}) > 2
    for examples_before in (3, 11, 45, 49):
        batches = split.train_batches(7, seed=1, step=9, examples=examples_before).take(4)
        assert numbers_of(batches) == order[examples_before : examples_before + 28]
    rest, held = split.held_out(0.3)
    assert sorted(numbers_of(rest.eval_batches(1)) + numbers_of(held.eval_batches(1))) == [
        *range(11)
    ]
    order = numbers_of(rest.train_batches(1, seed=2).take(3 * rest.size))
    assert set(order) == set(numbers_of(rest.eval_batches(1)))
    again = rest.train_batches(1, seed=2, examples=rest.size + 2).take(rest.size)
    assert numbers_of(again) == order[rest.size + 2 : 2 * rest.size + 2]


def test_resuming_a_py_dataset_reads_nothing_of_what_came_before():
    batches = Batches(y=np.arange(11) / 2)
    split = halves.data_set("mine", {"train": batches, "test": batches}).train
    del batches.read[:]
    next(iter(split.train_batches(1, seed=1, examples=11 * 1000)))
    assert len(batches.read) < 12  # what is prepared while the first is used


SHORT, LONG = (np.zeros(3), np.zeros(3)), (np.zeros(5), np.zeros(5))
X3 = {"number": np.arange(3), "text": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            dict(batch_1=(X3, np.arange(3), np.ones(3))),
            "batch 1 has 3 examples, but 4 are expected",
        ),
        (
            dict(batch_1=(X3, np.arange(3))),
            "batch 1 is of x['number'] [] int64, x['text'] [] string",
        ),
        (dict(batch_2=(X3, -np.arange(3), np.ones(3))), "batch 2 y: row 1 (counted from 0) is -1"),
        (dict(batch_2=3), "batch 2 x is int; return a dense array"),
        (dict(y=np.full(11, np.nan)), "batch 0 y: row 0 (counted from 0) has a NaN or an infinity"),
    ],
)
def test_batches_that_are_not_alike(load, changed, message):
    with pytest.raises(InputError, match="^mine:load: test ") as error:
        load((Batches(), Batches(**changed)))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_batch_that_is_wrong_later_is_named_when_it_is_read():
    y = np.arange(11) / 2
    wrong = Batches(y=y, batch_1=(X3, y[:3], np.ones(3)))
    split = halves.data_set("mine", {"train": wrong, "test": Batches(y=y)}).train
    with pytest.raises(tf.errors.InvalidArgumentError, match="mine: train batch 1 has 3 examples"):
        list(split.eval_batches(4))


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
    "nothing": (
        None,
        "mine:load returned NoneType; return (train, test), (train, test, num_classe",
    ),
    "five": ((HALF,) * 5, "mine:load returned ((ndarray"),
    "a half too few": ((HALF, 3), "mine:load returned ((ndarray uint8 (4, 5, 6, 3), ndarray int64"),
    "no test": ({"train": HALF}, "mine:load returned a dict of ['train']; return (train, test)"),
    "another name": ({"train": HALF, "tset": HALF}, "a dict of ['train', 'tset']; return"),
    "images only": (
        (IMAGES, IMAGES),
        "mine:load: train is ndarray uint8 (4, 5, 6, 3); each half is",
    ),
    "a dict": ((HALF, {"images": IMAGES}), "mine:load: test is dict; each half is (x, y)"),
    "lengths": ((HALF, (IMAGES, LABELS[:3])), "test x has 4 rows but y has 3; return as many of"),
    "weights": ((HALF, (*HALF, LABELS[:3])), "test x has 4 rows but sample_weight has 3; return"),
    "lengths inside": (
        (({"a": PADDED, "b": [PADDED, PADDED[:2]]}, LABELS), HALF),
        "train x['a'] has 4 rows but x['b'][1] has 2",
    ),
    "ragged": ((([[1], [1, 2]], [0, 1]), HALF), "train x is ((int), (int, int)), not an array"),
    "ragged objects": (
        ((np.array([[1], [1, 2]], object), [0, 1]), HALF),
        "row 0 (counted from 0) ",
    ),
    "objects": (((np.array(["a", None]), [0, 1]), HALF), "row 1 (counted from 0) has a NoneType; "),
    "ragged tensor": (
        ((RAGGED, LABELS), HALF),
        "train x is RaggedTensor int32 (4, None); return a dense array",
    ),
    "dates": (
        ((np.array(["2020-01-01"], "M8[D]"), [0]), HALF),
        "datetime64[D] (1,); return number",
    ),
    "a number": (((3, [0]), HALF), "train x is int; return a dense array, a row for each example"),
    "keys": ((({1: IMAGES}, LABELS), HALF), "train x has the keys [1]; return a dict with texts"),
    "empty": ((((), LABELS), HALF), "train x is an empty tuple; return arrays in it"),
    "text labels": (((IMAGES, TEXTS), HALF), "y = np.unique(y, return_inverse=True)"),
    "ints beyond a byte": (((IMAGES.astype(int) * 256, LABELS), HALF), "int64 from 0 to 65280; "),
    "no examples": (((IMAGES[:0], LABELS[:0]), HALF), "x is [0, 5, 6, 3]; return 1 or more"),
    "negative label": ((HALF, (IMAGES, [0, 1, -1, 0])), "test y: row 2 (counted from 0) is -1; cl"),
    "enormous label": (
        (HALF, (IMAGES, [0, 2**31, 1, 0])),
        "test y: row 1 (counted from 0) is 2147",
    ),
    "label beyond the classes": (
        (HALF, HALF, 2),
        "train y: row 1 (counted from 0) is 2; allowed a",
    ),
    "label beyond int32, of a dataset": (
        (examples(IMAGES, np.array([0, 1, 2**40, 0])), HALF),
        "train dataset: example 2 (counted from 0) has label 1099511627776; classes are 0, 1, 2",
    ),
    "classes without end": ((HALF, HALF, 2 * 10**9), "is 2000000000; return 1 or more, up to 1,0"),
    "classes 0": ((HALF, HALF, 0), "num_classes is 0; return 1 or more"),
    "classes float": ((HALF, HALF, 3.0), "num_classes is 3.0; return 1 or more"),
    "classes of no labels": (
        ((IMAGES, LABELS / 2), (IMAGES, LABELS / 2), 3),
        "num_classes is 3, but y is not one integer for each example; leave it out",
    ),
    "other shape": (
        (HALF, (IMAGES[:, 1:], LABELS)),
        "mine:load: train x is [5, 6, 3] uint8, but mine:load: test x is [4, 6, 3] uint8; make",
    ),
    "other type": ((HALF, (IMAGES / 255, LABELS)), "test x is [5, 6, 3] float32; make them alike"),
    "other targets": ((HALF, HALF, (IMAGES, LABELS / 1)), "test y is [] float32; make them alike"),
    "weights of one": (((*HALF, LABELS), HALF), "test has no sample_weight; make them alike"),
    "an image that is not finite": (
        ((np.where(IMAGES == 200, np.nan, IMAGES), LABELS), HALF),
        "train x: row 2 (counted from 0) has a NaN or an infinity",
    ),
    "a target that float32 does not hold": (
        ((IMAGES, {"a": [[1.0], [1e300], [0.0], [0.0]]}), HALF),
        "train y['a']: row 1 (counted from 0) has a number beyond float32",
    ),
    "no size": ((unsized(examples()), HALF), "does not know its size, the size given is None"),
    "endless": ((examples().repeat(), HALF), "train dataset is endless"),
    "another size": ((HALF, (examples(), 5)), "test dataset has 4 examples, the size given is 5"),
    "counted": ((HALF, (unsized(examples()), 5)), "test dataset has 4 examples but size is 5"),
    "size 0": ((HALF, (unsized(examples()), 0)), "the size given is 0; return (dataset.take(size)"),
    "size a string": ((HALF, (unsized(examples()), "4")), "the size given is 4"),
    "batched": ((examples().batch(2), HALF), "x as TensorSpec uint8 (None, 5, 6, 3); give single"),
    "of an unknown shape": ((shapeless(), HALF), "x as TensorSpec uint8 <unknown>; give single e"),
    "ragged elements": (
        (tf.data.Dataset.from_tensor_slices((RAGGED, LABELS)), HALF),
        "train dataset gives x as RaggedTensorSpec int32 (None,); pad it to one length, by x.to_t",
    ),
    "sparse elements": (
        (tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(PADDED), LABELS)), HALF),
        "train dataset gives x as SparseTensorSpec int64 (2,); make it dense, by tf.sparse.to_den",
    ),
    "dataset of dicts": (
        (tf.data.Dataset.from_tensor_slices({"image": IMAGES, "label": LABELS}), HALF),
        "train dataset gives dict; give single examples",
    ),
    "dataset of ints": ((examples(IMAGES.astype(int)), HALF), "give images as uint8 or float"),
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
        (
            IMAGES,
            LABELS,
            r"train dataset: example. \[1\] .* \[label\] \[2\] \[which is outside of 0..1",
        ),
        (IMAGES, LABELS - 1, r"example. \[0\] .* \[label\] \[-1\] \[which is outside of 0..1"),
        (IMAGES * np.float32(np.nan), LABELS // 2, r"example. \[0\] .* \[a NaN or an inf"),
    ],
)
def test_a_dataset_s_examples_are_checked_as_they_are_read(load, images, labels, message):
    good = images.astype(images.dtype), [0, 1, 0, 1]
    loaded = load(((examples(images, labels), 4), (np.nan_to_num(good[0]), good[1]), 2))
    for batches in (loaded.train.train_batches(4, seed=1), loaded.train.eval_batches(4)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            next(iter(batches))
