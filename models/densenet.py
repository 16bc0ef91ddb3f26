"""The densely connected networks with bottlenecks and compression of Huang et al. 2017.

    model = densenet_bc100_12(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

| function | layers | growth | weights |
|---|---|---|---|
| densenet_bc100_12 | 100 | 12 | 769,162 |

Source: Densely Connected Convolutional Networks, arXiv:1608.06993, sections 3 and 4; 0.8M weights
there.
"""

import keras

from .parts import (
    conv,
    images,
    logits,
    norm_relu,
    require_depth,
    require_rate,
    require_size,
    require_whole,
)

Shape = tuple[int, int, int]


def densenet_bc100_12(
    num_classes: int = 10, image_shape: Shape = (32, 32, 3), dropout: float = 0.0
) -> keras.Model:
    """Build the network of 100 layers that each add 12 channels; see `densenet_bc`."""
    return densenet_bc(100, 12, dropout, num_classes, image_shape)


def densenet_bc(
    depth: int = 100,
    growth: int = 12,
    dropout: float = 0.0,
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
) -> keras.Model:
    """Build a network of three blocks in which a layer sees the outputs of all before it.

    Args:
        depth: number of layers with weights, 6n + 4 for n = 1, 2, ...
        growth: number of channels that a layer of a block adds.
        dropout: rate of the dropout after each convolution but the first; the paper's is 0.2
            where images are not augmented.
        num_classes: number of logits.
        image_shape: `(H, W, C)` of the images, at least 4x4.

    Returns:
        A model from images `[B, H, W, C]` to logits `[B, num_classes]`. Under a mixed policy both
        are float32, so that the loss is computed in full precision.

    Raises:
        ValueError: an argument has a wrong type or is out of range.
    """
    require_whole(growth=growth, num_classes=num_classes)
    require_rate(dropout=dropout)
    require_depth(depth, 6, 4)
    require_size(image_shape, 4)

    def norm_relu_conv(x: keras.KerasTensor, num_channels: int, size: int, name: str):
        x = norm_relu(x, f"{name}_*")
        x = conv(f"{name}_conv", num_channels, size)(x)
        return keras.layers.Dropout(dropout, name=f"{name}_dropout")(x) if dropout else x

    inputs = images(image_shape)
    x = conv("conv1", 2 * growth)(inputs)
    for block in (1, 2, 3):
        if block > 1:
            x = norm_relu_conv(x, x.shape[-1] // 2, 1, f"transition{block - 1}")
            x = keras.layers.AveragePooling2D(2, name=f"pool{block - 1}")(x)
        for layer in range(1, (depth - 4) // 6 + 1):
            name = f"block{block}_layer{layer}"
            y = norm_relu_conv(x, 4 * growth, 1, f"{name}_bottleneck")
            y = norm_relu_conv(y, growth, 3, name)
            x = keras.layers.Concatenate(name=f"{name}_concat")([x, y])
    x = norm_relu(x, "last_*")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, logits(x, num_classes), name=f"densenet_bc{depth}_{growth}")
