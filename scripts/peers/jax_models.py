"""`models.cnn:cnn` and the networks of `models.resnet` in plain jax.numpy and jax.lax.

A model is two functions: `init(key)` gives the weights and BatchNorm's statistics as dictionaries,
`apply(weights, statistics, images, train, dtype)` logits `[B, num_classes]` and new statistics.
Images are `[B, H, W, C]`, kernels `[h, w, in, out]` and `[in, out]`, in the layouts of Keras.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from lane import Config, Skipped

Arrays = dict[str, jax.Array]


class Model(NamedTuple):
    """A model's functions, and the factors of the weights that it wants regularised."""

    init: Callable
    apply: Callable
    decays: dict[str, float]


def make_model(config: Config) -> Model:
    """Return the model that the configuration names.

    Raises:
        Skipped: there is no such model here.
    """
    arguments = dict(config.model_args)
    if config.model == "models.cnn:cnn":
        return cnn(config.image_shape, config.num_classes, **arguments)
    if match := re.fullmatch(r"models\.resnet:resnet(\d*)", config.model):
        depth = int(match[1] or arguments.pop("depth", 20))
        return resnet(depth, config.image_shape, config.num_classes, **arguments)
    raise Skipped(f"{config.model} is not written in JAX here, only cnn and resnets are")


def cnn(
    image_shape: tuple[int, int, int], num_classes: int, lrn: bool = True,
    weight_decay: float = 0.004,
) -> Model:  # fmt: skip
    """Return the convolutional network of TensorFlow's CIFAR-10 tutorial."""
    height, width, channels = image_shape
    flat = -(-height // 4) * -(-width // 4) * 64
    layers = {  # kernel's shape, its deviation, the bias
        "conv1": ((5, 5, channels, 64), 0.05, 0.0),
        "conv2": ((5, 5, 64, 64), 0.05, 0.1),
        "dense1": ((flat, 384), 0.04, 0.1),
        "dense2": ((384, 192), 0.04, 0.1),
        "logits": ((192, num_classes), 1 / 192, 0.0),
    }
    norm = _lrn if lrn else lambda x: x

    def init(key: jax.Array) -> tuple[Arrays, Arrays]:
        weights = {}
        for name, (shape, deviation, bias) in layers.items():
            key, drawn = jax.random.split(key)
            kernel = jax.random.truncated_normal(drawn, -2.0, 2.0, shape) * deviation
            weights |= {f"{name}/kernel": kernel, f"{name}/bias": jnp.full(shape[-1], bias)}
        return weights, {}

    def apply(weights: Arrays, statistics: Arrays, images, train, dtype=jnp.float32):
        w = {name: value.astype(dtype) for name, value in weights.items()}
        x = images.astype(dtype)
        x = norm(_pool(jax.nn.relu(_conv(x, w["conv1/kernel"]) + w["conv1/bias"])))
        x = _pool(norm(jax.nn.relu(_conv(x, w["conv2/kernel"]) + w["conv2/bias"])))
        x = x.reshape(x.shape[0], -1)
        x = jax.nn.relu(x @ w["dense1/kernel"] + w["dense1/bias"])
        x = jax.nn.relu(x @ w["dense2/kernel"] + w["dense2/bias"]).astype(jnp.float32)
        return x @ weights["logits/kernel"] + weights["logits/bias"], statistics

    return Model(init, apply, {"dense1/kernel": weight_decay, "dense2/kernel": weight_decay})


def resnet(
    depth: int, image_shape: tuple[int, int, int], num_classes: int, width: int = 16
) -> Model:
    """Return a residual network for CIFAR-10 of He et al. 2016, with shortcuts without weights."""
    convs, num_inputs = {"conv1": (image_shape[-1], width, 1)}, width
    for stage in (1, 2, 3):
        num_channels = width * 2 ** (stage - 1)
        for block in range(1, depth // 6 + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            convs[f"stage{stage}_block{block}_conv1"] = (num_inputs, num_channels, stride)
            convs[f"stage{stage}_block{block}_conv2"] = (num_channels, num_channels, 1)
            num_inputs = num_channels

    def init(key: jax.Array) -> tuple[Arrays, Arrays]:
        weights, statistics = {}, {}
        he_normal = jax.nn.initializers.he_normal()
        for name, (num_in, num_out, _) in convs.items():
            key, drawn = jax.random.split(key)
            weights[f"{name}/kernel"] = he_normal(drawn, (3, 3, num_in, num_out))
            norm = name.replace("conv", "norm")
            weights |= {f"{norm}/gamma": jnp.ones(num_out), f"{norm}/beta": jnp.zeros(num_out)}
            statistics[f"{norm}/moving_mean"] = jnp.zeros(num_out)
            statistics[f"{norm}/moving_variance"] = jnp.ones(num_out)
        weights["logits/kernel"] = he_normal(key, (num_inputs, num_classes))
        weights["logits/bias"] = jnp.zeros(num_classes)
        return weights, statistics

    def apply(weights: Arrays, statistics: Arrays, images, train, dtype=jnp.float32):
        updated = dict(statistics)

        def conv_norm(x: jax.Array, name: str) -> jax.Array:
            x = _conv(x, weights[f"{name}/kernel"].astype(dtype), convs[name][2])
            return _batch_norm(x, name.replace("conv", "norm"), weights, updated, train)

        x = jax.nn.relu(conv_norm(images.astype(dtype), "conv1"))
        for name, (num_in, num_out, stride) in convs.items():
            if not name.endswith("_conv1"):
                continue
            y = conv_norm(jax.nn.relu(conv_norm(x, name)), name.replace("conv1", "conv2"))
            if stride != 1:
                shortcut = [(0, 0), (0, 0), (0, 0), (0, num_out - num_in)]
                x = jnp.pad(x[:, ::stride, ::stride], shortcut)
            x = jax.nn.relu(x + y)
        x = x.mean((1, 2)).astype(jnp.float32)
        return x @ weights["logits/kernel"] + weights["logits/bias"], updated

    return Model(init, apply, {})


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def _lrn(x: jax.Array) -> jax.Array:
    """Local response normalization over 4 channels on either side, as `models.cnn`'s."""
    wide = x.astype(jnp.float32)
    squares = lax.reduce_window(wide * wide, 0.0, lax.add, (1, 1, 1, 9), (1, 1, 1, 1), "SAME")
    scale = 1.0 + 0.001 / 9.0 * squares
    return (wide * lax.rsqrt(scale * jnp.sqrt(scale))).astype(x.dtype)


def _batch_norm(
    x: jax.Array, name: str, weights: Arrays, statistics: Arrays, train: bool
) -> jax.Array:
    """Normalize with the moments of the batch in training; puts new averages in `statistics`."""
    wide = x.astype(jnp.float32)
    mean, variance = statistics[f"{name}/moving_mean"], statistics[f"{name}/moving_variance"]
    if train:
        of_batch = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        statistics[f"{name}/moving_mean"] = 0.9 * mean + 0.1 * of_batch[0]
        statistics[f"{name}/moving_variance"] = 0.9 * variance + 0.1 * of_batch[1]
        mean, variance = of_batch
    factor = weights[f"{name}/gamma"] * lax.rsqrt(variance + 1e-5)
    return (wide * factor + (weights[f"{name}/beta"] - mean * factor)).astype(x.dtype)
