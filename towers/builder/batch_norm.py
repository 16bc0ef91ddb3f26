"""BatchNorm in a tower: over the global batch, and by TensorFlow's fused kernels.

While a tower is traced, the moments of Keras' `BatchNormalization` layers are combined over the
towers, forward and backward. Keras normalizes by a chain of elementwise ops, which takes a third of
ResNet-20's step; fused kernels replace it where they exist: in float32, over all axes but the last.
Both give the same numbers up to rounding.

A GPU computes in the layer's own type, 16 bits too, and backward by the kernel of training: that of
inference supports one layout, and would need transposes. The updates of moving averages leave a
tower packed (`MovingAverageUpdate`).

Towers are traced one after the other, so a tower is traced before the others' values exist. It
continues with a placeholder for the stack of all towers' values. Once all towers are traced, the
values are stacked on the gather device, and the result replaces the placeholders. In the graph a
tower waits for these values alone. GPUs exchange by collectives: a gather device would cost two
more transfers.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import is_gpu
from towers.builder.gather import Collective, are_used
from towers.builder.replica_scope import MovingAverageUpdate, ReplicaScope
from towers.errors import InputError

_MOST_IMAGES = 65_535  # that cuDNN normalizes by given moments
_HERE = (
    "BatchNorm cannot use the statistics of all towers here; make the whole step a tf.function, "
    "with layers outside of branches, loops, tf.vectorized_map and jit_compile; or set "
    "batch_norm='local' (--batch_norm=local), without synchronized=True in any layer"
)
_SECOND = (
    "towers cannot exchange this gradient of synchronized BatchNorm: it is the gradient of a "
    "gradient, comes from tf.gradients, or from a tape outside of the towers' loop or branch; open "
    "the tape inside of it, or set batch_norm='local'"
)


# The exchange of the towers' values.


@dataclasses.dataclass(frozen=True)
class _Round:
    """One exchange of all towers' values."""

    collective: Collective | None
    values: list[tuple[tf.Tensor, Any]] = dataclasses.field(default_factory=list)  # (it, known)
    stand_ins: list[tf.Tensor] = dataclasses.field(default_factory=list)


class SyncGroup:
    """The exchanges of one step's towers.

    A tower's first exchange is with the first one of each other tower, and so on. All towers must
    make the same exchanges in the same order, like copies of one function.
    """

    def __init__(self, counts: Sequence[Any], devices: Sequence[str]):
        """Set the towers' numbers of examples: ints, tensors if 0 is possible, None if unknown.

        Args:
            counts: numbers of examples: ints, tensors if 0 is possible, None if unknown.
            devices: of the towers.
        """
        self.is_open = True  # while towers are traced
        self.handles = [SyncHandle(self, i, counts, device) for i, device in enumerate(devices)]
        self._devices, self._by_collectives = devices, are_used(devices)
        self._graph = tf.compat.v1.get_default_graph()
        self._rounds: list[_Round] = []
        self._num_joined = 0  # of these

    def round(self, place: int) -> _Round:
        """Return the exchange of a number, which the first tower to arrive begins."""
        if not self.is_open:
            raise InputError(_SECOND)
        # tf.vectorized_map traces what it calls in place, in a scope of this name.
        in_map = "loop_body" in tf.get_current_name_scope().split("/")
        here = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or in_map or here is not self._graph:
            raise InputError(_HERE)
        if place == len(self._rounds):
            self._rounds.append(_Round(Collective(self._devices) if self._by_collectives else None))
        return self._rounds[place]

    def join(self, gather_device: str) -> None:
        """Replace the stand-ins by the stacks, when all towers are traced."""
        for exchange in self._rounds[self._num_joined :]:
            shapes = {(x.dtype, tuple(x.shape), k) for x, k in exchange.values}
            if len(exchange.values) != len(self.handles) or len(shapes) > 1:
                raise InputError(
                    f"{len(exchange.values)} of {len(self.handles)} towers exchanged values of "
                    f"{len(shapes)} shapes; each copy of the function must run the same layers"
                )
            if exchange.stand_ins:
                with tf.device(gather_device), tf.name_scope("exchange"):
                    stacked = tf.stack([value for value, _ in exchange.values])
                for stand_in in exchange.stand_ins:
                    tf_internals.set_input(stand_in.op, stacked)
        self._num_joined, self.is_open = len(self._rounds), False


class SyncHandle:
    """The exchanges of one tower."""

    def __init__(self, group: SyncGroup, tower: int, counts: Sequence[Any], device: str):
        """Join a group, see `SyncGroup`."""
        self.tower, self.num_towers, self.count = tower, len(counts), counts[tower]
        self.equal = all(isinstance(c, int) and c == counts[0] for c in counts)
        self.layers: list[Any] = []  # of BatchNorm, that the tower has gone through
        self._group, self._device, self._places = group, device, itertools.count()

    def stack(self, value: tf.Tensor, known: Any = None) -> tf.Tensor:
        """Return the stack of all towers' values, `[N, ...]`, which has no gradient.

        Args:
            value: of this tower.
            known: a Python value that must be equal in all towers.

        Raises:
            InputError: the towers cannot exchange here; or, later, they differ in shape or `known`.
        """
        exchange = self._group.round(next(self._places))
        exchange.values.append((value, known))
        if exchange.collective:
            result = exchange.collective.stack(value, self._device)
        else:
            result = tf.identity(tf.zeros([self.num_towers, *value.shape], value.dtype))
            exchange.stand_ins.append(result)
        return _once_differentiated(result, value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Return the stack of all towers' values, `[N, ...]`, with gradients to each tower."""

        @tf.custom_gradient
        def gathered(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                return tf.reduce_sum(self.stack(upstream)[:, self.tower], axis=0)

            return self.stack(value), gradient

        return gathered(value)


@tf.custom_gradient
def _once_differentiated(result: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def gradient(_: tf.Tensor) -> tuple:
        raise InputError(_SECOND)

    return tf.identity(result), gradient


# The layers.


@contextlib.contextmanager
def over_all_towers(sync: SyncHandle | None, mode: str, device: str) -> Iterator[None]:
    """Make BatchNorm layers in the block take their moments over all towers.

    Args:
        sync: the tower's exchanges; None if there is one tower.
        mode: "sync", or "local" for layers with `synchronized=True` only.
        device: of the tower.
    """

    def sync_of(layer: Any) -> SyncHandle | None:
        return sync if mode == "sync" or layer.synchronized else None

    def make_call(keras_call: Callable) -> Callable:
        def call(layer: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> Any:
            scope = tf_internals.open_scope()
            if isinstance(scope, ReplicaScope):
                scope.averages |= averages_of(layer)
            fused = training is True and layer.trainable and mask is None
            fused = fused and not getattr(layer, "renorm", False)  # which Keras has since 3.14
            fused = fused and not tf_internals.has_own_moments(layer) and 0 not in inputs.shape
            last = layer.axis in (-1, inputs.shape.rank - 1)
            wide = keras.backend.result_type(inputs.dtype, "float32") == "float32"
            if fused and last and wide:
                return _call(layer, inputs, sync_of(layer), is_gpu(device), scope)
            return keras_call(layer, inputs, training=training, mask=mask)

        return call

    def make_moments(keras_moments: Callable) -> Callable:
        def moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple:
            if handle := sync_of(layer):
                return _moments(layer, inputs, mask, handle)
            return keras_moments(layer, inputs, mask)

        return moments

    with tf_internals.patch_batch_norm(make_call, make_moments):
        yield


def averages_of(layer: keras.layers.BatchNormalization) -> set[int]:
    """Return the ids of a layer's moving averages."""
    names = "moving_mean", "moving_variance", "renorm_mean", "renorm_stddev", "moving_stddev"
    return {id(getattr(layer, name)) for name in names if hasattr(layer, name)}


# The fused kernels. Shapes are x [B, H, W, C]; scale, offset and moments [C].


def _call(
    layer: Any, inputs: tf.Tensor, sync: SyncHandle | None, on_gpu: bool, scope: Any
) -> tf.Tensor:
    # On a GPU it computes in the layer's type, else in float32.
    num_channels = layer.moving_mean.shape[0]
    if inputs.shape[-1] is None:  # else of another number the reshape would make other rows
        inputs = tf.ensure_shape(inputs, [*inputs.shape[:-1], num_channels])
    x = tf.cast(inputs, layer.compute_dtype if on_gpu else tf.float32)
    if on_gpu and (x.shape.rank != 4 or (x.shape[0] or 0) > _MOST_IMAGES):
        x = tf.reshape(x, [1, -1, 1, num_channels])
    elif x.shape.rank != 4:  # on CPUs the other shape takes up to twice as long
        x = tf.reshape(x, [-1, 1, 1, num_channels])
    scale = tf.cast(layer.gamma, tf.float32) if layer.scale else tf.ones([num_channels])
    offset = tf.cast(layer.beta, tf.float32) if layer.center else tf.zeros([num_channels])
    correction = 1.0
    if sync is None:
        y, mean, variance, *_ = _in_training(x, scale, offset, layer.epsilon)
        correction = _correction(x)
        if not on_gpu or tf.is_tensor(correction):
            variance, correction = variance * correction, 1.0
    else:
        y, mean, variance = _normalize(x, scale, offset, layer.epsilon, sync, on_gpu)
    weight = 1.0 - layer.momentum
    for moving, value, share in (
        (layer.moving_mean, mean, weight),
        (layer.moving_variance, variance, weight * correction),
    ):
        average = MovingAverageUpdate(moving, value, layer.momentum, share, shared=sync is not None)
        if on_gpu and isinstance(scope, ReplicaScope):
            scope.defer(average)
        else:
            moving.assign(average.after(moving))
    return tf.cast(tf.reshape(y, tf.shape(inputs)), layer.compute_dtype)


def _in_training(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float, layout: str = "NHWC"
) -> Any:
    # Returns x normalized by its own moments, these, and the reserved outputs for backward.
    unknown = tf.zeros([0])
    return tf.raw_ops.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=unknown, variance=unknown, epsilon=epsilon,
        data_format=layout,
    )  # fmt: skip


def _correction(x: tf.Tensor) -> float | tf.Tensor:
    # Of the kernel's variance, which it divides by one less than the number of values.
    number = _number(x)
    less = tf.maximum(number - 1.0, 1.0) if tf.is_tensor(number) else max(number - 1, 1)
    return less / number


def _number(x: tf.Tensor) -> int | tf.Tensor:
    # Of the values of a channel.
    known = x.shape.num_elements()
    return tf.cast(tf.size(x) // x.shape[-1], tf.float32) if known is None else known // x.shape[-1]


def _normalize(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float, sync: SyncHandle,
    on_gpu: bool,
) -> tuple:  # fmt: skip
    """Return x normalized by the moments of all towers, and these.

    Forward and backward need one exchange each: of moments, then of the gradient's sums.
    """
    backward = _backward_by_own_moments if on_gpu else _backward

    @tf.custom_gradient
    def normalize(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tuple:
        _, own_mean, own_variance, *reserved = _in_training(x, scale, offset, epsilon)
        layer = _layer_of(own_mean, own_variance, x, scale, epsilon, sync, on_gpu)
        sync.layers.append(layer)

        def gradient(upstream: tf.Tensor, *_: Any) -> tuple:
            return backward(upstream, x, layer, reserved, sync)

        y = _by_moments(x, epsilon, scale, offset, layer.mean, layer.variance)
        return (y, layer.mean, layer.variance), gradient

    return normalize(x, scale, offset)


@dataclasses.dataclass(eq=False)
class _Layer:
    """A layer of C channels in one of N towers: its moments, and the factors of backward."""

    own_mean: tf.Tensor
    own_variance: tf.Tensor
    moments: tf.Tensor  # of each tower, mean and variance, and a third row, [N, 3, C]
    mean: tf.Tensor  # of all towers, as the variance
    variance: tf.Tensor
    scale: tf.Tensor
    epsilon: float
    number: Any  # of this tower's values of a channel, [C], as the next two
    everything: Any  # their number in all towers
    share: Any  # this tower's share of them; 0 for a padded slice without examples
    kernel_scale: tf.Tensor | None = None  # argument `scale` of backward's kernel
    # Factors of each tower's sums (by scale, by offset) in slope and level of the line that is
    # added, and in this tower's part of the gradient by scale, [N, 2, 3, C].
    lines: tf.Tensor | None = None


def _layer_of(
    own_mean: tf.Tensor, own_variance: tf.Tensor, x: tf.Tensor, scale: tf.Tensor, epsilon: float,
    sync: SyncHandle, on_gpu: bool,
) -> _Layer:  # fmt: skip
    # The variance is the kernel's. Variances are combined as in Chan et al. 1979, by the towers'
    # variances and the variance of their means: large means do not cancel.
    number, correction, channels = _number(x), _correction(x), own_mean.shape
    if on_gpu and sync.equal and not tf.is_tensor(number):
        # One kernel averages the towers' rows, and takes the variance of the third one. The factors
        # undo that a kernel divides a variance by one less than the number of its values.
        factors = [[1.0], [correction], [math.sqrt(1.0 - 1.0 / sync.num_towers)]]
        packed = tf.stack([own_mean, own_variance, own_mean]) * factors
        moments = sync.stack(packed, number)
        numbers = number, number * sync.num_towers, 1.0 / sync.num_towers
        number, everything, share = (np.full(channels, n, np.float32) for n in numbers)
        rows, ones = tf.reshape(moments, [sync.num_towers, -1, 1, 1]), tf.ones(3 * channels[0])
        _, averages, spreads, *_ = _in_training(rows, ones, 0.0 * ones, epsilon, "NCHW")
        mean, variance, _ = tf.unstack(tf.reshape(averages, packed.shape))
        variance += tf.unstack(tf.reshape(spreads, packed.shape))[2]
    else:
        number = tf.fill(channels, tf.cast(number, tf.float32))
        packed = _zero_if_empty(tf.stack([own_mean, own_variance * correction, number]), sync)
        moments = sync.stack(packed)
        means, variances, numbers = tf.unstack(moments, axis=1)
        everything = tf.reduce_sum(numbers, axis=0)
        share = tf.unstack(numbers)[sync.tower] / everything
        mean = tf.reduce_sum(numbers * means, axis=0) / everything
        variances += tf.math.squared_difference(means, mean)
        variance = tf.reduce_sum(numbers * variances, axis=0) / everything
    own = own_mean, tf.unstack(packed)[1]
    return _Layer(*own, moments, mean, variance, scale, epsilon, number, everything, share)


def _backward(
    upstream: tf.Tensor, x: tf.Tensor, layer: _Layer, _: Any, sync: SyncHandle
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the gradients by x, scale and offset, by the kernel of inference."""
    direct, of_scale, of_offset, *_ = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=upstream, x=x, scale=layer.scale, reserve_space_1=layer.mean,
        reserve_space_2=layer.variance, reserve_space_3=layer.variance, epsilon=layer.epsilon,
        is_training=False,
    )  # fmt: skip
    sums = tf.reduce_sum(sync.stack(tf.stack([of_scale, of_offset])), axis=0)
    weight = -layer.scale * tf.math.rsqrt(layer.variance + layer.epsilon) / layer.everything
    # Padding would be in the sums of the layer before.
    slope, level = tf.unstack(_zero_if_empty(weight, sync) * sums)
    line = _by_moments(x, layer.epsilon, slope, level, layer.mean, layer.variance)
    return direct + line, of_scale, of_offset


def _backward_by_own_moments(
    upstream: tf.Tensor, x: tf.Tensor, layer: _Layer, reserved: Sequence[tf.Tensor],
    sync: SyncHandle,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:  # fmt: skip
    """Return the gradients by x, scale and offset, by the kernel of training, for GPUs.

    That kernel subtracts the gradient through its own tower's moments. It is put back, and the
    gradient through all towers' moments is subtracted, as one linear function of x in each channel.
    """
    if layer.lines is None:
        _prepare([each for each in sync.layers if each.lines is None], sync)
    direct, by_own_scale, of_offset, *_ = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=upstream, x=x, scale=layer.kernel_scale, reserve_space_1=reserved[0],
        reserve_space_2=reserved[1], reserve_space_3=reserved[2], epsilon=layer.epsilon,
    )  # fmt: skip
    sums = sync.stack(tf.stack([by_own_scale, of_offset]))
    slope, level, of_scale = tf.unstack(
        tf.reduce_sum(layer.lines * tf.expand_dims(sums, 2), axis=[0, 1])
    )
    line = _by_moments(x, layer.epsilon, slope, level, layer.own_mean, layer.own_variance)
    return direct + line, of_scale, of_offset


def _prepare(layers: Sequence[_Layer], sync: SyncHandle) -> None:
    """Set the factors of backward of these layers, by few ops for all: launches are slow on a GPU.

    x normalized by all towers' moments is `ratio[j]` times x normalized by tower j's, plus
    `shift[j]`. The kernel has subtracted its own tower's means of dy and of dy * x in place of
    those of all.
    """
    sizes = [layer.scale.shape[0] for layer in layers]

    def joined(name: str) -> tf.Tensor:
        return tf.concat([getattr(layer, name) for layer in layers], axis=-1)

    of_layers = [getattr(layer, name) for name in ("mean", "variance", "scale") for layer in layers]
    mean, variance, scale = tf.unstack(tf.reshape(tf.concat(of_layers, axis=0), [3, -1]))
    means, variances, _ = tf.unstack(joined("moments"), axis=1)
    epsilon = np.repeat(np.float32([layer.epsilon for layer in layers]), sizes)
    inverse = tf.math.rsqrt(variance + epsilon)
    # Ratio and shift: factors of each tower's sums, in the sum by scale.
    by_all = tf.stack([tf.sqrt(variances + epsilon), means - mean], axis=1) * inverse
    pair = tf.unstack(by_all)[sync.tower]
    factor = scale * inverse
    of_own, of_all = 1.0 / joined("number"), 1.0 / joined("everything")

    itself = np.zeros([sync.num_towers, 2, 3, 1], np.float32)
    itself[sync.tower, 0, 0] = itself[sync.tower, 1, 1] = 1.0
    offset = np.zeros([2, 3, 1], np.float32)
    offset[1, 1] = 1.0
    taken = tf.concat([pair * (factor * -of_all), [joined("share") * tf.ones_like(factor)]], axis=0)
    lines = factor * (itself * of_own - offset * of_all) + tf.expand_dims(by_all, 2) * taken
    lines = _zero_if_empty(lines, sync)
    kernel_scales = tf.split(scale * tf.unstack(pair)[0], sizes)
    of_layers = zip(layers, kernel_scales, tf.split(lines, sizes, axis=-1), strict=True)
    for layer, kernel_scale, line in of_layers:
        layer.kernel_scale, layer.lines = kernel_scale, line


def _by_moments(
    x: tf.Tensor, epsilon: float, scale: tf.Tensor, offset: tf.Tensor, mean: tf.Tensor,
    variance: tf.Tensor,
) -> tf.Tensor:  # fmt: skip
    return tf.raw_ops.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=epsilon,
        is_training=False,
    ).y  # fmt: skip


def _zero_if_empty(values: tf.Tensor, sync: SyncHandle) -> tf.Tensor:
    if not tf.is_tensor(sync.count):
        return values
    # Padding has no moments, and no gradient goes through those of all towers to it.
    return tf.where(sync.count > 0, values, tf.zeros_like(values))


# The formula, for all else.


def _moments(
    layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None, sync: SyncHandle
) -> tuple[tf.Tensor, tf.Tensor]:
    axes = list(range(inputs.shape.rank))
    size = inputs.shape[axes.pop(layer.axis)]
    used, number, epsilon = None, tf.size(inputs, tf.int64) // size, 0.0
    if mask is not None:
        used = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.bool), tf.shape(inputs))
        number, epsilon = tf.math.count_nonzero(used) // size, keras.config.epsilon()  # as in Keras

    def total(values: tf.Tensor) -> tf.Tensor:
        values = values if used is None else tf.where(used, values, tf.zeros_like(values))
        return tf.reduce_sum(values, axes, keepdims=True)

    number = tf.cast(number, inputs.dtype)
    mean = tf.math.divide_no_nan(total(inputs), number)
    squares = total(tf.math.squared_difference(inputs, mean))
    if tf.is_tensor(sync.count):  # padding has no moments
        present = tf.cast(sync.count > 0, inputs.dtype)
        number, squares = number * present, squares * present
    packed = tf.concat([tf.reshape(mean, [size]), tf.reshape(squares, [size]), [number]], axis=0)
    # Combined as in Chan et al. 1979: large means do not cancel.
    means, squares, numbers = tf.split(sync.all_gather(packed), [size, size, 1], axis=1)
    everything = tf.reduce_sum(numbers) + epsilon
    mean = tf.reduce_sum(numbers * means, axis=0) / everything
    squares += numbers * tf.math.squared_difference(means, mean)
    return mean, tf.reduce_sum(squares, axis=0) / everything
