"""What each tower has to tell, against the same computed by hand; and looking changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers.training.run.setup import prepare

pytestmark = pytest.mark.run

BATCH = 8


class Slow(keras.layers.Layer):
    """Computes for long in tower 1."""

    def call(self, x):
        if "tower_1" not in tf.get_current_name_scope():
            return x
        square = tf.ones([500, 500]) + x[0, 0, 0, 0] * 0
        for _ in range(20):
            square = tf.linalg.normalize(square @ square)[0]
        return x + 0 * tf.reduce_sum(square)


def uneven_work(num_classes, image_shape):
    flat, dense = keras.layers.Flatten(), keras.layers.Dense(num_classes)
    return keras.Sequential([keras.Input(image_shape), Slow(), flat, dense])


class Looked:
    """One step of a run, and what it should say by hand."""

    def __init__(self, **options):
        options = {"batch_size": BATCH, "num_towers": 3, "max_steps": 3, **options}
        self.run = prepare(tiny.options("unused", **options))
        self.batches = self.run.data.train.train_batches(BATCH, seed=0)
        self.loop = self.run.train_loop()
        self.weights = self.run.train_state.model.trainable_variables

    def step(self, num_steps=1):
        values = self.loop(iter(self.batches), tf.constant(num_steps))
        return {name: value.numpy() for name, value in values.items()}

    def by_hand(self, sizes):
        """Return each tower's mean loss and gradient, as one vector."""
        start, losses, gradients = 0, [], []
        for size in sizes:
            batch = tiny.flat(next(iter(self.batches)))
            part = [value[start : start + size] for value in batch]
            start += size
            with tf.GradientTape() as tape, keras.StatelessScope():
                loss = tf.reduce_mean(self.run.task.tower_function(*part))
            found = tape.gradient(loss, [w.value for w in self.weights])
            losses.append(float(loss))
            gradients.append(np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in found]))
        return losses, gradients


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([8], {"num_towers": 1}),
        ([3, 3, 2], {"model": "tests.zoo.programs:embedding_twice", "augment": "none"}),
        ([4, 4], {"num_towers": 2, "variables": "replicated", "accumulate_steps": 2}),
        ([4, 4], {"num_towers": 2, "dtype": "mixed_bfloat16"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_towers_loss_and_gradient(sizes, options):
    looked = Looked(**options)
    if options.get("accumulate_steps"):  # each part is split over the towers
        losses, parts = looked.by_hand([2, 2, 2, 2])
        losses = [(losses[i] + losses[i + 2]) / 2 for i in (0, 1)]
        gradients = [(parts[i] + parts[i + 2]) / 2 for i in (0, 1)]
    else:
        losses, gradients = looked.by_hand(sizes)
    mean = np.average(gradients, axis=0, weights=sizes)
    found = looked.step()
    close = dict(rel=2e-2 if "dtype" in options else 1e-4)
    norms = [np.linalg.norm(g) for g in gradients]
    assert found["tower_examples"].tolist() == sizes
    assert found["tower_loss"] == pytest.approx(losses, **close)
    assert found["tower_gradient_norm"] == pytest.approx(norms, **close)
    assert found["data_gradient_norm"] == pytest.approx(np.linalg.norm(mean), **close)


def test_looking_changes_no_variable_and_no_step():
    given = dict(model="tests.tiny:cnn", num_towers=2, ema_decay=0.5, dtype="mixed_float16")
    states = []
    for looks in False, True:
        run = prepare(tiny.options("unused", **given))
        loop, batches = (
            run.train_loop(telemetry=looks),
            iter(run.data.train.train_batches(7, seed=0)),
        )
        for num_steps in 1, 4:
            loop(batches, tf.constant(num_steps))
        states.append({name: v.numpy() for name, v in run.train_state.variables().items()})
    assert any("seed" in name for name in states[0])
    tiny.assert_identical(*states)


def test_the_times_of_a_step_are_its_parts_and_the_slow_tower_takes_longer():
    looked = Looked(num_towers=2, model=f"{__name__}:uneven_work")
    looked.step()
    clock = tf.timestamp()
    found = looked.step(3)
    wall = float(tf.timestamp() - clock)
    parts = [found[f"{name}_seconds"] for name in ("input_wait", "compute", "gather", "update")]
    assert all(part >= 0 for part in parts)
    assert 0 < sum(parts) <= wall
    fast, slow = found["tower_seconds"]
    assert slow > 1.5 * fast > 0
    assert slow <= found["compute_seconds"] * (1 + 1e-5)
