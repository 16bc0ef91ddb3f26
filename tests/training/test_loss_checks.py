"""What data, model and loss have to do with each other: said before the first step."""

import re

import keras
import numpy as np
import pytest

from tests.runs import refusal
from towers import devices
from towers.data import ArraySplit, Data
from towers.errors import InputError
from towers.options.functions import option_text
from towers.options.run import Options
from towers.training.run import loss_checks
from towers.training.run.setup import assemble, prepare

# Keras warns of some faults itself, in other words.
pytestmark = [pytest.mark.graph, pytest.mark.filterwarnings("ignore::UserWarning")]
layers = keras.layers
SPARSE = "sparse_categorical_crossentropy"
BINARY = "binary_crossentropy"
SIZE = 8


def data_of(*example):
    """Return arrays of SIZE examples, which are one batch, as data of no checked source."""
    y = example[1] if len(example) > 1 else None
    is_label = isinstance(y, np.ndarray) and y.dtype.kind in "iu" and y[0].size == 1
    num_classes = int(max(1 + y.max(), 1)) if is_label else 0
    split = ArraySplit(*example)
    return Data("my:data", split, split, num_classes, tuple(map(str, range(num_classes))))


def lines(make, *example, **options):
    """Return what is said of a model and of arrays before the first step."""
    places = devices.tower_devices(1, "cpu")
    given = dict(model=option_text("model", make), dataset="my:data", batch_size=SIZE, max_steps=1)
    run = assemble(Options(**given, **options), places, data_of(*example))
    batch = next(iter(run.data.train.train_batches(SIZE, seed=0)))
    return loss_checks.check(run.task, batch)


def dense(loss, units, activation=None, metrics=None, *more, **of_head):
    """Return what makes a model of 4 numbers that ends so."""

    def make():
        head = layers.Dense(units, activation, name="head", **of_head)
        model = keras.Sequential([keras.Input((4,)), head, *more])
        model.compile("sgd", loss, metrics=metrics)
        return model

    return make


def sparse(**how):
    return keras.losses.SparseCategoricalCrossentropy(**how)


X = np.random.default_rng(0).normal(size=(SIZE, 4)).astype(np.float32)
CLASSES = np.arange(SIZE) % 3
ONE_HOT = np.eye(3, dtype=np.float32)[CLASSES]
SEVERAL = np.array([[0, 1, 1], [1, 0, 0]] * 4, np.float32)
BITS = np.arange(SIZE) % 2
NUMBERS = X.sum(axis=1)


def two():
    x = keras.Input((4,))
    heads = {"value": layers.Dense(1, name="a"), "kind": layers.Dense(3, name="b")}
    model = keras.Model(x, {name: layer(x) for name, layer in heads.items()})
    model.compile("sgd", {"value": "mse", "kind": sparse(from_logits=True)})
    return model


def bare():
    """A model that is not compiled."""
    return keras.Sequential([keras.Input((4,)), layers.Dense(3)])


# What is refused: a model, data, and the remedy.
WRONG = {
    "no activation": (dense(SPARSE, 3), (X, CLASSES), "SparseCategoricalCrossentropy(from_logits"),
    "softmax of one": (dense("mse", 1, "softmax"), (X, BITS), "or more units"),
    "one-hot": (dense(SPARSE, 3, "softmax"), (X, ONE_HOT), "are one-hot"),
    "too many classes": (dense(SPARSE, 2, "softmax"), (X, CLASSES), "give the last layer 3 units"),
    "no whole numbers": (dense(SPARSE, 3, "softmax"), (X, NUMBERS), "mean_squared_error"),
    "classes": (dense(BINARY, 1, "sigmoid"), (X, CLASSES), f"{SPARSE} and 3 units"),
    "numbers broadcast": (dense("mse", 3), (X, NUMBERS[:, None]), "1 unit, or give a target"),
    "weights of labels": (dense("mse", 1), (X, NUMBERS, SEVERAL), "sample weights (batch, 3)"),
    "no targets": (dense("mse", 1), (X,), "targets none"),
    "other names": (two, (X, {"value": NUMBERS, "sort": CLASSES}), "'sort': '(batch)'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_cannot_be_meant_is_refused_in_one_line(fault):
    make, data, remedy = WRONG[fault]
    assert remedy in refusal(lines, make, *data)


def test_a_softmax_of_logits_is_a_warning():
    (line,) = lines(dense(sparse(from_logits=True), 3, "softmax"), X, CLASSES)
    assert line.startswith("warning     ") and "remove the softmax from the last layer" in line


class OwnStep(keras.Sequential):
    """Brings its targets into form by itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred - y[:, None]))


def own_step():
    model = OwnStep([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", SPARSE)
    return model


def broadcast(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_pred - y_true[:, :1]), axis=-1)


SOUND = {
    "classes": (dense(sparse(from_logits=True), 3, None, ["accuracy"]), X, CLASSES),
    "constrained": (dense(BINARY, 1, kernel_constraint="non_neg"), X, BITS),
    "own loss": (dense(broadcast, 3), X, SEVERAL),
    "own step": (own_step, X, NUMBERS),
    "not compiled": (bare, X, CLASSES),
}  # fmt: skip


@pytest.mark.run
@pytest.mark.parametrize("case", SOUND)
def test_nothing_is_said_of_what_is_sound(case):
    make, *data = SOUND[case]
    assert lines(make, *data) == []


@pytest.mark.run
def test_what_flags_compile_is_named_by_the_flag():
    line = refusal(lines, bare, X, CLASSES, loss="sparse_categorical_crossentropy")
    assert line.startswith("--loss=sparse_categorical_crossentropy: the output layer dense")
    line = refusal(lines, bare, X, CLASSES, metrics="Precision")
    assert "its loss or a metric cannot be computed for this data set" in line
    assert "targets (batch); outputs (batch, 3)" in line


def raises(y_true, y_pred):
    raise ValueError("of my own")


def test_what_the_users_own_loss_raises_is_left_as_it_is():
    with pytest.raises(ValueError) as error:
        lines(dense(raises, 1), X, NUMBERS)
    assert not isinstance(error.value, InputError)
    assert "raises" in [entry.name for entry in error.traceback]


def of_classes(num_classes):
    return keras.Sequential([layers.Dense(num_classes)])


@pytest.mark.parametrize(
    "y, make, words",
    [
        ([0.5, 2] * 6, None, r"needs images.*--model=my_net:build"),
        ([1.0, 2] * 6, of_classes, "y.astype.*--loss=mean_squared_error"),
    ],
)
def test_targets_and_a_model_that_do_not_fit(tmp_path, y, make, words):
    np.savez(tmp_path / "mine.npz", x=np.ones([12, 2]), y=y)
    given = {"model": option_text("model", make)} if make else {}
    given |= dict(dataset=str(tmp_path / "mine.npz"), batch_size=SIZE, max_steps=1)
    assert re.search(words, refusal(prepare, Options(**given)))
