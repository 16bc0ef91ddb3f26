"""A small vision transformer for images of 32x32 pixels.

    model = vit_small(num_classes=10, image_shape=(32, 32, 3))
    logits = model(images)                                # [B, 32, 32, 3] -> [B, 10]

| function | blocks | width | heads | weights |
|---|---|---|---|---|
| vit_small | 6 | 192 | 3 | 2,693,194 |

The logits are of the mean of all patches, there is no token for the class.

Sources: An Image is Worth 16x16 Words, arXiv:2010.11929; the mean in its place, Better plain ViT
baselines for ImageNet-1k, arXiv:2205.01580.
"""

import keras

from .parts import drop_path, drop_rates, images, logits, require_rate, require_whole

Shape = tuple[int, int, int]
layers = keras.layers


def vit_small(
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
    dropout: float = 0.0,
    drop_path: float = 0.1,
) -> keras.Model:
    """Build the transformer of 6 blocks over patches of 4x4 pixels; see `vit`."""
    return vit(6, 192, 3, 4, dropout, drop_path, num_classes, image_shape)


def vit(
    depth: int = 6,
    width: int = 192,
    heads: int = 3,
    patch: int = 4,
    dropout: float = 0.0,
    drop_path: float = 0.1,
    num_classes: int = 10,
    image_shape: Shape = (32, 32, 3),
) -> keras.Model:
    """Build a transformer whose blocks normalize before attention and before the dense layers.

    Args:
        depth: number of blocks.
        width: number of channels of a patch, a multiple of `heads`.
        heads: number of heads of the attention.
        patch: height and width of a patch in pixels; it divides those of the image.
        dropout: rate of the dropout after each dense layer of a block.
        drop_path: rate at which the last block's two branches are skipped in training (stochastic
            depth); the others' rates grow toward it.
        num_classes: number of logits.
        image_shape: `(H, W, C)` of the images.

    Returns:
        A model from images `[B, H, W, C]` to logits `[B, num_classes]`. Under a mixed policy both
        are float32, so that the loss is computed in full precision.

    Raises:
        ValueError: an argument has a wrong type or is out of range.
    """
    require_whole(depth=depth, width=width, heads=heads, patch=patch, num_classes=num_classes)
    require_rate(dropout=dropout, drop_path=drop_path)
    if width % heads:
        raise ValueError(f"width={width} must be a multiple of heads={heads}")
    if image_shape[0] % patch or image_shape[1] % patch:
        raise ValueError(
            f"image_shape={tuple(image_shape)} must have multiples of patch={patch} pixels in "
            "height and in width"
        )
    inputs = images(image_shape)
    x = layers.Conv2D(
        width, patch, strides=patch, kernel_initializer="glorot_uniform", name="patches"
    )(inputs)
    x = layers.Reshape((-1, width), name="sequence")(x)
    x = Positions(name="positions")(x)
    for block, rate in enumerate(drop_rates(drop_path, depth), start=1):
        x = _block(x, heads, dropout, rate, f"block{block}")
    x = layers.LayerNormalization(epsilon=1e-6, name="last_norm")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, logits(x, num_classes, "glorot_uniform"), name="vit")


def _block(
    inputs: keras.KerasTensor, heads: int, dropout: float, drop_rate: float, name: str
) -> keras.KerasTensor:
    """Apply attention and two dense layers, `[B, N, C]` to `[B, N, C]`."""
    width = inputs.shape[-1]

    def drop(x: keras.KerasTensor, number: int) -> keras.KerasTensor:
        return layers.Dropout(dropout, name=f"{name}_dropout{number}")(x) if dropout else x

    x = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(inputs)
    x = layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(x, x)
    x = drop_path(drop(x, 1), drop_rate, f"{name}_drop_path1")
    attended = layers.Add(name=f"{name}_add1")([inputs, x])

    x = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(attended)
    x = drop(layers.Dense(4 * width, activation="gelu", name=f"{name}_dense1")(x), 2)
    x = drop(layers.Dense(width, name=f"{name}_dense2")(x), 3)
    x = drop_path(x, drop_rate, f"{name}_drop_path2")
    return layers.Add(name=f"{name}_add2")([attended, x])


@keras.saving.register_keras_serializable(package="towers_models")
class Positions(layers.Layer):
    """Adds a learned vector to each position of a sequence."""

    def build(self, input_shape: tuple) -> None:
        """Create the weights `[N, C]` for inputs `[B, N, C]`."""
        self.vectors = self.add_weight(
            shape=input_shape[1:],
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="vectors",
        )

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Map `[B, N, C]` to the same shape."""
        return inputs + keras.ops.cast(self.vectors, inputs.dtype)
