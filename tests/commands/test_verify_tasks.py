"""`towers verify` of tasks of all kinds: compiled models, or --loss, on data of any structure."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tasks
from towers import cli

layers = keras.layers


def verified(capsys, model, data, *flags):
    """Return exit code and JSON; models without a module are this one's."""
    model = model if ":" in model else f"{__name__}:{model}"
    small = "--batch_size=8 --steps=2 --num_towers=2,3".split()
    argv = [*small, f"--model={model}", f"--dataset=tests.tasks:{data}", *flags]
    capsys.readouterr()
    code = cli.main(["verify", "--json", *argv])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else err


# ---------------------------------------------------------------------------- What passes

MORE = {
    "images": "--ema_decay=0.9 --variables=sharded",
    "text": "--float32",
    "table": "--validation_fraction=0.2 --accumulate_steps=2",
}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_task_is_the_same_on_towers_as_in_plain_keras(capsys, task):
    code, result = verified(
        capsys, f"tests.tasks:{task}", f"{task}_data", *MORE.get(task, "").split()
    )
    assert code == 0 and result["first_difference"] is None
    assert list(result["max_relative_difference"]) == ["2", "3"]
    assert all(value < 1e-11 for value in result["max_relative_difference"].values())
    kinds = {name.partition("/")[0] for name in result["differences"]}
    assert {"loss", "metric", "model", "optimizer", "evaluation"} <= kinds
    assert ("average" in kinds) == ("ema" in MORE.get(task, ""))
    assert "evaluation/loss" in result["differences"]


def test_a_model_that_flags_compile_passes(capsys):
    flags = "--loss=mean_squared_error --metrics=mae --optimizer=adam --weight_decay=0.01"
    code, result = verified(capsys, "plain_table", "table_data", *flags.split())
    assert code == 0 and {"metric/mae", "evaluation/mae"} <= set(result["differences"])


def plain_table():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])


class InFloat32(layers.Layer):
    """TensorFlow's op has no float64."""

    def call(self, x):
        return tf.nn.local_response_normalization(x[:, None, None])[:, 0, 0]


def no_float64():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(InFloat32()(layers.Dense(6)(inputs))))
    model.compile("adam", "mse")
    return model


def test_what_cannot_be_had_in_float64_is_compared_in_the_runs_own_precision(capsys):
    code, result = verified(capsys, "no_float64", "table_data")
    assert code == 0 and result["dtype"] == "float32"
    assert 0 < result["max_relative_difference"]["3"] < 1e-4


# ---------------------------------------------------------------------------- What fails


class Guilty(layers.Layer):
    """Is wrong on several towers, each kind in its own way."""

    def __init__(self, kind, **kwargs):
        super().__init__(name="guilty", **kwargs)
        self.kind = kind

    def call(self, x, training=False):
        if self.kind == "mixed" or self.kind == "evaluation" and not training:
            return x - keras.ops.mean(x, axis=0)
        if self.kind == "tower" and "tower_1" in tf.get_current_name_scope():
            return x * 1.001
        if self.kind == "draws" and training:
            return x + np.random.normal(size=x.shape[1:]).astype(x.dtype.name)
        return x


def with_layer(kind):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, "tanh"),
            Guilty(kind),
            layers.BatchNormalization(name="norm"),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


class Counting:
    """Counts how often it is called, which is how often a step is traced."""

    calls = 0

    def __call__(self, y, outputs):
        type(self).calls += 1
        return keras.ops.mean(keras.ops.square(y - outputs), axis=-1) * type(self).calls


def stateful_loss():
    model = plain_table()
    model.compile("adam", Counting())
    return model


def stateful_metric():
    model = plain_table()
    model.compile("adam", "mse", metrics=[counted])
    return model


def counted(y, outputs):
    return Counting()(y, outputs)


@pytest.mark.parametrize(
    "model, name, cause",
    [
        ("with_layer --model_args=kind=mixed", "loss", "mixed examples: layer sequential/guilty"),
        ("with_layer --model_args=kind=tower", "loss", "tower-dependent branch: layer sequential/"),
        ("with_layer --model_args=kind=draws", "loss", "state in Python: layer sequential/guilty"),
        ("with_layer --model_args=kind=evaluation", "evaluation/", "evaluation: training is the"),
        ("with_layer --model_args=kind= --batch_norm=local", "loss",
         "local BatchNorm: sequential/norm takes"),
        ("stateful_loss", "loss", "state in Python: a step"),
        ("stateful_metric", "metric/counted", "metric: the loss is the same"),
    ],
)  # fmt: skip
def test_a_fault_is_found_and_named(capsys, model, name, cause):
    model, *flags = model.split()
    code, result = verified(capsys, model, "table_data", "--num_towers=2", *flags)
    first = result["first_difference"]
    assert code == 1 and first["name"].startswith(name)
    assert first["cause"].startswith(cause)
