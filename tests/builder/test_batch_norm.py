"""BatchNorm over the global batch, and fused: N towers compute what Keras does on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder
from towers.builder.kinds import cpus_for_gpus

DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
GPUS = DEVICES[1:]  # in the block of `cpus_for_gpus`


@pytest.fixture
def gpus():
    """Let logical CPUs stand in for GPUs."""
    with cpus_for_gpus():
        yield


def batch(size=7, seed=0):
    return tf.random.stateless_normal([size, 4, 4, 3], [seed, 0], 5.0, 2.0, tf.float64)


def build(**keywords):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            layers.BatchNormalization(momentum=0.5, **keywords),
            layers.Conv2D(5, 3, activation="tanh"),
            layers.BatchNormalization(momentum=0.9, scale=False, **keywords),
            layers.Flatten(),
            layers.Dense(4, activation="tanh"),
            layers.BatchNormalization(**keywords),
        ],
    )


def loss_of(model):
    return lambda x: tf.reduce_sum(model(x, training=True) ** 3, axis=1)


def on_one_device(model, x):
    """Loss, gradients and statistics of plain Keras."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(loss_of(model)(x))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return [loss, *gradients, *(v.numpy() for v in model.non_trainable_variables)]


def on_towers(model, x, builder, known_size=True, known_maps=True):
    shape = [len(x) if known_size else None, *x.shape[1:]]
    if not known_maps:
        shape = [None] * (len(shape) - 1) + shape[-1:]

    @tf.function(input_signature=[tf.TensorSpec(shape, x.dtype)])
    def step(x):
        return builder.gradients(loss_of(model), model.trainable_variables, x)

    loss, gradients = step(x)
    return [loss, *gradients, *(v.numpy() for v in model.non_trainable_variables)]


def largest_difference(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(np.max(np.abs(f - e)) / max(np.max(np.abs(e)), 1e-3) for f, e in pairs)


@pytest.mark.parametrize("known_size", [True, False], ids=["known size", "unknown size"])
@pytest.mark.parametrize("size, num_towers", [(7, 1), (7, 3), (8, 2), (2, 4)])
def test_sync_is_what_one_device_computes(float64, num_towers, size, known_size):
    x = batch(size)
    expected = on_one_device(build(), x)
    builder = TowerBuilder(DEVICES[:num_towers], batch_norm="sync")
    assert largest_difference(on_towers(build(), x, builder, known_size), expected) < 1e-9


of_shapes = pytest.mark.parametrize(
    "shape, keywords",
    [((3,), {}), ((5, 3), {"scale": False}), ((4, 4, 3), {"center": False}), ((2, 4, 4, 3), {})],
    ids=str,
)


def normalised(shape, **keywords):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.BatchNormalization(momentum=0.5, **keywords)]
    layers += [keras.layers.Dense(4, "tanh"), keras.layers.Flatten(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input(shape), *layers])


@pytest.mark.parametrize("num_towers", [1, 3])
@of_shapes
def test_the_fused_kernels_compute_what_keras_does(num_towers, shape, keywords):
    """In float32, where they are used; a mean of 15 deviations must cost few digits."""
    x = tf.random.stateless_normal([7, *shape], [1, 2], 30.0, 2.0)
    make = functools.partial(normalised, shape, **keywords)
    expected = on_one_device(make(), x)
    found = on_towers(make(), x, TowerBuilder(DEVICES[:num_towers], batch_norm="sync"))
    assert largest_difference(found, expected) < 1e-4


@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("shape", [(5, 3), (6, 5, 3)], ids=str)
def test_maps_of_unknown_size_are_normalised_by_the_fused_kernels(num_towers, shape):
    def model():
        keras.utils.set_random_seed(0)
        unknown = keras.Input([*[None] * (len(shape) - 1), shape[-1]])
        pool = [keras.layers.GlobalMaxPooling1D, keras.layers.GlobalMaxPooling2D]
        normalise = keras.layers.BatchNormalization(momentum=0.5)
        return keras.Sequential([unknown, normalise, pool[len(shape) - 2](), keras.layers.Dense(2)])

    x = tf.random.stateless_normal([7, *shape], [1, 2], 30.0, 2.0)
    builder = TowerBuilder(DEVICES[:num_towers], batch_norm="sync")
    found = on_towers(model(), x, builder, known_maps=False)
    assert largest_difference(found, on_one_device(model(), x)) < 1e-4
    spec = [tf.TensorSpec([None] * len(shape) + [shape[-1]])]
    gradients = tf.function(
        lambda x: builder.gradients(loss_of(own), own.trainable_variables, x), input_signature=spec
    )
    own = model()
    ops = {op.type for op in gradients.get_concrete_function().graph.get_operations()}
    assert "FusedBatchNormV3" in ops


def test_a_layer_that_asks_for_it_is_synchronized_anyway(float64):
    builder = TowerBuilder(DEVICES[:3], batch_norm="local")
    found = on_towers(build(synchronized=True), batch(), builder)
    assert largest_difference(found, on_one_device(build(), batch())) < 1e-9


def test_a_shared_layer_and_another_axis(float64):
    def make():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4, 4, 3))
        norm = keras.layers.BatchNormalization(axis=1, momentum=0.7)
        x = norm(keras.ops.tanh(norm(inputs)))
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))

    found = on_towers(make(), batch(), TowerBuilder(DEVICES[:3], batch_norm="sync"))
    expected = on_one_device(make(), batch())
    statistics = len(make().non_trainable_variables)
    assert largest_difference(found[:-statistics], expected[:-statistics]) < 1e-9
    assert largest_difference(found, expected) < 1e-9


class Positions(keras.layers.Layer):
    """Keeps the positions that are not masked."""

    supports_masking = True

    def call(self, x, mask=None):
        return tf.reshape(x * tf.cast(mask[..., tf.newaxis], x.dtype), [tf.shape(x)[0], 18])


def test_masks(float64):
    """Sequences of other lengths: a step that is masked counts nowhere."""

    def make():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Masking(0.0), keras.layers.BatchNormalization(momentum=0.5)]
        return keras.Sequential([keras.Input((6, 3)), *layers, Positions()])

    x = np.random.default_rng(0).normal(3, 2, (7, 6, 3))
    for i in range(7):
        x[i, i:] = 0
    x = tf.constant(x)
    found = on_towers(make(), x, TowerBuilder(DEVICES[:3], batch_norm="sync"))
    assert largest_difference(found, on_one_device(make(), x)) < 1e-9


def test_large_means_do_not_cancel():
    """Once the moving mean is near it, a mean of 1000 deviations costs no digits in float32."""
    x = tf.random.stateless_normal([64, 3], [0, 0]) + 1000.0
    layers = [keras.layers.BatchNormalization(momentum=0.5) for _ in range(2)]
    for layer in layers:
        layer.build(x.shape)
        layer.moving_mean.assign([1000.0] * 3)
    builder = TowerBuilder(DEVICES[:2], batch_norm="sync")
    loss_fn = lambda x: tf.reduce_sum(layers[0](x, training=True), 1)  # noqa: E731
    tf.function(lambda x: builder.gradients(loss_fn, [], x))(x)
    layers[1](x, training=True)
    np.testing.assert_allclose(layers[0].moving_variance, layers[1].moving_variance, rtol=1e-5)


def test_mixed_precision(float64):
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = tf.cast(batch(16), tf.float32)
    found = on_towers(build(), x, TowerBuilder(DEVICES[:4], batch_norm="sync"))
    expected = on_one_device(build(), x)
    assert largest_difference(found[-6:], expected[-6:]) < 2e-2  # the statistics


# The way of GPUs, which meet by collectives; their weights lie on the first one.


def build_on_gpu(make, *args, **keywords):
    with tf.device(GPUS[0]):
        return make(*args, **keywords)


@pytest.mark.parametrize("known_size", [True, False], ids=["known size", "unknown size"])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("size, num_towers", [(7, 1), (7, 3)])
def test_on_gpus_sync_is_what_one_device_computes(
    float64, gpus, num_towers, size, known_size, accumulate_steps
):
    x = batch(size)
    if accumulate_steps == 2:  # equal parts have equal statistics
        x = tf.concat([x, x[::-1]], axis=0)
    expected = on_one_device(build(), x)
    builder = TowerBuilder(
        GPUS[:num_towers], GPUS[0], batch_norm="sync", accumulate_steps=accumulate_steps
    )
    found = on_towers(build_on_gpu(build), x, builder, known_size)
    if accumulate_steps == 2:  # the variance that is kept is that of fewer values
        found, expected = found[:-6], expected[:-6]
    assert largest_difference(found, expected) < 1e-9


@pytest.mark.parametrize(
    "num_towers, size, known_size", [(1, 7, True), (3, 7, False), (3, 7, True), (3, 9, True)]
)
@of_shapes
def test_on_gpus_the_kernels_of_training_compute_what_keras_does(
    gpus, num_towers, shape, keywords, size, known_size
):
    x = tf.random.stateless_normal([size, *shape], [1, 2], 30.0, 2.0)
    make = functools.partial(normalised, shape, **keywords)
    expected = on_one_device(make(), x)
    builder = TowerBuilder(GPUS[:num_towers], GPUS[0], batch_norm="sync")
    found = on_towers(build_on_gpu(make), x, builder, known_size)
    assert largest_difference(found, expected) < 1e-4


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "local"])
def test_on_gpus_statistics_are_those_of_cpus(mode, accumulate_steps):
    x = tf.cast(batch(7), tf.float32)

    def found_on(devices):
        builder = TowerBuilder(
            devices, devices[0], batch_norm=mode, accumulate_steps=accumulate_steps
        )
        return on_towers(build(), x, builder)

    expected = found_on(DEVICES[:3])
    with cpus_for_gpus():
        assert largest_difference(found_on(GPUS), expected) < 1e-4


def test_on_gpus_a_shared_layer_and_one_that_is_read_again():
    """Of two calls, the second begins with what the first has assigned."""

    def make():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4, 4, 3))
        norm = keras.layers.BatchNormalization(momentum=0.7)
        x = norm(norm(inputs) ** 2 + inputs)
        once = keras.layers.BatchNormalization(momentum=0.7)
        x = once(once(x), training=False)
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))

    x = tf.cast(batch(), tf.float32)
    expected = on_one_device(make(), x)
    with cpus_for_gpus():
        builder = TowerBuilder(GPUS, GPUS[0], batch_norm="sync")
        assert largest_difference(on_towers(make(), x, builder), expected) < 1e-4


def test_on_gpus_mixed_precision_computes_in_16_bits(float64, gpus):
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = tf.cast(batch(16), tf.float32)
    expected = on_one_device(build(), x)
    builder = TowerBuilder(GPUS, GPUS[0], batch_norm="sync")
    model = build()
    found = on_towers(model, x, builder)
    assert largest_difference(found[-6:], expected[-6:]) < 2e-2  # the statistics


@pytest.mark.parametrize("mode, rule", [("sync", "inside of a branch or a loop"), ("local", "")])
def test_on_gpus_a_layer_in_a_loop(gpus, mode, rule):
    layer = keras.layers.BatchNormalization(momentum=0.5)
    layer.build((None, 3))

    def loss_fn(x):
        def body(i, y):
            return i + 1, tf.ensure_shape(layer(y, training=True), [2, 3])

        return tf.reduce_sum(tf.while_loop(lambda i, _: i < 2, body, (0, x))[1], axis=1)

    @tf.function(autograph=False)
    def step(x):
        return TowerBuilder(GPUS, GPUS[0], batch_norm=mode).gradients(loss_fn, [], x)

    if rule:
        with pytest.raises(ValueError, match=rule):
            step(tf.ones([6, 3]))
    else:
        step(tf.ones([6, 3]))  # 0 + 1/2, and no change by the second time round
        np.testing.assert_allclose(layer.moving_mean, [0.25] * 3)
