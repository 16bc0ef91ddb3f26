"""Values that towers exchange in the middle of a step."""

import numpy as np
import pytest
import tensorflow as tf

from towers.builder.sync import SyncGroup

pytestmark = pytest.mark.graph
DEVICES = ["/cpu:1", "/cpu:2", "/cpu:3"]


def on_towers(fn, *values):
    """Return a step that calls `fn(group, value)` for each value on a tower of its own."""

    @tf.function
    def step(*values):
        exchange, results = SyncGroup([None] * len(values), DEVICES[: len(values)]), []
        for i, value in enumerate(values):
            with tf.device(DEVICES[i]):
                results.append(fn(exchange.handle(i), value))
        exchange.join("/cpu:0")
        return results

    return step.get_concrete_function(*values)


def test_values_are_put_together_once_on_the_gather_device():
    values = tf.constant(1.0), tf.constant(2.0)
    step = on_towers(lambda tower, value: tower.all_sum(value) * 2, *values)
    np.testing.assert_array_equal(step(*values), [6.0, 6.0])
    (added,) = [op for op in step.graph.get_operations() if op.type == "AddN"]
    assert added.device.endswith("CPU:0")


def test_towers_that_make_other_calls_are_refused():
    with pytest.raises(ValueError, match="2 of 2 towers met with values of 2 shapes"):
        on_towers(lambda tower, value: tower.all_gather(value), tf.zeros([2]), tf.zeros([3]))
    calls = []

    def only_the_first(tower, value):
        calls.append(value)
        return tower.all_gather(value) if len(calls) == 1 else value

    with pytest.raises(ValueError, match="1 of 2 towers met"):
        on_towers(only_the_first, tf.zeros([2]), tf.zeros([2]))


@pytest.mark.unit
def test_towers_that_run_one_after_the_other_are_refused():
    with pytest.raises(ValueError, match=r"make a tf.function of the step"):
        SyncGroup([None] * 2, DEVICES[:2]).handle(0).all_gather(tf.zeros([2]))
