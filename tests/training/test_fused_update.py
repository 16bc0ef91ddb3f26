"""The update of joined weights, as GPUs make it, against Keras' update of each weight.

/cpu:1 stands in for a GPU; /cpu:0 is the host, where nothing is joined.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.runs import released
from towers import tf_internals
from towers.builder import device_names, gather
from towers.options.parts import OPTIMIZERS
from towers.options.run import Options
from towers.training.run.optimizers import make_optimizer
from towers.training.step import train_state as places
from towers.training.step.train_state import TrainState
from towers.training.step.update import make_update

pytestmark = pytest.mark.run
HOST, GPU = "/cpu:0", "/cpu:1"
STARTS_NOTHING = (
    "Const ReadVariableOp AssignVariableOp Reshape Identity NoOp _Arg _Retval _Send _Recv"
).split()


@pytest.fixture(autouse=True)
def gpus():
    with device_names.cpus_for_gpus():
        yield


def mix(dtype="float32"):
    """Return a model with weights of all sorts, some of another type; nobody calls it."""
    layers, l1, l2 = keras.layers, keras.regularizers.L1(0.1), keras.regularizers.L2(0.1)
    both, of_rows = keras.regularizers.L1L2(0.01, 0.02), keras.regularizers.OrthogonalRegularizer()
    with tf_internals.named_as_in_a_new_process():
        parts = [
            layers.Dense(5, kernel_regularizer=l2, bias_regularizer=l1),
            layers.BatchNormalization(),
            layers.Dense(6, kernel_regularizer=l2),
            layers.Dense(5, kernel_regularizer=both, dtype=dtype),
            layers.Dense(4, dtype=dtype),
            layers.Dense(3, kernel_regularizer=of_rows),
            layers.Dense(3, kernel_constraint=keras.constraints.UnitNorm()),
            layers.Dense(2, kernel_regularizer=l2),
            layers.Dense(2),
        ]
        model = keras.Sequential([keras.Input([4]), *parts])
    for weight in model.variables:
        weight.assign(np.random.default_rng(0).normal(size=weight.shape))
    return model


def masters_on(device, model, options, **more):
    places.move([(variable, device) for variable in model.variables])
    with tf_internals.named_as_in_a_new_process():
        with tf.device(device):
            own = own_clipping() if options.makes_own_optimizer else None
            optimizer = own or make_optimizer(model.trainable_variables, options)
        return TrainState(model, optimizer, device=device, **more)


def gradients_for(weights, step, overflow=False):
    """Return random gradients: one of them sparse, one of a regularized weight and one None."""
    random = np.random.default_rng(step)
    found = []
    for weight in weights:
        value = random.normal(size=weight.shape)
        value.flat[0] = np.inf if overflow and len(weight.shape) > 1 else value.flat[0]
        found.append(tf.constant(value, weight.dtype))
    rows = tf.constant(random.normal(size=(3, *weights[4].shape[1:])), weights[4].dtype)
    found[4] = tf.IndexedSlices(rows, tf.constant([2, 0, 2]), tf.constant(weights[4].shape))
    found[-1] = found[-4] = None
    return found


def after_each_step(device, options, steps=3, overflow=(), **more):
    """Return {name: value} of master variables, penalty and norm, after each of some steps."""
    train_state = masters_on(device, mix("float64"), options, **more)
    update = make_update(train_state, options, ":" not in options.optimizer)
    rate = tf.constant(0.1, tf.float64)

    @tf.function
    def step(gradients):
        with tf.device(device):
            statistics = train_state.statistics()
            for variable, value in statistics:
                variable.assign(value + 1)  # as towers do
            metrics = update([gradients], [rate], statistics)
            train_state.examples.assign_add(100)
        return metrics

    states = []
    for i in range(steps):
        gradients = gradients_for(train_state.model.trainable_variables, i, overflow=i in overflow)
        found = train_state.variables() | step(gradients)
        states.append({name: value.numpy() for name, value in found.items()})
    return states


def assert_same(left, right):
    """Compare, each number in its own precision; the metrics are of weights of both."""
    for name, value in left.items():
        exact = value.dtype != np.float32 and name not in ("penalty", "gradient_norm")
        tiny.assert_close({name: value}, {name: right[name]}, 1e-12 if exact else 2e-6)
    assert left.keys() == right.keys()


CASES = {
    **{name: dict(optimizer=name, weight_decay=0.1) for name in OPTIMIZERS},
    "clip_norm, moving average": dict(clip_norm=0.5, ema_decay=0.9),
    "clip_value": dict(optimizer="adam", clip_value=0.1),
    "own that clips": dict(optimizer="tests.training.test_fused_update:own_clipping"),
}


def own_clipping():
    return keras.optimizers.RMSprop(0.1, clipnorm=0.1, centered=True)


RELEASE = ("muon", "clip_value", "own that clips", "clip_norm, moving average")


@pytest.mark.parametrize("name", released(CASES, *RELEASE))
def test_joined_weights_are_updated_as_each_alone(name):
    options = Options(**CASES[name])
    ema = options.ema_decay > 0
    ours, theirs = (after_each_step(place, options, ema=ema)[-1] for place in (GPU, HOST))
    assert any(name.startswith("average/") for name in ours) == ema
    assert_same(ours, theirs)


def test_an_overflow_skips_the_step():
    options = Options(optimizer="momentum", ema_decay=0.9)
    given = dict(steps=4, overflow={1}, ema=True, limit=10)
    ours, theirs = (after_each_step(place, options, **given) for place in (GPU, HOST))
    before, after = ours[:2]
    same = before.keys() - {"step", "examples", "gradient_norm", "penalty"}
    tiny.assert_identical({n: after[n] for n in same}, {n: before[n] for n in same})
    assert_same(ours[-1], theirs[-1])


@pytest.mark.parametrize("name", ["adamw", "nadam", "clip_norm, moving average"])
def test_several_vectors_are_updated_as_one(name, monkeypatch):
    options = Options(**CASES[name])
    given = dict(steps=3, overflow={1}, ema=options.ema_decay > 0)
    one = after_each_step(GPU, options, **given)[-1]
    monkeypatch.setattr(gather, "GROUP_BYTES", 250)
    assert_same(after_each_step(GPU, options, **given)[-1], one)


def test_one_vector_waits_for_another(monkeypatch):
    """The memory of one is free before the next is made."""
    monkeypatch.setattr(gather, "GROUP_BYTES", 200)
    options, model = Options(optimizer="adam"), dense(9)
    nodes = executed(masters_on(GPU, model, options), options)
    by_name = {node.name: node for node in nodes}

    def before(name, seen):
        if name in by_name and name not in seen:
            seen.add(name)
            for source in by_name[name].input:
                before(source.lstrip("^").partition(":")[0], seen)
        return seen

    assigning = {n.name for n in nodes if n.op == "AssignVariableOp" and "adam" in n.name}
    joins = [n.name for n in nodes if n.op == "ConcatV2" and "adam" in n.name]
    waiting = sorted(len(before(name, set()) & assigning) for name in joins)
    assert len(joins) > 6 and waiting[:3] == [0, 0, 0] and all(waiting[3:])


def executed(train_state, options):
    """Return the nodes of an update, as they are executed; gradients lie beside the weights."""
    update, (replica,) = make_update(train_state, options), train_state.replicas

    @tf.function
    def step(gradients):
        with tf.device(GPU):
            return update([gradients], [tf.cast(replica.optimizer.iterations.value, tf.float64)])

    with tf.device(GPU):
        gradients = gradients_for(replica.weights, 0)
    with tf_internals.executed_graphs() as functions:
        step(gradients)
    return [node for graphs in functions for graph in graphs for node in graph.node]


def dense(num_layers):
    layers = [keras.layers.Dense(4 + i % 3, kernel_regularizer="l2") for i in range(num_layers)]
    return keras.Sequential([keras.Input([4]), *layers])


MOST = 90  # ops; one for each joined vector chooses between before and after


def test_many_weights_start_as_many_ops_as_few():
    options = Options(optimizer="adamw", weight_decay=0.1, ema_decay=0.9)
    counts = []
    for num_layers in 5, 9:
        train_state = masters_on(GPU, dense(num_layers), options)
        ops = [node.op for node in executed(train_state, options)]
        assert "UniqueV2" not in ops and "Unique" not in ops  # for whose size the host would wait
        counts.append(len([op for op in ops if op not in STARTS_NOTHING]))
    assert counts[0] == counts[1] <= MOST
