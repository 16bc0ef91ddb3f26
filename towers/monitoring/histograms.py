"""Histograms for TensorBoard: of weights, of gathered gradients, and of what layers give out.

    histograms = Histograms(builder, model, weights, loss_fn, loss_scale, options)
    batch = sampler.batch(step, examples)        # of samples.Sampler
    writer.heavy(histograms.of_step(batch), step)

No variable is changed: what the towers of a step would assign (BatchNorm statistics, seeds) is
dropped. The two functions are compiled at the first call.
"""

import functools
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


class Histograms:
    """The histograms of a run; holds its compiled functions."""

    def __init__(
        self,
        builder: TowerBuilder,
        model: keras.Model,
        weights: Sequence[Any],
        loss_fn: Callable,
        loss_scale: tf.Variable | None,
        options: Options,
    ):
        """Note what a step is made of; build nothing.

        Args:
            builder: of the towers.
            model: whose layers are looked at.
            weights: its trainable variables, as the builder takes them.
            loss_fn: the towers' function: (images, labels, draws) of a slice -> losses [b].
            loss_scale: what `loss_fn` multiplies losses by; None: nothing.
            options: of the run: how images are augmented, and their type.
        """
        self._builder, self._model, self._weights = builder, model, weights
        self._loss_fn, self._loss_scale, self._options = loss_fn, loss_scale, options

    def of_step(self, batch: Batch | None) -> Summary:
        """Return `weights/NAME`, `gradients/NAME` and `activations/LAYER`, as of now.

        Infinities and NaN are left out, and a tag of which nothing else remains. The gradients are
        those of the data's loss, as gathered from all towers, before regularisation and clipping.

        Args:
            batch: what gradients and activations are taken of; None: there are none of them.
        """
        summary = Summary()
        variables = self._model.trainable_variables
        names = list(_unique(v.path for v in variables))
        weights = (_thinned(v.value, _MAX_VALUES) for v in variables)
        _add(summary, "weights", zip(names, weights, strict=True))
        if batch is None:
            return summary
        gradients = self._gradients(*batch.tensors)
        _add(summary, "gradients", ((names[i], value) for i, value in gradients.items()))
        outputs = self._activations(batch.images[:NUM_EXAMPLES], batch.draws[:NUM_EXAMPLES])
        _add(summary, "activations", zip(_unique(self._layer_names), outputs, strict=True))
        return summary

    @functools.cached_property
    def _gradients(self) -> Callable[..., dict[int, tf.Tensor]]:
        """The compiled function from a batch to {place of the variable: values of its gradient}."""
        builder, scale = self._builder, self._loss_scale

        @tf.function(autograph=False)
        def gradients(*batch: tf.Tensor) -> dict[int, tf.Tensor]:
            with keras.StatelessScope():  # assignments end here
                _, found = builder.gradients(self._loss_fn, self._weights, *batch)
            result = {}
            with tf.device(builder.gather_device):
                for i, gradient in enumerate(found):
                    gradient = gradient.values[0] if isinstance(gradient, PerTower) else gradient
                    if gradient is None:
                        continue
                    value = _thinned(gradient, _MAX_VALUES)
                    result[i] = value if scale is None else value / tf.cast(scale, value.dtype)
            return result

        return gradients

    @functools.cached_property
    def _activations(self) -> Callable[..., list[tf.Tensor]]:
        """The compiled function from (images, draws) to some values of each layer's output.

        Tracing it sets `_layer_names`, in the order of its results.
        """
        kind = self._options.augment
        dtype = tf.float64 if self._options.dtype == "float64" else tf.float32

        @tf.function(autograph=False)
        def activations(images: tf.Tensor, draws: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(self._builder.devices[0]), keras.StatelessScope():
                inputs = augment.train_images(images, draws, kind, dtype=dtype)
                found = _outputs_of_layers(self._model, inputs)
                self._layer_names = [layer.path or layer.name for layer, _ in found]
                return [_thinned(value, _MAX_ACTIVATIONS) for _, value in found]

        return activations


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
