"""`towers.verify`: what passes of a compiled model, what fails, and that it stays as it is."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.runs import rare
from towers.commands.verify import fit
from towers.training.step.on_towers import builder_of

pytestmark = pytest.mark.run

layers = keras.layers
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(23, 5)).astype("float32"), RANDOM.integers(0, 3, 23)


def net(*middle, metrics=(), norm=False):
    keras.utils.set_random_seed(1)
    first = [layers.Dense(6, "tanh", kernel_regularizer="l2")]
    norms = [layers.BatchNormalization(name="norm")] if norm else []
    model = keras.Sequential(
        [keras.Input((5,)), *first, *norms, *middle, layers.Dense(3, "softmax")]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=list(metrics))
    return model


def verified(model, x=X, y=Y, **options):
    """Return the result and the lines that were said."""
    said = []
    options = {"num_towers": 2, "steps": 2, "batch_size": 9} | options
    return towers.verify(model, x, y, say=said.append, **options), said


def values(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [variable.numpy() for variable in variables]


def assert_as_before(model, before):
    after = values(model)
    assert len(before) == len(after)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


# ---------------------------------------------------------------------------- What passes


def test_neither_the_reference_nor_towers_are_compiled_by_xla(monkeypatch):
    """On GPUs it is Keras' default, and on new ones it may end the process."""
    model, asked, function = net(), [], tf.function
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)

    def recorded(*args, **kwargs):
        asked.append(kwargs.get("jit_compile"))
        return function(*args, **kwargs)

    monkeypatch.setattr(tf, "function", recorded)
    for dtype in "float64", None:
        assert verified(model, dtype=dtype)[0]["passed"]
    assert False in asked and True not in asked and model.jit_compile is True


def test_a_sound_model_passes_in_float64_throughout_and_stays_as_it_is(monkeypatch):
    """Also with classes that are known by no name."""

    class Inside(layers.Dense):
        pass

    class Loss(keras.Loss):
        def call(self, y, outputs):
            return keras.losses.sparse_categorical_crossentropy(y, outputs)

    def largest(y, outputs):
        return keras.ops.max(outputs, axis=-1)

    inner = keras.Sequential([keras.Input((6,), dtype="float32"), layers.Dense(6, "tanh")])
    model = net(inner, Inside(6, dtype="float32"), layers.Dropout(0.4), norm=True)
    optimizer = keras.optimizers.AdamW(0.01, clipnorm=0.5, use_ema=True, name="own")
    model.compile(optimizer, Loss(), metrics=["accuracy", largest])
    model.fit(X, Y, batch_size=9, verbose=0)
    before, step = values(model), model.train_function
    copies, compare = [], fit.verify_runners
    monkeypatch.setattr(fit, "verify_runners", lambda *a: copies.append(a[0].model) or compare(*a))
    result, said = verified(model, sample_weight=np.arange(23) % 4)
    assert_as_before(model, before)
    assert model.train_function is step and builder_of(model) is None
    assert model.dtype_policy.name == keras.config.floatx() == "float32"
    assert model.layers[2].inputs[0].dtype == "float32"
    assert result["passed"] is True and result["first_difference"] is None
    assert result["dtype"] == "float64" and list(result["max_relative_difference"]) == ["2"]
    assert 0 < result["max_relative_difference"]["2"] < 1e-11
    assert {
        "loss", "metric/accuracy", "metric/largest", "model/norm/moving_mean",
        "optimizer/own/iteration", "evaluation/loss", "evaluation/accuracy", "prediction/0",
    } <= set(result["differences"])  # fmt: skip
    assert said[-1].startswith("passed      the largest relative difference is")
    for layer in copies[0].layers:
        assert layer.compute_dtype == layer.variable_dtype == "float64", layer.name
    assert copies[0].inputs[0].dtype == copies[0].layers[2].inputs[0].dtype == "float64"


class Own(keras.Model):
    """Cannot be copied: nothing tells what it was made of."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, layers.Dense(3, "softmax")

    def call(self, x, training=False):
        return self.head(self.layer(x, training=training))


def test_a_step_that_is_set_on_the_model_is_compared_as_it_is():
    model = net(layers.Dense(4, "tanh"))
    model.compile("sgd", "sparse_categorical_crossentropy")
    of_class, calls = model.train_step, []
    model.train_step = lambda data: calls.append(0) or of_class(data)
    result, said = verified(model)
    assert result["passed"] and result["dtype"] == "float32"
    assert "train_step was set on the object" in said[0] and len(calls) > 1


def test_a_model_that_cannot_be_copied_is_compared_as_it_is_and_restored():
    keras.utils.set_random_seed(1)
    model = Own(keras.Sequential([layers.BatchNormalization(), layers.Dropout(0.3)]))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    towers.parallelize(model, 2)
    builder = builder_of(model)
    model.fit(X, Y, batch_size=9, verbose=0)
    before = values(model)
    result, said = verified(model)
    assert result["passed"] and result["dtype"] == "float32"
    assert 0 < result["max_relative_difference"]["2"] < 1e-4
    assert said[0].startswith("in float64") and "cannot be copied" in said[0]
    assert builder_of(model) is builder
    assert_as_before(model, before)
    model.fit(X, Y, batch_size=9, verbose=0)
    assert model.optimizer.iterations.numpy() == 6


def test_any_data_that_fit_takes_and_several_inputs_and_outputs():
    a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    inside = layers.Dense(4, "tanh")(layers.Concatenate()([a, b]))
    outputs = {"p": layers.Dense(1, name="p")(inside), "q": layers.Dense(2, name="q")(inside)}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("sgd", {"p": "mse", "q": "mae"}, metrics={"p": ["mae"]})
    x, y = {"a": X, "b": X**2}, {"p": X[:, :1], "q": X[:, :2]}
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    generator = (batch for batch in dataset.as_numpy_iterator())
    result, _ = verified(model, generator, None, steps=1)
    assert result["passed"] and result["dtype"] == "float64"
    assert {"prediction/0", "prediction/1"} <= set(result["differences"])


# ---------------------------------------------------------------------------- What fails


class Guilty(layers.Layer):
    """Takes the mean of the batch, or how many examples it has."""

    def __init__(self, kind="mixed", **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def get_config(self):
        return super().get_config() | {"kind": self.kind}

    def call(self, x):
        if self.kind == "number":
            return x * keras.ops.cast(keras.ops.shape(x)[0], x.dtype)
        return x - keras.ops.mean(x, axis=0)


class Counts(keras.metrics.Mean):
    """Adds how often it was traced, by whomever."""

    traces = 0

    def update_state(self, y, outputs, sample_weight=None):
        Counts.traces += 1
        super().update_state(outputs * Counts.traces)


def guilty(kind="mixed"):
    return net(Guilty(kind, name="guilty"))


@pytest.mark.parametrize(
    "make, options, name, cause",
    [
        rare(guilty, {"dtype": None}, "loss", "inexact: layer .*guilty differs"),
        rare(lambda: guilty("number"), {}, "loss", "inexact: layer guilty differs"),
        (lambda: net(norm=True), {"batch_norm": "local"}, "loss",
         'local BatchNorm: norm uses the statistics.*in Python batch_norm="sync"$'),
        (lambda: net(metrics=[Counts(name="counts")]), {}, "metric/counts", "metric: "),
    ],
    ids=["own precision", "number", "local BatchNorm", "metric"],
)  # fmt: skip
def test_a_fault_is_found_and_named(make, options, name, cause):
    result, said = verified(make(), **options)
    first = result["first_difference"]
    assert not result["passed"] and first["name"].startswith(name) and first["num_towers"] == 2
    assert re.match(cause, first["cause"]) and f"likely      {first['cause']}" in said
    assert first["step"] == 0
    assert result["dtype"] == ("float32" if options == {"dtype": None} else "float64")
    assert not said[0].startswith("in float64")


# ---------------------------------------------------------------------------- What is refused


@pytest.mark.graph
def test_bad_input_is_said_in_one_line():
    model, eager = net(), net()
    eager.run_eagerly = True
    for words, given, options in (
        ("takes a keras.Model, not int", 3, {}),
        ("is not compiled", keras.Sequential([layers.Dense(1)]), {}),
        ("run_eagerly=True", eager, {}),
        ("dtype='float16' must be", model, {"dtype": "float16"}),
        ("num_towers=2,1", model, {"num_towers": (2, 1)}),
        ("the loss of .* needs y: call towers.verify", model, {"y": None}),
        ("num_towers=3 and --devices=", model, {"num_towers": (3,), "devices": "/cpu:0,/cpu:1"}),
    ):
        with pytest.raises(towers.InputError, match=words) as error:
            verified(given, **options)
        assert "\n" not in str(error.value)
