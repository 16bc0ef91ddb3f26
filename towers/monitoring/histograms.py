"""Histograms for TensorBoard: of weights, of gathered gradients, and of what layers give out.

    draw = make_histograms(builder, model, weights, loss_fn, loss_scale, options)
    writer.heavy(draw(sampler.batch(step, examples)), step)      # of samples.Sampler

No variable is changed: what the towers of a step would assign (BatchNorm statistics, seeds) is
dropped.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb

from towers import tf_private
from towers.builder.splitting import PerTower
from towers.builder.tower import TowerBuilder
from towers.data import augment
from towers.monitoring.samples import Batch
from towers.options.run import Options

NUM_EXAMPLES = 16  # that activations are taken of
# Of larger tensors every so-manieth value is taken, so that a look costs no gigabytes.
_MAX_VALUES, _MAX_ACTIVATIONS = 2**20, 2**16


def make_histograms(
    builder: TowerBuilder,
    model: keras.Model,
    weights: Sequence[Any],
    loss_fn: Callable,
    loss_scale: tf.Variable | None,
    options: Options,
) -> Callable[[Batch | None], Summary]:
    """Return a function from a batch to `weights/NAME`, `gradients/NAME`, `activations/LAYER`.

    The gradients are those of the data's loss, as gathered from all towers, before regularisation
    and clipping. Infinities and NaN are left out, and a tag of which nothing else remains; without
    a batch there are weights alone.

    `weights` are the model's trainable variables, as the builder takes them; `loss_fn` leads from
    (images, labels, draws) of a slice to losses [b], which `loss_scale`, if any, is a factor of.
    """
    layer_names: list[str] = []  # set by tracing

    @tf.function(autograph=False)
    def look(*batch: tf.Tensor) -> tuple[dict[int, tf.Tensor], list[tf.Tensor]]:
        with keras.StatelessScope():  # assignments end here
            _, found = builder.gradients(loss_fn, weights, *batch)
            images, _, draws = (value[:NUM_EXAMPLES] for value in batch)
            with tf.device(builder.devices[0]):
                inputs = augment.train_images(images, draws, options.augment, options.input_dtype)
                outputs = _outputs_of_layers(model, inputs)
                activations = [_thinned(value, _MAX_ACTIVATIONS) for _, value in outputs]
        layer_names[:] = [layer.path or layer.name for layer, _ in outputs]
        gradients = {}  # by the place of the variable
        with tf.device(builder.gather_device):
            for i, gradient in enumerate(found):
                gradient = gradient.values[0] if isinstance(gradient, PerTower) else gradient
                if gradient is not None:
                    value = _thinned(gradient, _MAX_VALUES)
                    scale = 1 if loss_scale is None else tf.cast(loss_scale, value.dtype)
                    gradients[i] = value / scale
        return gradients, activations

    def draw(batch: Batch | None) -> Summary:
        summary = Summary()
        names = list(_unique(v.path for v in model.trainable_variables))
        values = (_thinned(v.value, _MAX_VALUES) for v in model.trainable_variables)
        _add(summary, "weights", zip(names, values, strict=True))
        if batch is not None:
            gradients, activations = look(*batch.tensors)
            _add(summary, "gradients", ((names[i], value) for i, value in gradients.items()))
            _add(summary, "activations", zip(_unique(layer_names), activations, strict=True))
        return summary

    return draw


def _outputs_of_layers(
    model: keras.Model, inputs: tf.Tensor
) -> list[tuple[keras.Layer, tf.Tensor]]:
    """Call a model in inference mode, and return (layer, its outputs as one flat tensor).

    Layers are caught wherever they are called from: in functional models, nested ones, and in a
    `call` of the user's; of several calls the last counts. What a layer returns inside a loop or a
    function of its own cannot be had.
    """
    graph = tf.compat.v1.get_default_graph()
    found: dict[int, tuple[keras.Layer, tf.Tensor]] = {}

    def make(call: Callable) -> Callable:
        def caught(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            outputs = call(layer, *args, **kwargs)
            numbers = [
                tf.reshape(_number(leaf), [-1])
                for leaf in tf.nest.flatten(outputs, expand_composites=True)
                if getattr(leaf, "graph", None) is graph
                and (leaf.dtype.is_floating or leaf.dtype.is_integer)
            ]
            if layer is not model and numbers:
                found.pop(id(layer), None)
                found[id(layer)] = layer, tf.concat(numbers, axis=0)
            return outputs

        return caught

    with tf_private.layer_calls_replaced(make):
        model(inputs, training=False)
    return list(found.values())


def _unique(names: Iterable[str]) -> Iterator[str]:
    """Yield the names, each that was there before with `~2`, `~3` and so on behind it."""
    counts = Counter()
    for name in names:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}~{counts[name]}"


def _add(summary: Summary, kind: str, named: Iterable[tuple[str, tf.Tensor]]) -> None:
    """Add a histogram of each tensor of which there is something to show."""
    for name, value in named:
        values = value.numpy()
        values = values[np.isfinite(values)]
        if values.size:
            summary.MergeFrom(histogram_pb(f"{kind}/{name}", values))


def _thinned(value: Any, most: int) -> tf.Tensor:
    """Return some values of a dense or sparse tensor, at most `most`, flat."""
    value = value.values if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
    value = tf.reshape(_number(value), [-1])
    # An odd stride meets all of a power of 2 channels.
    stride = -(-tf.size(value, tf.int64) // most)
    return value[:: tf.bitwise.bitwise_or(stride, tf.constant(1, tf.int64))]


def _number(value: tf.Tensor) -> tf.Tensor:
    """Return a tensor in a type that NumPy and a histogram can take: float32 or float64."""
    return value if value.dtype in (tf.float32, tf.float64) else tf.cast(value, tf.float32)
