"""`towers verify`: what passes, what fails, and what is said to be the cause."""

import dataclasses
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers import cli
from towers.commands.verify.differences import differences
from towers.commands.verify.runner import TrainRunner
from towers.training.step import update
from towers.training.step.step import Task

pytestmark = pytest.mark.run
layers = keras.layers
IMAGES = "--dataset=tests.tiny:images --augment=standardize"
TABLE = "--dataset=tests.tasks:table_data"  # of compiled models


def command(capsys, model, *argv, data=IMAGES):
    """Verify one of this module's models, or another one that has a module; return its JSON."""
    capsys.readouterr()
    small = f"{data} --batch_size=7 --steps=2 --num_towers=2"
    model = model if ":" in model else f"{__name__}:{model}"
    code = cli.main(["verify", *small.split(), f"--model={model}", "--json", *argv])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def net(image_shape, num_classes, *middle):
    first, head = layers.Dense(3, "tanh"), layers.Dense(num_classes)
    return keras.Sequential([keras.Input(image_shape), layers.Flatten(), first, *middle, head])


# ---------------------------------------------------------------------------- What passes

ALL_OPTIONS = (
    "--augment=tutorial --optimizer=adamw --weight_decay=0.01 --ema_decay=0.9 "
    "--clip_global_norm=0.1 --label_smoothing=0.1 --schedule=cosine --learning_rate=0.1"
).split()


def test_a_sound_model_passes_with_all_options_and_nothing_is_written(capsys, folder):
    before = tiny.files(folder)
    # A bias in front of BatchNorm has a gradient that is nothing but rounding.
    code, result, err = command(capsys, "tests.tiny:cnn", *ALL_OPTIONS)
    assert tiny.files(folder) == before
    assert code == 0 and result["passed"] is True and result["first_difference"] is None
    assert list(result["max_relative_difference"]) == ["2"]
    assert result["max_relative_difference"]["2"] < 1e-11
    names = set(result["differences"])
    of_evaluation = {f"evaluation/{name}" for name in "loss loss_ema accuracy accuracy_ema".split()}
    assert {
        "loss", "optimizer/adam_w/sequential_conv2d_kernel_momentum",
        "average/sequential/conv2d/kernel",
        "model/sequential/batch_normalization/moving_mean",
    } | of_evaluation <= names  # fmt: skip
    assert any(name.startswith("optimizer/") and "momentum" in name for name in names)
    assert "passed      the largest relative difference is" in err
    lines = [line.split() for line in err.splitlines()]
    header = next(line for line in lines if line[:3] == ["largest", "relative", "difference,"])
    assert header[-1] == "2"
    assert ["loss"] in [line[:1] for line in lines]


def plain_table():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])


class InFloat32(layers.Layer):
    """TensorFlow's op has no float64."""

    def call(self, x):
        return tf.nn.local_response_normalization(x[:, None, None])[:, 0, 0]


def no_float64():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6), InFloat32(), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_losses_by_flags_pass(capsys):
    flags = "--loss=mean_squared_error --metrics=mae --optimizer=adam --weight_decay=0.01".split()
    code, result, _ = command(capsys, "plain_table", *flags, data=TABLE)
    assert code == 0 and {"metric/mae", "evaluation/mae"} <= set(result["differences"])


def test_what_cannot_be_had_in_float64_is_compared_in_the_runs_own_precision(capsys):
    code, result, _ = command(capsys, "no_float64", data=TABLE)
    assert code == 0 and result["dtype"] == "float32"
    assert 0 < result["max_relative_difference"]["2"] < 1e-4


# ---------------------------------------------------------------------------- What fails


@tf.custom_gradient
def noisy(x):
    return tf.identity(x), lambda dy: dy * tf.random.uniform(tf.shape(x), dtype=x.dtype)


def random_gradient(num_classes, image_shape):
    return net(image_shape, num_classes, layers.Lambda(lambda x: noisy(x), name="guilty"))


def test_a_fault_is_found_and_named(capsys):
    """Other causes are those of test_verify_fit and of models in tests/zoo."""
    code, result, err = command(capsys, "random_gradient")
    first = result["first_difference"]
    assert code == 1 and result["passed"] is False
    assert first["step"] == 0 and first["name"].startswith("model/")
    assert first["relative_difference"] > 1e-3  # it does not hide in its own noise
    assert first["cause"].startswith("random op:")
    assert f"likely      {first['cause']}" in err


def test_padding_that_counts_is_found_in_evaluation_alone(capsys, monkeypatch):
    """Steps are the same, with parts and averages, too."""
    evaluate = TrainRunner.evaluate

    def all_count(runner, batch):
        example, counted = batch
        assert counted.numpy().tolist() == [1] * 6 + [0]
        return evaluate(runner, (example, counted if runner.num_towers < 2 else counted * 0 + 1))

    monkeypatch.setattr(TrainRunner, "evaluate", all_count)
    flags = (
        "--ema_decay=0.9 --optimizer=adamw --accumulate_steps=3 --clip_norm=0.01 "
        "--dtype=mixed_float16"
    )
    code, result, _ = command(capsys, "tests.tiny:dense", *flags.split())
    first = result["first_difference"]
    assert code == 1 and first["cause"].startswith("evaluation: ")
    assert [first[key] for key in ("name", "step", "num_towers")] == ["evaluation/loss", 1, 2]
    wrong = {name for name, row in result["differences"].items() if row["2"] > 1e-9}
    assert {"evaluation/accuracy", "evaluation/accuracy_ema"} <= wrong
    assert all(name.startswith("evaluation/") for name in wrong)


# ---------------------------------------------------------------------------- Planted faults

IN_TOWER = []  # not empty while a tower is traced


@pytest.fixture
def in_towers(monkeypatch):
    """Note in IN_TOWER that a tower is traced."""
    traced = Task.tower_function

    def noted(task, *batch):
        IN_TOWER.append(True)
        try:
            return traced(task, *batch)
        finally:
            IN_TOWER.pop()

    monkeypatch.setattr(Task, "tower_function", noted)


def clipped(x, times):
    """The identity, whose backward pass clips what comes from a loss that is `times` as large."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda dy: tf.clip_by_value(dy * times, -0.02, 0.02) / times

    return identity(x)


def clips(num_classes, image_shape):
    times = lambda: 7.0 if IN_TOWER else 1.0  # noqa: E731
    return net(image_shape, num_classes, layers.Lambda(lambda x: clipped(x, times())))


def test_a_backward_pass_that_is_not_linear_is_that_of_plain_keras(capsys):
    code, result, _ = command(capsys, "clips", "--num_towers=2,3")
    largest = result["max_relative_difference"]
    assert code == 0 and list(largest) == ["2", "3"] and max(largest.values()) < 1e-11


def test_towers_that_go_back_from_the_sum_are_found(capsys, in_towers):
    """They clip gradients that are as many times too large as there are examples."""
    code, result, _ = command(capsys, "clips", "--num_towers=2,3")
    assert code == 1 and result["passed"] is False
    assert min(result["max_relative_difference"].values()) > 1e-3
    assert result["first_difference"]["name"].startswith("model/")


def sound(num_classes, image_shape):
    """Has all that the faults below touch."""
    middle = (
        layers.BatchNormalization(),
        layers.Dropout(0.4),
        layers.Dense(4, kernel_regularizer="l2"),
    )
    return net(image_shape, num_classes, *middle)


def wrong_loss(monkeypatch):
    right = Task.losses_of
    monkeypatch.setattr(Task, "losses_of", lambda *args: right(*args) * (1 + 1e-6))


def wrong_averages(monkeypatch):
    right = update.update_averages

    def update_averages(train_state, rules, *args):
        right(train_state, dataclasses.replace(rules, ema_decay=rules.ema_decay / 2), *args)

    monkeypatch.setattr(update, "update_averages", update_averages)


def wrong_statistics(monkeypatch):
    norm = layers.BatchNormalization
    right = norm.call

    def call(layer, inputs, training=None, mask=None):
        before, layer.momentum = layer.momentum, 0.98 if IN_TOWER else layer.momentum
        try:
            return right(layer, inputs, training=training, mask=mask)
        finally:
            layer.momentum = before

    monkeypatch.setattr(norm, "call", call)


def wrong_penalty(monkeypatch):
    none = lambda weights, gradients: ([tf.zeros([])], gradients)  # noqa: E731
    monkeypatch.setattr(update, "_regularize", none)


def wrong_masks(monkeypatch):
    """Those of the examples of a tower in reverse."""
    right = layers.Dropout.call

    def call(layer, x, training=False):
        if not IN_TOWER:
            return right(layer, x, training=training)
        return tf.reverse(right(layer, tf.reverse(x, [0]), training=training), [0])

    monkeypatch.setattr(layers.Dropout, "call", call)


FAULTS = {
    "the loss": (wrong_loss, "loss"),
    "averages": (wrong_averages, "average/"),
    "statistics": (wrong_statistics, "model/.*moving_mean"),
    "regularization": (wrong_penalty, "model/"),
    "masks": (wrong_masks, "loss"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(capsys, monkeypatch, in_towers, fault):
    """Without a fault this model passes."""
    plant, name = FAULTS[fault]
    plant(monkeypatch)
    flags = "--ema_decay=0.15 --weight_decay=0.01 --optimizer=momentum".split()
    code, result, _ = command(capsys, "sound", *flags)
    first = result["first_difference"]
    assert code == 1 and result["passed"] is False
    assert first["step"] == 0 and re.match(name, first["name"])


# ---------------------------------------------------------------------------- The comparison

INF, NAN = np.inf, np.nan


@pytest.mark.unit
@pytest.mark.parametrize(
    "expected, found, noise, relative, with_noise",
    [
        (2.0, 2.5, 1.0, 0.25, 0.25),
        ([4.0, 0.0], [4.0, 2.0], 5.0, 0.5, 0.4),
        ([1e-17, 0.0], [-1e-17, 0.0], 1e-5, 2, 2e-12),
        ([0.0, 0.0], [0.0, 4e-16], 1e-3, 1e-10, 4e-13),  # to a millionth of its kind, or to noise
        ([NAN, 1.0], [NAN, 1.0], 0.0, 0, 0),
        ([1.0, 1.0], [NAN, 1.0], 0.0, INF, INF),
        ([1.0, 1.0], [1.0, 1.0, 1.0], 0.0, INF, INF),
        ([1.0, 1.0], None, 0.0, INF, INF),
    ],
)
def test_differences_are_relative_to_the_array_or_to_its_noise(
    expected, found, noise, relative, with_noise
):
    largest = {"gradient/largest": np.array(4.0)}
    expected = {"gradient/it": np.array(expected)} | largest
    found = largest if found is None else {"gradient/it": np.array(found)} | largest
    for of_noise, value in (None, relative), ({"gradient/it": noise}, with_noise):
        first, _ = differences(found, expected, 2, 0, of_noise)
        assert first.relative_difference == pytest.approx(value)
