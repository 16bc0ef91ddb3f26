"""A backward pass that is not linear goes back from the mean loss, as on one device.

Clipping inside of a layer gives another gradient for a sum of losses than for their mean.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers import TowerBuilder, parallelize
from towers.options.run import Options

pytestmark = pytest.mark.graph
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2"]
X = np.random.default_rng(0).normal(size=(7, 6))
Y = np.random.default_rng(1).normal(size=(7, 2))
WEIGHTS = np.random.default_rng(2).uniform(0.1, 3, size=7)  # of examples

BACKWARD = {
    "values": lambda dy: tf.clip_by_value(dy, -0.02, 0.02),
    "norms of rows": lambda dy: tf.clip_by_norm(dy, 0.03, axes=[1]),
    "signs": tf.sign,
}


class Clip(keras.layers.Layer):
    """Returns its input; what comes back from the loss is changed."""

    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind = kind

    def call(self, x):
        return tf.custom_gradient(lambda x: (tf.identity(x), BACKWARD[self.kind]))(x)


def network(num_outputs=2, shape=(6,)):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input(shape), keras.layers.Flatten()])
    for kind, size in zip(BACKWARD, (4, 5, num_outputs), strict=True):
        model.add(keras.layers.Dense(size, "tanh"))
        model.add(Clip(kind))
    return model


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


@pytest.fixture(autouse=True)
def all_in_float64(float64):
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


@pytest.fixture(params=[1, 2, 3])
def num_towers(request):
    return request.param


def losses_of(model):
    def loss_fn(x, y, weights):
        return weights * tf.reduce_mean((model(x, training=True) - y) ** 2, axis=-1)

    return loss_fn


def of_gradients(builder, model, *batch):
    return builder.gradients(losses_of(model), model.trainable_variables, *batch)


def of_outputs(builder, model, x, y, weights):
    with tf.GradientTape() as tape:
        outputs = builder.concat(lambda x: model(x, training=True), x)
        loss = tf.reduce_mean(losses_of(lambda *_, **__: outputs)(x, y, weights))
    return loss, tape.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize("way", [of_gradients, of_outputs])
@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "parts"])
@pytest.mark.parametrize("size", [7, None, "eager"])
def test_gradients_are_those_of_the_mean(num_towers, way, parts, size):
    model = network()
    builder = TowerBuilder(DEVICES[:num_towers], accumulate_steps=parts)
    step = lambda *batch: way(builder, model, *batch)  # noqa: E731
    if size != "eager":
        specs = [tf.TensorSpec([size, *x.shape[1:]], tf.float64) for x in (X, Y, WEIGHTS)]
        step = tf.function(step, input_signature=specs)
    for rows in (7, 2) if size is None else (7,):
        batch = [tf.constant(x[:rows]) for x in (X, Y, WEIGHTS)]
        with tf.GradientTape() as tape:
            expected = tf.reduce_mean(losses_of(model)(*batch))
        loss, gradients = step(*batch)
        assert_close([loss], [expected])
        assert_close(gradients, tape.gradient(expected, model.trainable_variables))


@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "parts"])
def test_fit_is_that_of_keras(num_towers, parts):
    weights = []
    for on_towers in False, True:
        model = network()
        if on_towers:
            parallelize(model, num_towers, accumulate_steps=parts)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, 4, 2, sample_weight=WEIGHTS, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_close(weights[1], weights[0])


def test_float16_keeps_what_it_keeps_on_one_device(num_towers):
    """Of 500 examples: the gradients of some losses underflow in float16, on one device, too."""
    x = tf.constant(np.random.default_rng(4).normal(size=(500, 6)), tf.float16)
    scales = tf.constant(10.0 ** np.random.default_rng(5).uniform(-6, 3, size=(500, 1)), tf.float32)
    layer = keras.layers.Dense(2, dtype="mixed_float16", use_bias=False)
    layer.build((None, 6))

    def loss_fn(x, scales):
        return tf.reduce_sum(tf.cast(layer(x), tf.float32) * scales, axis=-1)

    with tf.GradientTape() as tape:
        mean = tf.reduce_mean(loss_fn(x, scales))
    builder = TowerBuilder(DEVICES[:num_towers])
    _, [found] = tf.function(lambda *batch: builder.gradients(loss_fn, [layer.kernel], *batch))(
        x, scales
    )
    np.testing.assert_allclose(found, tape.gradient(mean, layer.kernel.value), rtol=2e-3)


# Of runs.


def images():
    *splits, num_classes = tiny.images()
    return *((x, y, np.resize(WEIGHTS, len(y))) for x, y in splits), num_classes


def classifier(num_classes, image_shape):
    return network(num_classes, image_shape)


def compiled(num_classes, image_shape):
    model = network(num_classes, image_shape)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


@pytest.mark.run
@pytest.mark.parametrize("make", [classifier, compiled])
@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "parts"])
def test_a_run_is_that_of_keras(num_towers, make, parts):
    sgd = dict(
        optimizer="sgd", schedule="constant", learning_rate=0.1, momentum=0.0, weight_decay=0.0
    )
    options = Options(
        model=f"{__name__}:{make.__name__}", dtype="float64",
        dataset=f"{__name__}:images", num_towers=num_towers, accumulate_steps=parts,
        max_steps=3, augment="none",
        batch_size=7, **(sgd if make is classifier else {}),
    )  # fmt: skip
    loop = tiny.Loop(options)
    task = loop.run.task
    model = compiled(tiny.NUM_CLASSES, tiny.IMAGE_SHAPE)
    model.set_weights([v.numpy() for v in task.model.weights])
    batches = loop.run.data.train.train_batches(7, seed=0)
    for example, draws in batches.take(3):
        model.train_on_batch(*task.prepare(example, draws))
    loop(3)
    assert_close(task.model.get_weights(), model.get_weights())
