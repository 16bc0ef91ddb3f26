"""N towers compute what one device computes: several steps of runs, and compiled models.

A run's steps are compared with those of the run on one tower; `towers verify` compares compiled
models with plain Keras. The same of the builder is in builder/test_equality.py, of `fit` in
training/test_parallelize.py, and of many more models in test_zoo.py.
"""

import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tasks, tiny
from tests.runs import released
from towers import TowerBuilder, cli

pytestmark = pytest.mark.graph

TOLERANCE = 1e-9  # in float64, of an array's largest value
FLOOR = 1e-3  # gradients that are zero in theory are not compared with their own rounding


def assert_same(found, expected):
    """Compare {name: array}, by the largest difference relative to each array's largest value."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        value, other = np.float64(value), np.float64(found[name])
        error = np.max(np.abs(other - value), initial=0)
        error /= max(np.max(np.abs(value), initial=0), FLOOR)
        assert error <= TOLERANCE, f"{name} differs by {error:.1e}"


def on(num_towers, model="tests.tiny:dense", **options):
    return num_towers, {"model": model} | options


DROPOUTS = "tests.zoo.draws:dropout_used_twice"
RUNS = {  # what the rules of updates are: training/test_update.py
    "dropouts": on(3, DROPOUTS),
    "two examples, crops": on(
        4, clip_global_norm=0.1, weight_decay=0.25, label_smoothing=0.2, augment="resnet",
        batch_size=2,
    ),
    "much at once": on(
        2, "tests.tiny:cnn", augment="tutorial", accumulate_steps=2, optimizer="nesterov",
        weight_decay=0.1, clip_global_norm=0.1, label_smoothing=0.1, schedule="onecycle",
    ),
    "a cutout, parts of a batch": on(
        3, augment="resnet,cutout=3", accumulate_steps=2, optimizer="lamb", schedule="linear",
    ),
}  # fmt: skip


def run(num_towers=1, **options):
    """Return the state after three steps in float64, and the metrics of the last."""
    given = dict(dtype="float64", ema_decay=0.9, learning_rate=0.25) | options
    loop = tiny.Loop(tiny.options("unused", num_towers=num_towers, **given))
    metrics = loop(3)
    return loop.state(), metrics


@functools.cache
def of_one_tower(name):
    return run(**RUNS[name][1])


@pytest.mark.run
@pytest.mark.parametrize("name", released(RUNS, *list(RUNS)[:2]))
def test_a_run_is_that_of_one_tower(name):
    num_towers, options = RUNS[name]
    expected, metrics = of_one_tower(name)
    assert expected["step"] == 3 and expected["examples"] == 3 * options.get("batch_size", 7)
    state, found = run(num_towers, **options)
    assert_same(state, expected)
    assert found == pytest.approx(metrics, rel=1e-6)


@pytest.mark.run
def test_a_run_in_parts_is_that_of_whole_batches():
    state, _ = run(2, model=DROPOUTS, accumulate_steps=2)
    assert_same(state, of_one_tower("dropouts")[0])


@pytest.mark.run
def test_batch_norm_sees_a_part_at_a_time(float64):
    """Loss, gradients and statistics are the means of parts on one device, by their examples."""
    keras.utils.set_random_seed(0)
    norm = keras.layers.BatchNormalization(momentum=0.5)
    own = [keras.layers.Dense(4, "tanh"), norm, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *own])
    x, state = np.random.default_rng(0).normal(size=(7, 3)), model.non_trainable_variables
    before, expected = [v.numpy() for v in state], 0

    def losses(x):
        return tf.reduce_sum(model(x, training=True) ** 3, axis=1)

    for part in np.array_split(x, 3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(part))
        of_part = [loss, *tape.gradient(loss, [w.value for w in model.trainable_variables]), *state]
        expected += np.array([np.array(value) for value in of_part], object) * len(part) / 7
        for v, value in zip(state, before, strict=True):
            v.assign(value)
    devices = [f"/cpu:{i}" for i in range(4)]
    builder = TowerBuilder(devices, batch_norm="sync", accumulate_steps=3)
    loss, gradients = tf.function(
        lambda x: builder.gradients(losses, model.trainable_variables, x), autograph=False
    )(tf.constant(x))
    found = dict(enumerate(np.array(value) for value in [loss, *gradients, *state]))
    assert_same(found, dict(enumerate(expected)))


# -------------------------------------------------------------------------------- Compiled models

TASKS = {
    "images": "--num_towers=2 --ema_decay=0.9 --variables=replicated",
    "text": "--num_towers=3",
    "table": "--num_towers=2 --validation_fraction=0.2 --accumulate_steps=2",
    "masks": "--num_towers=3",
    "two": "--num_towers=2",
}


@pytest.mark.run
@pytest.mark.parametrize("task", released(tasks.TASKS, "images", "text", "two"))
def test_every_task_is_that_of_plain_keras(capsys, task):
    flags = f"--dataset=tests.tasks:{task}_data --batch_size=8 --steps=2 --json {TASKS[task]}"
    assert cli.main(["verify", f"--model=tests.tasks:{task}", *flags.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] and result["first_difference"] is None
    assert all(value < 1e-11 for value in result["max_relative_difference"].values())
    kinds = {name.partition("/")[0] for name in result["differences"]}
    assert {"loss", "metric", "model", "optimizer", "evaluation"} <= kinds
    assert ("average" in kinds) == ("ema" in TASKS[task])
    assert "evaluation/loss" in result["differences"]


LOSSES = {  # beyond those of the tasks
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "weighted": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "ignoring": lambda: keras.losses.SparseCategoricalCrossentropy(True, ignore_class=1),
    "whole": lambda: lambda y, outputs: tf.reduce_mean(y - outputs) ** 2 * tf.ones_like(y[:, 0]),
}


def with_loss(kind):
    layers = keras.layers.Dense(5, "tanh", kernel_regularizer="l2"), keras.layers.Dense(3)
    model = keras.Sequential([keras.Input([4]), *layers])
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), LOSSES[kind]())
    return model


def numbers():
    random = np.random.default_rng(0)
    x, y, weights = random.normal(size=(23, 4)), random.normal(size=(23, 3)), random.random(23)
    return (x, y, weights), (x[:9], y[:9], weights[:9])


def classes():
    return tuple((x, np.arange(len(x)) % 3, weights) for x, _, weights in numbers())


@pytest.mark.run
@pytest.mark.parametrize("kind", released(LOSSES, "weighted", "whole"))
def test_losses_of_all_kinds_are_those_of_plain_keras(capsys, kind):
    data = "classes" if kind == "ignoring" else "numbers"
    flags = f"--model_args=kind={kind} --dataset={__name__}:{data} --batch_size=8 --steps=2 --json"
    argv = ["verify", f"--model={__name__}:with_loss", "--num_towers=3", *flags.split()]
    assert cli.main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] and result["max_relative_difference"]["3"] < 1e-11
