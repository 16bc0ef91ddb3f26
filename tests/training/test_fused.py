"""Fused kernels compute what Keras' chains of ops do."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tiny import assert_close
from towers import tf_private
from towers.builder import kinds
from towers.training.fused import by_kernels

K = keras.optimizers
DECAY = K.schedules.ExponentialDecay(0.1, 3, 0.7)


class OwnSGD(K.SGD):
    """Moves by a constant: no kernel may take its place."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, 0.5 * tf.ones_like(variable))


OPTIMIZERS = {
    "sgd": lambda: K.SGD(0.1),
    "momentum": lambda: K.SGD(DECAY, momentum=0.9),
    "nesterov": lambda: K.SGD(0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    "adam": lambda: K.Adam(DECAY, beta_1=0.8, epsilon=1e-3),
    "adamw": lambda: K.AdamW(0.1, weight_decay=0.1),
    "scaled": lambda: K.LossScaleOptimizer(K.Adam(0.1), initial_scale=8.0),
    "amsgrad": lambda: K.Adam(0.1, amsgrad=True),
    "clipping": lambda: K.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "averaging": lambda: K.Adam(0.1, use_ema=True),
    "rmsprop": lambda: K.RMSprop(0.1),
    "own": lambda: OwnSGD(0.1, momentum=0.9),
}
FUSED = ("sgd", "momentum", "nesterov", "adam", "adamw", "scaled")
SHAPES = ([3, 4], [5], [])


def after_steps(make, dtype, kernels, steps=20, sparse=False):
    """Return all variables after some steps, and the types of the ops that update them."""
    rng = np.random.default_rng(1)
    weights = [keras.Variable(rng.normal(size=shape), dtype=dtype) for shape in SHAPES]
    weights[1].constraint = keras.constraints.NonNeg()
    optimizer = make()
    optimizer.build(weights)

    @tf.function(autograph=False)
    def step(*gradients):
        gradients = list(gradients)
        if sparse:
            gradients[0] = tf.IndexedSlices(gradients[0][:2], tf.constant([2, 0]), [3, 4])
        with tf_private.each_update_apart(optimizer):
            if kernels:
                with by_kernels(optimizer):
                    optimizer.apply(gradients, weights)
            else:
                optimizer.apply(gradients, weights)

    for _ in range(steps):
        step(*(tf.constant(rng.normal(size=shape), dtype) for shape in SHAPES))
    specs = [tf.TensorSpec(shape, dtype) for shape in SHAPES]
    graph = step.get_concrete_function(*specs).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    ops = {node.op for node in nodes if node.op.startswith("ResourceApply")}
    assert "update_step" not in vars(optimizer)
    variables = (*weights, *optimizer.variables)
    return {f"{i} {v.name}": v.numpy() for i, v in enumerate(variables)}, ops


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 2e-5)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_slots_are_those_of_keras(name, dtype, tolerance):
    run = functools.partial(after_steps, OPTIMIZERS[name], dtype)
    (found, kernels), (expected, none) = run(True), run(False)
    found, expected = ({n.split()[0]: v for n, v in own.items()} for own in (found, expected))
    assert_close(found, expected, tolerance)
    assert not none and bool(kernels) == (name in FUSED)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_rows_of_a_sparse_gradient_go_keras_way(name):
    run = functools.partial(after_steps, OPTIMIZERS[name], "float64", sparse=True)
    (found, kernels), (expected, _) = run(True), run(False)
    for own, other in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-12)
    assert kernels  # of the other weights


def test_what_was_read_before_an_update_stays_what_it_was():
    """A snapshot of a weight shares its memory until the weight is written."""
    weight = keras.Variable(np.ones([64, 64], "f4"))
    optimizer = K.SGD(0.5, momentum=0.9)
    optimizer.build([weight])
    before = weight.value.read_value()
    with by_kernels(optimizer):
        optimizer.apply([tf.ones([64, 64])], [weight])
    assert np.all(before.numpy() == 1) and np.all(weight.numpy() == 0.5)


def test_gpus_keep_keras_ops():
    with kinds.cpus_for_gpus(), tf.device("/cpu:1"):
        _, kernels = after_steps(OPTIMIZERS["momentum"], "float32", True)
    assert not kernels
