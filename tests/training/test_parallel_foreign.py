"""`model.fit` over towers of what others write: steps of their own, several models, odd inputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(8, 4)), RANDOM.normal(size=(8, 1))
SQUARES = tf.math.squared_difference
dense, dropout = keras.layers.Dense, keras.layers.Dropout


@pytest.fixture(autouse=True)
def all_float64(float64):
    """Let data and losses be float64, too."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def network(size_in, size_out, *layers):
    """Return a small model with some layers in its middle."""
    parts = [dense(5, activation="tanh"), *layers, dense(size_out)]
    return keras.Sequential([keras.Input((size_in,)), *parts])


def update(tape, loss, optimizer, variables):
    optimizer.apply(tape.gradient(loss, variables), variables)


class Gan(keras.Model):
    """Two networks, two optimizers, noise, and a penalty on the critic's slope."""

    def __init__(self):
        super().__init__()
        self.generator = network(3, 4, keras.layers.BatchNormalization())
        self.critic = network(4, 1, dropout(0.3, seed=1))
        self.noise = keras.random.SeedGenerator(2)
        self.optimizers = keras.optimizers.Adam(), keras.optimizers.Adam()

    def _slopes(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            scores = self.critic(x, training=True)
        return tf.norm(tape.gradient(scores, x), axis=1)

    def train_step(self, data):
        real = data[0]
        noise = keras.random.normal((tf.shape(real)[0], 3), seed=self.noise)
        with tf.GradientTape() as tape:
            fake = self.generator(noise, training=True)
            apart = tf.reduce_mean(self.critic(fake, training=True) - self.critic(real))
            loss = apart + tf.reduce_mean((self._slopes((real + fake) / 2) - 1) ** 2)
        update(tape, loss, self.optimizers[0], self.critic.trainable_variables)
        with tf.GradientTape() as tape:
            deceit = -tf.reduce_mean(self.critic(self.generator(noise, training=True)))
        update(tape, deceit, self.optimizers[1], self.generator.trainable_variables)
        return {"critic": loss, "generator": deceit}


class Student(keras.Model):
    """Learns from a frozen teacher, in a loss of its own."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(4, 1, dropout(0.3, seed=1)), network(4, 1)
        self.teacher.trainable = False

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + tf.reduce_mean(SQUARES(y_pred, self.teacher(x)))


class TwoSteps(keras.Model):
    """Goes up the gradient and back within a step (sharpness-aware), and is not built before."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = dense(5), keras.layers.BatchNormalization(), dense(1)

    def call(self, x, training=False):
        return self.out(tf.tanh(self.norm(self.hidden(x), training=training)))

    def _loss(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(SQUARES(self(x, training=True), y))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        x, y = data
        loss, gradients = self._loss(x, y)
        steps = [0.05 * tf.math.l2_normalize(gradient) for gradient in gradients]
        for weight, step in zip(self.trainable_variables, steps, strict=True):
            weight.assign_add(step)
        _, gradients = self._loss(x, y)
        for weight, step in zip(self.trainable_variables, steps, strict=True):
            weight.assign_sub(step)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Compiled(keras.Model):
    """Its step is a `tf.function` with a loop in it, whose trace is kept between calls of `fit`."""

    def __init__(self):
        super().__init__()
        self.network = network(4, 1)
        self.optimizer_within = keras.optimizers.SGD(0.1)

    @tf.function
    def train_step(self, data):
        x, y = data
        variables = self.network.trainable_variables

        def body(i, _):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(SQUARES(self.network(x), y))
            update(tape, loss, self.optimizer_within, variables)
            return i + 1, loss

        zero = tf.constant(0.0, tf.float64)
        return {"loss": tf.while_loop(lambda i, _: i < 2, body, (0, zero))[1]}


class Unequal(keras.Model):
    """Takes rows of unequal lengths and texts, by name."""

    def __init__(self):
        super().__init__()
        self.words = keras.layers.StringLookup(vocabulary=["a", "b"])
        self.table, self.out = keras.layers.Embedding(3, 4), dense(1)

    def call(self, inputs):
        sums = tf.reduce_sum(inputs["rows"], axis=1, keepdims=True)
        return self.out(tf.concat([sums, self.table(self.words(inputs["text"]))], axis=1))


def ragged_and_texts():
    rows = tf.RaggedTensor.from_row_lengths(X.ravel()[:20], [3, 0, 5, 1, 2, 4, 4, 1])
    texts = tf.constant(list("abcaabbc"))
    return tf.data.Dataset.from_tensor_slices(({"rows": rows, "text": texts}, Y)).batch(4)


def sparse():
    rows = tf.sparse.from_dense(np.where(X > 0, X, 0))
    return tf.data.Dataset.from_tensor_slices((rows, Y)).batch(4)


def of_sparse():
    inputs = keras.Input((4,), sparse=True)
    return keras.Model(inputs, dense(1)(dense(3, activation="tanh")(inputs)))


def arrays():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def numbers(make, data, num_towers):
    """Return what two fits give, the first on one device, and all variables after them."""
    keras.utils.set_random_seed(3)
    model = make()
    model.compile("sgd", "mse")
    found = list(model.fit(data(), verbose=0).history.values())
    if num_towers:
        towers.parallelize(model, num_towers)
    found += model.fit(data(), verbose=0, epochs=2).history.values()
    variables = [*model.variables, *model.optimizer.variables]
    return [*found, *(np.asarray(variable.numpy(), "float64") for variable in variables)]


@pytest.mark.filterwarnings("ignore:.*shuffle=True.*")
@pytest.mark.parametrize(
    ("make", "data"),
    [
        (Gan, arrays), (Student, arrays), (TwoSteps, arrays), (Compiled, arrays),
        (Unequal, ragged_and_texts), (of_sparse, sparse),
    ],
    ids=["gan", "teacher", "two steps", "tf.function", "ragged and texts", "sparse"],
)  # fmt: skip
def test_models_of_others_have_the_numbers_of_one_device(make, data):
    expected, found = numbers(make, data, 0), numbers(make, data, 3)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_a_scalar_that_has_a_gradient_is_refused_as_an_argument():
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.network = network(4, 1)
            self.scale = self.add_weight(shape=(), name="scale")

        def call(self, x, scale=1.0, training=False):
            return self.network(x) * scale

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                scale = tf.exp(self.scale.value)
                loss = tf.reduce_mean(SQUARES(self(x, scale=scale), y))
            update(tape, loss, self.optimizer, self.trainable_variables)
            return {"loss": loss}

    model = towers.parallelize(Scaled(), 2)
    model.compile("sgd")
    with pytest.raises(towers.InputError, match="hand it over as an argument") as error:
        model.fit(X, Y, verbose=0)
    assert "\n" not in str(error.value)
