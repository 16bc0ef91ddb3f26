"""The rule book, against formulas: clipping, weight decay, optimizers and the moving average."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.runs import released
from towers.data import augment
from towers.options.parts import OPTIMIZERS as NAMES
from towers.training.run.optimizers import OPTIMIZERS
from towers.training.run.setup import prepare

pytestmark = pytest.mark.run
STEPS = 4
# Keras rounds some constants to float32, in float64, too. The other options here are exact in it.
ROUNDED_0_9, ROUNDED_0_999 = float(np.float32(0.9)), float(np.float32(0.999))


def embedding(num_classes, image_shape, l2=0.0):
    regularizer = keras.regularizers.L2(l2) if l2 else None
    words = keras.layers.Embedding(12, 3, embeddings_regularizer=regularizer)
    # Few enough tokens that a batch has each of them many times.
    tokens = keras.layers.Lambda(lambda x: tf.cast(tf.abs(x[:, :2, :, 0]) * 3, tf.int32))
    layers = [tokens, words, keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


def partly_trained(num_classes, image_shape):
    frozen = keras.layers.Dense(4, activation="tanh", trainable=False)
    layers = [keras.layers.Flatten(), frozen, keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


class AddsLosses(keras.layers.Layer):
    """Adds a mean over the slice, a value for each unit, and nothing of its own in evaluation."""

    def call(self, inputs, training=False):
        if training:
            self.add_loss(0.3 * tf.reduce_mean(inputs**2))
            self.add_loss([0.2 * tf.reduce_mean(tf.sin(inputs), axis=0), tf.reduce_mean(inputs)])
        return inputs


def adding(num_classes, image_shape):
    layers = keras.layers
    inner = [layers.Dense(5, "tanh", activity_regularizer="l2"), AddsLosses()]
    l2 = keras.regularizers.L2(2**-6)  # 0.01 would be rounded to float32
    head = layers.Dense(num_classes, activity_regularizer="l1", kernel_regularizer=l2)
    return keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), keras.Sequential(inner), head]
    )


def by_formula(options):
    """Return weights, averages and metrics after STEPS steps on one device, in numpy."""
    run = prepare(dataclasses.replace(options, weight_decay=0.0))  # it is written here
    model, size = run.train_state.model, run.data.train.size
    weights = {v.path: v.numpy() for v in model.trainable_variables}
    slots = {path: [np.zeros_like(w), np.zeros_like(w)] for path, w in weights.items()}
    averages = {v.path: v.numpy() for v in model.variables}
    batches = iter(run.data.train.train_batches(options.batch_size, seed=options.seed))
    decay = options.weight_decay
    for step in range(STEPS):
        images, labels, draws = tiny.flat(next(batches))
        inputs = augment.train_images(images, draws, options.augment, dtype=tf.float64)
        l2 = 0.0 if options.optimizer == "adamw" else decay
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            data_loss = tf.reduce_mean(tf.cast(losses, tf.float64))
            kernels = [v for v in model.trainable_variables if len(v.shape) > 1]
            kernels = [tf.cast(v.value, tf.float64) for v in kernels]
            penalty = l2 * sum(0.5 * tf.reduce_sum(kernel**2) for kernel in kernels)
            own = [tf.reduce_sum(tf.cast(loss, tf.float64)) for loss in model.losses]
            added = len(own) - sum(v.regularizer is not None for v in model.trainable_variables)
            data_loss += sum(own[:added])  # by layers, of the batch
            penalty += sum(own[added:])
            loss = data_loss + penalty
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        gradients = {
            v.path: tf.convert_to_tensor(g).numpy().astype(np.float64)
            for v, g in zip(model.trainable_variables, gradients, strict=True)
            if g is not None
        }
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
        for path, g in gradients.items():
            if options.clip_norm:
                g = g * min(1, options.clip_norm / np.linalg.norm(g))
            if options.clip_value:
                g = np.clip(g, -options.clip_value, options.clip_value)
            if options.clip_global_norm:
                g = g * min(1, options.clip_global_norm / norm)
            gradients[path] = g

        epoch = step * options.batch_size / size
        rate = options.learning_rate * 0.5 * (1 + np.cos(np.pi * epoch / run.total_epochs))
        for path, g in gradients.items():
            w, (m, v) = weights[path], slots[path]
            if options.optimizer != "adamw":
                m = options.momentum * m - rate * g
                w = w + {
                    "sgd": -rate * g, "momentum": m, "nesterov": options.momentum * m - rate * g
                }[options.optimizer]  # fmt: skip
            else:
                w = w - rate * decay * w if w.ndim > 1 else w
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                correction = np.sqrt(1 - ROUNDED_0_999 ** (step + 1)) / (
                    1 - ROUNDED_0_9 ** (step + 1)
                )
                w = w - rate * correction * m / (np.sqrt(v) + 1e-7)
            weights[path], slots[path] = w, [m, v]
        for variable in model.trainable_variables:
            variable.assign(weights[variable.path])

        seen = step * options.batch_size / 128
        ema = min(options.ema_decay, (1 + seen) / (10 + seen)) ** (options.batch_size / 128)
        for variable in model.variables:
            averages[variable.path] = ema * averages[variable.path] + (1 - ema) * variable.numpy()

    state = {f"model/{v.path}": v.numpy() for v in model.variables}
    if options.ema_decay:
        state |= {f"average/{path}": value for path, value in averages.items()}
    metrics = dict(loss=data_loss, penalty=penalty, gradient_norm=norm, learning_rate=rate)
    return state, {name: float(value) for name, value in metrics.items()}


SPARSE = dict(model="tests.training.test_update:embedding")
PARTLY = dict(model="tests.training.test_update:partly_trained")
ADDING = dict(model="tests.training.test_update:adding")
REPLICATED = dict(variables="replicated")
CASES = {
    "sgd, moving average after its ramp": dict(optimizer="sgd", ema_decay=0.15, batch_size=23),
    "momentum, fewer examples than towers": dict(momentum=0.75, batch_size=2, num_towers=3),
    "nesterov, regularizer, weight decay": dict(
        optimizer="nesterov", model_args="l2=0.25", weight_decay=0.25
    ),
    "clip_value": dict(clip_value=0.003),
    "sparse, parts": SPARSE | dict(accumulate_steps=2),
    "clip_global_norm, parts": dict(clip_global_norm=0.1, accumulate_steps=2),
    "frozen, decayed, batch larger than the data set": PARTLY | dict(
        weight_decay=0.25, ema_decay=0.5, batch_size=70
    ),
    "adamw, losses of layers, parts": ADDING | dict(
        accumulate_steps=2, optimizer="adamw", weight_decay=0.25, batch_size=2, num_towers=3
    ),
    "replicated, sparse, nesterov, regularizer": REPLICATED | SPARSE | dict(
        weight_decay=0.25, model_args="l2=0.25", optimizer="nesterov"
    ),
    "replicated, clip_norm": REPLICATED | dict(weight_decay=0.25, clip_norm=0.3),
}  # fmt: skip
RARE = {"clip_value", "nesterov, regularizer, weight decay"}


@pytest.mark.parametrize("name", released(CASES, *CASES.keys() - RARE))
def test_towers_compute_what_the_book_says(name):
    given = dict(dtype="float64", max_steps=STEPS, momentum=0.5, num_towers=2)
    given |= dict(weight_decay=2**-12) | CASES[name]
    expected, expected_metrics = by_formula(tiny.options("unused", **given | {"num_towers": 1}))
    loop = tiny.Loop(tiny.options("unused", **given))
    metrics, state = loop(STEPS), loop.state()
    tiny.assert_close({n: state[n] for n in expected}, expected, 1e-10)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    assert state["examples"] == STEPS * given.get("batch_size", 7)
    assert state["step"] == STEPS


class Overflow(keras.layers.Layer):
    """Has an infinite gradient where an image has a bright spot."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=shape[1:], initializer="ones", name="kernel")

    def call(self, inputs):
        spot = tf.reduce_max(inputs, axis=-1, keepdims=True) > 12
        infinity = tf.constant(np.inf, inputs.dtype)

        @tf.custom_gradient
        def overflow(values):
            return values, lambda upstream: upstream * tf.where(spot, infinity, 1)

        return overflow(inputs * self.kernel)


def overflowing(num_classes, image_shape):
    layers = keras.layers
    inner = [layers.Flatten(), Overflow(), layers.BatchNormalization(), layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *inner])


def batches_with_overflow(bad_steps, num_steps=10):
    """Return batches whose last example, that of the last tower, overflows in some steps."""
    images, labels, draws = (
        np.stack([part] * num_steps)
        for part in (*tiny.arrays(8), np.zeros([8, augment.NUM_DRAWS], np.float32))
    )
    images[bad_steps, -1] = 0
    images[bad_steps, -1, 0, 0, 0] = 255
    return tf.data.Dataset.from_tensor_slices(((images, labels), draws))


def test_in_float16_an_infinite_gradient_in_one_tower_skips_the_step_for_all():
    """Keras scales the loss: it sees the gathered gradient, and halves the scale."""
    given = dict(dtype="mixed_float16", batch_size=8, num_towers=2, ema_decay=0.5)
    options = tiny.options("unused", model=f"{__name__}:overflowing", **given)
    loop = tiny.Loop(options, batches_with_overflow([1]))
    scale = loop.train_state.model.optimizer.dynamic_scale
    scale.assign(2.0**8)
    assert np.isfinite(loop()["gradient_norm"])
    before = loop.state()
    assert not np.isfinite(loop()["gradient_norm"])
    after = loop.state()
    assert (after["step"], after["examples"]) == (2, 16) and float(scale) == 2.0**7
    weights = [v.path for v in loop.train_state.model.trainable_variables]
    for path in weights:
        np.testing.assert_array_equal(after[f"model/{path}"], before[f"model/{path}"])

    assert np.isfinite(loop()["gradient_norm"])  # and goes on
    changed = {name for name, value in loop.state().items() if np.any(value != before[name])}
    assert changed > {f"model/{path}" for path in weights}


def test_a_loss_scale_changes_no_number():
    given = dict(optimizer="sgd", weight_decay=0.01, num_towers=2)
    plain, scaled = (
        tiny.Loop(tiny.options("unused", dtype=dtype, **given))
        for dtype in ("float32", "mixed_float16")
    )
    scaled.train_state.model.optimizer.dynamic_scale.assign(64)  # no overflow
    found, expected = scaled(), plain()
    for name in ("loss", "penalty", "gradient_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-2)
    expected = {n: v for n, v in plain.state().items() if n.startswith("model/")}
    tiny.assert_close({n: scaled.state()[n] for n in expected}, expected, 1e-2)


@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16"])
def test_every_precision_trains(dtype):
    loop = tiny.Loop(tiny.options("unused", dtype=dtype, max_steps=40))
    kernel = loop.train_state.model.trainable_variables[0]
    assert kernel.value.dtype == ("float64" if dtype == "float64" else "float32")
    first, last = loop()["loss"], loop(39)["loss"]
    assert last < 0.8 * first
    assert keras.config.floatx() == keras.config.dtype_policy().name == "float32"


@pytest.mark.unit
def test_the_optimizers_are_those_that_the_flag_names():
    assert tuple(OPTIMIZERS) == NAMES
