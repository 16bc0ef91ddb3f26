"""Values that towers exchange in the middle of a step."""

import pytest
import tensorflow as tf

from towers.builder.exchange import Exchange

DEVICES = ["/cpu:1", "/cpu:2", "/cpu:3"]


def on_towers(fn, *values):
    """Run `fn(all_gather, value)` for each value on a tower of its own."""

    @tf.function
    def step():
        exchange = Exchange(len(values))
        results = []
        for i, (device, value) in enumerate(zip(DEVICES, values, strict=False)):
            with tf.device(device):
                results.append(fn(exchange.member(i).all_gather, tf.identity(value)))
        exchange.join("/cpu:0")
        return results

    return step()


def test_towers_that_make_other_calls_are_refused():
    def of_other_shapes(all_gather, value):
        return all_gather(value)

    with pytest.raises(ValueError, match="2 of 2 towers met with values of 2 shapes"):
        on_towers(of_other_shapes, tf.zeros([2]), tf.zeros([3]))
    calls = []

    def only_the_first(all_gather, value):
        calls.append(value)
        return all_gather(value) if len(calls) == 1 else value

    with pytest.raises(ValueError, match="1 of 2 towers met"):
        on_towers(only_the_first, tf.zeros([2]), tf.zeros([2]))


def test_towers_that_run_one_after_the_other_are_refused():
    with pytest.raises(ValueError, match=r"make a tf.function of the step"):
        Exchange(2).member(0).all_gather(tf.zeros([2]))
