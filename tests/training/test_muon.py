"""Muon: what a step does to each kind of weight."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tiny import assert_close
from towers.options.run import Options
from towers.training.run.muon import ADAM_RATIO
from towers.training.run.optimizers import make_optimizer

pytestmark = pytest.mark.graph


def model():
    layers = keras.layers
    convolution = layers.Conv2D(6, 3, use_bias=False, name="conv")
    others = layers.BatchNormalization(), layers.Conv2D(40, 1, name="wide"), layers.Flatten()
    last = layers.Dense(5, name="last")
    return keras.Sequential([keras.Input([8, 8, 3]), convolution, *others, last])


def step(**options):
    """Return {path: (weight before, gradient, weight after)} of one step."""
    keras.utils.set_random_seed(1)
    weights = model().trainable_variables
    optimizer = make_optimizer(weights, Options(optimizer="muon", learning_rate=0.2, **options))
    optimizer.build(weights)
    rng = np.random.default_rng(1)
    gradients = [rng.normal(size=w.shape).astype(np.float32) for w in weights]
    before = [w.numpy() for w in weights]
    tf.function(lambda: optimizer.apply(list(map(tf.constant, gradients)), weights))()
    after = [w.numpy() for w in weights]
    paths = [w.path.partition("/")[2] for w in weights]
    return dict(zip(paths, zip(before, gradients, after, strict=True), strict=True))


def test_a_kernel_gets_its_norm_and_turns_by_an_orthogonal_step():
    found = step()
    for path in ("conv/kernel", "wide/kernel"):
        before, gradient, after = (v.reshape(-1, v.shape[-1]) for v in found[path])
        scaled = before * (before.shape[1] ** 0.5 / np.linalg.norm(before))
        turn = (scaled - after) / 0.2
        values = np.linalg.svd(turn, compute_uv=False)
        assert np.all(values > 0.3) and np.all(values < 1.3)  # three iterations, not to the end
        # Along the gradient's own axes: U f(S) V with the gradient's U and V.
        u, _, v = np.linalg.svd(gradient, full_matrices=False)
        inner = u.T @ turn @ v.T
        np.testing.assert_allclose(inner, np.diag(np.diag(inner)), atol=1e-4)


def test_biases_scales_and_the_last_kernel_move_by_adam():
    found = step(weight_decay=0.5)
    for path, (before, gradient, after) in found.items():
        if path in ("conv/kernel", "wide/kernel"):
            continue
        weight = keras.Variable(before)
        adam = keras.optimizers.AdamW(
            0.2 * ADAM_RATIO, beta_2=0.99, weight_decay=0.5 / ADAM_RATIO if before.ndim > 1 else 0
        )
        adam.build([weight])
        adam.apply([tf.constant(gradient)], [weight])
        assert_close({path: after}, {path: weight.numpy()}, 1e-5)
