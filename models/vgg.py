"""VGG-16 with BatchNorm, as it is used on CIFAR-10.

    model = vgg16_bn(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

| function | layers | weights |
|---|---|---|
| vgg16_bn | 13 convolutions, one dense layer of 512, logits | 14,987,210 |

The two dense layers of 4096 that the paper has for larger images are one of 512 here.

Sources: Very Deep Convolutional Networks, arXiv:1409.1556, configuration D; Liu and Deng 2015,
Very deep CNN based image classification using small training sample size, for the head.
"""

import keras

from .parts import conv, images, logits, norm_relu, require_rate, require_size, require_whole

Shape = tuple[int, int, int]
_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # times the width, convolutions


def vgg16_bn(
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
    width: int = 64,
    dropout: float = 0.5,
) -> keras.Model:
    """Build the network of 13 convolutions and two dense layers.

    Args:
        num_classes: number of logits.
        image_shape: `(H, W, C)` of the images, at least 32x32.
        width: number of channels of the first stage; the others have 2, 4, 8 and 8 times as many.
        dropout: rate of the dropout before each of the two dense layers.

    Returns:
        A model from images `[B, H, W, C]` to logits `[B, num_classes]`. Under a mixed policy both
        are float32, so that the loss is computed in full precision.

    Raises:
        ValueError: an argument has a wrong type or is out of range.
    """
    require_whole(width=width, num_classes=num_classes)
    require_rate(dropout=dropout)
    require_size(image_shape, 32)
    x = inputs = images(image_shape)
    for stage, (times, convolutions) in enumerate(_STAGES, start=1):
        for i in range(1, convolutions + 1):
            x = conv(f"stage{stage}_conv{i}", times * width)(x)
            x = norm_relu(x, f"stage{stage}_*{i}")
        x = keras.layers.MaxPooling2D(name=f"pool{stage}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dropout(dropout, name="dropout1")(x)
    dense = keras.layers.Dense(
        8 * width, use_bias=False, kernel_initializer="he_normal", name="dense"
    )
    x = dense(x)
    x = norm_relu(x, "dense_*")
    x = keras.layers.Dropout(dropout, name="dropout2")(x)
    return keras.Model(inputs, logits(x, num_classes), name="vgg16_bn")
