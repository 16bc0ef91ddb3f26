"""Outputs of models on towers that are no rows of examples, and steps that fail on towers alone."""

import collections
import dataclasses
import re
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

pytestmark = [
    pytest.mark.run,
    pytest.mark.checked,
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

    def __init__(self, outputs, use, built):
        super().__init__()
        self.hidden, self.end = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
        if built:
            self.hidden.build([None, 5]), self.end.build([None, 4])
            self.built = True
        self.outputs_of, self.use = outputs, use

    def call(self, x):
        h = self.hidden(x)
        return {"y": self.end(h), "more": self.outputs_of(x, h)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean((y - y_pred["y"]) ** 2) * (1.5 + self.use(y_pred["more"]))

    def predict_step(self, data):
        found = self(data[0] if isinstance(data, tuple) else data)
        return found["y"] * (1.5 + self.use(found["more"]))


def returning(outputs, use, built=False):
    """Return a function that makes a compiled model; a factor of its loss is made of outputs."""

    def build():
        model = Returning(outputs, lambda found: tf.cast(use(found), tf.float64), built)
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
    rows += tf.reduce_mean(found["named"].rows)
    return (python + objects + len(found["named"].name)) / 30 + rows / 20


@pytest.mark.parametrize("num_towers", [rare(1), 2, rare(3)])
@pytest.mark.parametrize("more", [0, 1])
def test_values_that_all_towers_return_are_handed_through(num_towers, more):
    """The last batch has one example if there is one more; Keras builds no such model then."""
    build = returning(alike, of_all, built=bool(more))
    assert compared(build, lambda: batches(8, more), num_towers) == []


def of_one_part(make):
    """Return outputs that `make` adds to for batches of less than eight."""
    return lambda x, h: make(h) if x.shape[0] < 8 else h


def raising(_):
    raise KeyError("eight")


PARTLY = {
    r"output 0 is \d for one part and \d for another": (lambda x, h: x.shape[0], lambda n: n / 8),
    r"output 0 is array.* for another": (
        lambda x, h: np.ones([x.shape[0], 1]), lambda ones: ones.sum() / 8
    ),
    "output 0 is Features.* for another": (
        lambda x, h: Features(h), lambda found: tf.reduce_mean(found.rows)
    ),
    "output 0 is <.*Scale object.* for another": (lambda x, h: Scale(2.0), lambda it: it.value),
    "output 0 is <function .* for another": (lambda x, h: lambda: 2.0, lambda it: it()),
    "output 0 is <.*TensorArray": (
        lambda x, h: tf.TensorArray(h.dtype, 1).write(0, h[0, 0]), lambda array: array.read(0)
    ),
    "output 0 is (None for one part and a tensor|a tensor for one part and None)": (
        lambda x, h: None if x.shape[0] < 8 and "tower_0" in h.name else h,
        lambda it: tf.reduce_mean(it)
    ),
    "output 0 has no row for each example; compute": (lambda x, h: tf.reduce_mean(h), lambda m: m),
    "output 0 has no row": (lambda x, h: tf.constant(3.0, h.dtype), lambda it: it),
    "output 0 has no row for each": (
        lambda x, h: tf.concat([h, -h], axis=0), lambda h: h[0, 0] + h[-1, -1]
    ),
    "output 0 has no row for each example": (lambda x, h: tf.repeat(h, 2, 0), lambda h: h[3, 0]),
    "same nested structure": (
        lambda x, h: {"h": h} if "tower_0" in h.name else h,
        lambda it: tf.reduce_mean(tf.nest.flatten(it)[0]),
    ),
    "with another number of examples|raises KeyError on towers: eight": (
        of_one_part(raising), lambda h: tf.reduce_mean(h)
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", PARTLY)
def test_what_is_another_in_each_tower_is_made_on_one_device_and_told(said):
    lines = compared(returning(*PARTLY[said]), batches, 2)
    one_device = ["runs on one device" in line for line in lines]
    assert lines and all(one_device)
    assert all(re.search(said, line) for line in lines), lines


@pytest.mark.parametrize("said", PARTLY)
def test_one_tower_is_a_plain_call(said):
    assert compared(returning(*PARTLY[said]), batches, 1) == []


def test_batches_of_all_sizes_keep_their_values():
    sizes = [4, 7, 1, 3, 8]

    def from_generator():
        parts = np.split(np.arange(23), np.cumsum(sizes)[:-1])
        specs = [tf.TensorSpec([None, n], tf.float64) for n in (5, 1)]
        rows = lambda: ((X[part], Y[part]) for part in parts)  # noqa: E731
        return tf.data.Dataset.from_generator(rows, output_signature=tuple(specs))

    build = returning(lambda x, h: (h.shape[-1], x.shape[0]), lambda found: found[0])
    lines = compared(build, from_generator, 3)
    assert all(re.search("output 1 is . for one part", x) for x in lines), lines


# Builders by hand.


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("compiled", [lambda f: f, tf.function], ids=["eager", "function"])
def test_concat_hands_values_through_and_refuses_others(compiled, taped):
    builder = TowerBuilder(DEVICES[:2], on_warning=lambda line: None)
    found = []

    def call(value):
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x if taped else [])
                found.append(builder.concat(lambda x: {"y": 2 * x, "more": value(x)}, x))
            return found[-1]["y"]

        return compiled(step)(tf.constant(X[:8])).numpy()

    shared = [Size(3), "name", None, 0.5, np.float64(2.0)]
    np.testing.assert_array_equal(call(lambda x: shared), 2 * X[:8])
    assert found[-1]["more"] == shared
    for value in (lambda x: x.shape[0]), (lambda x: Scale(1)):
        with pytest.raises(InputError, match="output 0 is .* return a tensor with a row for each"):
            call(value)
    assert builder.concat(lambda: "a value") == "a value"


# Steps that fail.


def failing(kind, where="tower_1"):
    """Return a model that raises an error in one tower, or everywhere."""

    def outputs(x, h):
        if where in tf.zeros([]).op.name:
            raise kind("not here")
        return h

    return returning(outputs, tf.reduce_mean)


def test_an_error_in_a_tower_alone_is_told_with_its_message():
    lines = compared(failing(AssertionError), batches, 2)
    assert [line.partition(" ")[0] for line in lines] == ["train_step", "test_step", "predict_step"]
    assert all("runs on one device: it raises AssertionError on towers: not" in x for x in lines)


def test_an_error_on_one_device_too_is_the_users_own():
    with pytest.raises(ZeroDivisionError, match="not here") as error:
        numbers(failing(ZeroDivisionError, ""), batches, 2)
    assert error.value.__context__ is None or not isinstance(error.value.__context__, InputError)
    assert error.traceback[-1].name == "outputs"


def test_an_interrupt_is_no_error():
    with pytest.raises(KeyboardInterrupt):
        numbers(failing(KeyboardInterrupt), batches, 2)


def test_a_step_that_was_mended_is_on_towers_again(float64):
    """An error of both is no reason to leave the towers."""
    places, is_wrong = [], [True]

    def outputs(x, h):
        places.append(tf.zeros([]).device)
        if is_wrong[0]:
            raise ValueError("wrong")
        return h

    model = towers.parallelize(returning(outputs, tf.reduce_mean)(), devices=DEVICES[:2])
    with pytest.raises(ValueError, match="wrong"):
        model.fit(batches(), shuffle=False, verbose=0)
    is_wrong[0] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        places.clear()
        model.fit(batches(), shuffle=False, verbose=0)
    assert any("CPU:1" in place for place in places)


# Steps that are put on one device later, and when towers are checked.


def steps_of(model):
    return vars(model)["_tower_steps"]


def test_a_step_can_be_put_on_one_device_between_two_steps():
    def train(num_towers, leaves):
        places = []

        def outputs(x, h):
            places.append(tf.zeros([]).device)
            return h

        def leave(batch, logs):
            if batch == 1:
                steps_of(model).run_on_one_device("train_step", "of a whim")
                places.clear()

        with fits.in_float64():
            keras.utils.set_random_seed(0)
            model = returning(outputs, tf.reduce_mean)()
            model.compile("adam")
            if num_towers:
                towers.parallelize(model, devices=DEVICES[:num_towers])
            callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=leave)] * leaves
            model.fit(batches(4), epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
            variables = model.variables + model.optimizer.variables
            return [v.numpy() for v in variables], places

    expected, _ = train(0, False)
    with pytest.warns(UserWarning, match="train_step of model .* runs on one device: of a whim"):
        found, places = train(2, True)
    assert places and not any("CPU:1" in place for place in places)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9)


def noted_checks(model, monkeypatch):
    noted = []
    monkeypatch.setattr(model_checks(model), "after_step", lambda n: noted.append(n) or [])
    return noted


def model_checks(model):
    return steps_of(model).builder.checks


def test_checks_are_made_after_steps_that_were_shown(monkeypatch, float64):
    model = towers.parallelize(returning(lambda x, h: h, tf.reduce_mean)(), devices=DEVICES[:2])
    noted, shown = noted_checks(model, monkeypatch), []

    def show(batch, logs):
        shown.append((batch + 1, list(noted)))

    show = keras.callbacks.LambdaCallback(on_train_batch_end=show)
    model.fit(batches(8), shuffle=False, verbose=0, callbacks=[show])
    assert shown == [(1, []), (2, [1]), (3, [1, 2])] and noted == [1, 2, 3]
    model.evaluate(batches(8), verbose=0)
    assert noted == [1, 2, 3, 3]  # what evaluation has made is checked, too
    model.train_on_batch(X[:8], Y[:8])
    assert noted == [1, 2, 3, 3, 4]
    assert not model_checks(model).is_deferred


def test_predict_and_evaluate_alone_are_checked_at_their_end(monkeypatch, float64):
    for call in "evaluate", "predict":
        model = towers.parallelize(returning(lambda x, h: h, tf.reduce_mean)(), devices=DEVICES[:2])
        noted = noted_checks(model, monkeypatch)
        getattr(model, call)(batches(8), verbose=0)
        assert noted == [3]


def mixing(x, h):
    return h - tf.reduce_mean(h, axis=0, keepdims=True)


@pytest.mark.parametrize("asked", ["warn", "stop", "one_device"])
def test_what_is_done_with_a_model_whose_examples_see_each_other(asked):
    def train(num_towers):
        with fits.in_float64():
            keras.utils.set_random_seed(0)
            model = returning(mixing, lambda h: tf.reduce_mean(h**2))()
            if num_towers:
                towers.parallelize(model, devices=DEVICES[:2], on_inexact=asked)
            return model.fit(batches(8), shuffle=False, verbose=0).history["loss"]

    if asked == "stop":
        with pytest.raises(towers.RunError, match="returning"):
            train(2)
        return
    with pytest.warns(UserWarning) as told:
        found = train(2)
    lines = [str(one.message) for one in told if "towers" in one.filename]
    assert len(lines) == 1 and ("runs on one device" in lines[0]) == (asked == "one_device")
    assert (found == pytest.approx(train(0), rel=1e-9)) == (asked == "one_device")


def test_checks_can_be_left_out(float64):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = returning(mixing, lambda h: tf.reduce_mean(h**2))()
        towers.parallelize(model, devices=DEVICES[:2], check="off").fit(
            batches(), shuffle=False, verbose=0
        )
    for wrong in {"check": "never"}, {"on_inexact": "ignore"}:
        with pytest.raises(ValueError, match="must be one of"):
            towers.parallelize(model, devices=DEVICES[:2], **wrong)
