"""Towers in several threads and in programs of XLA's; nobody beside them meets a patch."""

import concurrent.futures
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.builder import test_equality as equality
from tests.builder.test_equality import THREE, assert_equal
from towers import TowerBuilder, cli, tf_internals
from towers.errors import InputError
from towers.graphs.placement import read_placement, traced_ops
from towers.training.train import train

pytestmark = pytest.mark.run
layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
TWO = ["/cpu:0", "/cpu:1"]


def test_towers_that_are_traced_at_the_same_time():
    make, start = equality.moments_of_several_layers, threading.Barrier(2)

    def outcome(case):
        step = equality.step_of(case, THREE)
        start.wait()
        return equality.outcome(case, step)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for found in pool.map(outcome, [equality.case_of(make) for _ in range(2)]):
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
    with pytest.raises(InputError, match="call the function directly"):
        outer.concat(lambda x: inner.concat(lambda x: 2 * x, x), tf.constant(X))


@pytest.mark.graph
def test_towers_read_what_a_scope_around_them_holds():
    """As the averages of weights in an evaluation."""
    weight = keras.Variable(2.0)
    with keras.StatelessScope([(weight, tf.constant(3.0))]):
        found = TowerBuilder(TWO).concat(lambda x: weight * x, tf.ones(4))
    np.testing.assert_array_equal(found, [3.0] * 4)


# By XLA.


class Text(layers.Layer):
    """Does what XLA cannot."""

    def call(self, inputs):
        return inputs + tf.cast(tf.strings.length(tf.strings.as_string(inputs)), inputs.dtype)


def text(num_classes, image_shape):
    body = layers.Flatten(), Text(name="text"), layers.Dense(num_classes)
    return keras.Sequential([keras.Input(image_shape), *body])


def options(train_dir, **changes):
    return tiny.options(train_dir, num_towers=2, jit_compile=True, max_steps=3, **changes)


def test_each_tower_is_one_program_and_the_run_says_so(tmp_path, capsys):
    """Read from the executed graph: no op of the model runs by itself."""
    loop = tiny.Loop(options(tmp_path))
    placement = read_placement(loop.loop, loop.batches, tf.constant(0))
    assert "MatMul" not in {op.type for op in placement.ops}
    for tower in (0, 1):
        inside = [op for op in placement.compiled if op.tower == tower]
        assert {op.device for op in inside} == {f"/cpu:{tower}"}
        assert [op.type for op in inside].count("MatMul") == 5  # of two layers, forth and back
    concrete = loop.loop.get_concrete_function(loop.batches, tf.constant(0))
    calls = [op for _, op in traced_ops(concrete.graph) if "Call" in op.type]
    assert [op.get_attr("_XlaMustCompile") for op in calls] == [True, True]
    train(options(tmp_path, placement="strict", log_device_placement=True))
    out = capsys.readouterr().out
    assert "placement   2 towers, each compiled by XLA on its tower's device\n" in out


@pytest.mark.parametrize(
    ("model", "code", "line"),
    [
        ("tests.tiny:cnn", 2, "BatchNorm .*jit_compile.*--batch_norm=local"),
        (f"{__name__}:text", 1, "--jit_compile: XLA cannot compile the towers: .*AsString"),
    ],
)
def test_what_xla_cannot_compile_is_one_line(tmp_path, capsys, model, code, line):
    """Called from so deep that TensorFlow cuts the end of its message off: it adds the stack."""
    given = "--num_towers=2 --dataset=tests.tiny:images --augment=standardize --max_steps=2"
    flags = [*given.split(), f"--model={model}", f"--train_dir={tmp_path / 'run'}"]

    def below(depth):
        return below(depth - 1) if depth else cli.main(["train", "--jit_compile", *flags])

    assert below(200) == code
    error = capsys.readouterr().err
    assert re.search(rf"^towers: .*{line}.*\n", error, re.MULTILINE)
    if code == 2:
        assert error.count("\n") == 1 and not (tmp_path / "run").exists()
