"""Towers in several threads, and what is beside them: nobody meets a patch."""

import concurrent.futures
import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builder import test_equality as equality
from tests.builder.test_equality import THREE, assert_equal
from towers import TowerBuilder, tf_internals
from towers.errors import InputError

pytestmark = pytest.mark.run
layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
TWO = ["/cpu:0", "/cpu:1"]


def in_threads(*functions):
    """Run functions at the same time; return what they return."""
    start = threading.Barrier(len(functions))

    def call(function):
        start.wait()
        return function()

    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(call, functions))


def test_towers_that_are_traced_at_the_same_time():
    make = equality.moments_of_several_layers
    cases = [equality.case_of(make) for _ in range(2)]
    steps = [equality.step_of(case, THREE) for case in cases]
    runs = map(functools.partial, [equality.outcome] * 2, cases, steps)
    for found in in_threads(*runs):
        assert_equal(found, equality.of_one_device(make))


@pytest.mark.graph
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind_by_an_error(error):
    call = layers.BatchNormalization.call
    assign = tf.Variable(0).assign

    def loss_fn(x):
        raise error("from the user's own code")

    with pytest.raises(error):
        TowerBuilder(TWO).gradients(loss_fn, [], tf.constant(X))
    assert layers.BatchNormalization.call is call
    assert tf.Variable(0).assign.__func__ is assign.__func__
    assert not tf_internals._SWITCHES


@pytest.mark.graph
def test_towers_in_towers_are_refused():
    inner, outer = TowerBuilder(TWO), TowerBuilder(TWO)
    with pytest.raises(InputError, match="call the function itself"):
        outer.concat(lambda x: inner.concat(lambda x: 2 * x, x), tf.constant(X))


@pytest.mark.graph
def test_towers_read_what_a_scope_around_them_holds():
    """As the averages of weights in an evaluation."""
    weight = keras.Variable(2.0)
    with keras.StatelessScope([(weight, tf.constant(3.0))]):
        found = TowerBuilder(TWO).concat(lambda x: weight * x, tf.ones(4))
    np.testing.assert_array_equal(found, [3.0] * 4)
