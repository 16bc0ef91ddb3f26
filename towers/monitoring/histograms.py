"""Histograms for TensorBoard: of weights, of gathered gradients, and of what layers give out.

    draw = make_histograms(builder, model, task.gradients, task.inputs)
    writer.heavy(draw(sampler.batch(step, examples)), step)      # of gallery.Sampler

No variable is changed: what the towers of a step would assign (BatchNorm statistics, seeds) is
dropped.
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

NUM_EXAMPLES = 16  # that activations are taken of
_MAX_VALUES = 2**18  # of a larger tensor every so-manieth is taken: a look costs no gigabytes


def make_histograms(
    builder: TowerBuilder, model: keras.Model, gradients: Callable, inputs: Callable
) -> Callable[[Batch], Summary]:
    """Return a function from a batch to `weights/NAME`, `gradients/NAME`, `activations/LAYER`.

    The gradients are those of the data's loss, as gathered from all towers, before regularisation
    and clipping. Infinities and NaN are left out, and tags without any other value. Of several
    layers of one name the last is shown.

    Args:
        builder: of the towers.
        model: whose layers and weights are shown.
        gradients: those of a task.
        inputs: those of a task.
    """

    @tf.function(autograph=False)
    def look(example: Any, draws: tf.Tensor) -> dict[str, tf.Tensor]:
        with keras.StatelessScope():  # assignments end here
            found = gradients(*example, draws)
            first = tf.nest.map_structure(lambda t: t[:NUM_EXAMPLES], (example[0], draws))
            with tf.device(builder.devices[0]):
                values = _activations(model, inputs(*first))
        with tf.device(builder.gather_device):
            for variable, gradient in zip(model.trainable_variables, found, strict=True):
                if gradient is not None:
                    values[f"gradients/{variable.path}"] = _thinned(gradient)
        return values

    def draw(batch: Batch) -> Summary:
        found = {f"weights/{v.path}": _thinned(v.value) for v in model.trainable_variables}
        summary = Summary()
        for tag, tensor in (found | look(*batch)).items():
            values = tensor.numpy()
            values = values[np.isfinite(values)]
            if values.size:
                summary.MergeFrom(histogram_pb(tag, values))
        return summary

    return draw


def _activations(model: keras.Model, inputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Call a model in inference mode, and return {tag: a layer's outputs, flat}.

    Layers are caught wherever they are called from: in functional models, nested ones, and in a
    `call` of the user's; of several calls the last counts. Left out are outputs inside a loop or a
    function of its own, and those that are not one tensor of numbers.
    """
    graph = tf.compat.v1.get_default_graph()
    found: dict[str, tf.Tensor] = {}

    def make(call: Callable) -> Callable:
        def caught(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            outputs = call(layer, *args, **kwargs)
            here = isinstance(outputs, tf.Tensor) and getattr(outputs, "graph", None) is graph
            if here and layer is not model and outputs.dtype not in (tf.bool, tf.string):
                found[f"activations/{layer.path or layer.name}"] = _thinned(outputs)
            return outputs

        return caught

    with tf_internals.patch_layer_calls(make):
        model(inputs, training=False)
    return found


def _thinned(value: Any) -> tf.Tensor:
    """Return some values of a dense or sparse tensor, flat, as float32 or float64."""
    value = value.values if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
    value = value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
    stride = -(-tf.size(value, tf.int64) // _MAX_VALUES)
    # An odd stride meets all of a power of 2 channels.
    return tf.reshape(value, [-1])[:: tf.bitwise.bitwise_or(stride, tf.constant(1, tf.int64))]
