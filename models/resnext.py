"""The residual networks of Xie et al. 2017, whose 3x3 convolutions are of groups of channels.

    model = resnext29_8x64d(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

| function | layers | groups | weights |
|---|---|---|---|
| resnext29_8x64d | 29 | 8 of 64 channels | 34,426,698 |
| resnext29_16x64d | 29 | 16 of 64 channels | 68,155,210 |

Source: Aggregated Residual Transformations for Deep Neural Networks, arXiv:1611.05431, section 5.3;
34.4M and 68.1M weights there.
"""

import keras

from .parts import (
    conv,
    drop_path,
    drop_rates,
    images,
    logits,
    norm,
    norm_relu,
    require_depth,
    require_rate,
    require_whole,
)

Shape = tuple[int, int, int]


def resnext29_8x64d(
    num_classes: int = 10, image_shape: Shape = (32, 32, 3), drop_path: float = 0.0
) -> keras.Model:
    """Build the network of 29 layers with 8 groups of 64 channels; see `resnext`."""
    return resnext(29, 8, 64, 64, drop_path, num_classes, image_shape)


def resnext29_16x64d(
    num_classes: int = 10, image_shape: Shape = (32, 32, 3), drop_path: float = 0.0
) -> keras.Model:
    """Build the network of 29 layers with 16 groups of 64 channels; see `resnext`."""
    return resnext(29, 16, 64, 64, drop_path, num_classes, image_shape)


def resnext(
    depth: int = 29,
    groups: int = 8,
    group_width: int = 64,
    width: int = 64,
    drop_path: float = 0.0,
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
) -> keras.Model:
    """Build a residual network of three stages of bottlenecks with grouped convolutions.

    Args:
        depth: number of layers with weights, 9n + 2 for n = 1, 2, ...; shortcuts by convolution
            are not counted.
        groups: number of groups of channels of a 3x3 convolution, the paper's cardinality.
        group_width: number of channels of a group in the first stage; it doubles in the others.
        width: number of channels of the first convolution; the stages end in 4, 8 and 16 times as
            many.
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
    require_whole(groups=groups, group_width=group_width, width=width, num_classes=num_classes)
    require_rate(drop_path=drop_path)
    require_depth(depth, 9, 2)
    blocks = (depth - 2) // 9
    rates = iter(drop_rates(drop_path, 3 * blocks))

    inputs = images(image_shape)
    x = conv("conv1", width)(inputs)
    x = norm_relu(x, "*1")
    for stage in (1, 2, 3):
        for block in range(1, blocks + 1):
            x = _block(
                x,
                num_inner=groups * group_width * 2 ** (stage - 1),
                num_channels=4 * width * 2 ** (stage - 1),
                groups=groups,
                stride=2 if stage > 1 and block == 1 else 1,
                drop_rate=next(rates),
                name=f"stage{stage}_block{block}",
            )
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    name = f"resnext{depth}_{groups}x{group_width}d"
    return keras.Model(inputs, logits(x, num_classes), name=name)


def _block(
    inputs: keras.KerasTensor,
    num_inner: int,
    num_channels: int,
    groups: int,
    stride: int,
    drop_rate: float,
    name: str,
) -> keras.KerasTensor:
    """Map `[B, H, W, C]` to `[B, H / stride, W / stride, num_channels]`."""
    x = conv(f"{name}_conv1", num_inner, 1)(inputs)
    x = norm_relu(x, f"{name}_*1")
    x = GroupedConv2D(
        num_inner,
        kernel_size=3,
        strides=stride,
        padding="same",
        groups=groups,
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv2",
    )(x)
    x = norm_relu(x, f"{name}_*2")
    x = conv(f"{name}_conv3", num_channels, 1)(x)
    x = norm(f"{name}_norm3")(x)
    x = drop_path(x, drop_rate, f"{name}_drop_path")
    if inputs.shape[-1] != num_channels or stride != 1:
        inputs = conv(f"{name}_shortcut", num_channels, 1, stride)(inputs)
        inputs = norm(f"{name}_shortcut_norm")(inputs)
    x = keras.layers.Add(name=f"{name}_add")([inputs, x])
    return keras.layers.ReLU(name=f"{name}_relu3")(x)


@keras.saving.register_keras_serializable(package="towers_models")
class GroupedConv2D(keras.layers.Conv2D):
    """A `Conv2D` that computes its groups one by one, with the same weights and values.

    TensorFlow has no gradients of grouped convolutions in float64 and float16 on CPUs, and Keras
    compiles them by XLA there, which takes many times as long.
    """

    def convolution_op(self, inputs: keras.KerasTensor, kernel: keras.KerasTensor):
        """Map `[B, H, W, C]` by a kernel `[h, w, C / groups, C']` to `[B, H', W', C']`."""
        ops = keras.ops
        convolve = super().convolution_op
        of_groups = zip(
            ops.split(inputs, self.groups, axis=-1),
            ops.split(kernel, self.groups, axis=-1),
            strict=True,
        )
        return ops.concatenate([convolve(x, weights) for x, weights in of_groups], axis=-1)
