"""Batches: a pure function of (seed, step, examples); every example once an epoch."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tests.data.splits import all_of, assert_same, flat, run, take
from towers.data import ArraySplit, DatasetSplit, augment
from towers.data.folder import ImageSplit
from towers.data.pipeline import held_out_rows, shuffled_rows

pytestmark = pytest.mark.graph


class Images(ImageSplit):
    """Images that are read one by one, from memory."""

    def __init__(self, images, labels):
        super().__init__("", [""] * len(images), labels, images.shape[1:], None)
        self._images = images

    def _read(self, row):
        return self._images[row]


def make(size, kind="arrays"):
    """A split whose labels are the row numbers, and so are its images."""
    rows = np.arange(size)
    images = np.broadcast_to(rows[:, None, None, None] % 256, (size, 2, 3, 3)).astype(np.uint8)
    if kind == "arrays":
        return ArraySplit(images, rows)
    if kind == "images":
        return Images(images, rows)
    return DatasetSplit(tf.data.Dataset.from_tensor_slices((images, rows)), size)


def labels_of(batches):
    return np.concatenate([labels for _, labels, _ in batches])


# Training


@pytest.fixture(
    scope="module",
    params=[
        ("arrays", 7, 16),
        ("dataset", 12, 4),
        *run([("images", 12, 4)]),
    ],
)
def whole(request):
    """The first batches of a split, with seed 5."""
    kind, size, batch_size = request.param
    split = make(size, kind)
    dataset = split.train_batches(batch_size, seed=5)
    return types.SimpleNamespace(
        split=split, batch_size=batch_size, dataset=dataset, batches=flat(dataset.take(12))
    )


def test_every_epoch_has_every_example_once_in_full_and_static_batches(whole):
    """With autotuning the end of a long run waits up to a minute for a thread that sleeps."""
    size, labels = whole.split.size, labels_of(whole.batches)
    epochs = labels[: len(labels) // size * size].reshape(-1, size)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), [range(size)] * len(epochs))
    if size >= 10:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
        assert tuple(epochs[0]) != tuple(range(size))
    size = whole.batch_size
    example = tf.TensorSpec([size, 2, 3, 3], tf.uint8), tf.TensorSpec([size], tf.int32)
    draws = tf.TensorSpec([size, augment.NUM_DRAWS], tf.float32)
    assert whole.dataset.element_spec == (example, draws)
    assert whole.dataset.options().autotune.enabled is False
    for images, labels, draws in whole.batches:
        np.testing.assert_array_equal(images[:, 0, 0, 0], labels)
        assert (images == images[:, :1, :1, :1]).all()
        assert draws.min() >= 0 and draws.max() < 1


def test_resuming_gives_exactly_the_tail(whole):
    tf.random.set_seed(7)  # the program's own changes nothing
    given = dict(seed=5, step=8, examples=8 * whole.batch_size)
    assert_same(whole.batches[8:11], take(whole.split, whole.batch_size, 3, **given))


def drawn(seed, step, num):
    """Return the draws of a step, but for the turn of each example."""
    of_parts = [num, augment.NUM_DRAWS - 5], [seed, -2 - step]
    draws = [([num, 4], [seed, step]), of_parts]
    found = [tf.random.stateless_uniform(*shape_and_seed, alg="philox") for shape_and_seed in draws]
    return np.concatenate(found, axis=1)


def test_the_order_goes_by_examples_and_the_draws_by_seed_and_step(whole):
    """So the batch size may change."""
    batch_size = 13 if whole.batch_size < 16 else 3
    parts = take(whole.split, batch_size, 2, seed=5, step=99, examples=7)
    place = slice(7, 7 + 2 * batch_size)
    np.testing.assert_array_equal(labels_of(parts), labels_of(whole.batches)[place])
    turns, same = (np.concatenate([b[2][:, -1] for b in some]) for some in (parts, whole.batches))
    np.testing.assert_array_equal(turns, same[place])
    for step, (_, _, draws) in enumerate(parts, start=99):
        np.testing.assert_array_equal(draws[:, :-1], drawn(5, step, batch_size))


def chi_square(values, kinds):
    """Return it per degree of freedom: near 1 where all kinds are as likely."""
    counts, expected = np.bincount(values.ravel(), minlength=kinds), values.size / kinds
    return ((counts - expected) ** 2 / expected).sum() / kinds


def orders(size, num_epochs):
    """Return the rows of each epoch."""
    batches = shuffled_rows(size, size, seed=1, examples=0).take(num_epochs)
    return np.array([*batches.as_numpy_iterator()])


@pytest.mark.run
def test_epochs_are_unrelated_and_do_not_repeat():
    size, num_epochs = 64, 600
    rows = orders(size, num_epochs)
    assert len({tuple(epoch) for epoch in rows}) == num_epochs
    # Each place has each example about equally often, as do the steps from epoch to epoch and from
    # place to place (given the plain seed it is above 5).
    steps = (rows[1:] - rows[:-1]) % size
    neighbors = (rows[:, 1:] - rows[:, :-1]) % size
    assert 0.4 < chi_square(rows + size * np.arange(size), size * size) < 1.6
    assert 0.4 < chi_square(steps, size) < 1.6
    assert 0.4 < chi_square(neighbors - 1, size - 1) < 1.6
    size = 20_000
    rows = orders(size, 10)  # of a large set
    neighbors = (rows[:, 1:] - rows[:, :-1]) % size
    assert chi_square(neighbors * 200 // size, 200) < 1.6


# Evaluation


@pytest.mark.parametrize(
    ("kind", "batch_size"),
    [("arrays", 3), ("arrays", 10), ("dataset", 64), ("images", 3)] + run(("dataset", 3)),
)
def test_one_pass_counts_each_example_once(kind, batch_size):
    dataset = make(10, kind).eval_batches(batch_size)
    example = tf.TensorSpec([batch_size, 2, 3, 3], tf.uint8), tf.TensorSpec([batch_size], tf.int32)
    assert dataset.element_spec == (example, tf.TensorSpec([batch_size], tf.float32))
    assert dataset.options().autotune.enabled is False
    batches = flat(dataset)
    images, labels, weights = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert len(batches) == -(-10 // batch_size)
    np.testing.assert_array_equal(weights, np.arange(len(weights)) < 10)
    np.testing.assert_array_equal(labels[:10], range(10))
    np.testing.assert_array_equal(images[:10, 0, 0, 0], range(10))
    assert not images[10:].any() and not labels[10:].any()


# A part that is held out


@pytest.mark.run
@pytest.mark.parametrize("kind", ["arrays", "dataset", "images"])
def test_a_part_is_held_out(kind):
    parts, numbers = make(11, kind).held_out(0.3), held_out_rows(11, 0.3)
    for split, rows in zip(parts, numbers, strict=True):  # the same of any kind
        assert all_of(split)[1].tolist() == rows.tolist()
        assert kind == "dataset" or split.numbers(np.arange(split.size)).tolist() == rows.tolist()
        trained = take(split, 3, 7, seed=1)
        assert sorted(labels_of(trained)[: split.size]) == rows.tolist()
    assert_same(trained[5:7], take(split, 3, 2, seed=1, step=5, examples=15))


# Memory, and errors


@pytest.mark.run
def test_images_are_not_copied_into_the_graph():
    split = ArraySplit(np.zeros((2000, 32, 32, 3), np.uint8), np.zeros(2000, np.int32))

    @tf.function
    def first():
        return [next(iter(b)) for b in (split.eval_batches(16), split.train_batches(16, seed=1))]

    assert first.get_concrete_function().graph.as_graph_def().ByteSize() < 200_000


@pytest.mark.run
@pytest.mark.parametrize(("size", "says"), [(9, "at least 10 elements"), (11, "only 10 elements")])
def test_a_dataset_of_another_size_than_it_says(size, says):
    images, labels = np.zeros((10, 2, 2, 1), np.uint8), np.arange(10)

    def examples():
        yield from zip(images, labels, strict=True)

    signature = tf.TensorSpec([2, 2, 1], tf.uint8), tf.TensorSpec([], tf.int64)
    dataset = tf.data.Dataset.from_generator(examples, output_signature=signature)
    split = DatasetSplit(dataset, size)
    for batches in (split.train_batches(4, seed=1).take(10), split.eval_batches(4)):
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"contained {says}"):
            list(batches)
