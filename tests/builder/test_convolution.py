"""The gradients of kernels by products of matrices are those of TensorFlow."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder
from towers.builder import convolution

pytestmark = pytest.mark.graph


def gradients(convolve, x, kernel, upstream):
    with tf.GradientTape() as tape:
        tape.watch((x, kernel))
        total = tf.reduce_sum(convolve(x, kernel) * upstream)
    return tape.gradient(total, (x, kernel))


@pytest.mark.run
@pytest.mark.parametrize(
    ("image", "kernel", "known"),
    [
        ((1, 1), (1, 1), True),
        ((1, 1), (7, 7), False),
        ((2, 3), (5, 3), True),
        ((2, 3), (7, 7), True),
        ((7, 7), (3, 3), False),
        ((11, 10), (1, 1), False),
        ((11, 10), (5, 3), True),
        ((11, 10), (7, 7), True),
    ],
)
def test_gradients_are_those_of_tensorflow(image, kernel, known):
    random = tf.random.Generator.from_seed(0)
    given = [
        random.normal(shape, dtype=tf.float64)
        for shape in ([3, *image, 4], [*kernel, 4, 5], [3, *image, 5])
    ]
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in given]
    if not known:
        specs[0] = tf.TensorSpec([None, None, None, 4], tf.float64)
    ours = tf.function(lambda *a: gradients(convolution._convolve, *a), input_signature=specs)
    plain = gradients(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), *given)
    for own, other in zip(ours(*given), plain, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-12)


def kernels_ops(image=(4, 4), dtype="mixed_bfloat16", channels=128, by=(1, 1), **options):
    """Return how many ops of a layer's kernel's gradient are convolutions, and how many products.

    Ops that would be computed at a size of maps alone count, too.
    """
    options = {"kernel_size": 3, "padding": "same", **options}
    layer = keras.layers.Conv2D(channels, dtype=dtype, strides=by, **options)
    layer.build([None, *image, channels])
    builder = TowerBuilder(["/cpu:0"])

    @tf.function(input_signature=[tf.TensorSpec([None, *image, channels])])
    def step(x):
        return builder.gradients(
            lambda x: tf.reduce_sum(layer(tf.cast(x, layer.compute_dtype)), [1, 2, 3]),
            [layer.kernel.value],
            x,
        )

    graph = step.get_concrete_function().graph.as_graph_def()
    kinds = [node.op for part in (graph, *graph.library.function) for node in nodes(part)]
    return kinds.count("Conv2DBackpropFilter"), kinds.count("MatMul")


def nodes(part):
    return part.node if hasattr(part, "node") else part.node_def


@pytest.mark.run
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, (0, 9)),
        ({"kernel_size": (1, 5)}, (0, 5)),
        ({"image": (None, None)}, (1, 9)),
        ({"image": (11, 11)}, (1, 0)),
        ({"dtype": "float32"}, (1, 0)),
        ({"channels": 64}, (1, 0)),
        ({"by": (2, 2)}, (1, 0)),
        ({"kernel_size": 2}, (1, 0)),
        ({"padding": "valid"}, (1, 0)),
        ({"dilation_rate": 2}, (1, 0)),
    ],
    ids=str,
)
def test_products_are_for_small_maps_in_16_bits(setting, expected):
    assert kernels_ops(**setting) == expected


def test_as_near_to_the_true_gradient_as_tensorflows_own():
    random = tf.random.Generator.from_seed(0)
    shapes = [20, 7, 7, 128], [3, 3, 128, 128], [20, 7, 7, 128]
    given = [tf.cast(random.normal(shape), tf.bfloat16) for shape in shapes]
    convolve = lambda x, w: tf.nn.conv2d(x, w, 1, "SAME")  # noqa: E731
    true = gradients(convolve, *(tf.cast(t, tf.float64) for t in given))[1]

    def distance(found):
        return float(tf.norm(tf.cast(found, tf.float64) - true) / tf.norm(true))

    ours, own = (distance(gradients(c, *given)[1]) for c in (convolution._convolve, convolve))
    assert ours < 1.1 * own < 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16"])
def test_towers_that_run_eagerly(dtype):
    layer = keras.layers.Conv2D(128, 3, padding="same", dtype=dtype)
    x = keras.random.normal([2, 4, 4, 128], dtype="bfloat16", seed=0)
    layer.build(x.shape)

    def loss(x):
        return tf.reduce_sum(tf.cast(layer(x), tf.float32) ** 2, [1, 2, 3])

    builder = TowerBuilder(["/cpu:0"])
    _, [ours, _] = builder.gradients(loss, [layer.kernel.value, layer.bias.value], x)
    with tf.GradientTape() as tape:
        mean = tf.reduce_mean(loss(x))
    theirs = tape.gradient(mean, layer.kernel.value)
    ours, theirs = (tf.cast(each, tf.float32) for each in (ours, theirs))
    assert tf.norm(ours - theirs) < 0.01 * tf.norm(theirs)
