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


def test_the_paper_does_not_count_the_normalizations_of_1001_layers():
    """Each 9 layers add the same number of weights, and the network itself is slow to build."""
    totals, without_norms = [], []
    for depth in (11, 20):
        model = preact_resnet.preact_resnet(depth, bottleneck=True)
        norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
        totals.append(count(model.trainable_variables))
        without_norms.append(totals[-1] - sum(count(x.trainable_variables) for x in norms))
    (total, without) = (a + 110 * (b - a) for a, b in (totals, without_norms))
    assert f"| {total:,} |" in preact_resnet.__doc__
    assert f"{without / 1e6:.1f}" == "10.2"


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


def test_drop_path_skips_a_branch_for_whole_examples_and_keeps_its_mean():
    model = preact_resnet.preact_resnet(8, drop_path=0.3)
    again = preact_resnet.preact_resnet(8, drop_path=0.3)
    assert [layer.name for layer in again.layers] == [layer.name for layer in model.layers]
    of_stages = [model.get_layer(f"stage{stage}_block1_drop_path") for stage in (1, 2, 3)]
    assert [layer.rate for layer in of_stages] == pytest.approx([0.1, 0.2, 0.3])
    ones = np.ones([4000, 2, 1, 3], np.float32)
    np.testing.assert_array_equal(of_stages[-1](ones), ones)
    y = of_stages[-1](ones, training=True).numpy().reshape(4000, -1)
    assert np.all(y == y[:, :1])
    assert set(np.round(y[:, 0], 3)) == {0, np.float32(1.429)}
    assert y.mean() == pytest.approx(1, abs=0.04)


# ResNet.


def test_convolutions_have_no_bias_and_normalization_the_papers_constants():
    model = resnet.resnet(depth=8)
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    assert len(convolutions) == len(norms) == 7
    assert all(x.kernel_size == (3, 3) and not x.use_bias for x in convolutions)
    assert {(x.momentum, x.epsilon) for x in norms} == {(0.9, 1e-5)}
    names = [layer.name for layer in model.layers]
    assert names[:5] == ["images", "conv1", "norm1", "relu1", "stage1_block1_conv1"]
    assert names[-2:] == ["pool", "logits"]


def test_a_block_without_convolution_is_the_identity():
    """With the gammas of a block's last normalization at 0, only the shortcut is left."""
    model = resnet.resnet(depth=8)
    for stage in (1, 2, 3):
        gamma = model.get_layer(f"stage{stage}_block1_norm2").gamma
        gamma.assign(tf.zeros_like(gamma))
    features = keras.Model(
        model.inputs,
        [model.get_layer("relu1").output, model.get_layer("stage3_block1_relu2").output],
    )
    first, last = features(tf.random.stateless_normal([2, 32, 32, 3], seed=(1, 2)))
    np.testing.assert_array_equal(last[..., :16], first[:, ::4, ::4])
    np.testing.assert_array_equal(last[..., 16:], np.zeros([2, 8, 8, 48]))
