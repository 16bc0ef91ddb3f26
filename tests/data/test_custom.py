"""`--dataset=module:function`: the user's own data."""

import numpy as np
import pytest
import tensorflow as tf

from towers import data

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
