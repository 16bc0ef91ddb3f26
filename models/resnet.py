"""The residual networks for CIFAR-10 of He et al. 2016.

    model = resnet20(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

| function | layers | weights |
|---|---|---|
| resnet20 | 20 | 269,722 |
| resnet32 | 32 | 464,154 |
| resnet44 | 44 | 658,586 |
| resnet56 | 56 | 853,018 |
| resnet110 | 110 | 1,727,962 |

Source: Deep Residual Learning for Image Recognition, arXiv:1512.03385, section 4.2.
"""

import keras

from .parts import Shortcut, conv, images, logits, norm, norm_relu

Shape = tuple[int, int, int]


def resnet20(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 20 layers; see `resnet`."""
    return resnet(20, num_classes=num_classes, image_shape=image_shape)


def resnet32(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 32 layers; see `resnet`."""
    return resnet(32, num_classes=num_classes, image_shape=image_shape)


def resnet44(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 44 layers; see `resnet`."""
    return resnet(44, num_classes=num_classes, image_shape=image_shape)


def resnet56(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 56 layers; see `resnet`."""
    return resnet(56, num_classes=num_classes, image_shape=image_shape)


def resnet110(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 110 layers; see `resnet`. The paper warms its learning rate up."""
    return resnet(110, num_classes=num_classes, image_shape=image_shape)


def resnet(
    depth: int = 20,
    width: int = 16,
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
) -> keras.Model:
    """Build a residual network of three stages, with shortcuts that have no weights.

    Args:
        depth: number of layers with weights, 6n + 2 for n = 1, 2, ...
        width: number of channels of the first stage; it doubles in each that follows.
        num_classes: number of logits.
        image_shape: `(H, W, C)` of the images.

    Returns:
        A model from images `[B, H, W, C]` to logits `[B, num_classes]`. Under a mixed policy both
        are float32, so that the loss is computed in full precision.

    Raises:
        ValueError: the depth is another one, or an argument is no whole number of at least 1.
    """
    for name, value in (("width", width), ("num_classes", num_classes)):
        if not isinstance(value, int) or value < 1:
            hint = "; the paper's is 16" if name == "width" else ""
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1{hint}")
    if not isinstance(depth, int | float) or not abs(depth) < float("inf"):
        raise ValueError(f"depth={depth!r} must be a whole number, 6n + 2 with n >= 1")
    if depth < 8 or depth % 6 != 2:
        lower = max(8, int((depth - 2) // 6 * 6 + 2))
        nearest = f"{lower}" if depth < 8 else f"{lower} or {lower + 6}"
        raise ValueError(f"depth={depth} must be 6n + 2 with n >= 1; nearest: {nearest}")

    inputs = images(image_shape)
    x = norm_relu(conv("conv1", width)(inputs), "*1")
    for stage in (1, 2, 3):
        for block in range(1, int(depth) // 6 + 1):
            x = _residual_block(
                x,
                num_channels=width * 2 ** (stage - 1),
                stride=2 if stage > 1 and block == 1 else 1,
                name=f"stage{stage}_block{block}",
            )
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, logits(x, num_classes), name=f"resnet{depth}")


def _residual_block(
    inputs: keras.KerasTensor, num_channels: int, stride: int, name: str
) -> keras.KerasTensor:
    """Apply two convolutions, `[B, H, W, C]` to `[B, H / stride, W / stride, num_channels]`."""
    x = conv(f"{name}_conv1", num_channels, stride=stride)(inputs)
    x = norm_relu(x, f"{name}_*1")
    x = conv(f"{name}_conv2", num_channels)(x)
    x = norm(f"{name}_norm2")(x)
    if stride != 1:
        inputs = Shortcut(num_channels, stride, name=f"{name}_shortcut")(inputs)
    x = keras.layers.Add(name=f"{name}_add")([inputs, x])
    return keras.layers.ReLU(name=f"{name}_relu2")(x)
