"""Where the master variables lie, and that they are named without towers or devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import runs, tiny
from towers.graphs.placement import read_placement
from towers.training.run.setup import prepare
from towers.training.step.train_state import TrainState
from towers.training.train import train

pytestmark = pytest.mark.graph


@pytest.mark.run
def test_only_the_batch_crosses_to_replicated_towers(tmp_path):
    """Beside what collectives exchange; graphs/test_placement has the same for cpu."""
    loop = tiny.Loop(tiny.options(tmp_path, num_towers=2, variables="replicated", batch_size=8))
    placement = read_placement(loop.loop, loop.batches, tf.constant(0))
    batch = 4 * (8 * 8 * 3 + 4)  # tower 1's half: images of bytes, int32 labels
    assert sum(placement.crossing_bytes().values()) == pytest.approx(batch, abs=100)


@pytest.mark.run
def test_copies_that_drift_are_told_and_go_on_from_what_is_saved(tmp_path, capsys, monkeypatch):
    """One bit of what the optimizer keeps of a weight, on the second tower."""

    def drift():
        variable = train_state[-1].replicas[1].optimizer.variables[-1].value
        flat = variable.numpy().ravel()
        flat[0] = np.nextafter(flat[0], np.float32(9))
        variable.assign(flat.reshape(variable.shape))

    train_state, real = [], TrainState.make_copies_equal
    monkeypatch.setattr(
        TrainState, "make_copies_equal", lambda own: train_state.append(own) or real(own)
    )
    runs.at_step(monkeypatch, {4: drift})
    given = dict(num_towers=2, variables="replicated", checkpoint_every_steps=2, steps_per_loop=1)
    train(tiny.options(tmp_path, max_steps=6, **given))
    lines = [line for line in capsys.readouterr().out.splitlines() if "differ at step" in line]
    assert len(lines) == 1
    assert "/cpu:0 and /cpu:1 differ at step 4" in lines[0] and "--variables=cpu" in lines[0]
    first, other = (dict(enumerate(r.variables())) for r in train_state[-1].replicas)
    tiny.assert_identical(other, first)


# What they are called.


class Pair(keras.Model):
    """Two layers of one name on one level, which Keras allows in a model of one's own."""

    def __init__(self, num_classes):
        super().__init__()
        self.first = keras.layers.Dense(4, name="dense")
        self.second = keras.layers.Dense(num_classes, name="dense")
        self.flatten = keras.layers.Flatten()

    def call(self, inputs):
        return self.second(self.first(self.flatten(inputs)))


def pair(num_classes):
    return Pair(num_classes)


def names(**changes):
    return list(prepare(tiny.options("unused", **changes)).train_state.variables())


def test_names_say_what_a_variable_is_and_not_where_it_is_used():
    weights = [f"{layer}/{kind}" for layer in ("dense", "dense_1") for kind in ("kernel", "bias")]
    assert names(ema_decay=0.9, num_towers=2) == [
        *(f"model/sequential/{weight}" for weight in weights),
        "optimizer/sgd/iteration",
        "optimizer/sgd/learning_rate",
        *(f"optimizer/sgd/sequential_{w.replace('/', '_')}_momentum" for w in weights),
        *(f"average/sequential/{weight}" for weight in weights),
        "step",
        "examples",
    ]


def test_layers_of_one_name_are_told_apart():
    given = dict(model=f"{__name__}:pair", ema_decay=0.5)
    train_state = prepare(tiny.options("unused", **given)).train_state
    variables, trained = train_state.variables(), train_state.model.trainable_variables
    assert len(variables) == 3 * len(trained) + 4
    assert {id(v) for v in variables.values()} > {id(v.value) for v in trained}
