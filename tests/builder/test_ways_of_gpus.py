"""What GPUs gather, assign and read: few ops and transfers, and the same numbers.

Logical CPU devices stand in for GPUs; /cpu:0 is the host, where the batch is.
"""

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import PerTower, TowerBuilder, tf_private
from towers.builder.kinds import cpus_for_gpus

GPUS = ["/cpu:1", "/cpu:2", "/cpu:3"]
layers = keras.layers


@pytest.fixture(autouse=True)
def gpus():
    with cpus_for_gpus():
        yield


class Moments(layers.Layer):
    """Keeps the mean of what it has seen, and its largest value."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.most = self.add_weight(shape=(3,), initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(keras.ops.mean(x))
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(x, axis=0)))
        return x


def build(num_layers=1, *others):
    keras.utils.set_random_seed(0)
    body = []
    for _ in range(num_layers):
        body += [layers.Dense(3, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]
    return on_gpu(keras.Input((3,)), *others, *body, layers.Dense(2))


def on_gpu(*parts):
    """Return a model whose variables lie on the first GPU."""
    model = keras.Sequential(parts)
    with tf.device(GPUS[0]):
        for v in model.variables:
            value = tf.Variable(tf.identity(v.value), trainable=v.trainable)
            tf_private.set_value_of(v, value)
    return model


def copies(model, num_towers):
    """Return the weights as `gradients` takes them, with a copy on each tower."""
    weights = model.trainable_variables
    others = []
    for device in GPUS[1:num_towers]:
        with tf.device(device):
            others.append([keras.Variable(tf.identity(v.value)) for v in weights])
            for own in others[-1]:
                tf_private.set_value_of(own, tf.Variable(tf.identity(own.value)))
    return [PerTower(own) for own in zip(weights, *others, strict=True)] if others else weights


def step_of(model, num_towers, known=True, **keywords):
    keywords = {"batch_norm": "sync"} | keywords
    builder = TowerBuilder(GPUS[:num_towers], GPUS[0], **keywords)
    weights = copies(model, num_towers)
    spec = tf.TensorSpec([12 if known else None, 3], keras.config.floatx())

    @tf.function(input_signature=[spec])
    def step(x):
        def loss_fn(x):
            return tf.reduce_sum(model(x, training=True) ** 2, axis=1)

        loss, gradients = builder.gradients(loss_fn, weights, x)
        return loss, [g.values if isinstance(g, PerTower) else [g] for g in gradients]

    return step


def batch(size=12):
    return tf.random.stateless_normal([size, 3], [3, 4], 1.0, 2.0, keras.config.floatx())


@pytest.fixture
def wide(float64):
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def results(num_towers, size=12, **keywords):
    model = build(1, Moments())
    loss, gradients = step_of(model, num_towers, **keywords)(batch(size))
    for copied in gradients:  # the same on each tower
        assert all(np.array_equal(copied[0], other) for other in copied)
    found = [loss, *(own[0] for own in gradients)]
    return [np.asarray(v) for v in (*found, *(v.value for v in model.non_trainable_variables))]


CASES = {
    "as it is": {},
    "unknown size": dict(known=False),
    "uneven": dict(known=False, size=11),
    "towers without examples": dict(known=False, size=2),
    "in parts": dict(accumulate_steps=2, batch_norm="local"),
    "compiled by XLA": dict(jit_compile=True, batch_norm="local"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_ways_of_cpus(wide, monkeypatch, case):
    """These, on one tower or with moments of a tower's own on several, are plain Keras'."""
    found = results(3, **CASES[case])
    of_one = results(1, **CASES[case])
    monkeypatch.setattr("towers.builder.kinds._in_block", False)
    expected = results(3, **CASES[case])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    if case not in ("in parts", "compiled by XLA"):
        for a, b in zip(of_one, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


# What it costs.


def executed(model, num_towers, **keywords):
    """Return {(sender, receiver): types} of the values that one step sends, and ops by device."""
    x, step = batch(), step_of(model, num_towers, **keywords).python_function
    weights = copies(model, num_towers)
    with tf.device(GPUS[0]):
        kept = tf.Variable(tf.zeros([]), trainable=False)

    @tf.function(input_signature=[tf.TensorSpec(x.shape, x.dtype)])
    def update(x):
        loss, gradients = step(x)
        kept.assign(loss)
        for weight, own in zip(weights, gradients, strict=True):
            for copied, gradient in zip(getattr(weight, "values", [weight]), own, strict=True):
                with tf.device(copied.value.device):
                    copied.value.assign_sub(gradient)

    update.get_concrete_function()  # with all that is tried before
    with tf_private.executed_graphs() as graphs:
        update(x)
    sent, ops = collections.defaultdict(list), collections.defaultdict(collections.Counter)

    def place(device):
        return "/cpu:" + re.search(r"CPU:(\d)$", device)[1]

    for node in (node for graph in graphs for node in graph.node):
        ops[place(node.device)][node.op] += 1
        if node.op == "_Send" and "/ctrl/" not in node.input[0]:
            ends = [place(node.attr[end].s.decode()) for end in ("send_device", "recv_device")]
            if ends[0] != ends[1]:
                sent[tuple(ends)].append(tf.as_dtype(node.attr["T"].type).name)
    return dict(sent), ops


def launches(ops):
    """Return how many ops of a device do something on a GPU."""
    free = ("Const", "Identity", "Reshape", "NoOp", "ReadVariableOp", "Assign", "_Arg", "_Recv")
    return sum(n for op, n in ops.items() if not op.startswith(free))


def test_one_gpu_receives_the_batch_and_sends_nothing():
    sent, _ = executed(build(2, Moments()), 1)
    assert sent == {("/cpu:0", GPUS[0]): ["float32"]}


@pytest.mark.parametrize("num_towers", [2, 3])
def test_towers_receive_their_slices_and_the_key_of_collectives_and_the_state_of_seeds(num_towers):
    sent, ops = executed(build(2), num_towers)
    of_host = {("/cpu:0", device): ["float32", "int32"] for device in GPUS[:num_towers]}
    of_first = {(GPUS[0], device): ["int64"] for device in GPUS[1:num_towers]}
    assert {ends: sorted(types) for ends, types in sent.items()} == of_host | of_first
    # Of each BatchNorm layer one forward and one backward, then gradients and loss.
    assert ops[GPUS[0]]["CollectiveGatherV2"] == 2
    assert ops[GPUS[0]]["CollectiveReduceV2"] == 3


def test_local_statistics_are_sent_once_a_tower():
    sent, _ = executed(build(2), 3, batch_norm="local")
    assert [sent[device, GPUS[0]] for device in GPUS[1:]] == [["float32"]] * 2


def test_what_other_layers_keep_is_sent_once_for_each_way_to_put_it_together():
    sent, _ = executed(build(1, Moments(), Moments()), 2)
    assert sent[GPUS[1], GPUS[0]] == ["float32"] * 2  # means, largest values


def test_parts_of_a_batch_are_added_packed():
    def ops(num_layers):
        body = [layers.Dense(3) for _ in range(num_layers)]
        return executed(on_gpu(keras.Input((3,)), *body), 1, accumulate_steps=2)[1][GPUS[0]]

    assert ops(5)["AddN"] == ops(1)["AddN"] > 0


@pytest.mark.parametrize("num_towers", [1, 2])
def test_more_variables_cost_no_more_ops_of_the_gather(num_towers):
    def ops(num_layers):
        body = [layers.Dense(3) for _ in range(num_layers)]
        return launches(executed(on_gpu(keras.Input((3,)), *body), num_towers)[1][GPUS[0]])

    three, six, nine = ops(3), ops(6), ops(9)
    assert nine - six == six - three  # forward and backward of a layer
    assert (six - three) / 3 <= 6  # product and bias; two products, bias; which the test updates


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_of_joined_outputs(wide, monkeypatch, parts):
    def found():
        model = build()
        builder = TowerBuilder(GPUS, GPUS[0], batch_norm="sync", accumulate_steps=parts)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                outputs = builder.concat(lambda x: model(x, training=True), x)
                loss = tf.reduce_logsumexp(outputs)
            return loss, tape.gradient(loss, model.trainable_variables)

        loss, gradients = step(batch())
        return [loss, *gradients, *(v.value for v in model.non_trainable_variables)]

    ours = found()
    monkeypatch.setattr("towers.builder.kinds._in_block", False)
    for a, b in zip(ours, found(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
