"""A training set that lies on GPUs gives the same batches, of which the host sends numbers."""

import numpy as np
import pytest
import tensorflow as tf

from tests.data.splits import run
from towers import TowerBuilder
from towers.builder import device_names
from towers.data import ArraySplit, device_cache

pytestmark = pytest.mark.graph

GPUS = ["/cpu:1", "/cpu:2"]


@pytest.fixture(autouse=True)
def stand_ins():
    with device_names.cpus_for_gpus():
        yield


def split(num=23, **changes):
    random = np.random.default_rng(0)
    x = {
        "image": random.integers(0, 256, (num, 4, 5, 3)).astype(np.uint8),
        "tokens": random.integers(0, 9, (num, 7)).astype(np.int32),
    }
    return ArraySplit(x | changes, random.integers(0, 5, num), random.random(num))


@pytest.mark.parametrize("held", [False, *run([True])])
def test_batches_are_those_of_the_host(held):
    train = split().held_out(0.3)[0] if held else split()
    stored = device_cache.cache_on_devices(train, GPUS)
    given = dict(seed=3, step=2, examples=14)
    ours, theirs = stored.train_batches(7, **given), train.train_batches(7, **given)
    for (rows, draws), (example, same_draws) in zip(ours.take(9), theirs.take(9), strict=True):
        np.testing.assert_array_equal(draws, same_draws)
        found = tf.nest.map_structure(tf.convert_to_tensor, stored.example(rows))
        tf.nest.map_structure(np.testing.assert_array_equal, found, example)


@pytest.mark.run
def test_each_tower_takes_its_rows_where_it_is():
    train = split()
    stored = device_cache.cache_on_devices(train, GPUS)
    (example, _) = next(iter(train.train_batches(5, seed=1)))
    (rows, _) = next(iter(stored.train_batches(5, seed=1)))

    @tf.function
    def towers(rows):
        return TowerBuilder(GPUS).map(lambda *example: example, *stored.example(rows))

    for own, part in zip(towers(rows), (slice(0, 3), slice(3, 5)), strict=True):
        expected = tf.nest.map_structure(lambda array, part=part: array[part], example)
        types, expected_types = ([t.dtype for t in tf.nest.flatten(one)] for one in (own, expected))
        assert types == expected_types
        tf.nest.map_structure(np.testing.assert_array_equal, own, expected)
    gathers = [
        op.device[-5:].lower()
        for op in towers.get_concrete_function(rows).graph.get_operations()
        if op.type == "ResourceGather"
    ]
    assert sorted(gathers) == ["cpu:1"] * 4 + ["cpu:2"] * 4


@pytest.mark.unit
def test_what_does_not_fit_stays_on_the_host(monkeypatch):
    train = split()
    size = device_cache.num_bytes(train)
    assert size == 23 * (4 * 5 * 3 + 8 * 7 + 8 + 4)
    limits = dict.fromkeys(GPUS, 4 * size)
    monkeypatch.setattr(device_cache.tf_internals, "device_memory_bytes", lambda: limits)
    assert device_cache.cache_on_devices(train, GPUS).bytes == size
    limits["/cpu:2"] -= 1
    assert device_cache.cache_on_devices(train, GPUS) is None
    assert device_cache.cache_on_devices(train, GPUS[:1])


@pytest.mark.unit
def test_nothing_is_copied_to_a_cpu_nor_are_texts_to_a_gpu():
    assert device_cache.cache_on_devices(split(), ["/cpu:0", "/cpu:1"]) is None
    assert device_cache.cache_on_devices(split(text=np.array(["a"] * 23)), GPUS) is None
