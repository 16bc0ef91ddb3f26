"""Where the master variables lie: other places, the same numbers."""

import numpy as np
import pytest
import tensorflow as tf

from tests import runs, tiny
from towers.builder import collectives, gather
from towers.builder.tower import TowerBuilder
from towers.graphs.placement import read_placement, short_device_name
from towers.training.step.train_state import TrainState
from towers.training.train import train

pytestmark = pytest.mark.graph


@pytest.mark.run
def test_copies_stay_the_same_bit_for_bit():
    """By an optimizer that asks for paths; of a kernel that its layer assigns: test_nonfinite."""
    given = dict(num_towers=2, variables="replicated", optimizer="muon")
    loop = tiny.Loop(tiny.options("unused", **given))
    loop(5)
    assert_copies_equal(loop.train_state)


def assert_copies_equal(train_state):
    first, *others = (dict(enumerate(r.variables())) for r in train_state.replicas)
    assert others
    for other in others:
        tiny.assert_identical(other, first)


def test_where_variables_lie(tmp_path):
    def places(variables):
        options = tiny.options(
            tmp_path, num_towers=2, variables=variables, model_args="width=40", ema_decay=0.9
        )
        return {
            name: short_device_name(v.device)
            for name, v in tiny.Loop(options).train_state.variables().items()
        }

    assert set(places("cpu").values()) == {"/cpu:0"}
    sharded = places("sharded")
    kernels = [name for name in sharded if name.endswith("/kernel")]
    # The largest weight is alone on one tower; its slot and its average are beside it.
    large, small = "sequential/dense/kernel", "sequential/dense_1/kernel"
    assert {sharded[f"model/{large}"], sharded[f"model/{small}"]} == {"/cpu:0", "/cpu:1"}
    assert sharded[f"average/{small}"] == sharded[f"model/{small}"]
    assert sharded["optimizer/sgd/sequential_dense_1_kernel_momentum"] == sharded[f"model/{small}"]
    assert len(kernels) == 4
    assert set(places("replicated").values()) == {"/cpu:0"}


@pytest.mark.run
def test_only_the_batch_crosses_to_replicated_towers(tmp_path):
    """And a sharded weight to those towers that do not have it; graphs/test_placement has cpu."""
    crossing = {}
    for variables in "sharded", "replicated":
        loop = tiny.Loop(tiny.options(tmp_path, num_towers=2, variables=variables, batch_size=8))
        placement = read_placement(loop.loop, loop.batches, tf.constant(0))
        crossing[variables] = sum(placement.crossing_bytes().values())
    variables = loop.train_state.model.trainable_variables
    weights = 4 * sum(v.value.shape.num_elements() for v in variables)
    batch = 4 * (8 * 8 * 3 + 4)  # tower 1's half: images of bytes, int32 labels
    assert crossing["sharded"] == pytest.approx(2 * weights + batch, abs=100)
    assert crossing["replicated"] == pytest.approx(batch, abs=100)


# The all-sum itself.

DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]


@pytest.mark.parametrize("num_towers, bucket_bytes", [(2, 1), (3, 100), (4, 2**20)])
def test_every_tower_gets_the_sums(num_towers, bucket_bytes, monkeypatch):
    monkeypatch.setattr(collectives, "BUCKET_BYTES", bucket_bytes)
    shapes = [([5], tf.float32), ([], tf.float32), ([2, 3], tf.float64), ([7, 1], tf.float32)]
    draw = tf.random.stateless_normal
    values = [
        [draw(shape, [i, k], dtype=dtype) for k, (shape, dtype) in enumerate(shapes)]
        for i in range(num_towers)
    ]
    devices = DEVICES[:num_towers]
    for own in tf.function(lambda: collectives.all_sum(values, devices))():
        for k, total in enumerate(own):
            np.testing.assert_allclose(total, sum(v[k] for v in values), rtol=1e-5)


def test_towers_that_cannot_sum_together_are_refused():
    with pytest.raises(ValueError, match=r"make a tf.function of the step"):
        collectives.all_sum([[tf.zeros(2)], [tf.zeros(2)]], DEVICES[:2])
    with pytest.raises(ValueError, match="each needs a device of its own"):
        tf.function(lambda: collectives.all_sum([[tf.zeros(2)]] * 2, ["/cpu:1", "/cpu:1"]))()


def test_what_not_all_towers_have_is_gathered_and_handed_out():
    places = gather.GatherPlan(DEVICES[:2], "/cpu:0", TowerBuilder.add)

    @tf.function
    def means():
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
        gradients = [[tf.ones(2), None, slices], [tf.ones(2), tf.ones(3), slices]]
        return [
            [tf.convert_to_tensor(g) for g in own]
            for own in gather.mean_on_every_tower(gradients, places, tf.constant(4.0))
        ]

    for own in means():
        np.testing.assert_allclose(own[0], [0.5, 0.5])
        np.testing.assert_allclose(own[1], [0.25] * 3)
        np.testing.assert_allclose(own[2], [[0, 0], [0.5, 0.5], [0, 0]])


@pytest.mark.run
@pytest.mark.parametrize("slot", runs.released([False, True], True))
def test_copies_that_drift_are_told_and_go_on_from_what_is_saved(
    tmp_path, capsys, monkeypatch, slot
):
    """One bit of a weight, or of what the optimizer keeps of it, on the second tower."""

    def drift():
        replica = train_state[-1].replicas[1]
        variable = (replica.optimizer.variables[-1] if slot else replica.weights[0]).value
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
    assert_copies_equal(train_state[-1])
