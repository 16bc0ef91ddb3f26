"""Layers with the papers' constants, and checks of arguments, for all families of models."""

import keras

Shape = tuple[int, int, int]


def images(image_shape: Shape) -> keras.KerasTensor:
    """Return the input `[B, H, W, C]`, in full precision under a mixed policy."""
    return keras.Input(image_shape, dtype=full_precision(), name="images")


def conv(name: str, num_channels: int, size: int = 3, stride: int = 1) -> keras.layers.Layer:
    """Return a convolution of `size` x `size` that pads its input."""
    return keras.layers.Conv2D(
        num_channels,
        kernel_size=size,
        strides=stride,
        padding="same",
        use_bias=False,  # the normalization that follows has one
        kernel_initializer="he_normal",
        name=name,
    )


def norm(name: str) -> keras.layers.Layer:
    """Return a BatchNorm with the constants of the papers on residual networks."""
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)


def norm_relu(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    """Apply a BatchNorm and a ReLU; those of `block_*1` are `block_norm1` and `block_relu1`."""
    x = norm(name.replace("*", "norm"))(x)
    return keras.layers.ReLU(name=name.replace("*", "relu"))(x)


def drop_path(x: keras.KerasTensor, rate: float, name: str) -> keras.KerasTensor:
    """Zero a branch `[B, ...]` for random examples in training, and scale up the others.

    Source: Deep Networks with Stochastic Depth, arXiv:1603.09382.
    """
    if not rate:
        return x
    shape = (None, *[1] * (len(x.shape) - 1))
    return keras.layers.Dropout(rate, noise_shape=shape, name=name)(x)


def drop_rates(last: float, num_blocks: int) -> list[float]:
    """Return linearly growing rates of `drop_path`, up to `last` for the last block."""
    return [last * (block + 1) / num_blocks for block in range(num_blocks)]


def logits(x: keras.KerasTensor, num_classes: int, initializer: str = "he_normal"):
    """Map `[B, C]` to logits `[B, num_classes]`, in full precision under a mixed policy."""
    return keras.layers.Dense(
        num_classes, kernel_initializer=initializer, dtype=full_precision(), name="logits"
    )(x)


def full_precision() -> str:
    """Return the type of weights under the policy in force."""
    return keras.config.dtype_policy().variable_dtype


def require_whole(**arguments: int) -> None:
    """Raise ValueError unless each is a whole number of at least 1."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


def require_rate(**arguments: float) -> None:
    """Raise ValueError unless each is a number in [0, 1)."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"{name}={value!r} must be a number from 0 up to, not including, 1")


def require_depth(depth: int, factor: int, rest: int) -> None:
    """Raise ValueError unless `depth` is `factor` * n + `rest` for an n of at least 1."""
    rule = f"must be {factor}n + {rest} with n >= 1"
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise ValueError(f"depth={depth!r} {rule}")
    if depth < factor + rest or (depth - rest) % factor:
        lower = max(factor + rest, (depth - rest) // factor * factor + rest)
        nearest = f"{lower}" if depth < lower else f"{lower} or {lower + factor}"
        raise ValueError(f"depth={depth} {rule}; nearest: {nearest}")


def require_size(image_shape: Shape, smallest: int) -> None:
    """Raise ValueError if images are too small for the poolings of a model."""
    if min(image_shape[:2]) < smallest:
        raise ValueError(
            f"image_shape={tuple(image_shape)} must have at least {smallest} pixels in height "
            "and in width: this model halves both until one is left"
        )


@keras.saving.register_keras_serializable(package="towers_models")
class Shortcut(keras.layers.Layer):
    """The paper's option A: takes every `stride`-th pixel and appends channels of zeros."""

    def __init__(self, num_channels: int, stride: int, **kwargs: object):
        """Set the shape of the output.

        Args:
            num_channels: number of channels of the output, at least that of the input.
            stride: of the pixels, along height and width.
            **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.
        """
        super().__init__(**kwargs)
        self.num_channels = num_channels
        self.stride = stride

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Map `[B, H, W, C]` to `[B, H / stride, W / stride, num_channels]`, rounded up."""
        # A pool of one pixel: on CPUs a strided slice and its gradient take ten times as long.
        pixels = keras.ops.average_pool(inputs, pool_size=1, strides=self.stride)
        num_missing = self.num_channels - inputs.shape[-1]
        return keras.ops.pad(pixels, [(0, 0), (0, 0), (0, 0), (0, num_missing)])

    def get_config(self) -> dict:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "num_channels": self.num_channels, "stride": self.stride}
