"""Networks of keras.applications at small sizes, and data sets for them: minutes each."""

import keras
import numpy as np

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


def images_75():
    return _images(75)


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
xception = _application("Xception", "separable convolutions", 75)
