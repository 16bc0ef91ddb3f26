"""The wide residual networks of Zagoruyko and Komodakis 2016.

    model = wide_resnet16_4(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

| function | layers | times as wide | weights |
|---|---|---|---|
| wide_resnet16_4 | 16 | 4 | 2,748,890 |
| wide_resnet28_10 | 28 | 10 | 36,479,194 |

Source: Wide Residual Networks, arXiv:1605.07146, section 2; 2.7M and 36.5M weights there. The paper
counts the first shortcut by convolution of each stage as a layer, and not the logits.
"""

import keras

from .parts import (
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


def wide_resnet16_4(
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> keras.Model:
    """Build the network of 16 layers, 4 times as wide; see `wide_resnet`."""
    return wide_resnet(16, 4, dropout, drop_path, num_classes, image_shape)


def wide_resnet28_10(
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> keras.Model:
    """Build the network of 28 layers, 10 times as wide; see `wide_resnet`."""
    return wide_resnet(28, 10, dropout, drop_path, num_classes, image_shape)


def wide_resnet(
    depth: int = 16,
    widen: int = 4,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
) -> keras.Model:
    """Build a residual network with pre-activation of few layers with many channels.

    Args:
        depth: number of layers, 6n + 4 for n = 1, 2, ...
        widen: the stages have 16, 32 and 64 times this many channels.
        dropout: rate of the dropout between a block's convolutions; the paper's is 0.3 on CIFAR.
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
    require_whole(widen=widen, num_classes=num_classes)
    require_rate(dropout=dropout, drop_path=drop_path)
    require_depth(depth, 6, 4)
    blocks = (depth - 4) // 6
    rates = iter(drop_rates(drop_path, 3 * blocks))

    inputs = images(image_shape)
    x = conv("conv1", 16)(inputs)
    for stage in (1, 2, 3):
        for block in range(1, blocks + 1):
            x = _block(
                x,
                num_channels=16 * widen * 2 ** (stage - 1),
                stride=2 if stage > 1 and block == 1 else 1,
                dropout=dropout,
                drop_rate=next(rates),
                name=f"stage{stage}_block{block}",
            )
    x = norm_relu(x, "last_*")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, logits(x, num_classes), name=f"wide_resnet{depth}_{widen}")


def _block(
    inputs: keras.KerasTensor,
    num_channels: int,
    stride: int,
    dropout: float,
    drop_rate: float,
    name: str,
) -> keras.KerasTensor:
    """Map `[B, H, W, C]` to `[B, H / stride, W / stride, num_channels]`."""
    x = norm_relu(inputs, f"{name}_*1")
    shortcut = inputs
    if inputs.shape[-1] != num_channels:
        shortcut = conv(f"{name}_shortcut", num_channels, 1, stride)(x)
    x = conv(f"{name}_conv1", num_channels, stride=stride)(x)
    x = norm_relu(x, f"{name}_*2")
    if dropout:
        x = keras.layers.Dropout(dropout, name=f"{name}_dropout")(x)
    x = conv(f"{name}_conv2", num_channels)(x)
    x = drop_path(x, drop_rate, f"{name}_drop_path")
    return keras.layers.Add(name=f"{name}_add")([shortcut, x])
