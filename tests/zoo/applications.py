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


mobilenet = _application("MobileNet", "depthwise convolutions", alpha=0.25)
mobilenet_v2 = _application("MobileNetV2", "inverted residuals", alpha=0.35)
mobilenet_v3_small = _application(
    "MobileNetV3Small", "squeeze and excite", alpha=0.75, minimalistic=True
)
efficientnet_b0 = _application("EfficientNetB0", "whole branches dropped by example")
efficientnet_v2_b0 = _application("EfficientNetV2B0", "fused blocks")
resnet50_v2 = _application("ResNet50V2", "deep, BatchNorm before each convolution")
densenet121 = _application("DenseNet121", "121 BatchNorms")
convnext_tiny = _application("ConvNeXtTiny", "LayerNorm and LayerScale")
nasnet_mobile = _application("NASNetMobile", "two thousand layers")
xception = _application("Xception", "separable convolutions", 75)
inception_v3 = _application("InceptionV3", "BatchNorm without scale", 75)


@entry(SAME, "dropout on features", dataset="tests.zoo.applications:images_32")
def vgg11(num_classes, image_shape):
    """VGG11 with an eighth of its channels."""
    model = keras.Sequential([keras.Input(image_shape)])
    for block in ((8,), (16,), (32, 32), (64, 64), (64, 64)):
        for filters in block:
            model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    for _ in range(2):
        model.add(layers.Dense(64, activation="relu"))
        model.add(layers.Dropout(0.5))
    model.add(layers.Dense(num_classes))
    return model
