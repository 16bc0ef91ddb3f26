"""Towers that XLA compiles: the same numbers, and one line where it cannot."""

import re

import keras
import pytest
import tensorflow as tf

from tests import tiny
from towers import cli
from towers.graphs.placement import read_placement, traced_ops
from towers.training.train import train

pytestmark = pytest.mark.run
layers = keras.layers
DEVICES = ["/cpu:1", "/cpu:2", "/cpu:3"]  # where no master is


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
    given = "--num_towers=2 --dataset=tests.tiny:images --augment=none --batch_size=7 --max_steps=2"
    flags = [*given.split(), f"--model={model}", f"--train_dir={tmp_path / 'run'}"]

    def below(depth):
        return below(depth - 1) if depth else cli.main(["train", "--jit_compile", *flags])

    assert below(200) == code
    error = capsys.readouterr().err
    assert re.search(rf"^towers: .*{line}.*\n", error, re.MULTILINE)
    if code == 2:
        assert error.count("\n") == 1 and not (tmp_path / "run").exists()
