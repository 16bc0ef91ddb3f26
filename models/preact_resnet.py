"""The residual networks with pre-activation (v2) for CIFAR-10 of He et al. 2016.

    model = preact_resnet20(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

| function | blocks | weights |
|---|---|---|
| preact_resnet20 | two convolutions | 269,722 |
| preact_resnet56 | two convolutions | 853,018 |
| preact_resnet110 | two convolutions | 1,727,962 |
| preact_resnet164 | bottleneck | 1,703,258 |
| preact_resnet1001 | bottleneck | 10,327,706 |

Source: Identity Mappings in Deep Residual Networks, arXiv:1603.05027; 1.7M weights for 110 and 164
layers there, and 10.2M for 1001, which is without the 0.15M of its normalizations.
"""

import keras

from .parts import (
    Shortcut,
    conv,
    drop_path,
    drop_rates,
    images,
    logits,
    norm_relu,
    require_depth,
    require_rate,
    require_whole,
)

Shape = tuple[int, int, int]


def preact_resnet20(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 20 layers; see `preact_resnet`."""
    return preact_resnet(20, num_classes=num_classes, image_shape=image_shape)


def preact_resnet56(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 56 layers; see `preact_resnet`."""
    return preact_resnet(56, num_classes=num_classes, image_shape=image_shape)


def preact_resnet110(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 110 layers; see `preact_resnet`."""
    return preact_resnet(110, num_classes=num_classes, image_shape=image_shape)


def preact_resnet164(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 164 layers with bottlenecks; see `preact_resnet`."""
    return preact_resnet(164, bottleneck=True, num_classes=num_classes, image_shape=image_shape)


def preact_resnet1001(num_classes: int = 10, image_shape: Shape = (32, 32, 3)) -> keras.Model:
    """Build the network of 1001 layers with bottlenecks; see `preact_resnet`."""
    return preact_resnet(1001, bottleneck=True, num_classes=num_classes, image_shape=image_shape)


def preact_resnet(
    depth: int = 20,
    width: int = 16,
    bottleneck: bool = False,
    drop_path: float = 0.0,
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
) -> keras.Model:
    """Build a residual network of three stages whose blocks normalize before they convolve.

    Args:
        depth: number of layers with weights, 6n + 2 for n = 1, 2, ...; 9n + 2 with bottlenecks,
            whose shortcuts by convolution are not counted.
        width: number of channels of the first convolution; it doubles in the last two stages.
        bottleneck: whether a block is convolutions of 1x1, 3x3 and 1x1, the last with four times
            the channels, instead of two of 3x3.
        drop_path: rate at which the last block is skipped in training (stochastic depth); the
            others' rates grow toward it.
        num_classes: number of logits.
        image_shape: `(H, W, C)` of the images.

    Returns:
        A model from images `[B, H, W, C]` to logits `[B, num_classes]`. Under a mixed policy both
        are float32, so that the loss is computed in full precision.

    Raises:
        ValueError: an argument has a wrong type or is out of range.
    """
    require_whole(width=width, num_classes=num_classes)
    require_rate(drop_path=drop_path)
    if not isinstance(bottleneck, bool):
        raise ValueError(f"bottleneck={bottleneck!r} must be true or false")
    convolutions = 3 if bottleneck else 2
    require_depth(depth, 3 * convolutions, 2)
    blocks = (depth - 2) // (3 * convolutions)
    rates = iter(drop_rates(drop_path, 3 * blocks))

    inputs = images(image_shape)
    x = conv("conv1", width)(inputs)
    for stage in (1, 2, 3):
        for block in range(1, blocks + 1):
            x = (_bottleneck if bottleneck else _basic)(
                x,
                num_channels=width * 2 ** (stage - 1),
                stride=2 if stage > 1 and block == 1 else 1,
                first=block == 1 and (stage == 1 or bottleneck),
                drop_rate=next(rates),
                name=f"stage{stage}_block{block}",
            )
    x = norm_relu(x, "last_*")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, logits(x, num_classes), name=f"preact_resnet{depth}")


def _basic(
    inputs: keras.KerasTensor,
    num_channels: int,
    stride: int,
    first: bool,
    drop_rate: float,
    name: str,
) -> keras.KerasTensor:
    """Map `[B, H, W, C]` to `[B, H / stride, W / stride, num_channels]`."""
    x = norm_relu(inputs, f"{name}_*1")
    shortcut = x if first else inputs  # the first block's activation belongs to both paths
    x = conv(f"{name}_conv1", num_channels, stride=stride)(x)
    x = norm_relu(x, f"{name}_*2")
    x = conv(f"{name}_conv2", num_channels)(x)
    x = drop_path(x, drop_rate, f"{name}_drop_path")
    if stride != 1:
        shortcut = Shortcut(num_channels, stride, name=f"{name}_shortcut")(shortcut)
    return keras.layers.Add(name=f"{name}_add")([shortcut, x])


def _bottleneck(
    inputs: keras.KerasTensor,
    num_channels: int,
    stride: int,
    first: bool,
    drop_rate: float,
    name: str,
) -> keras.KerasTensor:
    """Map `[B, H, W, C]` to `[B, H / stride, W / stride, 4 * num_channels]`."""
    x = shortcut = norm_relu(inputs, f"{name}_*1")
    x = conv(f"{name}_conv1", num_channels, 1, stride)(x)
    x = norm_relu(x, f"{name}_*2")
    x = conv(f"{name}_conv2", num_channels)(x)
    x = norm_relu(x, f"{name}_*3")
    x = conv(f"{name}_conv3", 4 * num_channels, 1)(x)
    x = drop_path(x, drop_rate, f"{name}_drop_path")
    if first:
        shortcut = conv(f"{name}_shortcut", 4 * num_channels, 1, stride)(shortcut)
    else:
        shortcut = inputs
    return keras.layers.Add(name=f"{name}_add")([shortcut, x])
