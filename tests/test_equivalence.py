"""N towers compute what one device computes: models, options, numbers of towers, several steps.

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
from tests.training.test_update import batches_with_overflow
from towers import TowerBuilder, cli

pytestmark = pytest.mark.graph

TOLERANCE = 1e-9  # in float64, of an array's largest value
FLOOR = 1e-3  # gradients that are zero in theory are not compared with their own rounding


def difference(found, expected):
    """Return the largest difference of {name: array}, relative to each array's largest value."""
    assert found.keys() == expected.keys()
    errors = {}
    for name, value in expected.items():
        value, other = np.float64(value), np.float64(found[name])
        size = max(np.max(np.abs(value), initial=0), FLOOR)
        errors[name] = np.max(np.abs(other - value), initial=0) / size
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return float(np.nan_to_num(errors[worst], nan=np.inf)), worst


def assert_same(found, expected):
    error, name = difference(found, expected)
    assert error <= TOLERANCE, f"{name} differs by {error:.1e}"


def assert_not_same(found, expected):
    assert difference(found, expected)[0] > 1e-4


def on(num_towers, model="tests.tiny:dense", **options):
    return num_towers, {"model": model} | options


DROPOUTS = "tests.zoo.draws:dropouts"
MODELS = {
    "dropouts": on(3, DROPOUTS),
    "frozen": on(4, "tests.zoo.norms:batch_norm_frozen"),
    "lstm": on(3, "tests.zoo.sequences:lstm"),
    "attention": on(2, "tests.zoo.sequences:vision_transformer"),
}
EMBEDDING, PARTLY = "tests.zoo.programs:embedding_twice", "tests.zoo.gradients:partly_used"
RUNS = MODELS | {  # of options that do not hide each other
    "two examples, partly used": on(4, PARTLY, batch_size=2),
    "two examples, sparse": on(4, EMBEDDING, batch_size=2),
    "sgd, clip_global_norm, weight decay, smooth labels, resnet's crops": on(
        2, optimizer="sgd", clip_global_norm=0.1, weight_decay=0.25, label_smoothing=0.2,
        augment="resnet",
    ),
    "momentum, clip_value, two examples": on(4, momentum=0.5, clip_value=0.002, batch_size=2),
    "nesterov, augmentation of all kinds": on(
        3, optimizer="nesterov", augment="shift,cutout=3,color,randaugment", schedule="linear"
    ),
    "adamw, regularizer": on(2, optimizer="adamw", weight_decay=0.25, model_args="l2=0.25"),
    "clip_norm, the tutorial's crops": on(4, clip_norm=0.02, augment="tutorial"),
    "mixed with others": on(
        3, augment="resnet,mixup,cutmix", label_smoothing=0.1, batch_size=7
    ),
    "CutMix in parts, lamb": on(2, augment="none,cutmix", accumulate_steps=2, optimizer="lamb"),
    "sparse slots": on(4, EMBEDDING, optimizer="adamw", weight_decay=0.1),
    "sparse momentum, clipped": on(3, EMBEDDING, optimizer="nesterov", clip_norm=0.02),
    "moments of parts": on(2, "tests.tiny:cnn", accumulate_steps=3),
    "much at once": on(
        3, "tests.tiny:cnn", augment="tutorial", accumulate_steps=2, optimizer="nesterov",
        weight_decay=0.1, clip_global_norm=0.1, label_smoothing=0.1, ema_decay=0.5,
        schedule="onecycle",
    ),
}  # fmt: skip
OVERFLOWING = "tests.training.test_update:overflowing"


def make_loop(num_towers=1, batches=None, loss_scale=None, **options):
    """Return the loop of a run in float64."""
    given = dict(dtype="float64", ema_decay=0.9, learning_rate=0.25) | options
    loop = tiny.Loop(tiny.options("unused", num_towers=num_towers, **given), batches)
    if loss_scale:
        loop.masters.loss_scale = tf.Variable(loss_scale, trainable=False)
        loop.masters.good_steps = tf.Variable(0, trainable=False, dtype=tf.int64)
    return loop


def run(num_towers=1, batches=None, num_steps=3, **options):
    """Return the state after some steps, and the metrics of the last."""
    loop = make_loop(num_towers, batches, **options)
    metrics = loop(num_steps)
    return loop.state(), metrics


@functools.cache
def without_options(model):
    return run(model=model)


RARE = (
    "adamw, regularizer", "CutMix in parts, lamb", "sparse momentum, clipped",
    "two examples, sparse", "nesterov, augmentation of all kinds", "moments of parts",
    "mixed with others", "lstm", "attention",
)  # fmt: skip


@pytest.mark.run
@pytest.mark.parametrize("name", released(RUNS, *RUNS.keys() - set(RARE)))
def test_a_run_is_that_of_one_tower(name):
    num_towers, options = RUNS[name]
    plain, metrics = without_options(options["model"])
    expected = plain
    if name not in MODELS:
        expected, metrics = run(**options)
        biases = [n for n in expected if n.startswith("model/") and n.endswith("bias")]
        # The options do something here.
        assert_not_same({n: expected[n] for n in biases}, {n: plain[n] for n in biases})
    assert expected["step"] == 3 and expected["examples"] == 3 * options.get("batch_size", 7)
    state, found = run(num_towers, **options)
    assert_same(state, expected)
    assert found == pytest.approx(metrics, rel=1e-6)


@pytest.mark.run
@pytest.mark.parametrize("model, num_towers", [(DROPOUTS, 3), (EMBEDDING, 1)])
def test_a_run_in_parts_is_that_of_whole_batches(model, num_towers):
    state, _ = run(num_towers, model=model, accumulate_steps=3)
    assert_same(state, without_options(model)[0])


@pytest.mark.parametrize("num_towers", [1, 4])
def test_batch_norm_sees_a_part_at_a_time(float64, num_towers):
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
    devices = [f"/cpu:{i}" for i in range(num_towers)]
    builder = TowerBuilder(devices, batch_norm="sync", accumulate_steps=3)
    loss, gradients = tf.function(
        lambda x: builder.gradients(losses, model.trainable_variables, x), autograph=False
    )(tf.constant(x))
    found = dict(enumerate(np.array(value) for value in [loss, *gradients, *state]))
    assert_same(found, dict(enumerate(expected)))


@pytest.mark.run
def test_the_loss_scale_and_a_skipped_step_are_those_of_one_tower():
    """The overflow is in the last tower's slice, the second step of four."""
    given = dict(model=OVERFLOWING, batch_size=8, loss_scale=2.0**8, num_steps=4)
    (expected, metrics), (state, found) = (
        run(n, batches_with_overflow({1}), **given) for n in (1, 3)
    )
    assert expected["loss_scale"] == 2**7 and expected["good_steps"] == 2
    assert_same(state, expected)
    assert found == pytest.approx(metrics, rel=1e-6)


def test_clipping_comes_after_the_sum():
    """The update's norm is the limit: with each tower's gradient clipped it would be up to 1.41.

    MirroredStrategy with Keras 3 clips on each of its replicas.
    """
    options = dict(optimizer="sgd", schedule="constant", learning_rate=1.0, clip_norm=1.0)
    loop = make_loop(2, model_args="scale=100,activation=linear", **options)
    before = loop.state()
    assert loop()["gradient_norm"] > 10
    after = loop.state()
    norms = [np.linalg.norm(after[n] - before[n]) for n in after if n.endswith("dense/kernel")]
    assert norms[0] == pytest.approx(1.0, abs=1e-9)


# -------------------------------------------------------------------------------- Compiled models

TASKS = {
    "images": "--num_towers=1,3 --ema_decay=0.9 --variables=sharded",
    "text": "--num_towers=3",
    "table": "--num_towers=2 --validation_fraction=0.2 --accumulate_steps=2",
    "masks": "--num_towers=3",
    "two": "--num_towers=2",
    "several": "--num_towers=2 --float32",
}


@pytest.mark.run
@pytest.mark.parametrize("task", released(tasks.TASKS, "images", "two"))
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


@pytest.mark.run
@pytest.mark.extended
def test_on_gpus_too_keras_squares_each_example_s_row_of_an_embedding(monkeypatch):
    monkeypatch.setenv("TOWERS_CPUS_FOR_GPUS", "1")
    task = "--model=tests.tasks:text --dataset=tests.tasks:text_data --devices=cpu"
    assert cli.main(f"verify {task} --num_towers=2 --batch_size=7 --steps=1".split()) == 0
