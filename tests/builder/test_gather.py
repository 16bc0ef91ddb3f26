"""Sums and stacks by collectives, a ring of CPUs; `test_equality` has what is gathered."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from towers.builder import gather
from towers.builder.device_names import cpus_for_gpus

pytestmark = pytest.mark.graph
DEVICES = ["/cpu:1", "/cpu:2", "/cpu:3"]
GPUS = ["/gpu:0", "/gpu:1"]


@pytest.mark.unit
def test_gpus_of_their_own_meet_and_nccl_is_asked_for_between_cards(monkeypatch):
    for cards, parts, expected in (2, 2, "nccl"), (1, 2, "auto"), (0, 0, "auto"):
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda _, n=cards: [None] * n)
        monkeypatch.setattr(gather, "devices_here", lambda _, n=parts: [None] * n)
        assert gather._hint(GPUS if cards else DEVICES) == expected
    of_workers = ["/job:worker/task:0/gpu:0", "/job:worker/task:1/gpu:0"]
    others = ["/gpu:0"], ["/gpu:0", "/gpu:0"], ["/gpu:0", "/cpu:0"], of_workers
    for stand_in in contextlib.nullcontext, cpus_for_gpus:
        with stand_in():
            assert gather.are_used(GPUS)
            assert not any(map(gather.are_used, others))
            assert gather.are_used(DEVICES) is (stand_in is cpus_for_gpus)


def keys_of(tensors):
    """Return the instance keys of the collectives that have made tensors, as a tensor."""
    ops = tensors[0].graph.get_operations()
    return tf.stack([op.inputs[3] for op in ops if op.type.startswith("Collective")])


def test_calls_take_few_keys_and_no_two_functions_share_one():
    """TensorFlow never forgets a key, and a key has one type and one shape for ever."""

    @tf.function(autograph=False)
    def sums(x):
        values = [[x * i, tf.ones([100], tf.float64)] for i in (1.0, 2.0, 3.0)]
        totals = [own[0] for own in gather.all_sum(values, DEVICES)]
        return totals, keys_of(totals)

    @tf.function(autograph=False)
    def stacks(x):
        collective = gather.Collective(DEVICES)
        stacked = [collective.stack(x * i, name) for i, name in enumerate(DEVICES)]
        # The gradient of a stack is summed, and a sum needs a shape.
        assert all(each.shape == [len(DEVICES), *x.shape] for each in stacked)
        return stacked, keys_of(stacked)

    used = {sums: set(), stacks: set()}
    for n in range(150):
        x = tf.constant([1.0, n])
        totals, keys = sums(x)
        np.testing.assert_array_equal(totals, [[6.0, 6.0 * n]] * 3)
        used[sums] |= set(keys.numpy())
        stacked, keys = stacks(x)
        np.testing.assert_array_equal(stacked, [[[0.0, 0.0], [1.0, n], [2.0, 2.0 * n]]] * 3)
        used[stacks] |= set(keys.numpy())
    assert len(used[sums]) == 2 and len(used[stacks]) == 1
    assert used[sums].isdisjoint(used[stacks])


def test_a_function_may_be_called_many_times_in_a_step_and_by_several_threads():
    """Two calls that use a key at the same time would end all collectives of the process."""

    @tf.function
    def sums(x):
        values = [[x * i] for i in (1.0, 2.0, 3.0)]
        return [own[0] for own in gather.all_sum(values, DEVICES)]

    @tf.function(autograph=False)
    def step(x):
        gather.all_sum([[x]] * 3, DEVICES)
        once = [sums(x * factor) for factor in factors]
        looped = tf.map_fn(sums, x[:, None] * [[1.0, 2.0]], fn_output_signature=[tf.float32] * 3)
        return once, looped

    factors = [float(i) for i in range(70)]
    x = np.array([1.0, 2.0], np.float32)

    def call(_):
        once, looped = step(x)
        np.testing.assert_array_equal(once, [[6.0 * x * factor] * 3 for factor in factors])
        np.testing.assert_array_equal(looped, [6.0 * x[:, None] * [1.0, 2.0]] * 3)

    call(0)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(call, range(6)))


def test_what_nccl_takes_for_another_type_is_summed_and_stacked_in_float32(monkeypatch):
    monkeypatch.setattr(gather, "_hint", lambda _: "nccl")

    @tf.function
    def made():
        halves = [[tf.constant([1.0, 2.0**-8], tf.bfloat16), tf.ones(3)]] * 3
        collective = gather.Collective(DEVICES)
        ranks = tf.range(3.0)
        stacked = [
            collective.stack(tf.cast(ranks[i : i + 1], tf.bfloat16), device)
            for i, device in enumerate(DEVICES)
        ]
        return gather.all_sum(halves, DEVICES), stacked

    ops = made.get_concrete_function().graph.get_operations()
    exchanged = [op for op in ops if op.type.startswith("Collective")]
    assert {op.get_attr("T") for op in exchanged} == {tf.float32}
    assert {op.get_attr("communication_hint") for op in exchanged} == {b"nccl"}
    assert len(exchanged) == 9 and not any(op.get_attr("timeout_seconds") for op in exchanged)
    monkeypatch.undo()
    sums, stacked = tf.function(made.python_function)()
    assert {own[0].dtype for own in sums} == {x.dtype for x in stacked} == {tf.bfloat16}
    np.testing.assert_array_equal(tf.cast(sums[2][0], tf.float32), [3.0, 3 * 2.0**-8])
    for own in stacked:
        np.testing.assert_array_equal(tf.cast(own, tf.float32), [[0.0], [1.0], [2.0]])


def test_a_tower_that_fails_ends_the_step_and_the_next_ones_work():
    @tf.function(autograph=False)
    def step(x, least):
        first = gather.all_sum([[x]] * 3, DEVICES)
        with tf.control_dependencies([tf.debugging.assert_less(x, least)]):
            values = [[tf.identity(first[0][0])], *first[1:]]
        return gather.all_sum(values, DEVICES)[0][0]

    assert float(step(tf.constant(1.0), tf.constant(5.0))) == 9.0
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(7.0), tf.constant(5.0))
    for _ in range(70):  # with the keys of the call that failed, too
        assert float(step(tf.constant(2.0), tf.constant(5.0))) == 18.0


def test_values_of_unknown_shape_are_refused():
    """A key's second use with another shape would end all collectives of the process."""

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        collective = gather.Collective(DEVICES)
        return [collective.sum(x, name) for name in DEVICES]

    with pytest.raises(ValueError, match="fully defined"):
        step(tf.ones([3]))
