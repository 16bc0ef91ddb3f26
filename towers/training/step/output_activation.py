"""The final activation of a model's outputs, and a cross entropy of logits."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.errors import InputError

_LINEAR = keras.activations.linear


def output_ending(model: keras.Model) -> tuple[str | None, str]:
    """Return the final activation of a model's single output, and the layer that has it.

    It is "softmax", "sigmoid", "linear", or None: another, or unknown, as that of a model with
    several outputs. Activations inside of a user's own layer or of a subclassed model's `call` are
    not found, except that of the layer that was made last.
    """
    outputs = getattr(model, "outputs", None)
    if not outputs:  # a subclassed model
        layer = model.layers[-1] if model.layers else None
        if isinstance(layer, keras.Model):
            return output_ending(layer)
        return _name(getattr(layer, "activation", layer)), ""
    tensor = outputs[0]
    while len(outputs) == 1:
        layer, place, inputs = tf_internals.maker_of(tensor)
        inner = layer.layer if isinstance(layer, keras.layers.TimeDistributed) else layer
        if isinstance(layer, keras.Model):
            if not getattr(layer, "outputs", None):
                return output_ending(layer)
            tensor = layer.outputs[place]
        elif isinstance(inner, keras.layers.Activation) and inner.activation is _LINEAR:
            tensor = inputs[0]
        else:
            return _activation(inner), inner.name
    return None, ""


def _activation(layer: keras.Operation) -> str | None:
    is_keras = type(layer).__module__.startswith("keras.")
    activation = getattr(layer, "activation", layer) if is_keras else layer
    if activation is _LINEAR:  # a constraint may make it one of probabilities
        return "linear" if getattr(layer, "kernel_constraint", None) is None else None
    if activation is layer and getattr(layer, "axis", -1) != -1:
        return None
    return _name(activation)


def _name(activation: object) -> str | None:
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    return name if name in ("softmax", "sigmoid") else None


def check_rows(output: Any) -> None:
    """Raise InputError for an output, symbolic or not, that has no single row for each image."""
    if tf.TensorShape(output.shape).rank != 2:
        raise InputError(
            "--test_time_flip needs one row of numbers for each image, and the model's outputs "
            f"have shape {output.shape}: leave it out"
        )


def mirrored(call: Callable, images: tf.Tensor) -> Any:
    """Return the mean outputs for images and their mirror images, float32 at least.

    Args:
        call: a model: from images to an output `[b, n]`, or a structure of such.
        images: `[b, H, W, C]`.

    Raises:
        InputError: an output has another rank.
    """

    def mean(output: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        check_rows(output)
        dtype = tf.float32 if output.dtype.size < 4 else output.dtype
        return (tf.cast(output, dtype) + tf.cast(other, dtype)) / 2

    return tf.nest.map_structure(mean, call(images), call(tf.reverse(images, [2])))


class SmoothedCrossEntropy(keras.losses.SparseCategoricalCrossentropy):
    """Cross entropy of logits with label smoothing (Szegedy et al. 2016).

    The right class has probability 1 - `smoothing`, and the rest is spread over all classes.
    """

    def __init__(self, smoothing: float):
        """Set the smoothing, 0 to 1."""
        super().__init__(from_logits=True)
        self.smoothing = smoothing

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the loss of each example, see `keras.Loss`."""
        of_all = -tf.reduce_mean(tf.nn.log_softmax(y_pred), axis=-1)
        return (1.0 - self.smoothing) * super().call(y_true, y_pred) + self.smoothing * of_all
