"""`model.fit` over towers: one table of models with the numbers of one device, and what else it is.

Models are the examples, and what others write: steps, losses, optimizers and inputs of their own.
"""

import copy
import functools
import importlib
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import fits
from tests.fits import layer_of, of_step
from tests.runs import refusal
from towers.training.step import on_towers
from towers.training.step.on_towers import builder_of, unparallelize

pytestmark = pytest.mark.run
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(27, 5)), RANDOM.normal(size=(27, 1))
dense, dropout = keras.layers.Dense, keras.layers.Dropout


# The data.

ARRAYS = {"x": X, "y": Y, "batch_size": 8}  # 27 examples: 8, 8, 8 and 3
VALIDATED = {"batch_size": 8, "validation_split": 0.2}  # of the 27 examples, 8, 8 and 5 are left


def validated():
    return {"x": X, "y": Y, **VALIDATED}


def arrays():
    return ARRAYS


def batches_of(x):
    return {"x": tf.data.Dataset.from_tensor_slices((x, Y[:8])).batch(4), "shuffle": False}


def ragged_and_texts():
    rows = tf.RaggedTensor.from_row_lengths(X.ravel()[:20], [3, 0, 5, 1, 2, 4, 4, 1])
    return batches_of({"rows": rows, "text": tf.constant(list("abcaabbc"))})


def sparse():
    return batches_of(tf.sparse.from_dense(np.where(X[:8] > 0, X[:8], 0)))


def in_tf_data():
    return batches_of(X[:8])


# The models.


def network(*makers, **compiled):
    """Return a compiled model with layers of these classes."""
    layers = [dense(6, activation="relu"), *(make() for make in makers), dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


def small(size_in, size_out, *layers):
    """Return a part of a model, with some layers in its middle."""
    parts = [dense(5, activation="tanh"), *layers, dense(size_out)]
    return keras.Sequential([keras.Input((size_in,)), *parts])


def update(tape, loss, optimizer, variables):
    optimizer.apply(tape.gradient(loss, variables), variables)


def adds_losses():
    """Return a layer that adds a mean over the examples and a sum over them, and draws."""

    def call(self, x):
        self.add_loss(0.3 * keras.ops.mean(x**2))
        self.add_loss(0.1 * keras.ops.sum(keras.ops.abs(x)))
        return self.dropout(x)

    return layer_of(call, dropout=lambda: dropout(0.4))


def apart(self, x, _):
    """Return a loss in which examples see each other."""
    codes = self.encoder(x)
    products = tf.matmul(codes, codes, transpose_a=True) + tf.eye(4, dtype=x.dtype)
    return tf.reduce_mean((self.decoder(codes) - x) ** 2) - 0.01 * tf.linalg.logdet(products)


def own_step():
    encoder = functools.partial(dense, 4, activation="tanh")
    return of_step(apart, "adam", encoder=encoder, decoder=lambda: dense(5))


def mean_square(x):
    return tf.reduce_mean(x**2)


def trains_its_variable():
    """Train a tf.Variable of a function that XLA compiles, and only then the weights."""
    shift = tf.Variable(np.ones(5))
    add = tf.function(lambda x: tf.tanh(x + shift), jit_compile=True)

    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = mean_square(self.layer(x) - y)
        shift.assign_sub(0.1 * tape.gradient(loss, shift))
        return mean_square(self.layer(x) - y)

    def make():
        return layer_of(lambda self, x: self.out(add(x) * add(-x)), out=lambda: dense(1))

    return of_step(step, layer=make)


def model_of(methods, loss="mse", optimizer="sgd", **parts):
    """Return a function that makes a compiled model of methods and of parts that are made anew."""

    def build():
        model = type("Own", (keras.Model,), methods)()
        for name, make in parts.items():
            setattr(model, name, make())
        model.compile(optimizer, loss)
        return model

    return build


def gan_step(self, data):
    """Train two networks by two optimizers, with noise and a penalty on the critic's slope."""
    real = data[0]
    noise = keras.random.normal((tf.shape(real)[0], 3), seed=self.noise)
    with tf.GradientTape() as tape:
        fake = self.generator(noise, training=True)
        apart = tf.reduce_mean(self.critic(fake, training=True) - self.critic(real))
        between = (real + fake) / 2
        with tf.GradientTape() as inner:
            inner.watch(between)
            scores = self.critic(between, training=True)
        slopes = tf.norm(inner.gradient(scores, between), axis=1)
        loss = apart + tf.reduce_mean((slopes - 1) ** 2)
    update(tape, loss, self.optimizers[0], self.critic.trainable_variables)
    with tf.GradientTape() as tape:
        deceit = -tf.reduce_mean(self.critic(self.generator(noise, training=True)))
    update(tape, deceit, self.optimizers[1], self.generator.trainable_variables)
    return {"critic": loss, "generator": deceit}


def unequal(self, inputs):
    """Take rows of unequal lengths and texts, by name."""
    sums = tf.reduce_sum(inputs["rows"], axis=1, keepdims=True)
    return self.out(tf.concat([sums, self.table(self.words(inputs["text"]))], axis=1))


def of_sparse():
    inputs = keras.Input((5,), sparse=True)
    model = keras.Model(inputs, dense(1)(dense(3, activation="tanh")(inputs)))
    model.compile("sgd", "mse")
    return model


# The table.


class Case(NamedTuple):
    build: Callable
    data: Callable = arrays
    numbers: Sequence[int] = (3,)
    options: Mapping[str, Any] = MappingProxyType({})  # of parallelize
    plain_first: bool = False
    rare: bool = False  # tried by `scripts/test --all` alone


def with_dropout():
    return network(lambda: dropout(0.3), optimizer="adam")


def with_steps():
    """Return a model on which each step was set."""
    model = network()

    def cubed(data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(model(x, training=True) - y) ** 3)
        update(tape, loss, model.optimizer, model.trainable_variables)
        return {"cube": loss}

    model.train_step = cubed
    model.test_step = lambda data: {"sum": tf.reduce_sum(model(data[0]))}
    model.predict_step = lambda data: 2 * model(data[0] if isinstance(data, tuple) else data)
    return model


def sparing():
    """Spare weights of decay, which Keras knows by an id of their `tf.Variable`."""
    model = network(optimizer=keras.optimizers.AdamW(0.1, weight_decay=0.5))
    model.optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:3])
    model.optimizer.build(model.trainable_variables)
    return model


def example(name, *numbers):
    module = importlib.import_module(f"scripts.examples.{name}")
    given = functools.partial(module.data, size=29)  # 23 to train on: 8, 8 and 7
    return Case(module.build, lambda: given() | VALIDATED, numbers, rare=True)


REPLICATED = {"variables": "replicated"}
CASES = {
    "added losses, BatchNorm": Case(
        lambda: network(adds_losses, keras.layers.BatchNormalization, metrics=["mae"]),
        numbers=(2,),
    ),
    "several steps at once, clipped once": Case(
        lambda: network(
            steps_per_execution=2, optimizer=keras.optimizers.SGD(1.0, 0.9, clipnorm=0.1)
        ), validated,
    ),
    "parts": Case(with_dropout, numbers=(2,), options={"accumulate_steps": 3}, rare=True),
    "XLA": Case(with_dropout, numbers=(2,), options={"jit_compile": True}, rare=True),
    "replicated": Case(with_dropout, options=REPLICATED),
    "replicated, penalties, several steps": Case(
        lambda: network(adds_losses, steps_per_execution=2, optimizer="adam"), numbers=(2,),
        options=REPLICATED,
    ),
    "replicated, own step": Case(own_step, numbers=(4,), options=REPLICATED),
    "steps that are set": Case(with_steps, validated),
    "replicated, weights without decay": Case(sparing, options=REPLICATED),
    "all on one device": Case(with_dropout, options={"devices": ["/cpu:0"] * 3}),
    "own step, fewer examples than towers": Case(own_step, numbers=(4,)),
    "XLA trains its variable": Case(trains_its_variable, in_tf_data),
    "gan": Case(model_of(
        {"train_step": gan_step},
        generator=lambda: small(3, 5, keras.layers.BatchNormalization()),
        critic=lambda: small(5, 1, dropout(0.3, seed=1)),
        noise=lambda: keras.random.SeedGenerator(2),
        optimizers=lambda: (keras.optimizers.Adam(), keras.optimizers.Adam()),
    ), in_tf_data, (2,)),
    "ragged and texts": Case(model_of(
        {"call": unequal}, words=lambda: keras.layers.StringLookup(vocabulary=["a", "b"]),
        table=lambda: keras.layers.Embedding(3, 4), out=lambda: dense(1),
    ), ragged_and_texts, plain_first=True),
    "example images": example("images", 1, 3, 4),
    "example pairs": example("pairs", 3),
    "example segmentation": example("segmentation", 3),
    "example table": example("table", 3),
    "example text": example("text", 3),
    "example two_outputs": example("two_outputs", 1, 2, 4),
}  # fmt: skip


@functools.cache
def by_keras(build, data, plain_first=False):
    return fits.fit(build, data(), plain_first=plain_first)


def of_table():
    for name, case in CASES.items():
        for number in case.numbers:
            marks = [pytest.mark.extended] if case.rare else []
            yield pytest.param(name, number, marks=marks, id=f"{name} on {number}")


@pytest.mark.filterwarnings("ignore:.*unbuilt state:UserWarning")  # of layers without build()
@pytest.mark.parametrize("name, num_towers", list(of_table()))
def test_towers_have_the_numbers_of_one_device(name, num_towers):
    case = CASES[name]
    expected = by_keras(case.build, case.data, case.plain_first)
    given = {"plain_first": case.plain_first, **case.options}
    found = fits.fit(case.build, case.data(), num_towers, **given)
    assert fits.differences(expected, found) == {}


# What runs on one device, with a line that says why.


def of_outputs(call, **parts):
    """Return a function that makes a model whose loss is made of all outputs of a layer."""
    step = lambda self, x, y: mean_square(self.layer(x)) + tf.reduce_sum(y)  # noqa: E731
    return lambda: of_step(step, layer=lambda: layer_of(call, **parts))


def one_row():
    mean = lambda _, x: keras.ops.mean(x, axis=0, keepdims=True)  # noqa: E731
    return network(lambda: layer_of(mean), loss=lambda _, outputs: keras.ops.sum(outputs**2))


def loop(self, x, y):
    """Compute from a model that has BatchNorm, under a tape."""
    outputs = tf.while_loop(
        lambda i, _: i < 2,
        lambda i, total: (i + 1, total + self.net(x * total, training=True)),
        (0, tf.ones_like(x[:, :1])),
    )
    return mean_square(outputs[1] - y)


def in_windows_of_five():
    """Return a model that takes no other length, and does not say so."""
    call = lambda self, x: self.out(keras.ops.reshape(x, (-1, 5, 1))[:, :2, 0])  # noqa: E731
    layer = lambda: layer_of(call, out=lambda: dense(1))  # noqa: E731
    return of_step(lambda self, x, y: mean_square(self.layer(x) - y), layer=layer)


def ragged_tokens():
    return batches_of(tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7], [8, 1], [2] * 4, [1], [3]]))


ON_ONE_DEVICE = {
    "ConcatOp : Dimension 1": (of_outputs(
        lambda self, x: self.table(x.to_tensor()), table=lambda: keras.layers.Embedding(9, 3)
    ), ragged_tokens),
    "axis=-1": (of_outputs(
        lambda self, x: keras.ops.squeeze(self.out(x)), out=lambda: dense(1)
    ), in_tf_data),
    "sequential": (one_row, in_tf_data),
    "run_eagerly": (lambda: network(optimizer="adam", run_eagerly=True), in_tf_data),
    "train_step of .*: .*BatchNorm": (
        lambda: of_step(loop, net=lambda: network(keras.layers.BatchNormalization)), in_tf_data
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", ON_ONE_DEVICE)
def test_programs_that_towers_cannot_follow_run_on_one_device_with_a_line(why):
    differences, (line,) = fits.compare(*ON_ONE_DEVICE[why], 2)
    assert differences == {} and re.search("runs? on one device", line) and re.search(why, line)


def test_rows_that_values_select_are_joined_in_order():
    select = of_outputs(
        lambda self, x: tf.boolean_mask(self.out(x), x[:, 0] > 0), out=lambda: dense(1)
    )
    assert fits.compare(select, in_tf_data, 3) == ({}, [])


@pytest.mark.parametrize("why", ON_ONE_DEVICE)
def test_one_tower_is_one_device_of_which_nothing_is_said(why):
    assert fits.compare(*ON_ONE_DEVICE[why], 1) == ({}, [])


@pytest.mark.filterwarnings("ignore:.*unbuilt state:UserWarning")  # it has no build()
def test_a_length_that_nothing_tells_is_asked_for(float64):
    model = towers.parallelize(in_windows_of_five(), devices=["/cpu:0", "/cpu:1"])
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    with pytest.warns(UserWarning, match="runs on one device.*tf.ensure_shape"):
        step.get_concrete_function(*(tf.TensorSpec([None, n], tf.float64) for n in (None, 1)))


@pytest.mark.checked
def test_sparse_inputs_have_the_numbers_of_one_device_under_sgd_and_are_told_of():
    expected = fits.fit(of_sparse, sparse())
    with pytest.warns(UserWarning, match="sparse gradient of the weight .*SGD does not"):
        found = fits.fit(of_sparse, sparse(), 3)
    assert fits.differences(expected, found) == {}


@pytest.mark.parametrize("last", ["softmax", lambda x: tf.nn.softmax(x)], ids=["name", "function"])
def test_a_loss_of_probabilities_sees_the_logits_behind_them_as_in_keras(last):
    """Of probabilities themselves nothing is left where a model is sure and wrong."""

    def saturated():
        start = keras.initializers.RandomNormal(0, 40, 1)
        own = [dense(3, kernel_initializer=start), keras.layers.Activation(last)]
        model = keras.Sequential([keras.Input([4]), *own])
        model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy")
        return model

    x = np.random.RandomState(0).normal(size=(10, 4))
    given = {"x": x, "y": np.eye(3)[np.arange(10) % 3], "batch_size": 10, "shuffle": False}
    expected = fits.fit(saturated, given)
    ((_, losses),) = expected["losses"]
    assert losses[0] > 20  # of clipped probabilities it would be 16 at most
    assert fits.differences(expected, fits.fit(saturated, given, 3)) == {}


@pytest.mark.unit
@pytest.mark.parametrize("part", fits.PARTS)
def test_a_small_difference_is_seen_in_each_part(part):
    found = {name: [("zero", np.zeros(2)), ("it", np.array([-3.0, 1.0]))] for name in fits.PARTS}
    assert fits.differences(found, found) == {}
    changed = [*found[part][:1], ("it", np.array([-3.0, 1.0 + 6e-9]))]
    assert list(fits.differences(found, found | {part: changed})) == [part]


# The model stays Keras'.


def test_towers_are_made_once(monkeypatch):
    """TensorFlow traces a step that makes variables twice; with towers they are made outside."""
    made, concat = [], on_towers.concat
    monkeypatch.setattr(on_towers, "concat", lambda *own: (made.append(own), concat(*own))[1])
    counts = []
    for num_towers in 0, 2:
        model = keras.Sequential([keras.Input((5,)), Counted(1)])
        model.compile("adam", "mse", metrics=["mae"])
        if num_towers:
            towers.parallelize(model, num_towers)
        before = model.layers[0].calls
        model.fit(X[:24], Y[:24], batch_size=8, verbose=0)
        counts.append(model.layers[0].calls - before)
    assert len(made) == 1 and counts == [2, 1]


class Counted(keras.layers.Dense):
    """Counts how often it is called; what all towers count is one call."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return super().call(x)


def test_fit_says_that_a_tower_has_no_example():
    model = keras.Sequential([keras.Input((5,)), dense(1)])
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="no example for 1 tower; .* at least 3"):
        towers.parallelize(model, 3).fit(X[:4], Y[:4], batch_size=2, verbose=0)


@pytest.mark.parametrize("kind", ["SGD", "Nadam", "LossScaleOptimizer"])
def test_variables_of_optimizers_have_the_names_of_keras(kind):
    def names(num_towers):
        keras.utils.clear_session()
        optimizer = getattr(keras.optimizers, "SGD" if kind.startswith("Loss") else kind)(0.1)
        if kind.startswith("Loss"):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model = keras.Sequential([keras.Input((5,)), dense(1)])
        model.compile(optimizer, "mse")
        if num_towers:
            towers.parallelize(model, num_towers, "cpu")
        model.fit(X, Y, verbose=0)
        return [variable.path for variable in model.optimizer.variables]

    assert names(2) == names(0)


def test_steps_of_several_models_are_no_retracing(caplog):
    tf.get_logger().addHandler(caplog.handler)
    for _ in range(6):
        model = towers.parallelize(network(), 2)
        tf.function(model.test_step, autograph=False)((X, Y))
        assert not caplog.text
    sizes = tf.function(model.test_step, autograph=False)
    for size in range(2, 8):
        sizes((X[:size], Y[:size]))
    tf.get_logger().removeHandler(caplog.handler)
    assert f"{type(model).__name__}.test_step" in caplog.text


def test_copies_and_files_of_a_parallelized_model_are_plain(tmp_path):
    model = towers.parallelize(network(), 2)
    model.save(tmp_path / "model.keras")
    plain = [
        keras.models.load_model(tmp_path / "model.keras"), keras.models.clone_model(model),
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
    ]  # fmt: skip
    assert builder_of(model)
    for other in plain:
        assert builder_of(other) is None
        assert "train_step" not in vars(other)
    np.testing.assert_allclose(plain[0].predict(X, verbose=0), model.predict(X, verbose=0), 1e-5)


def test_a_model_can_be_compiled_again_and_put_back_on_one_device():
    devices = []

    class Notes(keras.layers.Layer):
        def call(self, x):
            devices.append(x.device)
            return x

    model = towers.parallelize(network(Notes), 2)

    def uses_two():
        devices.clear()
        model.train_on_batch(X, Y)
        assert devices
        return any("CPU:1" in device for device in devices)

    assert uses_two()
    model.compile("adam", "mae")
    assert uses_two()
    unparallelize(model)
    assert not uses_two()


@pytest.mark.graph
def test_bad_arguments_are_refused_in_one_line():
    model = network()
    for given, message in (
        ({"variables": "sharded"}, "replicated"), ({"batch_norm": "global"}, "sync"),
        ({"accumulate_steps": 0}, "accumulate_steps"), ({"devices": "/gpu:0"}, "/gpu:0"),
        ({"devices": []}, "a list with one device for each tower"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message) as error:
            towers.parallelize(model, **given)
        assert "\n" not in str(error.value)
    of_keras_2 = type("Model", (), {"__module__": "tf_keras.src.engine.training"})
    for other, message in (
        (lambda x: x, "not function"), (type("Own", (of_keras_2,), {})(), "not Own of tf_keras"),
    ):  # fmt: skip
        with pytest.raises(towers.InputError, match=f"takes a keras.Model, {message}"):
            towers.parallelize(other)


def test_an_infinity_on_one_tower_skips_the_step_for_all():
    """MirroredStrategy with Keras 3 skips it on one replica alone."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0)
    model = towers.parallelize(network(optimizer=optimizer), 2)
    before = [weight.numpy() for weight in model.weights]
    x = np.ones((8, 5), "float32")
    x[-1] = np.inf  # of the second tower
    model.train_on_batch(x, np.ones((8, 1), "float32"))
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    assert optimizer.dynamic_scale.numpy() == 1.0
    model.train_on_batch(np.ones((8, 5), "float32"), np.zeros((8, 1), "float32"))
    assert any((w.numpy() != v).any() for w, v in zip(model.weights, before, strict=True))


def test_a_number_of_gpus_that_are_not_there_is_refused():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    assert "GPU" in refusal(towers.parallelize, model, num_gpus=2)
    assert "leave out num_gpus" in refusal(towers.parallelize, model, num_gpus=2, num_towers=2)
