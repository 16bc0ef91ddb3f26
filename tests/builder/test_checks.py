"""When functions are checked, and what follows from what is found."""

import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder, tf_internals
from towers.builder.check import Check
from towers.errors import RunError

pytestmark = [pytest.mark.run, pytest.mark.checked]
DEVICES = ["/cpu:0", "/cpu:1"]
X = np.random.default_rng(0).normal(size=(7, 3))


def mixed(x):
    return tf.reduce_sum(x - tf.reduce_mean(x, 0), axis=1) ** 2


def squares(x):
    return tf.reduce_sum(x**2, axis=1)


@pytest.fixture
def made(monkeypatch):
    """The checks that are made, in order: "run" traces both sides, "again" does not."""
    kinds, run = [], Check.run

    def noted(check, is_made=False):
        kinds.append("again" if is_made else "run")
        return run(check, is_made)

    monkeypatch.setattr(Check, "run", noted)
    return kinds


def builder(told, **options):
    return TowerBuilder(DEVICES, on_warning=told.append, **options)


def test_a_check_of_any_rows_returns_messages(float64):
    towers = TowerBuilder(DEVICES, on_warning=pytest.fail)
    w = tf.Variable(np.ones((3, 2)), name="matrix")
    assert towers.check(lambda x: squares(x @ w), [w], tf.constant(X)) == []
    (line,) = towers.check(lambda x: mixed(x @ w), [w], X)
    assert line.startswith("inexact: output 0 of the loss function itself")
    (line,) = towers.check(lambda x: squares(x @ w) / 0.0, [w], X)
    assert line.startswith("not checked: its results are not finite")


@pytest.mark.parametrize(
    "when, is_cheap, expected",
    [
        ("once", True, {1: ["run"], 100: ["again"]}),
        ("always", True, {1: ["run"], 10: ["again"], 100: ["again"]}),
        ("always", False, {1: ["run"], 10: ["again"]}),
        ("off", True, {}),
    ],
)
def test_checks_that_are_left_to_steps(made, when, is_cheap, expected):
    told, found = [], {}
    towers = builder(told, check=when)
    towers.checks.is_deferred = True
    towers.concat(squares, tf.constant(X))
    assert not made, "the first step comes before the check"
    for step in range(1, 121):
        towers.checks._last -= 1e6 * is_cheap  # seconds have gone by
        towers.checks.after_step(step)
        if made:
            found[step], made[:] = list(made), []
    assert (found, told) == (expected, [])


def test_what_has_passed_is_not_checked_again(made):
    first, second, other = builder([]), builder([]), builder([])
    first.concat(squares, tf.constant(X))
    assert len(first.checks.passed) == 1 and made == ["run"]
    for towers in second, other:
        towers.checks.passed |= first.checks.passed
    second.concat(lambda x: squares(x), tf.constant(X))  # the same graph
    assert made == ["run"]
    other.concat(lambda x: squares(2 * x), tf.constant(X))
    assert made == ["run", "run"]


def test_stop_raises_before_anything_is_computed():
    calls = []

    def noted(x):
        calls.extend([] if tf.is_symbolic_tensor(x) else [x])
        return mixed(x)

    towers = builder([], on_inexact="stop")
    for run in (towers.concat, tf.function(towers.concat, autograph=False)):
        with pytest.raises(RunError, match="inexact"):
            run(noted, tf.constant(X))
    assert not calls


@pytest.mark.parametrize("compiled", [False, True])
def test_one_device_is_exact_and_says_so_once(compiled, float64):
    told, w = [], tf.Variable(np.ones((3, 2)))
    towers = builder(told, on_inexact="one_device", accumulate_steps=2)
    step = lambda x: towers.gradients(lambda x: mixed(x @ w), [w], x)  # noqa: E731
    step = tf.function(step, autograph=False) if compiled else step
    with tf.GradientTape() as tape:
        expected = tf.reduce_mean(mixed(X @ w))
    gradient = tape.gradient(expected, w)
    for _ in range(2):
        loss, [found] = step(tf.constant(X))
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        np.testing.assert_allclose(found, gradient, rtol=1e-12)
    assert len(told) == 1 and "runs on one device" in told[0]


# A value that is in no row that is made up.


def of_marks(towers, signature=None):
    """Return a compiled step in which all numbers of 7.25 get the mean of the batch."""
    w = tf.Variable(np.ones((3, 2)))
    fn = lambda x: tf.where(x == 7.25, tf.reduce_mean(x), x) @ w  # noqa: E731
    return tf.function(lambda x: towers.concat(fn, x), signature, autograph=False)


MARKED = np.where(X > 0, 7.25, X)


@pytest.mark.parametrize("when", [1, 100])
def test_a_function_is_checked_on_the_rows_of_its_first_and_its_hundredth_run(when, float64):
    told = []
    step = of_marks(builder(told))
    step.get_concrete_function(tf.TensorSpec([7, 3], tf.float64))
    for run in range(1, when + 1):
        assert not told
        step(tf.constant(MARKED if run == when else X))
    assert len(told) == 1 and told[0].startswith("inexact: ")


def test_rows_of_other_lengths_than_those_made_up_are_checked(float64):
    for rows, number in (X, 0), (MARKED, 1):
        told = []
        step = of_marks(builder(told), [tf.TensorSpec([None, None, 3], tf.float64)])
        step(tf.constant(np.stack([rows] * 6, axis=1)))
        assert ["inexact: " in line for line in told] == [True] * number


def test_a_check_does_not_wait_for_the_thread_that_it_holds(float64, monkeypatch):
    """TensorFlow may have a single thread that runs ops; then the step goes on meanwhile."""
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 1)
    told, threads = [], []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.append(thread))
    of_marks(builder(told))(tf.constant(MARKED))
    (thread,) = [thread for thread in threads if not thread.daemon]
    assert not told
    thread.run()
    assert len(told) == 1


def test_what_is_printed_is_printed_by_the_towers_alone(capfd):
    def printing(x):
        tf.print("seen", output_stream=sys.stderr)
        return squares(x)

    builder([]).concat(printing, tf.constant(X))
    assert capfd.readouterr().err.count("seen") == len(DEVICES)


def test_nothing_of_the_users_changes(float64):
    told, count = [], keras.Variable(0.0, trainable=False, dtype="float64")
    w = tf.Variable(np.ones((3, 2)))

    def fn(x):
        count.assign_add(1.0)
        return squares(x @ w)

    towers = builder(told)
    towers.check(fn, [w], X)
    assert count.numpy() == 0 and np.array_equal(w, np.ones((3, 2)))
    towers.gradients(fn, [w], tf.constant(X))
    assert count.numpy() == 1 and not told


@pytest.mark.parametrize("wrong", [{"check": "twice"}, {"on_inexact": "go on"}])
def test_values_are_among_those_allowed(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}='{value}' must be one of"):
        TowerBuilder(DEVICES, **wrong)


def test_ordinary_layers_leave_the_check_to_steps(made):
    """Nothing has to be chosen for them before the first step."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4, 3)), layers.GRU(4, dropout=0.2, return_sequences=True)]
        + [layers.BatchNormalization(), layers.Dropout(0.1), layers.Flatten(), layers.Dense(1)]
    )
    towers = builder([])
    towers.checks.is_deferred = True
    tf.function(lambda x: towers.concat(lambda x: model(x, training=True), x))(tf.ones([7, 4, 3]))
    assert not made


def test_a_difference_is_reported_once_whatever_its_size(float64):
    told, w = [], tf.Variable(np.ones((3, 2)))
    towers = builder(told)
    for times in 1.0, 2.0:
        towers.concat(lambda x, times=times: (x - times * tf.reduce_mean(x, 0)) @ w, tf.constant(X))
    assert len(told) == 1


def test_a_check_leaves_the_options_by_which_functions_are_optimized(float64):
    """With other options TensorFlow optimizes each function again."""
    context = tf_internals.function("context")()
    tf.function(squares)(tf.constant(X))
    before = context.function_call_options.config_proto_serialized
    assert TowerBuilder(DEVICES).check(squares, [], tf.constant(X)) == []
    assert context.function_call_options.config_proto_serialized == before
    with tf_internals.graph_optimizer_set(remapping="OFF"):
        assert context.function_call_options.config_proto_serialized != before
