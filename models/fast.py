"""A small network that learns CIFAR-10 in few epochs, in the manner of the airbench records.

    model = fast(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

A fixed 2x2 convolution separates the patterns of neighboring pixels and colors. Six 3x3
convolutions in three groups of 64, 256 and 256 channels follow. It has
1,973,968 weights, of which 1,971,328 are trained.

The network has 118 million multiplications for an image of 32x32. As in fast.ai's entries to
DAWNBench, the first steps may use smaller images: `small_size=24, small_steps=100`.

Source: Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv:2404.00498.
"""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from . import parts

_GROUPS = (1, 4, 4)  # times `width`: channels
_MOST_PIXELS = 100  # of a map whose kernel gradient is computed by products; measured at 9 to 225
_LEAST_CHANNELS = 128  # input and output
_SHRINKS_BY = 8  # by three poolings; a global one follows


def fast(
    num_classes: int = 10,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    width: int = 64,
    small_size: int = 0,
    small_steps: int = 0,
) -> keras.Model:
    """Build the network.

    Args:
        num_classes: number of logits.
        image_shape: `(H, W, C)` of the images, at least 12 x 12.
        width: number of channels of the first group; the others have four times as many.
        small_size: height and width to which images are resized in the first steps; 0: never.
        small_steps: number of these steps.

    Returns:
        A model from images `[B, H, W, C]` to logits `[B, num_classes]`. Under a mixed policy both
        are float32, so that the loss is computed in full precision.

    Raises:
        ValueError: an argument has a wrong type or is out of range.
    """
    least = _SHRINKS_BY + 4
    parts.require_whole(num_classes=num_classes, width=width)
    if not isinstance(small_steps, int) or small_steps < 0:
        raise ValueError(f"small_steps={small_steps!r} must be a whole number of at least 0")
    smallest = min(*image_shape[:2], small_size or least)
    if not isinstance(small_size, int) or smallest < least:
        raise ValueError(
            f"image_shape={tuple(image_shape)} and small_size={small_size!r}: images must be at "
            f"least {least} x {least} pixels; small_size=0 is for images of one size"
        )
    full_precision = parts.full_precision()
    layers = keras.layers

    inputs = x = parts.images(image_shape)
    if small_size and small_steps:
        x = SmallAtFirst(small_size, small_steps, dtype=full_precision, name="small")(x)
    # Both signs of each pattern: the activation loses nothing.
    x = layers.Conv2D(
        filters=8 * image_shape[-1],
        kernel_size=2,
        use_bias=False,
        kernel_initializer=CosinePatterns(),
        trainable=False,
        name="patterns",
    )(x)
    # Without an offset no gradient goes back beyond it: 5 % of a step.
    x = _normalize_and_activate(x, "patterns", epsilon=5e-4, center=False)
    for group, times in enumerate(_GROUPS, start=1):
        x = _conv(f"group{group}_conv1", times * width)(x)
        x = layers.MaxPooling2D(2, name=f"group{group}_pool")(x)
        x = _normalize_and_activate(x, f"group{group}_1")
        x = _conv(f"group{group}_conv2", times * width)(x)
        x = _normalize_and_activate(x, f"group{group}_2")
    x = layers.GlobalMaxPooling2D(name="pool")(x)
    # Smaller values and larger weights than usual: the logits begin near 0 and change slowly.
    scale = (4 * width) ** -0.5
    x = layers.Rescaling(scale, dtype=full_precision, name="scale")(x)
    logits = layers.Dense(
        num_classes,
        use_bias=False,
        kernel_initializer=keras.initializers.RandomNormal(stddev=scale),
        dtype=full_precision,
        name="logits",
    )(x)
    return keras.Model(inputs, logits, name="fast")


def _conv(name: str, num_channels: int) -> keras.layers.Layer:
    return Conv2D(
        num_channels,
        kernel_size=3,
        padding="same",
        use_bias=False,  # the normalization that follows has one
        kernel_initializer=IdentityFirst(),
        name=name,
    )


def _normalize_and_activate(
    x: keras.KerasTensor, name: str, epsilon: float = 1e-6, center: bool = True
) -> keras.KerasTensor:
    # Without a scale: Muon keeps the kernels' norms, and all channels have equal weight.
    x = keras.layers.BatchNormalization(
        momentum=0.6, epsilon=epsilon, scale=False, center=center, name=f"{name}_norm"
    )(x)
    return keras.layers.Activation("relu", name=f"{name}_relu")(x)


@keras.saving.register_keras_serializable(package="towers_models")
class Conv2D(keras.layers.Conv2D):
    """A convolution of odd size and stride 1 with a faster kernel gradient in bfloat16, on CPUs.

    oneDNN computes a convolution and the gradient of its input at twice float32's rate, but the
    gradient of its kernel no faster than in float32. For small maps of many channels one matrix
    product for each position of the kernel is faster, of the inputs that the position multiplies
    and the upstream gradients. It skips the padding: at 3x3 pixels that is 40 %.

    On two cores of an AMD EPYC with AVX512_BF16, for 256 to 256 channels and 1000 images, 226 ms
    became 144 ms at 7x7 pixels. At 5x5, 124 became 69, and at 3x3, 58 became 20. For fewer
    channels, 64 to
    256, oneDNN is faster: 128 and 140 at 11x11 pixels.
    """

    def convolution_op(self, inputs: tf.Tensor, kernel: keras.Variable) -> tf.Tensor:
        """Map `[B, H, W, C]` to `[B, H, W, D]` by a kernel `[h, w, C, D]`."""
        kernel = tf.convert_to_tensor(kernel)  # in the type of the layer
        wide = min(kernel.shape[2:]) >= _LEAST_CHANNELS
        if inputs.dtype == kernel.dtype == tf.bfloat16 and wide and _is_on_cpu(inputs):
            return convolve(inputs, kernel)
        return super().convolution_op(inputs, kernel)


def _is_on_cpu(x: tf.Tensor) -> bool:
    device = tf.identity(x).device
    return "CPU" in device if device else not tf.config.list_logical_devices("GPU")


@tf.custom_gradient
def convolve(x: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Return `tf.nn.conv2d(x, kernel, 1, "SAME")` with the kernel gradient of `Conv2D`."""

    def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
        common = dict(out_backprop=upstream, strides=[1] * 4, padding="SAME")
        of_x = tf.raw_ops.Conv2DBackpropInput(input_sizes=tf.shape(x), filter=kernel, **common)
        of_kernel = tf.cond(
            tf.reduce_prod(tf.shape(x)[1:3]) <= _MOST_PIXELS,
            lambda: _by_products(x, upstream, kernel.shape),
            lambda: tf.raw_ops.Conv2DBackpropFilter(input=x, filter_sizes=kernel.shape, **common),
        )
        return [of_x, of_kernel]

    return tf.nn.conv2d(x, kernel, 1, "SAME"), gradient


def _by_products(x: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    # Rows of maps come first: slices of them are no copies. It takes a tenth of the time.
    x, upstream = (tf.transpose(maps, [1, 0, 2, 3]) for maps in (x, upstream))
    down, across = (range(-(size // 2), size // 2 + 1) for size in shape[:2])
    products = {}
    for j in across:
        columns, gradients = x[:, :, _overlap(j)], upstream[:, :, _overlap(-j)]
        for i in down:
            products[i, j] = tf.matmul(
                tf.reshape(columns[_overlap(i)], [-1, shape[2]]),
                tf.reshape(gradients[_overlap(-i)], [-1, shape[3]]),
                transpose_a=True,
            )
    return tf.reshape(tf.stack([products[place] for place in sorted(products)]), shape)


def _overlap(distance: int) -> slice:
    # The pixels that a kernel position at this distance from the middle multiplies.
    return slice(max(distance, 0), min(distance, 0) or None)


@keras.saving.register_keras_serializable(package="towers_models")
class CosinePatterns(keras.initializers.Initializer):
    """The patterns of a cosine transform over a patch and its colors, and their negatives.

    The source uses the principal components of patches of training images, which for natural images
    are nearly those of the cosine transform.
    """

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> tf.Tensor:
        """Return a kernel `[h, w, C, 2 h w C]`."""
        dtype = dtype or keras.config.floatx()
        rows, columns, colors = (_cosines(size, dtype) for size in shape[:3])
        patterns = tf.einsum("ai,bj,ck->ijkabc", rows, columns, colors)
        patterns = tf.reshape(patterns, [*shape[:3], shape[-1] // 2])
        return tf.concat([patterns, -patterns], axis=-1)


def _cosines(size: int, dtype: str) -> tf.Tensor:
    # The orthonormal discrete cosine transform, [size, size], a row for each pattern.
    numbers = tf.range(size, dtype=tf.float64)
    rows = tf.cos(numbers[:, None] * (numbers + 0.5) * math.pi / size)
    return tf.cast(tf.math.l2_normalize(rows, axis=1), dtype)


@keras.saving.register_keras_serializable(package="towers_models")
class IdentityFirst(keras.initializers.VarianceScaling):
    """Kernels whose first channels pass the input on; the others are random, uniform.

    Source: arXiv:2404.00498, section 3.1, "dirac initialization".
    """

    def __init__(self, seed: int | None = None):
        """Set the seed of the random channels."""
        super().__init__(1 / 3, "fan_in", "uniform", seed)  # PyTorch's for convolutions

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> tf.Tensor:
        """Return a kernel `[h, w, C_in, C_out]`."""
        height, width, num_inputs, num_outputs = shape
        random = super().__call__(shape, dtype)
        identity = tf.eye(num_inputs, min(num_inputs, num_outputs), dtype=random.dtype)
        top, left = height // 2, width // 2
        around = [[top, height - 1 - top], [left, width - 1 - left], [0, 0], [0, 0]]
        identity = tf.pad(identity[None, None], around)
        return tf.concat([identity, random[..., num_inputs:]], axis=-1)

    def get_config(self) -> dict:
        """Return the arguments of the constructor."""
        return {"seed": super().get_config()["seed"]}


@keras.saving.register_keras_serializable(package="towers_models")
class SmallAtFirst(keras.layers.Layer):
    """Shrinks images in the first training steps, and counts the steps.

    The network behind it must accept images of any size.
    """

    def __init__(self, size: int, num_steps: int, **kwargs: object):
        """Set the size and the number of steps.

        Args:
            size: height and width of the small images, in pixels.
            num_steps: number of training steps with small images.
            **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.
        """
        super().__init__(**kwargs)
        self.size = size
        self.num_steps = num_steps

    def build(self, input_shape: tuple) -> None:
        """Create the counter."""
        self.steps = self.add_weight(
            shape=(), initializer="zeros", dtype="int64", trainable=False, name="steps"
        )

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Map `[B, H, W, C]` to `[B, size, size, C]` at first, then to itself."""
        if not training:
            return images
        before = tf.convert_to_tensor(self.steps.value)
        self.steps.assign(before + 1)
        return tf.cond(
            before < self.num_steps,
            lambda: tf.cast(
                tf.image.resize(images, [self.size, self.size], antialias=True), images.dtype
            ),
            lambda: tf.identity(images),
        )

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """Return the shape, of unknown height and width."""
        return (input_shape[0], None, None, input_shape[-1])

    def get_config(self) -> dict:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "size": self.size, "num_steps": self.num_steps}
