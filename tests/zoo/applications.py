"""Networks of keras.applications and the shipped families at small sizes: minutes each."""

import keras
import numpy as np

from models.densenet import densenet_bc
from models.fast import fast
from models.preact_resnet import preact_resnet
from models.resnext import resnext
from models.vgg import vgg16_bn
from models.vit import vit
from models.wide_resnet import wide_resnet
from tests.zoo.entry import SAME, entry

layers = keras.layers
NUM_CLASSES = 3


def _images(size):
    """Return the arrays of a data set of images [size, size, 3]."""
    random = np.random.default_rng(size)

    def arrays(number):
        images = random.integers(0, 256, (number, size, size, 3)).astype(np.uint8)
        return images, random.integers(0, NUM_CLASSES, number).astype(np.int32)

    return arrays(28), arrays(7), NUM_CLASSES


def images_32():
    return _images(32)


def _application(name, why, size=32, **keywords):
    """Return a model function of one of Keras' networks, without its trained weights."""

    @entry(SAME, why, dataset=f"tests.zoo.applications:images_{size}")
    def model(num_classes, image_shape):
        return getattr(keras.applications, name)(
            weights=None,
            input_shape=image_shape,
            classes=num_classes,
            classifier_activation=None,
            **keywords,
        )

    return model


mobilenet_v3_small = _application(
    "MobileNetV3Small", "squeeze and excite", alpha=0.75, minimalistic=True
)
efficientnet_b0 = _application("EfficientNetB0", "whole branches dropped by example")
resnet50_v2 = _application("ResNet50V2", "deep, BatchNorm before each convolution")
convnext_tiny = _application("ConvNeXtTiny", "LayerNorm and LayerScale")


def _family(function, why, *args, dataset="tests.tiny:images", **keywords):
    """Return a model function of a shipped one with these arguments."""

    @entry(SAME, why, dataset=dataset)
    def model(num_classes, image_shape):
        return function(*args, **keywords, num_classes=num_classes, image_shape=image_shape)

    return model


preact_basic = _family(preact_resnet, "two convolutions, stochastic depth", 8, 2, drop_path=0.5)
preact_bottleneck = _family(
    preact_resnet, "shortcuts by convolution of what is normalized", 11, 2, bottleneck=True
)
wide = _family(
    wide_resnet, "dropout in a branch that may be skipped", 10, 1, dropout=0.3, drop_path=0.5
)
vgg = _family(
    vgg16_bn, "BatchNorm of single pixels, and of none", width=1,
    dataset="tests.zoo.applications:images_32",
)  # fmt: skip
dense_net = _family(densenet_bc, "dropout in what is concatenated", 10, 2, dropout=0.2)
growing = _family(
    fast, "images that grow on the way", width=2, small_size=16, small_steps=2,
    dataset="tests.zoo.applications:images_32",
)  # fmt: skip
grouped = _family(resnext, "groups one by one, stochastic depth", 11, 2, 2, 2, drop_path=0.5)
transformer = _family(
    vit, "attention, stochastic depth of two branches", 1, 6, 2, 4, dropout=0.2, drop_path=0.5
)
