"""What the TensorFlow 2 peers share, as TensorFlow's guides do it: devices, model, input.

The model is built by the function that is measured on our side too. Where it normalizes local
responses, it gets TensorFlow's own op: our layer is part of what is compared.
"""

from __future__ import annotations

import inspect

import keras
import tensorflow as tf
from lane import Config, Skipped, stored_images, synthetic_batch

from towers.options.functions import load_function

BRIGHTNESS = 63
CONTRAST = (0.2, 1.8)
PADDING = 4  # pixels on each side, "resnet"


def versions() -> dict[str, str]:
    """Return the versions of what is measured."""
    return {"tensorflow": tf.__version__, "keras": keras.__version__}


def configure_devices(config: Config, num_devices: int) -> list[str]:
    """Return the names of `num_devices` GPUs or logical CPU devices; before TensorFlow starts.

    Raises:
        Skipped: there are not so many GPUs.
    """
    if config.gpus:
        seen = len(tf.config.list_physical_devices("GPU"))
        if seen < num_devices:
            raise Skipped(f"num_devices={num_devices} with gpus, and TensorFlow sees {seen}")
        return [f"/gpu:{i}" for i in range(num_devices)]
    tf.config.set_visible_devices([], "GPU")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * num_devices,
    )
    return [f"/cpu:{i}" for i in range(num_devices)]


class TensorFlowLrn(keras.layers.Layer):
    """TensorFlow's own local response normalization, which has no bfloat16 kernel on a CPU."""

    def __init__(self, depth_radius: int, bias: float, alpha: float, **kwargs: object):
        """Set the constants of the formula, those of `models.cnn.LocalResponseNormalization`."""
        super().__init__(**kwargs)
        self.constants = {"depth_radius": depth_radius, "bias": bias, "alpha": alpha}

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Normalize `[B, H, W, C]` over channels."""
        x = tf.cast(inputs, tf.float32)
        return tf.cast(
            tf.nn.local_response_normalization(x, beta=0.75, **self.constants), inputs.dtype
        )


def make_model(config: Config) -> keras.Model:
    """Build the model with its regularization; call it in the strategy's scope."""
    config.require(dtype=("float32", "mixed_bfloat16"))
    keras.config.set_dtype_policy(config.dtype)
    keras.utils.set_random_seed(config.seed)
    function = load_function("model", config.model)
    of_data = {"num_classes": config.num_classes, "image_shape": config.image_shape}
    parameters = inspect.signature(function).parameters
    model = function(**{k: v for k, v in of_data.items() if k in parameters}, **config.model_args)
    if not config.own_layers:
        model = with_tensorflow_lrn(model)
    if config.weight_decay and config.optimizer != "adamw":
        for variable in kernels(model):
            variable.regularizer = _with_decay(variable.regularizer, config.weight_decay)
    return model


def with_tensorflow_lrn(model: keras.Model) -> keras.Model:
    """Return the model, or a copy with TensorFlow's op where it normalizes local responses."""

    def is_lrn(layer: keras.layers.Layer) -> bool:
        return type(layer).__name__ == "LocalResponseNormalization"

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        if is_lrn(layer):
            return TensorFlowLrn(**layer.get_config())
        return layer.__class__.from_config(layer.get_config())

    if not any(map(is_lrn, model.layers)):
        return model
    copy = keras.models.clone_model(model, clone_function=clone)
    copy.set_weights(model.get_weights())
    return copy


def kernels(model: keras.Model) -> list[keras.Variable]:
    """Return what weight decay acts on: neither biases nor scales."""
    return [v for v in model.trainable_variables if len(v.shape) > 1]


def make_optimizer(config: Config, model: keras.Model) -> keras.optimizers.Optimizer:
    """Return Keras' optimizer, which also keeps the moving average, built."""
    average = {"use_ema": True, "ema_momentum": config.ema_decay} if config.ema_decay else {}
    if config.optimizer == "adamw":
        optimizer = keras.optimizers.AdamW(
            config.learning_rate, weight_decay=config.weight_decay, **average
        )
        decayed = {id(v) for v in kernels(model)}
        optimizer.exclude_from_weight_decay(
            var_list=[v for v in model.trainable_variables if id(v) not in decayed]
        )
    else:
        optimizer = keras.optimizers.SGD(
            config.learning_rate,
            momentum=0.0 if config.optimizer == "sgd" else config.momentum,
            nesterov=config.optimizer == "nesterov",
            **average,
        )
    # Inside a tf.function with a loop no variable can be created.
    optimizer.build(model.trainable_variables)
    return optimizer


def make_dataset(config: Config) -> tf.data.Dataset:
    """Return global batches (images `[B, h, w, C]`, labels `[B]`) without end."""
    if not config.data:
        batch = synthetic_batch(config)
        return tf.data.Dataset.from_tensors(batch).repeat().prefetch(tf.data.AUTOTUNE)
    images, labels = stored_images(config)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(len(labels), seed=config.seed).repeat()
    dataset = dataset.map(
        lambda image, label: (augmented(image, config.augment), label),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=False,
    )
    return dataset.batch(config.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def augmented(image: tf.Tensor, kind: str) -> tf.Tensor:
    """Augment one image, uint8 `[H, W, C]`, with TensorFlow's own functions."""
    height, width, channels = image.shape
    if kind == "tutorial":
        # While the pixels are bytes, a crop moves a quarter as much.
        size = [max(1, height * 3 // 4), max(1, width * 3 // 4), channels]
        image = tf.image.random_crop(image, size)
    elif kind == "resnet":
        image = tf.image.resize_with_crop_or_pad(image, height + 2 * PADDING, width + 2 * PADDING)
        image = tf.image.random_crop(image, [height, width, channels])
    if kind in ("tutorial", "resnet"):
        image = tf.image.random_flip_left_right(image)
    image = tf.cast(image, tf.float32)
    if kind == "tutorial":
        image = tf.image.random_brightness(image, BRIGHTNESS)
        image = tf.image.random_contrast(image, *CONTRAST)
    return image if kind == "off" else tf.image.per_image_standardization(image)


def _with_decay(regularizer: keras.regularizers.L2 | None, decay: float) -> keras.regularizers.L2:
    """Add `decay * sum(w ** 2) / 2` to what a layer already asks for."""
    before = float(regularizer.l2) if regularizer is not None else 0.0
    return keras.regularizers.L2(before + decay / 2)
