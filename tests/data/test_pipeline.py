"""Batches: a pure function of (seed, step, examples); every example once an epoch."""

import numpy as np
import pytest
import tensorflow as tf

from tests.data.image_files import assert_same, flat, take
from towers.data import ArraySplit, DatasetSplit, augment, streams
from towers.data.encoded import EncodedSplit
from towers.errors import InputError

KINDS = ["arrays", "dataset", "encoded"]


class Rows:
    """A source of encoded images, as `encoded.Source`, each known by its first pixel."""

    def __init__(self, images):
        self.labels = np.arange(len(images))
        self._contents = [tf.io.encode_png(image).numpy() for image in images]

    def read(self, row):
        return self._contents[row]


def make(size, kind="arrays", dtype=np.uint8):
    """A split whose labels are the row numbers, and so are its images."""
    rows = np.arange(size)
    images = np.broadcast_to(rows[:, None, None, None] % 256, (size, 2, 3, 3)).astype(dtype)
    if kind == "arrays":
        return ArraySplit(images, rows)
    if kind == "encoded":
        return EncodedSplit(Rows(images), (2, 3, 3), resize=False)
    return DatasetSplit(tf.data.Dataset.from_tensor_slices((images, rows)), size)


def labels_of(batches):
    return np.concatenate([labels for _, labels, _ in batches])


# Training


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "batch_size"), [(12, 4), (7, 16), (1, 3), (50, 50), (130, 64)])
def test_every_epoch_has_every_example_once(kind, size, batch_size):
    num_epochs = 3
    num_batches = -(-num_epochs * size // batch_size)
    labels = labels_of(take(make(size, kind), batch_size, num_batches, seed=1))
    epochs = labels[: num_epochs * size].reshape(num_epochs, size)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), [range(size)] * num_epochs)
    if size >= 10:
        assert len({tuple(epoch) for epoch in epochs}) == num_epochs
        assert tuple(epochs[0]) != tuple(range(size))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_one_order_and_one_set_of_draws(kind):
    first = take(make(40, kind), 8, 6, seed=1)
    tf.random.set_seed(7)  # the program's own changes nothing
    assert_same(first, take(make(40, kind), 8, 6, seed=1))
    for seed in (0, -1, 1 + 2**32, 2**63 - 1) if kind == "arrays" else (2,):
        different = take(make(40, kind), 8, 6, seed=seed)
        assert labels_of(different).tolist() != labels_of(first).tolist()
        assert not np.array_equal(different[0][2], first[0][2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "batch_size"), [(12, 4), (7, 16)])
def test_resuming_gives_exactly_the_tail(kind, size, batch_size):
    split = make(size, kind)
    whole = take(split, batch_size, 12, seed=5)
    for step in (1, 8):
        tail = take(split, batch_size, 3, seed=5, step=step, examples=step * batch_size)
        assert_same(whole[step : step + 3], tail)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_goes_by_examples_so_the_batch_size_may_change(kind):
    split = make(10, kind)
    whole = labels_of(take(split, 1, 40, seed=5))
    for batch_size, examples in [(3, 7), (16, 12)]:
        part = labels_of(take(split, batch_size, 1, seed=5, step=99, examples=examples))
        np.testing.assert_array_equal(part, whole[examples : examples + batch_size])


@pytest.mark.parametrize("kind", KINDS)
def test_draws_go_by_seed_and_step_alone(kind):
    batches = take(make(10, kind), 6, 3, seed=7, step=40, examples=3)
    for step, (_, _, draws) in enumerate(batches, start=40):
        of_bases = tf.random.stateless_uniform([6, 4], [7, step], alg="philox")
        np.testing.assert_array_equal(draws[:, :4], of_bases)
        seed, num = [7, -2 - step], augment.NUM_DRAWS - 5
        of_parts = tf.random.stateless_uniform([6, num], seed, alg="philox")
        np.testing.assert_array_equal(draws[:, 4:-1], of_parts)


@pytest.mark.parametrize("batch_size", [1, 4, 25])
@pytest.mark.parametrize("size", [9, 10])
def test_the_last_draw_of_an_image_moves_by_a_half_in_each_epoch(size, batch_size):
    batches = take(make(size), batch_size, -(-4 * size // batch_size), seed=7)
    draws = np.concatenate([draws[:, -1] for _, _, draws in batches])
    first, *later = (
        dict(zip(labels_of(batches)[part], draws[part], strict=True))
        for part in (slice(epoch * size, (epoch + 1) * size) for epoch in range(4))
    )
    assert len(set(first.values())) == size
    assert sum(draw < 0.5 for draw in first.values()) in (size // 2, -(-size // 2))
    for epoch, found in enumerate(later, start=1):
        expected = {label: (draw + epoch / 2) % 1 for label, draw in first.items()}
        assert found == pytest.approx(expected)
    resumed = take(make(size), 3, 1, seed=7, step=40, examples=size + 2)[0][-1][:, -1]
    np.testing.assert_array_equal(resumed, draws[size + 2 : size + 5])
    other = take(make(size), batch_size, 1, seed=8)
    assert draws[0] != other[0][-1][0, -1] or labels_of(other)[0] != labels_of(batches)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_partner_is_the_example_before_in_the_batch(kind):
    split = make(10, kind)
    given = dict(seed=7, step=40, examples=3)
    example, draws = next(iter(split.train_batches(6, **given)))
    again, (own, partners) = next(iter(split.with_partners().train_batches(6, **given)))
    for ours, theirs in zip(
        tf.nest.flatten((again, own)), tf.nest.flatten((example, draws)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(
        tf.nest.flatten(partners), tf.nest.flatten((example, draws)), strict=True
    ):
        np.testing.assert_array_equal(ours, np.roll(theirs, 1, axis=0))
    assert not split.paired


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, np.uint8) for kind in KINDS), ("arrays", np.float32), ("dataset", np.float32)],
)
def test_batches_are_full_static_and_keep_the_stored_type(kind, dtype):
    split = make(10, kind, dtype)
    spec = split.train_batches(4, seed=1).element_spec
    stored = tf.as_dtype(dtype)
    example = tf.TensorSpec([4, 2, 3, 3], stored), tf.TensorSpec([4], tf.int32)
    assert spec == (example, tf.TensorSpec([4, augment.NUM_DRAWS], tf.float32))
    counted = tf.TensorSpec([4], tf.float32)
    assert split.eval_batches(4).element_spec == (example, counted)
    for images, labels, draws in take(split, 4, 6, seed=1):
        np.testing.assert_array_equal(images[:, 0, 0, 0], labels)
        assert (images == images[:, :1, :1, :1]).all()
        assert draws.min() >= 0 and draws.max() < 1


def test_training_does_not_end():
    split = make(3)
    assert labels_of(take(split, 2, 500, seed=1)).shape == (1000,)
    far = labels_of(take(split, 2, 3, seed=1, step=2**40, examples=3 * 2**40))
    assert sorted(far[:3]) == sorted(far[3:]) == [0, 1, 2]


def test_epochs_are_unrelated_and_do_not_repeat():
    size, num_epochs = 64, 600
    labels = labels_of(take(make(size), size, num_epochs, seed=1)).reshape(num_epochs, size)
    assert len({tuple(epoch) for epoch in labels}) == num_epochs
    # Each place has each example about equally often, as do the steps from epoch to epoch and from
    # place to place: chi-square per degree of freedom near 1 (given the plain seed it is above 5).
    steps = (labels[1:] - labels[:-1]) % size
    neighbours = (labels[:, 1:] - labels[:, :-1]) % size
    for values, kinds in [
        (labels + size * np.arange(size), size * size),
        (steps, size),
        (neighbours - 1, size - 1),
    ]:
        counts = np.bincount(values.ravel(), minlength=kinds)
        expected = values.size / kinds
        chi_square = ((counts - expected) ** 2 / expected).sum() / kinds
        assert 0.4 < chi_square < 1.6


def test_neighbours_of_a_large_epoch_are_unrelated():
    size, num_epochs = 20_000, 60
    labels = labels_of(take(make(size), size, num_epochs, seed=1)).reshape(num_epochs, size)
    neighbours = (labels[:, 1:] - labels[:, :-1]) % size
    counts = np.bincount(neighbours.ravel() * 200 // size, minlength=200)
    expected = neighbours.size / 200
    assert ((counts - expected) ** 2 / expected).sum() / 200 < 1.6


# Evaluation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 3, 10, 64])
def test_one_pass_counts_each_example_once(kind, batch_size):
    batches = flat(make(10, kind).eval_batches(batch_size))
    images, labels, weights = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert len(batches) == -(-10 // batch_size)
    np.testing.assert_array_equal(weights, np.arange(len(weights)) < 10)
    np.testing.assert_array_equal(labels[:10], range(10))
    np.testing.assert_array_equal(images[:10, 0, 0, 0], range(10))
    assert not images[10:].any() and not labels[10:].any()
    assert weights.dtype == np.float32


# Any structure


INPUTS = {
    "x alone": lambda n: (np.arange(n)[:, None],),
    "text and a number": lambda n: (
        {"text": np.array([f"row {i}" for i in range(n)], object), "price": np.arange(n) / 2},
        np.arange(n) * 0.5,
        np.arange(n) % 2,
    ),
    "two inputs, two outputs, weights of each": lambda n: (
        (np.arange(n * 4, dtype=np.int64).reshape(n, 4), np.ones((n, 2, 2, 3), np.uint8)),
        {"mask": np.arange(n * 6).reshape(n, 3, 2) % 2 == 0, "value": np.arange(n)},
        {"mask": np.ones((n, 3)), "value": np.arange(n) / n},
    ),
}


def structured(name, size, kind):
    """A split, and what its example number i should be."""
    example = INPUTS[name](size)
    whole = ArraySplit(*example)
    if kind == "dataset":
        whole = DatasetSplit(tf.data.Dataset.from_tensor_slices(example), size)
    return whole, example


def rows_of(example):
    """Return each row of a batch of any structure as something that can be compared."""
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(example)]
    return [
        tuple(np.asarray(leaf[i]).tolist().__repr__() for leaf in leaves)
        for i in range(len(leaves[0]))
    ]


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
@pytest.mark.parametrize("name", INPUTS)
def test_any_structure_is_given_out_whole_and_in_step(kind, name):
    split, example = structured(name, 11, kind)
    batches = list(split.eval_batches(4))
    tf.nest.assert_same_structure(batches[0][0], example)
    tf.nest.assert_same_structure(split.spec, example)
    expected = rows_of(next(iter(split.eval_batches(11)))[0])
    assert len(set(expected)) == 11
    found = [row for batch, counted in batches for row in rows_of(batch)][:11]
    assert found == expected
    assert np.concatenate([counted for _, counted in batches]).tolist() == [1] * 11 + [0]
    shuffled = [rows_of(batch) for batch, _ in split.train_batches(4, seed=1).take(11)]
    epochs = np.array([row for rows in shuffled for row in rows]).reshape(4, 11, -1)
    assert [sorted(map(tuple, epoch)) for epoch in epochs] == [sorted(expected)] * 4
    tail = [
        rows_of(batch) for batch, _ in split.train_batches(4, seed=1, step=3, examples=12).take(8)
    ]
    assert tail == shuffled[3:]


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_floats_and_weights_become_float32_and_single_integers_labels(kind):
    split, _ = structured("text and a number", 4, kind)
    of = tf.TensorSpec
    assert split.spec == (
        {"text": of([], tf.string), "price": of([], tf.float32)},
        of([], tf.float32),
        of([], tf.float32),
    )
    split, _ = structured("two inputs, two outputs, weights of each", 4, kind)
    assert split.spec == (
        (of([4], tf.int64), of([2, 2, 3], tf.uint8)),
        {"mask": of([3, 2], tf.bool), "value": of([], tf.int64)},
        {"mask": of([3], tf.float32), "value": of([], tf.float32)},
    )
    batch = next(iter(split.train_batches(2, seed=0)))[0]
    assert tf.nest.map_structure(lambda t: of(t.shape[1:], t.dtype), batch) == split.spec


# A part that is held out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "fraction", "num"), [(50, 0.1, 5), (2, 0.01, 1), (7, 0.9, 6)])
def test_a_part_is_held_out(kind, size, fraction, num):
    rest, held = make(size, kind).held_out(fraction)
    assert (rest.size, held.size) == (size - num, num)
    parts = [
        labels_of(flat(split.eval_batches(4)))[: split.size].tolist() for split in (rest, held)
    ]
    assert sorted(parts[0] + parts[1]) == list(range(size))
    again = make(size, "arrays").held_out(fraction)[1]  # of any kind, the same examples
    assert labels_of(flat(again.eval_batches(4)))[:num].tolist() == parts[1] == sorted(parts[1])
    for split, part in zip((rest, held), parts, strict=True):
        trained = take(split, 3, 7 + split.size, seed=1)
        assert sorted(labels_of(trained)[: split.size]) == part
        assert_same(trained[5:7], take(split, 3, 2, seed=1, step=5, examples=15))


def test_what_is_held_out_of_data_with_a_period_is_a_fair_sample():
    _, held = make(2000).held_out(0.1)
    labels = labels_of(flat(held.eval_batches(200)))
    assert np.bincount(labels % 10, minlength=10).min() > 8
    assert np.bincount(labels // 200, minlength=10).min() > 8


def test_a_part_is_held_out_of_a_part():
    rest, test = make(40).held_out(0.25)
    train, validation = rest.held_out(0.2)
    parts = [labels_of(flat(s.eval_batches(s.size))) for s in (train, validation, test)]
    assert [len(part) for part in parts] == [24, 6, 10]
    assert sorted(np.concatenate(parts)) == list(range(40))
    sums = {s.checksum()["sha256"] for s in (rest, test, train, validation)}
    assert len(sums) == 4


def test_nothing_can_be_held_out_of_one_example():
    with pytest.raises(InputError, match="there is 1 example"):
        make(1).held_out(0.5)


# Memory


def test_images_are_not_copied_into_the_graph():
    split = ArraySplit(np.zeros((2000, 32, 32, 3), np.uint8), np.zeros(2000, np.int32))

    @tf.function
    def first(kind):
        batches = split.eval_batches(16) if kind == "eval" else split.train_batches(16, seed=1)
        return next(iter(batches))[0]

    for kind in ("train", "eval"):
        graph = first.get_concrete_function(kind).graph.as_graph_def()
        assert graph.ByteSize() < 100_000


# Errors


@pytest.mark.parametrize(("size", "says"), [(9, "at least 10 elements"), (11, "only 10 elements")])
def test_a_dataset_of_another_size_than_it_says(size, says):
    images, labels = np.zeros((10, 2, 2, 1), np.uint8), np.arange(10)

    def examples():
        yield from zip(images, labels, strict=True)

    spec = (tf.TensorSpec([2, 2, 1], tf.uint8), tf.TensorSpec([], tf.int64))
    split = DatasetSplit(tf.data.Dataset.from_generator(examples, output_signature=spec), size)
    for batches in (split.train_batches(4, seed=1).take(10), split.eval_batches(4)):
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"contained {says}"):
            list(batches)


def test_the_shuffle_buffer_is_bounded(monkeypatch):
    monkeypatch.setattr(streams, "_SHUFFLE_BUFFER_BYTES", 400)
    read = []

    def note(image, label):
        tf.py_function(lambda value: read.append(int(value)), [label], [])
        return image, label

    images = np.zeros((1000, 10, 5, 2), np.uint8)  # 100 bytes each
    dataset = tf.data.Dataset.from_tensor_slices((images, np.arange(1000))).map(note)
    next(iter(DatasetSplit(dataset, 1000).train_batches(1, seed=1)))
    assert 4 <= len(read) < 20  # the buffer, and the batches that are made ahead


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_is_dropped_at_once(kind):
    """With autotuning the end of a long run waits up to a minute for a thread that sleeps."""
    split = make(20, kind)
    for batches in (split.train_batches(4, seed=0), split.eval_batches(4)):
        assert batches.options().autotune.enabled is False
