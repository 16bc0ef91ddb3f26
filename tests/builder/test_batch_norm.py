"""BatchNorm over the global batch, fused, in parts and on GPUs; `test_equality` has the rest."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builder import test_equality as equality
from tests.builder.test_equality import GPUS, LOCAL, THREE, assert_equal, of_towers
from tests.runs import rare
from towers import TowerBuilder
from towers.builder.batch_norm import SyncGroup
from towers.builder.device_names import cpus_for_gpus
from towers.errors import InputError

pytestmark = pytest.mark.run
layers = keras.layers
DEVICES = ["/cpu:1", "/cpu:2", "/cpu:3"]


@pytest.mark.parametrize(
    ("shape", "on_gpus"),
    [((6, 5, 3), False), ((5, 3), True)],
    ids=lambda value: "GPUs" if value is True else str(value),
)
def test_batches_and_maps_of_unknown_size_are_normalized_by_the_fused_kernels(shape, on_gpus):
    def make():
        keras.config.set_dtype_policy("float32")
        pools = {2: [layers.GlobalMaxPooling1D()], 3: [layers.GlobalMaxPooling2D()]}
        first, second = (layers.BatchNormalization(momentum=0.5) for _ in range(2))
        # The gradient meets again in the first.
        body = layers.Dense(3, use_bias=False), first, layers.Dense(3, "softplus", use_bias=False)
        body = *body, second, *pools.get(len(shape), []), layers.Dense(2)
        x = tf.random.stateless_normal([7, *shape], [1, 2], 30.0, 2.0)
        return equality.of_model(equality.sequential([*[None] * (len(shape) - 1), 3], *body), x)

    builder = TowerBuilder(DEVICES, batch_norm="sync")

    def step_of(case):
        specs = [tf.TensorSpec([None] * len(shape) + [3])]
        return tf.function(lambda x: builder.gradients(case.losses, case.weights, x), specs)

    for size in (7, 2) if len(shape) > 1 else (7,):  # of two, a tower gets none
        case = equality.case_of(make)
        step = step_of(case)
        with cpus_for_gpus() if on_gpus else contextlib.nullcontext():
            assert_equal(equality.outcome(case, step, size), equality.of_one_device(make, size))
        ops = {op.type for op in step.get_concrete_function().graph.get_operations()}
        assert "FusedBatchNormV3" in ops


@pytest.mark.parametrize("on_gpus", [False, True], ids=["CPUs", "GPUs"])
def test_large_means_do_not_cancel(on_gpus):
    """Once the moving mean is near it, a mean of 1000 deviations costs no digits in float32."""
    x = tf.random.stateless_normal([64, 3], [0, 0]) + 1000.0
    norms = [layers.BatchNormalization(momentum=0.5) for _ in range(2)]
    for norm in norms:
        norm.build(x.shape)
        norm.moving_mean.assign([1000.0] * 3)
    builder = TowerBuilder(DEVICES[:2], batch_norm="sync")
    loss_fn = lambda x: tf.reduce_sum(norms[0](x, training=True), 1)  # noqa: E731
    with cpus_for_gpus() if on_gpus else contextlib.nullcontext():
        tf.function(lambda x: builder.gradients(loss_fn, [], x))(x)
    norms[1](x, training=True)
    np.testing.assert_allclose(norms[0].moving_variance, norms[1].moving_variance, rtol=1e-5)


@pytest.mark.graph
@pytest.mark.parametrize("mode", ["sync", "local"])
def test_on_gpus_no_more_than_65535_images_reach_a_kernel(mode):
    """By cuDNN's limit for given moments; tables and series have many rows."""
    most = 2 * 65_535
    shapes = {  # of both towers' inputs, and of the kernel's on one
        (most + 2, 3): [1, 65_536, 1, 3],
        (66, 2048, 3): [1, 33 * 2048, 1, 3],
        (66, 2048, 1, 1, 3): [1, 33 * 2048, 1, 3],
        (most, 2, 1, 3): [65_535, 2, 1, 3],
        (most + 2, 2, 1, 3): [1, 2 * 65_536, 1, 3],
        (None, 3): [1, None, 1, 3],
    }
    builder = TowerBuilder(DEVICES[:2], batch_norm=mode)

    for shape, expected in shapes.items():
        layer, axes = layers.BatchNormalization(), list(range(1, len(shape)))
        layer.build(shape)
        loss_fn = lambda x: tf.reduce_sum(layer(x, training=True), axes)  # noqa: B023, E731
        weights = layer.trainable_variables
        step = tf.function(lambda x: builder.gradients(loss_fn, weights, x))  # noqa: B023
        with cpus_for_gpus():
            ops = step.get_concrete_function(tf.TensorSpec(shape)).graph.get_operations()
        kernels = [op for op in ops if op.type.startswith("FusedBatchNorm")]
        of_images = [op for op in kernels if op.get_attr("data_format") == b"NHWC"]
        found = [op.inputs[0].shape.as_list() for op in of_images]
        assert len(found) >= 4 and found == [expected] * len(found), shape


def in_16_bits():
    keras.config.set_dtype_policy("mixed_bfloat16")
    first, second = layers.BatchNormalization(momentum=0.5), layers.BatchNormalization(scale=False)
    body = first, layers.Dense(5, "tanh"), second, layers.Flatten(), layers.Dense(4)
    x = tf.cast(equality.images(16), tf.float32)
    return equality.of_model(equality.sequential((4, 4, 3), *body), x)


@pytest.mark.parametrize("way", [rare(THREE), GPUS], ids=["CPUs", "GPUs"])
def test_mixed_precision_computes_in_16_bits(way):
    found = of_towers(in_16_bits, way)
    expected = equality.of_one_device(in_16_bits)
    statistics = [name for name in found if name.endswith("after step 1")]
    assert len(statistics) == 4
    for name in statistics:
        size = np.max(np.abs(expected[name]))
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-2 * size)


PARTS, MOMENTS = THREE._replace(num_towers=2, parts=2), equality.moments_of_several_layers
TWO_LOCAL = LOCAL._replace(num_towers=2)
of_cpus = functools.cache(of_towers)


@pytest.mark.parametrize(
    ("make", "way", "changes"),
    [
        (MOMENTS, PARTS._replace(known=False), dict(on_gpus=True)),
        rare(MOMENTS, LOCAL, dict(on_gpus=True)), rare(MOMENTS, TWO_LOCAL, dict(by_xla=True)),
        rare(MOMENTS, LOCAL, dict(on_gpus=True, by_xla=True)),
    ],
)  # fmt: skip
def test_numbers_that_depend_on_the_towers_are_those_of_cpus_without_xla(make, way, changes):
    """Those of parts on CPUs: test_equivalence."""
    assert_equal(of_towers(make, way._replace(**changes)), of_cpus(make, way))


@pytest.mark.parametrize("call", [
    lambda layer, x: tf.vectorized_map(lambda row: layer(row[None], training=True)[0], x),
    lambda layer, x: tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, layer(y, training=True)), (0, x))[1],
])  # fmt: skip
@pytest.mark.graph
def test_a_layer_where_towers_cannot_meet_is_refused(call):
    layer = layers.BatchNormalization()
    layer.build((None, 3))
    builder = TowerBuilder(DEVICES, on_warning=lambda _: None)
    step = tf.function(lambda x: builder.concat(lambda x: call(layer, x), x))
    with pytest.raises(InputError, match="batch_norm='local'"):
        step(tf.ones([6, 3]))


@pytest.mark.graph
def test_gradients_that_no_tape_around_the_towers_makes_are_refused():
    net = keras.Sequential([keras.Input((3,)), layers.BatchNormalization()])

    @tf.function
    def step(x):
        joined = TowerBuilder(DEVICES).concat(lambda x: net(x, training=True), x)
        return tf.gradients(tf.reduce_sum(joined**2), [net.layers[0].gamma.value])

    with pytest.raises(InputError, match="from tf.gradients.*open the tape"):
        step(tf.ones([6, 3]))


# The exchange, by the gather device.


def on_towers(fn, *values):
    """Return a step that calls `fn(group, value)` for each value on a tower of its own."""

    @tf.function
    def step(*values):
        exchange, results = SyncGroup([None] * len(values), DEVICES[: len(values)]), []
        for i, value in enumerate(values):
            with tf.device(DEVICES[i]):
                results.append(fn(exchange.handles[i], value))
        exchange.join("/cpu:0")
        return results

    return step.get_concrete_function(*values)


def test_values_are_put_together_once_on_the_gather_device():
    values = tf.constant(1.0), tf.constant(2.0)
    step = on_towers(lambda tower, value: tower.stack(value) * 2, *values)
    np.testing.assert_array_equal(step(*values), [[2.0, 4.0]] * 2)
    (stacked,) = [op for op in step.graph.get_operations() if op.type == "Pack"]
    assert stacked.device.endswith("CPU:0")


def test_towers_that_make_other_calls_are_refused():
    with pytest.raises(ValueError, match="2 of 2 towers exchanged values of 2 shapes"):
        on_towers(lambda tower, value: tower.all_gather(value), tf.zeros([2]), tf.zeros([3]))
    calls = []

    def only_the_first(tower, value):
        calls.append(value)
        return tower.all_gather(value) if len(calls) == 1 else value

    with pytest.raises(ValueError, match="1 of 2 towers exchanged"):
        on_towers(only_the_first, tf.zeros([2]), tf.zeros([2]))


@pytest.mark.unit
def test_towers_that_run_one_after_the_other_are_refused():
    with pytest.raises(ValueError, match="make the whole step a tf.function"):
        SyncGroup([None] * 2, DEVICES[:2]).handles[0].all_gather(tf.zeros([2]))
