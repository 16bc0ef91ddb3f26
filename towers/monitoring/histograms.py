"""Histograms of weights, gathered gradients and layer outputs for TensorBoard.

    draw = make_histograms(builder, model, task.gradients, task.inputs)
    writer.write_summary("train", step, draw(sampler.batch(step, examples)))

No variable changes: assignments, as of BatchNorm statistics and seeds, are dropped.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb

from towers import tf_internals
from towers.builder.tower import TowerBuilder
from towers.monitoring.image_summaries import Batch

NUM_EXAMPLES = 16  # whose activations are shown
_MAX_VALUES = 2**18  # larger tensors are sampled with a stride


def make_histograms(
    builder: TowerBuilder, model: keras.Model, gradients: Callable, inputs: Callable
) -> Callable[[Batch], Summary]:
    """Return a function from a batch to `weights/NAME`, `gradients/NAME`, `activations/LAYER`.

    Gradients are those of the data loss, gathered from all towers, before regularisation and
    clipping. Infinities and NaN are dropped, and tags without finite values. Of several layers with
    the same name the last is shown.

    Args:
        builder: builder of the towers.
        model: model whose layers and weights are shown.
        gradients: `gradients` of the task.
        inputs: `inputs` of the task.
    """

    @tf.function(autograph=False)
    def look(example: Any, draws: tf.Tensor) -> dict[str, tf.Tensor]:
        with keras.StatelessScope():  # drops assignments
            gathered = gradients(*example, draws)
            first = tf.nest.map_structure(lambda t: t[:NUM_EXAMPLES], (example[0], draws))
            with tf.device(builder.devices[0]):
                values = _activations(model, inputs(*first))
        with tf.device(builder.gather_device):
            for variable, gradient in zip(model.trainable_variables, gathered, strict=True):
                if gradient is not None:
                    values[f"gradients/{variable.path}"] = _thinned(gradient)
        return values

    def draw(batch: Batch) -> Summary:
        weights = {f"weights/{v.path}": _thinned(v.value) for v in model.trainable_variables}
        summary = Summary()
        for tag, tensor in (weights | look(*batch)).items():
            values = tensor.numpy()
            values = values[np.isfinite(values)]
            if values.size:
                summary.MergeFrom(histogram_pb(tag, values))
        return summary

    return draw


def _activations(model: keras.Model, inputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Call a model in inference mode, and return {tag: a layer's flattened outputs}.

    Layers are recorded wherever they are called, also in nested models and the user's `call`; the
    last of several calls counts. Outputs inside a loop or inner function are left out, and outputs
    other than one numeric tensor.
    """
    graph = tf.compat.v1.get_default_graph()
    activations: dict[str, tf.Tensor] = {}

    def make(call: Callable) -> Callable:
        def caught(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            outputs = call(layer, *args, **kwargs)
            here = isinstance(outputs, tf.Tensor) and getattr(outputs, "graph", None) is graph
            if here and layer is not model and outputs.dtype not in (tf.bool, tf.string):
                activations[f"activations/{layer.path or layer.name}"] = _thinned(outputs)
            return outputs

        return caught

    with tf_internals.replaced((keras.Layer, "__call__", make)):
        model(inputs, training=False)
    return activations


def _thinned(value: Any) -> tf.Tensor:
    """Return at most `_MAX_VALUES` values of a dense or sparse tensor, as float32 or float64."""
    value = value.values if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
    value = value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
    stride = -(-tf.size(value, tf.int64) // _MAX_VALUES)
    # An odd stride samples every channel if their number is a power of 2.
    return tf.reshape(value, [-1])[:: tf.bitwise.bitwise_or(stride, tf.constant(1, tf.int64))]
