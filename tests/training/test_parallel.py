"""`model.fit` over towers: the numbers of one device, and a model that stays Keras'."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.training.parallel import builder_of

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(22, 5)), RANDOM.normal(size=(22, 1))


@pytest.fixture
def all_float64(float64):
    """Let data and losses be float64, too."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def network(*layers, **compiled):
    """Return a compiled model with layers of these classes; each has the same initial weights."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([
        keras.Input((5,)), keras.layers.Dense(6, activation="relu"),
        *(make() for make in layers),
        keras.layers.Dense(1),
    ])  # fmt: skip
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


def fitted(model, num_towers=0, epochs=2, **options):
    """Return all numbers of a model that is trained on uneven batches."""
    if num_towers:
        towers.parallelize(model, num_towers, **options)
    keras.utils.set_random_seed(4)
    history = model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0).history
    variables = [*model.variables, *model.optimizer.variables]
    return [*history.values(), *(np.asarray(v.numpy(), "float64") for v in variables)]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


class AddsLosses(keras.layers.Layer):
    """Adds a mean over the examples, a sum over them, and draws."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.4)

    def call(self, x, training=None):
        self.add_loss(0.3 * keras.ops.mean(x**2))
        self.add_loss(0.1 * keras.ops.sum(keras.ops.abs(x)))
        return self.dropout(x, training=training)


class OwnStep(keras.Model):
    """Trains two networks by a step of its own, in which examples see each other."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(5)

    def call(self, x):
        return self.decoder(self.encoder(x))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            codes = self.encoder(x)
            products = tf.matmul(codes, codes, transpose_a=True) + tf.eye(4, dtype=x.dtype)
            apart = tf.linalg.logdet(products)
            loss = tf.reduce_mean((self.decoder(codes) - x) ** 2) - 0.01 * apart
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Positions(keras.layers.Layer):
    """Adds a weight for each position, whose gradient has the same rows for any batch."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(6, 1)

    def call(self, x):
        return x + keras.ops.squeeze(self.table(keras.ops.arange(6)), -1)


def own_step():
    keras.utils.set_random_seed(2)
    model = OwnStep()
    model.compile("adam")
    return model


@pytest.mark.usefixtures("all_float64")
@pytest.mark.parametrize(
    "make",
    [
        lambda: network(AddsLosses, keras.layers.BatchNormalization, metrics=["mae"]),
        lambda: network(steps_per_execution=2, optimizer=keras.optimizers.AdamW(global_clipnorm=1)),
        lambda: network(Positions, optimizer="adam"),
        own_step,
    ],
    ids=["layers", "options", "positions", "own step"],
)
def test_towers_have_the_numbers_of_one_device(make):
    expected = fitted(make())
    for num_towers in (2, 4):
        assert_same(fitted(make(), num_towers), expected)


class MeanOfBatch(keras.layers.Layer):
    """Returns no row for each example."""

    def call(self, x):
        return keras.ops.mean(x, axis=0, keepdims=True)


class HalfOfFour(keras.layers.Layer):
    """Cannot be called with another number of examples."""

    def call(self, x):
        return keras.ops.reshape(x, (8, 6))


@pytest.mark.usefixtures("all_float64")
@pytest.mark.parametrize("layer", [MeanOfBatch, HalfOfFour])
def test_what_cannot_be_called_with_a_part_of_the_batch_runs_on_one_device(layer):
    def fitted_on(num_towers):
        model = network(layer, loss=lambda y, outputs: keras.ops.sum(outputs**2))
        towers.parallelize(model, num_towers)
        history = model.fit(X[:16], Y[:16], batch_size=8, verbose=0).history
        return [*history.values(), *model.get_weights()]

    expected = fitted_on(1)
    with pytest.warns(UserWarning, match="sequential.* runs on one device"):
        assert_same(fitted_on(2), expected)


class LayerByLayer(keras.Model):
    """Calls its layers in the step, one by one, so that a mask goes from one to the next."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(4, 3, mask_zero=True)
        self.rnn, self.top = keras.layers.LSTM(2), keras.layers.Dense(1)

    def call(self, x):
        return self.top(self.rnn(self.embedding(x)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.top(self.rnn(self.embedding(x))) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.usefixtures("all_float64")
def test_masks_go_from_one_layer_of_a_step_to_the_next():
    tokens = RANDOM.integers(0, 4, size=(22, 5))

    def fitted_on(num_towers):
        keras.utils.set_random_seed(2)
        model = LayerByLayer()
        model.compile("sgd")
        if num_towers:
            towers.parallelize(model, num_towers)
        model.fit(tokens, Y, batch_size=8, verbose=0)
        return model.get_weights()

    assert_same(fitted_on(2), fitted_on(0))


def test_a_model_that_runs_eagerly_says_that_it_runs_on_one_device():
    model = network(run_eagerly=True)
    with pytest.warns(UserWarning, match="run_eagerly"):
        found = fitted(model, 2, epochs=1)
    assert_same(found, fitted(network(run_eagerly=True), epochs=1))


class LongestOfBatch(keras.Model):
    """Fails of no example: it makes a loop over the longest row of a batch."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(9, 3, mask_zero=True)
        self.rnn, self.top = keras.layers.LSTM(2), keras.layers.Dense(1)

    def call(self, x):
        return self.top(self.rnn(self.embedding(x.to_tensor())))


@pytest.mark.usefixtures("all_float64")
def test_a_last_batch_may_have_fewer_examples_than_there_are_towers():
    rows = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7], [8, 1]])

    def fitted_on(num_towers):
        keras.utils.set_random_seed(2)
        model = LongestOfBatch()
        model.compile("adam", "mse")
        if num_towers:
            towers.parallelize(model, num_towers)
        losses = model.fit(rows, Y[:5], batch_size=4, verbose=0).history["loss"]
        return [losses, *model.get_weights(), model.predict(rows, batch_size=4, verbose=0)]

    assert_same(fitted_on(3), fitted_on(0))


def test_a_layer_in_which_examples_see_each_other_is_named():
    class Centred(keras.layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, axis=0)

    with pytest.warns(UserWarning, match="mixed examples: layer .*centred"):
        fitted(network(lambda: Centred(name="centred")), 2, epochs=1)


@pytest.mark.usefixtures("all_float64")
@pytest.mark.parametrize(
    "options", [{"accumulate_steps": 3}, {"jit_compile": True}, {"variables": "sharded"}], ids=str
)
def test_options_of_towers_change_no_number(options):
    def make():
        return network(lambda: keras.layers.Dropout(0.3), optimizer="adam")

    assert_same(fitted(make(), 2, **options), fitted(make()))


def test_sharded_weights_and_their_slots_lie_on_the_towers():
    model = network(optimizer="adam")
    fitted(model, 2, variables="sharded", epochs=1)
    places = {weight.value.device for weight in model.trainable_variables}
    assert {place[-5:] for place in places} == {"CPU:0", "CPU:1"}
    slots = model.optimizer._momentums
    for weight, slot in zip(model.trainable_variables, slots, strict=True):
        assert slot.value.device == weight.value.device


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

    model = network(Notes)
    fitted(model, 2)
    assert any("CPU:1" in device for device in devices)
    model.compile("adam", "mae")
    devices.clear()
    model.fit(X, Y, verbose=0)
    assert any("CPU:1" in device for device in devices)
    towers.unparallelize(model)
    devices.clear()
    model.fit(X, Y, verbose=0)
    assert devices and not any("CPU:1" in device for device in devices)


def test_bad_arguments_are_refused_in_one_line():
    for given, message in (
        ({"variables": "everywhere"}, "sharded"), ({"batch_norm": "global"}, "sync"),
        ({"accumulate_steps": 0}, "accumulate_steps"), ({"devices": "/gpu:0"}, "/gpu:0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message) as error:
            towers.parallelize(network(), **given)
        assert "\n" not in str(error.value)
    with pytest.raises(towers.InputError, match="keras.Model"):
        towers.parallelize(lambda x: x)


# What goes wrong under tf.distribute.MirroredStrategy.


@pytest.mark.usefixtures("all_float64")
def test_gradients_are_clipped_once_for_all_towers():
    def make():
        return network(optimizer=keras.optimizers.SGD(1.0, clipnorm=0.1))

    assert_same(fitted(make(), 3), fitted(make()))


@pytest.mark.usefixtures("all_float64")
def test_statistics_of_batch_norm_are_those_of_the_whole_batch():
    def make():
        return network(keras.layers.BatchNormalization)

    assert_same(fitted(make(), 3), fitted(make()))


def test_an_infinity_on_one_tower_skips_the_step_for_all():
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


def saturated(end):
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(3, kernel_initializer=keras.initializers.RandomNormal(0, 40, 1))
    outputs = hidden(inputs)
    if end == "function":
        outputs = Raw()(outputs)
    else:
        outputs = keras.layers.Activation(end)(outputs)
    loss = "binary_crossentropy" if end == "sigmoid" else "categorical_crossentropy"
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


class Raw(keras.layers.Layer):
    def call(self, x):
        return tf.nn.softmax(x)


@pytest.mark.parametrize("end", ["softmax", "sigmoid", "function"])
def test_a_loss_of_probabilities_sees_the_logits_behind_them_as_in_keras(all_float64, end):
    """Of probabilities themselves nothing is left where a model is sure and wrong."""
    x = np.random.RandomState(0).normal(size=(10, 4))
    y = np.eye(3)[np.arange(10) % 3]
    found = []
    for num_towers in (0, 2, 3):
        model = saturated(end)
        if num_towers:
            towers.parallelize(model, devices=[f"/cpu:{i}" for i in range(num_towers)])
        history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
        found.append([history["loss"], *model.get_weights()])
    assert found[0][0][0] > 20  # of clipped probabilities it would be 16 at most
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-9)
