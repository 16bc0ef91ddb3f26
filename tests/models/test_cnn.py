import functools

import numpy as np
import pytest
import tensorflow as tf

from models.cnn import cnn, local_response_normalization

pytestmark = pytest.mark.graph


def value_and_gradient(function, x, upstream):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y, tape.gradient(y, x, upstream)


def test_has_the_tutorials_layers_and_number_of_weights():
    model = cnn()
    assert [layer.name for layer in model.layers] == (
        "images conv1 pool1 relu1 norm1 conv2 norm2 pool2 flatten dense1 dense2 logits".split()
    )
    assert model.get_layer("pool1").output.shape == (None, 12, 12, 64)
    assert model.get_layer("pool2").output.shape == (None, 6, 6, 64)
    # 5*5*3*64+64 + 5*5*64*64+64 + 2304*384+384 + 384*192+192 + 192*10+10
    assert model.count_params() == 1_068_298
    assert len(model.trainable_variables) == 10
    without = cnn(lrn=False)
    assert not [layer for layer in without.layers if "norm" in layer.name]
    assert without.count_params() == 1_068_298


def test_weight_decay_is_the_tutorials_l2_loss_on_the_hidden_dense_layers():
    model = cnn(weight_decay=0.004)
    kernels = [model.get_layer(name).kernel.value for name in ("dense1", "dense2")]
    expected = 0.004 * sum(float(tf.nn.l2_loss(kernel)) for kernel in kernels)
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)
    assert cnn(weight_decay=0).losses == []


@pytest.mark.parametrize("num_channels", [1, 8, 64])
@pytest.mark.parametrize("depth_radius", [0, 4, 5])
@pytest.mark.parametrize("size, bias, alpha", [(1, 1, 0.001 / 9), (100, 1, 0.001 / 9), (1, 2, 0.3)])
def test_lrn_gives_tensorflows_values_and_gradients(num_channels, depth_radius, size, bias, alpha):
    constants = dict(depth_radius=depth_radius, bias=bias, alpha=alpha)
    of_tensorflow = functools.partial(tf.nn.local_response_normalization, beta=0.75)
    for num_examples in (3, 0):
        x = size * tf.random.stateless_normal([num_examples, 5, 4, num_channels], seed=(1, 2))
        upstream = tf.random.stateless_normal(x.shape, seed=(3, 4))
        found, expected = (
            value_and_gradient(functools.partial(function, **constants), x, upstream)
            for function in (local_response_normalization, of_tensorflow)
        )
        for value, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5)
