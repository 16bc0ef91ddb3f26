"""The families of models against their papers: weights, layers, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models import densenet, preact_resnet, resnext, vgg, vit, wide_resnet

FAMILIES = {
    "preact_resnet": preact_resnet.preact_resnet,
    "wide_resnet": wide_resnet.wide_resnet,
    "vgg": vgg.vgg16_bn,
    "densenet": densenet.densenet_bc,
    "resnext": resnext.resnext,
    "vit": vit.vit,
}


def count(variables):
    return sum(int(np.prod(variable.shape)) for variable in variables)


@pytest.mark.parametrize(
    ("module", "name", "in_the_paper", "exactly"),
    [
        (preact_resnet, "preact_resnet20", None, 269_722),
        (preact_resnet, "preact_resnet56", None, 853_018),
        (preact_resnet, "preact_resnet110", "1.7", 1_727_962),
        (preact_resnet, "preact_resnet164", "1.7", 1_703_258),
        (wide_resnet, "wide_resnet16_4", "2.7", 2_748_890),
        (wide_resnet, "wide_resnet28_10", "36.5", 36_479_194),
        (vgg, "vgg16_bn", None, 14_987_210),
        (densenet, "densenet_bc100_12", "0.8", 769_162),
        (resnext, "resnext29_8x64d", "34.4", 34_426_698),
        (resnext, "resnext29_16x64d", "68.1", 68_155_210),
        (vit, "vit_small", None, 2_693_194),
    ],
)
def test_has_the_papers_number_of_weights(module, name, in_the_paper, exactly):
    found = count(getattr(module, name)().trainable_variables)
    assert found == exactly
    assert f"| {exactly:,} |" in module.__doc__
    if in_the_paper:  # they round down, too: 68.1
        assert found / 1e6 == pytest.approx(float(in_the_paper), abs=0.06)


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


@pytest.mark.parametrize(
    ("family", "argument", "values"),
    [
        *((family, "num_classes", [0, -1, "x", 2.5, True]) for family in FAMILIES),
        *(
            (family, "drop_path", [-0.1, 1, 1.5, "x", float("nan"), True])
            for family in ("preact_resnet", "wide_resnet", "resnext", "vit")
        ),
        *(
            (family, "dropout", [-0.1, 1, "x"])
            for family in ("wide_resnet", "vgg", "densenet", "vit")
        ),
        ("preact_resnet", "bottleneck", [1, "x"]),
        ("preact_resnet", "depth", [21, 2, 20.0, "x"]),
        ("wide_resnet", "depth", [20, 4, "x"]),
        ("densenet", "depth", [99, 4, "x"]),
        ("resnext", "depth", [20.5, 28, 2]),
        ("vit", "heads", [0, "x"]),
        ("vit", "width", [100]),
        ("vit", "patch", [0]),
    ],
)
def test_bad_arguments_are_said_by_the_model_itself(family, argument, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{argument}={value!r} must be") as error:
            FAMILIES[family](**{argument: value})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("depth", "nearest"), [(21, "20 or 26"), (7, "8"), (-4, "8"), (18, "14 or 20")]
)
def test_the_nearest_depths_are_named(depth, nearest):
    with pytest.raises(ValueError, match=f"^depth={depth} must be 6n .* 1; nearest: {nearest}$"):
        preact_resnet.preact_resnet(depth)


@pytest.mark.parametrize(
    ("family", "shape"),
    [("vgg", (31, 32, 3)), ("densenet", (4, 3, 3)), ("vit", (32, 30, 3))],
)
def test_images_that_are_too_small_or_do_not_fit_are_refused(family, shape):
    with pytest.raises(ValueError, match=r"^image_shape=\(.*\) must have [^\n]*$"):
        FAMILIES[family](image_shape=shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_a_name_of_its_own(family):
    names = [layer.name for layer in FAMILIES[family]().layers]
    assert names[0] == "images" and names[-1] == "logits"
    assert names == [layer.name for layer in FAMILIES[family]().layers]


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
    of_stages = [model.get_layer(f"stage{stage}_block1_drop_path") for stage in (1, 2, 3)]
    assert [layer.rate for layer in of_stages] == pytest.approx([0.1, 0.2, 0.3])
    ones = np.ones([4000, 2, 1, 3], np.float32)
    np.testing.assert_array_equal(of_stages[-1](ones), ones)
    y = of_stages[-1](ones, training=True).numpy().reshape(4000, -1)
    assert np.all(y == y[:, :1])
    assert set(np.round(y[:, 0], 3)) == {0, np.float32(1.429)}
    assert y.mean() == pytest.approx(1, abs=0.04)
