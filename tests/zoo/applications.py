"""Networks of keras.applications at small sizes, and data sets for them: minutes each."""

import keras
import numpy as np

layers, applications = keras.layers, keras.applications
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


def _application(name, **keywords):
    """Return a model function of one of Keras' networks, without its trained weights."""

    def model(num_classes, image_shape):
        return getattr(applications, name)(
            weights=None,
            input_shape=image_shape,
            classes=num_classes,
            classifier_activation=None,
            **keywords,
        )

    return model


mobilenet = _application("MobileNet", alpha=0.25)
mobilenet_v2 = _application("MobileNetV2", alpha=0.35)
mobilenet_v3_small = _application("MobileNetV3Small", alpha=0.75, minimalistic=True)
efficientnet_b0 = _application("EfficientNetB0")
efficientnet_v2_b0 = _application("EfficientNetV2B0")
resnet50_v2 = _application("ResNet50V2")
densenet121 = _application("DenseNet121")
convnext_tiny = _application("ConvNeXtTiny")
nasnet_mobile = _application("NASNetMobile")
xception = _application("Xception")
inception_v3 = _application("InceptionV3")


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
