"""Several towers in a program whose TensorFlow has started with the one CPU device it has."""

import json

import pytest

from tests.programs import python
from tests.test_readme import blocks

pytestmark = pytest.mark.process

PROGRAM = """
import json, sys

import keras
import numpy as np
import tensorflow as tf

import towers

keras.config.set_floatx("float64")
x, y = np.random.default_rng(0).normal(size=(2, 13, 5))
y = y[:, :1]

def build():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = [layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input([5]), *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse", metrics=["mae"])
    return model

def fitted(model):
    history = model.fit(x, y, batch_size=7, epochs=3, verbose=0).history
    return np.concatenate([np.ravel(v) for v in [*history.values(), *model.get_weights()]])

plain, found = fitted(build()), {}
assert len(tf.config.list_logical_devices()) == 1
three = towers.parallelize(build(), num_towers=3, devices="cpu", variables="sharded")
found["fit"] = float(np.abs(fitted(three) - plain).max())

verified = towers.verify(build(), x, y, num_towers=(2,), say=lambda line: None)
found["verify"] = max(verified["max_relative_difference"].values())
assert verified["passed"]

print(json.dumps(found))
exec(sys.argv[1])
"""


def test_towers_share_it_with_the_numbers_of_plain_keras_and_a_line(tmp_path):
    program = next(block for block in blocks("python") if "TowerBuilder" in block)
    # Also where the guides' line chooses GPUs and there is none.
    given = dict(cwd=tmp_path, variables={"CUDA_VISIBLE_DEVICES": '"0,1"'})
    done = python("-c", PROGRAM, program, **given)
    (found,) = [json.loads(line) for line in done.stdout.splitlines() if line[:2] == '{"'] or [
        pytest.fail(done.stderr)
    ]
    assert len(found) == 2 and max(found.values()) < 1e-9, found
    assert "[[ 44.  56.]\n [ 98. 128.]]" in done.stdout, done.stderr
    shared = [line for line in done.stderr.splitlines() if " share /cpu:0" in line]
    assert len(shared) == len(set(shared)) == 2  # of 3 towers and of 2, which are made twice
    assert "type towers.devices.tower_devices(3) before" in shared[0]
    assert "Warning" not in done.stderr
