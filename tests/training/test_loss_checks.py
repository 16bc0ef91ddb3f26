"""What data, model and loss have to do with each other: said before the first step."""

import re

import keras
import numpy as np
import pytest

from tests import tasks
from tests.runs import refusal, released
from towers import cli, devices
from towers.data import ArraySplit, Data
from towers.errors import InputError
from towers.options.inline_objects import option_text
from towers.options.run import Options
from towers.training.run.setup import assemble, prepare
from towers.training.step import loss_checks

# Keras warns of some faults itself, in other words.
pytestmark = [pytest.mark.graph, pytest.mark.filterwarnings("ignore::UserWarning")]
layers = keras.layers
SPARSE, CATEGORICAL = "sparse_categorical_crossentropy", "categorical_crossentropy"
BINARY, BCE = "binary_crossentropy", keras.losses.BinaryCrossentropy
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


def two(loss=None, head=None):
    def make():
        x = keras.Input((4,))
        heads = {"value": layers.Dense(1, name="a"), "kind": layers.Dense(3, head, name="b")}
        model = keras.Model(x, {name: layer(x) for name, layer in heads.items()})
        model.compile("sgd", loss or {"value": "mse", "kind": sparse(from_logits=True)})
        return model

    return make


def bare(activation=None):
    """A model that is not compiled."""
    return lambda: keras.Sequential([keras.Input((4,)), layers.Dense(3, activation)])


BOTH = {"value": NUMBERS, "kind": CLASSES}
ONES = np.ones(SIZE, np.float32)
# What is refused: a model, data, and the remedy.
WRONG = {
    "no activation": (dense(SPARSE, 3), (X, CLASSES), "SparseCategoricalCrossentropy(from_logits"),
    "no activation, by class": (dense(BCE(), 1), (X, BITS), 'activation="sigmoid"'),
    "softmax of one": (dense("mse", 1, "softmax"), (X, BITS), "or more units"),
    "one-hot": (dense(SPARSE, 3, "softmax"), (X, ONE_HOT), "must have rank (ndim)"),
    "too many classes": (dense(SPARSE, 2, "softmax"), (X, CLASSES), "give the last layer 3 units"),
    "from 1": (dense(SPARSE, 3, "softmax"), (X, CLASSES + 1), "from 0, or give the last layer 4"),
    "negative": (dense(SPARSE, 3, "softmax"), (X, CLASSES - 1), "ignore_class=-1"),
    "no whole numbers": (dense(SPARSE, 3, "softmax"), (X, NUMBERS), "mean_squared_error"),
    "-1 and 1": (dense(BINARY, 1, "sigmoid"), (X, BITS * 2 - 1), "takes 0..1: bring them there"),
    "classes": (dense(BINARY, 1, "sigmoid"), (X, CLASSES), f"{SPARSE}, and 3 units"),
    "numbers broadcast": (dense("mse", 3), (X, NUMBERS[:, None]), "1 unit, or a target"),
    "weights of labels": (dense("mse", 1), (X, NUMBERS, SEVERAL), "sample weights (batch, 3)"),
    "weights of a classifier":
        (bare(), (X, CLASSES, ONES[:, None]), "--dataset=my:data: sample weights of shape"),
    "no targets": (dense("mse", 1), (X,), "targets none"),
    "other names": (two(), (X, {"value": NUMBERS, "sort": CLASSES}), "'sort': '(batch)'"),
    "one for two": (two(), (X, NUMBERS), "have different structures"),
    "one of two": (two(), (X, BOTH | {"kind": CLASSES + 1}), "or give the last layer 4 units"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_cannot_be_meant_is_refused_in_one_line(fault):
    make, data, remedy = WRONG[fault]
    assert remedy in refusal(lines, make, *data)


@pytest.mark.parametrize("make", [dense(sparse(from_logits=True), 3, "softmax"), bare("softmax")])
def test_a_softmax_of_logits_is_a_warning(make):
    (line,) = lines(make, X, CLASSES)
    assert line.startswith("warning     ") and "take the softmax off the last layer" in line


class Own(keras.Model):
    """A subclassed model, whose outputs are not known before it is called."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3)
        self.softmax = layers.Softmax()

    def call(self, inputs):
        return self.softmax(self.head(inputs))


class OwnStep(keras.Sequential):
    """Brings its targets into form by itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred - y[:, None]))


def own_class():
    model = Own()
    model.compile("sgd", SPARSE)
    return model


def own_step():
    model = OwnStep([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", SPARSE)
    return model


def broadcast(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_pred - y_true[:, :1]), axis=-1)


def tagger():
    """A class for each token, of which some are no tokens."""
    parts = [layers.Embedding(20, 4, mask_zero=True), layers.TimeDistributed(layers.Dense(3))]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *parts])
    model.compile("sgd", sparse(from_logits=True), weighted_metrics=["accuracy"])
    return model


TOKENS = np.random.default_rng(2).integers(0, 20, (SIZE, 5)).astype(np.int32)
SOUND = {
    "classes": (dense(sparse(from_logits=True), 3, None, ["accuracy"]), X, CLASSES),
    "no class": (dense(sparse(ignore_class=-1), 3, "softmax"), X, CLASSES - 1),
    "one-hot": (dense(CATEGORICAL, 3, "softmax"), X, ONE_HOT),
    "bits": (dense(BINARY, 1, "sigmoid", ["accuracy"]), X, BITS),
    "unknown labels": (dense(BINARY, 3, "sigmoid"), X, SEVERAL - 1, ONES),
    "constrained": (dense(BINARY, 1, kernel_constraint="non_neg"), X, BITS),
    "in another precision":
        (dense(SPARSE, 3, "softmax", None, layers.Activation("linear")), X, CLASSES),
    "flat output": (dense("mae", 1, None, None, layers.Reshape(())), X, NUMBERS),
    "weights of tokens": (tagger, TOKENS, TOKENS % 3, np.ones((SIZE, 5), np.float32)),
    "one weight for two": (two(), X, BOTH, ONES),
    "a loss for one of two": (two({"value": "mse"}), X, {"value": NUMBERS}),
    "own class": (own_class, X, CLASSES),
    "own loss": (dense(broadcast, 3), X, SEVERAL),
    "own step": (own_step, X, NUMBERS),
    "not compiled": (bare(), X, CLASSES),
}  # fmt: skip


@pytest.mark.run
@pytest.mark.parametrize("case", SOUND)
def test_nothing_is_said_of_what_is_sound(case):
    make, *data = SOUND[case]
    assert lines(make, *data) == []


@pytest.mark.run
@pytest.mark.parametrize("name", released(tasks.TASKS, "two", "masks"))
def test_nothing_is_said_of_sound_tasks(name):
    train, _ = getattr(tasks, f"{name}_data")()
    assert lines(getattr(tasks, name), *train) == []


@pytest.mark.run
def test_what_flags_compile_is_named_by_the_flag():
    line = refusal(lines, bare(), X, CLASSES, loss="sparse_categorical_crossentropy")
    assert line.startswith("--loss=sparse_categorical_crossentropy: the output, of layer dense")
    line = refusal(lines, bare(), X, CLASSES, metrics="Precision")
    assert "the metric Precision cannot be computed of this data set" in line
    assert "targets (batch); outputs (batch, 3)" in line


def raises(y_true, y_pred):
    raise ValueError("of my own")


def reshapes(y_true, y_pred):
    return keras.ops.reshape(y_true, (3, 3))


@pytest.mark.parametrize("loss", [raises, reshapes])
def test_what_the_users_own_loss_raises_is_left_as_it_is(loss):
    with pytest.raises(ValueError) as error:
        lines(dense(loss, 1), X, NUMBERS)
    assert not isinstance(error.value, InputError)
    assert loss.__name__ in [entry.name for entry in error.traceback]


def test_training_refuses_before_it_makes_a_folder(tmp_path, capsys):
    flags = "--model=tests.tiny:dense --dataset=tests.tiny:images --num_towers=2 --batch_size=7"
    flags = [*flags.split(), "--loss=sparse_categorical_crossentropy"]
    assert cli.main(["train", *flags, f"--train_dir={tmp_path}/run"]) == 2
    assert "has no activation" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def of_classes(num_classes):
    return keras.Sequential([layers.Dense(num_classes)])


@pytest.mark.parametrize(
    "y, make, words",
    [
        ([0.5, 2] * 6, None, r"has no images.*--model=my_net:build"),
        ([1.0, 2] * 6, of_classes, "y.astype.*--loss=mean_squared_error"),
        (
            [0, 2 * 10**9] * 6,
            of_classes,
            "y: row 1 .*has label 2000000000.*--loss=mean",
        ),
    ],
)
def test_targets_and_a_model_that_do_not_fit(tmp_path, y, make, words):
    np.savez(tmp_path / "mine.npz", x=np.ones([12, 2]), y=y)
    given = {"model": option_text("model", make)} if make else {}
    given |= dict(dataset=str(tmp_path / "mine.npz"), batch_size=SIZE, max_steps=1)
    assert re.search(words, refusal(prepare, Options(**given)))
