import keras
import numpy as np
import pytest
import tensorflow as tf

from models import resnet as resnets
from models.resnet import Shortcut, resnet


@pytest.mark.parametrize(
    ("depth", "in_the_paper", "exactly"),
    [
        (20, "0.27", 269_722),
        (32, "0.46", 464_154),
        (44, "0.66", 658_586),
        (56, "0.85", 853_018),
        (110, "1.7", 1_727_962),
    ],
)
def test_has_the_papers_number_of_weights(depth, in_the_paper, exactly):
    model = getattr(resnets, f"resnet{depth}")()
    decimals = len(in_the_paper) - 2
    count = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert f"{count / 1e6:.{decimals}f}" == in_the_paper
    assert count == exactly
    assert f"| {exactly:,} |" in resnets.__doc__
    counted = (keras.layers.Conv2D, keras.layers.Dense)
    assert sum(isinstance(layer, counted) for layer in model.layers) == depth
    assert model.name == f"resnet{depth}"


def test_stages_halve_the_image_and_double_the_channels():
    model = resnet(depth=8, width=4, image_shape=(32, 30, 1))
    shapes = [model.get_layer(f"stage{s}_block1_relu2").output.shape for s in (1, 2, 3)]
    assert shapes == [(None, 32, 30, 4), (None, 16, 15, 8), (None, 8, 8, 16)]


def test_every_layer_has_a_name_of_its_own():
    names = [layer.name for layer in resnet(depth=14).layers]
    assert names[:5] == ["images", "conv1", "norm1", "relu1", "stage1_block1_conv1"]
    assert names[-2:] == ["pool", "logits"]
    # Keras numbers the layers that were not named: conv2d_3.
    assert names == [layer.name for layer in resnet(depth=14).layers]


def test_convolutions_have_no_bias_and_normalization_the_papers_constants():
    model = resnet(depth=8)
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    assert len(convolutions) == len(norms) == 7
    assert all(x.kernel_size == (3, 3) and not x.use_bias for x in convolutions)
    assert {(x.momentum, x.epsilon) for x in norms} == {(0.9, 1e-5)}


def test_shortcut_takes_every_second_pixel_and_appends_zeros():
    x = np.random.default_rng(1).normal(size=[2, 5, 4, 3]).astype(np.float32)
    layer = Shortcut(num_channels=6, stride=2)
    y = layer(x)
    np.testing.assert_array_equal(y[..., :3], x[:, [0, 2, 4]][:, :, [0, 2]])
    np.testing.assert_array_equal(y[..., 3:], np.zeros([2, 3, 2, 3]))
    assert layer.weights == []


def test_a_block_without_convolution_is_the_identity():
    """With the gammas of a block's last normalization at 0, only the shortcut is left."""
    model = resnet(depth=8)
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


@pytest.mark.parametrize(
    ("depth", "nearest"),
    [(21, "20 or 26"), (18, "14 or 20"), (2, "8"), (0, "8"), (-4, "8"), (20.5, "20 or 26")],
)
def test_other_depths_are_refused(depth, nearest):
    with pytest.raises(ValueError) as error:
        resnet(depth=depth)
    assert str(error.value) == f"depth={depth} must be 6n + 2 with n >= 1; nearest: {nearest}"


def test_width_below_1_is_refused():
    with pytest.raises(ValueError, match="^width=0 must be .* 1; the paper's is 16$"):
        resnet(width=0)
