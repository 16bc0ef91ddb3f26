"""Outputs of models on towers that are no rows of examples, and steps that fail on towers alone."""

import collections
import dataclasses
import functools
import types
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import fits
from tests.runs import rare
from towers import InputError, TowerBuilder
from towers.training import parallelize

pytestmark = [
    pytest.mark.run,
    pytest.mark.filterwarnings("ignore:.*unbuilt state:UserWarning"),  # of models without build()
]
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(26, 5)), RANDOM.normal(size=(26, 1))
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2"]


@dataclasses.dataclass
class Size:
    width: int


@dataclasses.dataclass
class Features:
    rows: tf.Tensor


class Scale:
    def __init__(self, value):
        self.value = value


class Equal(Scale):
    def __eq__(self, other):
        return self.value == other.value


Named = collections.namedtuple("Named", "rows name")
KEPT = Scale(2.0)


class Returning(keras.Model):
    """Returns what `outputs(x, h)` makes of features h beside its rows; `use` makes a factor."""

    def __init__(self, outputs, use):
        super().__init__()
        self.hidden, self.end = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
        self.outputs_of, self.use = outputs, use

    def call(self, x):
        h = self.hidden(x)
        return {"y": self.end(h), "more": self.outputs_of(x, h)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean((y - y_pred["y"]) ** 2) * (1.5 + self.use(y_pred["more"]))

    def predict_step(self, data):
        found = self(data[0] if isinstance(data, tuple) else data)
        return found["y"] * (1.5 + self.use(found["more"]))


def returning(outputs, use):
    """Return a function that makes a compiled model; a factor of its loss is made of outputs."""

    def build():
        model = Returning(outputs, lambda found: tf.cast(use(found), tf.float64))
        model.compile("sgd")
        return model

    return build


def batches(size=8, more=0):
    """Return batches of a size that is known to the graph, or with a last one of `more` rows."""
    data = tf.data.Dataset.from_tensor_slices((X[: 24 + more], Y[: 24 + more])).batch(size)
    if not more:
        data = data.map(lambda *row: [tf.ensure_shape(x, [size, x.shape[1]]) for x in row])
    return data


def numbers(build, data, num_towers):
    """Return what fit, evaluate and predict give; and the lines that towers say."""
    with fits.in_float64(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        keras.utils.set_random_seed(0)
        model = build()
        if num_towers:
            towers.parallelize(model, devices=DEVICES[:num_towers])
        losses = model.fit(data(), epochs=2, shuffle=False, verbose=0).history["loss"]
        evaluated = model.evaluate(data(), verbose=0)
        predicted = model.predict(data(), verbose=0)
        weights = [weight.numpy() for weight in model.weights]
    package = str(Path(towers.__file__).parent)
    lines = [str(one.message) for one in told if one.filename.startswith(package)]
    return [losses, evaluated, predicted, *weights], lines


def compared(build, data, num_towers):
    """Return the lines that towers say; fail unless their numbers are those of plain Keras."""
    expected, _ = numbers(build, data, 0)
    found, lines = numbers(build, data, num_towers)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
    return lines


# Beside the rows.


def alike(x, h):
    return {
        "python": (h.shape[-1], 0.5, "name", None, True, h.dtype, {1, 2}, np.ones([2]), len),
        "objects": [Size(4), Equal(3.0), KEPT, np.array(["a"]), tf.TensorShape([2])],
        "none": ({}, [], ()),
        "named": Named(h, "h"),
        "input": x,
        "rows": [tf.cast(3 * x, tf.int32), x > 0, tf.strings.as_string(x)],
        "ragged": tf.RaggedTensor.from_tensor(h, padding=9.0),
        "sparse": tf.sparse.from_dense(tf.nn.relu(h)),
    }


def of_all(found):
    width, share, name, nothing, flag, dtype, group, ones, function = found["python"]
    size, equal, kept, names, shape = found["objects"]
    assert nothing is None and flag is True and dtype == "float64" and found["none"] == ({}, [], ())
    python = width * share + function(name) + len(group) + ones.sum()
    objects = size.width + equal.value + kept.value + len(names) + shape[0]
    whole, signs, texts = (tf.cast(x, tf.float64) for x in (
        found["rows"][0], found["rows"][1], tf.strings.length(found["rows"][2])
    ))  # fmt: skip
    rows = tf.reduce_mean(whole) + tf.reduce_mean(signs) + tf.reduce_mean(texts)
    rows += tf.reduce_mean(found["ragged"].flat_values ** 2) + tf.reduce_mean(found["input"])
    rows += tf.sparse.reduce_sum(found["sparse"]) + tf.reduce_mean(found["named"].rows)
    return (python + objects + len(found["named"].name)) / 30 + rows / 20


@pytest.mark.parametrize("num_towers", [rare(1), 2, rare(3)])
@pytest.mark.parametrize("more", [0, 1])
def test_values_that_all_towers_return_are_handed_through(num_towers, more):
    """The last batch has one example if there is one more."""
    assert compared(returning(alike, of_all), lambda: batches(8, more), num_towers) == []


def of_one_part(make):
    """Return outputs that `make` adds to for batches of less than eight."""
    return lambda x, h: make(h) if x.shape[0] < 8 else h


def raising(_):
    raise KeyError("eight")


PARTLY = {
    "output 1 is 4 for one part and 8 for another": (lambda x, h: x.shape[0], lambda n: n / 8),
    r"output 1 is array.* for another": (
        lambda x, h: np.ones([x.shape[0], 1]), lambda ones: ones.sum() / 8
    ),
    "output 1 is Features.* for another": (
        lambda x, h: Features(h), lambda found: tf.reduce_mean(found.rows)
    ),
    "output 1 is <.*Scale object.* for another": (lambda x, h: Scale(2.0), lambda it: it.value),
    "output 1 is <function .* for another": (lambda x, h: lambda: 2.0, lambda it: it()),
    "output 1 is <.*TensorArray": (
        lambda x, h: tf.TensorArray(h.dtype, 1).write(0, h[0, 0]), lambda array: array.read(0)
    ),
    "output 1 is None for one part and a tensor": (
        lambda x, h: None if x.shape[0] < 8 and "tower_0" in h.name else h,
        lambda it: tf.reduce_mean(it)
    ),
    "output 1 has no row for each example; compute": (lambda x, h: tf.reduce_mean(h), lambda m: m),
    "output 1 has no row": (lambda x, h: tf.constant(3.0, h.dtype), lambda it: it),
    "output 1 has no row for each": (
        lambda x, h: tf.concat([h, -h], axis=0), lambda h: h[0, 0] + h[-1, -1]
    ),
    "output 1 has no row for each example": (lambda x, h: tf.repeat(h, 2, 0), lambda h: h[3, 0]),
    "same structure": (
        lambda x, h: {"h": h} if "tower_0" in h.name else h,
        lambda it: tf.reduce_mean(tf.nest.flatten(it)[0]),
    ),
    "with another number of examples|raises KeyError: eight": (
        of_one_part(raising), lambda h: tf.reduce_mean(h)
    ),
}  # fmt: skip


@pytest.mark.parametrize("number, said", list(enumerate(PARTLY)))
def test_what_is_another_in_each_tower_is_made_on_one_device_and_told(number, said):
    lines = compared(returning(*PARTLY[said]), batches, 2)
    one_device = ["runs on one device" in line for line in lines]
    assert lines and all(one_device)
    assert all(pytest.importorskip("re").search(said, line) for line in lines), lines


@pytest.mark.parametrize("said", PARTLY)
def test_one_tower_is_a_plain_call(said):
    assert compared(returning(*PARTLY[said]), batches, 1) == []
