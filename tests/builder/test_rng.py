"""Draws by example: N towers draw what one device draws for the whole batch."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs import rare
from towers import TowerBuilder
from towers.builder import rng
from towers.builder.rng import BatchSlice, ReplicaRng

pytestmark = pytest.mark.unit
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
SEED = (3, 4)
EXAMPLES = tf.random.stateless_uniform([7, 6, 5], [0, 0])
uniform, normal = tf.random.stateless_uniform, tf.random.stateless_normal
truncated = tf.random.stateless_truncated_normal
DRAWS = {
    "uniform": lambda shape, dtype: uniform(shape, SEED, dtype=dtype),
    "normal": lambda shape, dtype: normal(shape, SEED, dtype=dtype),
    "truncated": lambda shape, dtype: truncated(shape, SEED, dtype=dtype),
    "integers": lambda shape, dtype: uniform(
        shape, SEED, 0, 1000, tf.int64 if dtype == tf.float64 else tf.int32
    ),
    "bits": lambda shape, dtype: uniform(
        shape, SEED, None, None, tf.uint64 if dtype == tf.float64 else tf.uint32
    ),
}


ROWS = st.integers(1, 9)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("name", DRAWS)
@settings(deadline=None, max_examples=15)
@given(before=st.integers(0, 50) | st.just(49_999), size=ROWS, after=st.integers(0, 9), row=ROWS)
def test_a_slice_gets_its_rows_of_the_whole_draw(name, dtype, before, size, after, row):
    whole = DRAWS[name]([before + size + after, row], dtype)
    with ReplicaRng(BatchSlice(before, size, before + size + after)).drawing():
        part = DRAWS[name]([size, row], dtype)
    np.testing.assert_array_equal(part, whole[before : before + size])


def test_what_is_not_by_example_is_the_same_in_every_tower_and_windows_belong_to_theirs():
    for shape in [], [3], [7, 5], [6, 2]:
        whole = uniform(shape, SEED)
        with ReplicaRng(BatchSlice(10, 4, 20)).drawing():
            np.testing.assert_array_equal(uniform(shape, SEED), whole)
    whole = uniform([5 * 3, 2, 2], SEED)
    with ReplicaRng(BatchSlice(2, 2, 5)).drawing():
        np.testing.assert_array_equal(uniform([2 * 3, 2, 2], SEED), whole[6:12])


# Layers, over towers.

LAYERS = {
    "Dropout": lambda: keras.layers.Dropout(0.4, seed=1),
    "SpatialDropout1D": lambda: keras.layers.SpatialDropout1D(0.4, seed=1),
    "AlphaDropout": lambda: keras.layers.AlphaDropout(0.4, seed=1),
    "GaussianNoise": lambda: keras.layers.GaussianNoise(0.5, seed=1),
    "MultiHeadAttention": lambda: Attention(),
}


class Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        given = dict(seed=1, kernel_initializer=keras.initializers.GlorotUniform(seed=0))
        self.inner = keras.layers.MultiHeadAttention(2, 3, dropout=0.5, **given)

    def call(self, x, training):
        return self.inner(x, x, training=training)


@pytest.mark.run
@pytest.mark.parametrize(("num_towers", "size"), [rare(4, 7), (3, None)])
def test_layers_draw_for_each_example_what_one_device_draws(num_towers, size):
    plain, own = ({name: make() for name, make in LAYERS.items()} for _ in range(2))
    for layer in (*plain.values(), *own.values()):
        layer(EXAMPLES, training=False)
    expected = [{name: plain[name](EXAMPLES, training=True) for name in plain} for _ in range(2)]
    builder = TowerBuilder(DEVICES[:num_towers])
    fn = lambda x: {name: layer(x, training=True) for name, layer in own.items()}  # noqa: E731
    spec = tf.TensorSpec([size, 6, 5])
    step = tf.function(lambda x: builder.concat(fn, x), [spec], autograph=False)
    found = [step(EXAMPLES) for _ in range(2)]
    for name in LAYERS:
        assert np.abs(expected[0][name] - expected[1][name]).max() > 0  # it draws anew
        for each, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(each[name], other[name], 2e-5, 2e-5, err_msg=name)


# On GPUs.


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_keys_that_are_made_on_the_device_are_tensorflows(dtype, data):
    numbers = st.integers(dtype.min, dtype.max)
    seed = tf.constant([data.draw(numbers), data.draw(numbers)], dtype)
    found = rng.key_and_counter(seed)
    made_by_tensorflow = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    for part, expected in zip(found, made_by_tensorflow, strict=True):
        assert part.dtype == expected.dtype
        np.testing.assert_array_equal(part, expected)


# By XLA.


@pytest.mark.run
def test_a_draw_that_is_another_is_refused():
    weight, builder = tf.Variable(1.0), TowerBuilder(DEVICES[:2], jit_compile=True)
    noise = lambda x: weight * x * tf.random.stateless_truncated_normal([1], [1, 2])  # noqa: E731
    with pytest.raises(ValueError, match="truncated normal"):
        builder.gradients(noise, [weight], tf.ones(4))


@pytest.mark.run
def test_numbers_are_those_of_tensorflows_kernels():
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 4])
    types = tf.float16, tf.bfloat16, tf.float32, tf.float64
    given = [dict(key=key, counter=counter, alg=1, dtype=t, shape=[7, 3, 5]) for t in types]

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def drawn():
        uniform, normal = rng.random_uniform, rng.random_normal
        return [uniform(**own) for own in given], [normal(**own) for own in given]

    for uniform, normal, own in zip(*drawn(), given, strict=True):
        expected = tf.raw_ops.StatelessRandomNormalV2(**own)
        assert normal.dtype == expected.dtype
        np.testing.assert_array_equal(uniform, tf.raw_ops.StatelessRandomUniformV2(**own))
        np.testing.assert_allclose(
            tf.cast(normal, tf.float64), tf.cast(expected, tf.float64), rtol=1e-5, atol=1e-6
        )
