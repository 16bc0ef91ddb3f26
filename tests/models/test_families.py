"""The models against their papers: weights, layers, and the parts that are their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models import densenet, fast, preact_resnet, resnet, resnext, vgg, vit, wide_resnet

pytestmark = pytest.mark.graph


def count(variables):
    return sum(int(np.prod(variable.shape)) for variable in variables)


LARGE = [pytest.mark.run, pytest.mark.extended]  # slow to build


@pytest.mark.parametrize(
    ("module", "name", "in_the_paper", "exactly"),
    [
        (resnet, "resnet20", "0.27", 269_722),
        pytest.param(resnet, "resnet32", "0.46", 464_154, marks=LARGE),
        pytest.param(resnet, "resnet44", "0.66", 658_586, marks=LARGE),
        pytest.param(resnet, "resnet56", "0.85", 853_018, marks=LARGE),
        pytest.param(resnet, "resnet110", "1.7", 1_727_962, marks=LARGE),
        (preact_resnet, "preact_resnet20", None, 269_722),
        pytest.param(preact_resnet, "preact_resnet56", None, 853_018, marks=LARGE),
        pytest.param(preact_resnet, "preact_resnet110", "1.7", 1_727_962, marks=LARGE),
        pytest.param(preact_resnet, "preact_resnet164", "1.7", 1_703_258, marks=LARGE),
        (wide_resnet, "wide_resnet16_4", "2.7", 2_748_890),
        pytest.param(wide_resnet, "wide_resnet28_10", "36.5", 36_479_194, marks=LARGE),
        pytest.param(vgg, "vgg16_bn", None, 14_987_210, marks=pytest.mark.run),
        pytest.param(densenet, "densenet_bc100_12", "0.8", 769_162, marks=pytest.mark.run),
        pytest.param(resnext, "resnext29_8x64d", "34.4", 34_426_698, marks=pytest.mark.run),
        pytest.param(resnext, "resnext29_16x64d", "68.1", 68_155_210, marks=LARGE),
        (vit, "vit_small", None, 2_693_194),
        (fast, "fast", None, 1_971_328),
    ],
)
def test_has_the_papers_number_of_weights(module, name, in_the_paper, exactly):
    model = getattr(module, name)()
    found = count(model.trainable_variables)
    assert found == exactly
    if module is fast:
        assert f"{model.count_params():,} weights, of which {exactly:,} are" in module.__doc__
    else:
        assert f"| {exactly:,} |" in module.__doc__
    if in_the_paper:  # they round down, too: 68.1
        last = 10.0 ** -len(in_the_paper.partition(".")[2])
        assert found / 1e6 == pytest.approx(float(in_the_paper), abs=0.6 * last)
    if module is resnet:
        counted = (keras.layers.Conv2D, keras.layers.Dense)
        depth = sum(isinstance(layer, counted) for layer in model.layers)
        assert name == model.name == f"resnet{depth}"


def test_grouped_convolution_has_the_values_and_gradients_of_keras_own():
    x = tf.random.stateless_normal([2, 7, 6, 6], seed=(1, 2))
    arguments = dict(filters=9, kernel_size=3, strides=2, padding="same", groups=3)
    ours, keras_own = resnext.GroupedConv2D(**arguments), keras.layers.Conv2D(**arguments)
    results = []
    for layer in (keras_own, ours):
        layer.build(x.shape)
        layer.kernel.assign(keras_own.kernel)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(tf.sin(y))
        results.append([y, *tape.gradient(loss, [x, layer.kernel.value])])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# ResNet.
