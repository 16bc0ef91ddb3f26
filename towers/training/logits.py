"""Whether a model gives probabilities where the loss takes logits: read from its traced graph."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers import tf_private
from towers.data import augment
from towers.training.model import floatx_of
from towers.training.run import Run

# Ops that hand on what they are given, in another type or shape.
_PASSING = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "StopGradient")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def notes(run: Run) -> list[str]:
    """Return a line for a model that ends in a softmax or a sigmoid, none for any other."""
    shape = augment.output_shape(run.data.image_shape, run.options.augment)
    with floatx_of(run.options.dtype):
        found = final_activation(run.masters.model, shape, run.options.input_dtype)
    if found is None:
        return []
    return [
        f"warning     {run.options.model} ends in a {found}, and the loss takes logits, of which "
        f"it takes the softmax itself: it will learn badly; take the {found} off the last layer"
    ]


def final_activation(
    model: keras.Model, image_shape: Sequence[int], dtype: str = "float32"
) -> str | None:
    """Return "softmax" or "sigmoid" for a model that ends in one, also in one written by hand.

    The logarithm of a softmax gives logits as good as any other: None.
    """
    images = tf.TensorSpec([None, *image_shape], dtype)

    @tf.function(autograph=False)
    def call(images: tf.Tensor) -> tf.Tensor:
        with keras.StatelessScope():  # traced, and not run
            return model(images, training=True)

    op = _source(call.get_concrete_function(images).graph.outputs[0])
    if op.type in ("Softmax", "Sigmoid"):
        return op.type.lower()
    if op.type in ("RealDiv", "DivNoNan"):
        above, below = (_source(tensor) for tensor in op.inputs)
        if above.type == "Exp" and below.type == "Sum" and _source(below.inputs[0]) is above:
            return "softmax"
    return None


def _source(tensor: tf.Tensor) -> tf.Operation:
    """Return the op that computes a tensor, before others hand it on; also inside a function."""
    op = tensor.op
    if op.type in _PASSING:
        return _source(op.inputs[0])
    if op.type in _CALLS:
        inner = tf_private.called_graph(op, "f")
        if inner is not None:
            return _source(inner.outputs[tensor.value_index])
    return op
