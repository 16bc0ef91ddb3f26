"""All-sums between towers in a compiled step."""

import numpy as np
import pytest
import tensorflow as tf

from towers.collectives import Group

DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]


def on_each(group, fn, values):
    """Run `fn(value, all_sum)` on every member."""
    results = []
    for i, (device, value) in enumerate(zip(group.devices, values, strict=True)):
        with tf.device(device):
            results.append(fn(value, group.all_sum(i)))
    return results


@pytest.mark.parametrize("num_towers", [1, 2, 3, 4])
def test_every_tower_gets_the_sum(num_towers):
    group = Group(DEVICES[:num_towers])
    values = [tf.random.stateless_normal([5], [i, 0]) for i in range(num_towers)]
    sums = tf.function(lambda *v: on_each(group, lambda x, all_sum: all_sum(x), v))(*values)
    for found in sums:
        np.testing.assert_allclose(found, sum(values), rtol=1e-6)


def test_every_tower_gets_what_each_has():
    group = Group(DEVICES[:3])

    @tf.function
    def stacks(*values):
        results = []
        for i, (device, value) in enumerate(zip(group.devices, values, strict=True)):
            with tf.device(device):
                results.append(group.all_gather(i)(value))
        return results

    values = [tf.constant([i, 10.0 * i]) for i in range(3)]
    for found in stacks(*values):
        np.testing.assert_array_equal(found, [[0, 0], [1, 10], [2, 20]])


def test_gradients_go_through_the_sum(float64):
    """Two all-sums, one on the other, against one device."""
    values = [tf.random.stateless_normal([4], [i, 0], dtype=tf.float64) for i in range(3)]

    def loss(x, all_sum):
        y = tf.tanh(x * all_sum(x * x))
        return tf.reduce_sum(y * all_sum(tf.reduce_sum(y)[tf.newaxis]))

    @tf.function
    def towers(*values):
        group = Group(DEVICES[:3])

        def gradient(x, all_sum):
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(x, all_sum)
            return tape.gradient(value, x)

        return on_each(group, gradient, values)

    with tf.GradientTape() as tape:
        tape.watch(values)
        sums = tf.add_n([x * x for x in values])
        ys = [tf.tanh(x * sums) for x in values]
        total = tf.add_n([tf.reduce_sum(y) for y in ys])
        value = tf.add_n([tf.reduce_sum(y * total) for y in ys])
    for found, expected in zip(towers(*values), tape.gradient(value, values), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_in_a_loop_and_in_several_functions(float64):
    """The keys of one function's sums are not those of another's, of other shapes."""

    def make(size, num_towers):
        @tf.function
        def repeat(n):
            group = Group(DEVICES[:num_towers])

            def body(i, x):
                parts = on_each(group, lambda x, all_sum: all_sum(x), [x] * num_towers)
                return i + 1, tf.add_n(parts) / num_towers**2 + 1.0

            return tf.while_loop(lambda i, x: i < n, body, (0, tf.zeros(size)))[1]

        return repeat

    for size, num_towers in [(2, 2), (3, 2), (3, 4), (2, 3)]:
        repeat = make([size], num_towers)
        for n in 5, 20:
            np.testing.assert_allclose(repeat(n), np.full(size, float(n)), rtol=1e-6)


def test_towers_that_cannot_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="make a tf.function of the step"):
        Group(DEVICES[:2]).all_sum(0)(tf.ones(2))
    group = Group(["/cpu:1", "/cpu:1"])
    with pytest.raises(ValueError, match="each needs a device of its own"):
        tf.function(lambda x: group.all_sum(0)(x))(tf.ones(2))
    np.testing.assert_array_equal(Group(["/cpu:1"]).all_sum(0)(tf.ones(2)), [1, 1])
