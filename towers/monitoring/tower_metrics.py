"""Measures each tower's losses, gradients and times in a step.

The step's results do not depend on it: norms are computed only if `measured`, by the same graph.

CPUs are timed in every step. For TensorFlow a GPU's op ends when its kernel is queued, so the host
has to wait for a value from the GPU to time it. GPUs are therefore timed only in measured steps,
which start when the GPUs are idle; in other steps nothing is sent to the host.
"""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import gather
from towers.builder.device_names import HOST, is_gpu
from towers.builder.passes import TowerGradients
from towers.builder.tower import TowerBuilder

PHASES = ("input_wait_seconds", "compute_seconds", "gather_seconds")
_GPU_SECONDS = ("tower_seconds", "compute_seconds", "gather_seconds")  # on GPUs


def measured_shapes(num_towers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the results of `measure`, except seconds."""
    of_towers = ("tower_examples", "tower_loss", "tower_gradient_norm")
    return dict.fromkeys(of_towers, (num_towers,)) | {"data_gradient_norm": ()}


def timed_shapes(num_towers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the seconds in the results of `measure`."""
    return {"tower_seconds": (num_towers,)} | dict.fromkeys(PHASES, ())


def on_gpus(builder: TowerBuilder) -> bool:
    """Return whether towers are on GPUs, so that only measured steps are timed."""
    return any(map(is_gpu, builder.devices))


def time_after(values: Any) -> tf.Tensor:
    """Return the host's time, in seconds, when `values` have been computed.

    It is NaN if ops are deterministic, since TensorFlow then refuses to read a clock.
    """
    waiting = tf.control_dependencies(_tensors(values))
    with tf.device(HOST), tf.name_scope("telemetry"), waiting:
        if tf_internals.ops_are_deterministic():
            return tf.constant(math.nan, tf.float64)
        return tf.timestamp()


class GpuIdleBarrier:
    """Waits for idle GPUs before a measured step, so that earlier kernels do not count.

    A copy to the host arrives when all kernels before it have run.

    Attributes:
        wanted: bool variable: whether steps are to be measured.
    """

    def __init__(self, builder: TowerBuilder):
        """Create a scalar on each GPU that has a tower."""
        self._marks = []
        with tf.device(HOST):
            self.wanted = tf.Variable(True, trainable=False)
            self._steps = tf.Variable(0, trainable=False)  # since the last measured one
        for device in filter(is_gpu, builder.devices):
            with tf.device(device):
                self._marks.append(tf.Variable(0.0, trainable=False))

    def before(self, batch: Any, measured: tf.Tensor) -> Any:
        """Return a batch on the host; in a measured step it waits until the GPUs are idle.

        Args:
            batch: structure of tensors.
            measured: bool scalar: whether the step is measured.
        """

        def wait() -> tf.Tensor:
            values = []
            for mark in self._marks:
                with tf.device(mark.device):
                    values.append(on_current_device(mark.read_value()))
            with tf.device(HOST):
                return tf.add_n(values)

        with tf.device(HOST), tf.name_scope("telemetry"):
            idle = tf.cond(measured, wait, lambda: tf.zeros([]))
            with tf.control_dependencies([idle]):
                return tf.nest.map_structure(tf.identity, batch)

    def for_all_steps(
        self, values: dict[str, tf.Tensor], num_steps: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Return a measured step's seconds times the steps since the measured one before.

        Args:
            values: results of a call of the train loop, with the seconds of `measure`.
            num_steps: number of its steps, an integer scalar.
        """
        self._steps.assign_add(num_steps)
        steps = tf.cast(self._steps.read_value(), tf.float32)
        self._steps.assign(tf.where(self.wanted, 0, self._steps))
        return {name: values[name] * steps for name in _GPU_SECONDS}


def measure(
    gradients: TowerGradients | None,
    builder: TowerBuilder,
    measured: tf.Tensor,
    scale: Any = 1.0,
    start: tf.Tensor | None = None,
    loss: tf.Tensor | None = None,
) -> dict[str, tf.Tensor]:
    """Return the seconds of a step up to its gathered gradients, and its towers' losses and norms.

    Args:
        gradients: the towers' parts of the loss's gradient; None if they are unknown.
        builder: builder of the towers.
        measured: bool scalar: whether the step is measured; otherwise norms are 0, and on GPUs all
            values.
        scale: scale of the loss.
        start: time before which no tower starts, in seconds, if towers have their own losses;
            otherwise the forward and backward passes are timed one by one.
        loss: the gathered loss, if towers have losses of their own.

    Returns:
        For each tower, [towers], 0 without examples: "tower_seconds" from the batch to its
        gradients, "tower_examples", "tower_loss" and "tower_gradient_norm". The last two are of the
        mean over its examples. The loss is NaN if towers have none. Scalars: "compute_seconds"
        (until the last tower has its gradients), "gather_seconds" (from then on: most of the gather
        runs while towers compute), "data_gradient_norm" (of the gathered gradient).
    """
    num_towers = len(builder.devices)
    shapes = measured_shapes(num_towers) | timed_shapes(num_towers)
    unknown = {name: tf.zeros(shape) for name, shape in shapes.items()}
    unknown["tower_loss"] = tf.fill([num_towers], math.nan)
    if gradients is None:
        return unknown
    with tf.device(HOST):
        examples = tf.cast(tf.stack(gradients.counts), tf.float32)

    def end_times(of_towers: Any) -> list[tf.Tensor]:
        return [_end_time(*pair) for pair in zip(of_towers, builder.devices, strict=False)]

    def compute(measured: tf.Tensor | None) -> dict[str, tf.Tensor]:
        found = {}
        if start is None:
            with tf.device(HOST):
                seconds = tf.zeros_like(examples, tf.float64)
            for before, after in gradients.phases:
                begun, ends = time_after(before), end_times(after)
                with tf.device(HOST):
                    # Nothing waits for this clock, so it may be read too late.
                    seconds += tf.maximum(tf.stack(ends) - begun, 0.0)
        else:
            ends = end_times(zip(gradients.losses, gradients.of_towers, strict=True))
            gathered = time_after((gradients.gathered, ends))
            with tf.device(HOST):
                seconds = tf.stack(ends) - start
                found["gather_seconds"] = gathered - start - tf.reduce_max(seconds)
                with tf.control_dependencies([loss]):  # as in `_squares`
                    losses = tf.cast(tf.stack(gradients.losses), tf.float32)
                found |= _pad({"tower_loss": tf.math.divide_no_nan(losses, examples)}, builder)
        norms = _norms(gradients, builder, measured, scale)
        with tf.device(HOST):
            times = {"tower_seconds": seconds, "compute_seconds": tf.reduce_max(seconds)}
            found |= {name: tf.cast(value, tf.float32) for name, value in times.items()}
            return norms | found | _pad({"tower_seconds": found["tower_seconds"]}, builder)

    with tf.device(HOST):
        known = _pad({"tower_examples": examples}, builder)
    return unknown | known | _if_measured(compute, measured, builder)


def _squares(
    of_towers: Sequence[Sequence[Any]],
    gathered: Sequence[Sequence[Any]],
    devices: Sequence[str],
    measured: tf.Tensor | None,
) -> tf.Tensor:
    """Return the sum of squares of each tower's gradients, and of the gathered ones, [towers + 1].

    Each is computed where the gradients are, 0 unless `measured`; each device sends one tensor.
    All wait for the gather: `add_n` accumulates into any input buffer without another reader, so
    that a reader before it would change the order of its additions at random.
    """
    rows = len(of_towers) + 1
    by_place = collections.defaultdict(list)  # {device: [(row, gradient)]}
    for row, (gradients, device) in enumerate(zip(of_towers, devices, strict=False)):
        by_place[device] += [(row, each) for each in gradients if each is not None]
    for each in gathered[0]:
        if each is not None:
            device = each.values.device if isinstance(each, tf.IndexedSlices) else each.device
            by_place[device].append((rows - 1, each))

    def sums(members: Sequence[tuple[int, Any]]) -> tf.Tensor:
        zero = tf.zeros([])
        values = [[zero] for _ in range(rows)]
        for row, gradient in members:
            wide = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
            values[row].append(2.0 * tf.nn.l2_loss(wide))
        return tf.stack([tf.reduce_sum(tf.stack(each)) for each in values])

    with tf.device(HOST), gather.after(gathered):
        late = on_current_device(tf.constant(True) if measured is None else measured)
    parts = []
    for place, members in by_place.items():
        with tf.device(place):
            if measured is None:
                with tf.control_dependencies([late]):
                    parts.append(sums(members))
                continue
            here = on_current_device(late)  # sent once: the branch is decided here
            of_place = functools.partial(sums, members)
            parts.append(tf.cond(here, of_place, lambda: tf.zeros([rows])))
    with tf.device(HOST):
        return tf.add_n(parts)


def on_current_device(value: tf.Tensor) -> tf.Tensor:
    """Copy `value` to the current device; Grappler would remove a tf.identity."""
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)


def _norms(
    gradients: TowerGradients, builder: TowerBuilder, measured: tf.Tensor | None, scale: Any
) -> dict[str, tf.Tensor]:
    """Return norms; a tower's gradient is its mean gradient times its share of the examples."""
    of_towers, gathered = gradients.of_towers, gradients.gathered
    squares = _squares(of_towers, gathered, builder.devices, measured)
    with tf.device(HOST):
        examples = tf.cast(tf.stack(gradients.counts), tf.float32)
        share = examples / tf.reduce_sum(examples)
        own = tf.math.divide_no_nan(tf.sqrt(squares[:-1]), share * tf.cast(scale, tf.float32))
        norms = _pad({"tower_gradient_norm": own}, builder)
        return norms | {"data_gradient_norm": tf.sqrt(squares[-1]) / tf.cast(scale, tf.float32)}


def _if_measured(
    compute: Callable, measured: tf.Tensor, builder: TowerBuilder
) -> dict[str, tf.Tensor]:
    """Return `compute(measured)`; on GPUs, since it waits for them, zeros unless `measured`."""
    if not on_gpus(builder):
        return compute(measured)
    metrics: dict[str, tf.Tensor] = {}

    def when_measured() -> list[tf.Tensor]:
        metrics.update(compute(None))
        return list(metrics.values())

    def zeros() -> list[tf.Tensor]:
        return [tf.zeros(value.shape, value.dtype) for value in metrics.values()]

    with tf.device(HOST):
        values = tf.cond(measured, when_measured, zeros)
    return dict(zip(metrics, values, strict=True))


def _pad(of_towers: dict[str, tf.Tensor], builder: TowerBuilder) -> dict[str, tf.Tensor]:
    num_towers = len(builder.devices)  # the last towers may have no examples
    return {
        name: tf.pad(values, [[0, num_towers - values.shape[0]]])
        for name, values in of_towers.items()
    }


def _end_time(values: Any, device: str) -> tf.Tensor:
    """Return the time when a device has computed `values`.

    For TensorFlow a GPU's op ends when its kernel is queued, but a copy to the host arrives after
    the kernels before it have run. So the smallest value is sent, after all others.
    """
    tensors = _tensors(values)
    smallest = min(tensors, key=lambda t: t.shape.num_elements() or 2**40)
    with tf.device(device), tf.control_dependencies(tensors):
        done = on_current_device(
            tf.reshape(smallest, [-1])[:1] if smallest.shape.rank else smallest
        )
    with tf.device(HOST):
        arrived = tf.reduce_sum(tf.cast(tf.math.is_finite(tf.cast(done, tf.float32)), tf.float64))
        # Use the value: a control dependency alone would not wait for the copy.
        return time_after(arrived) + tf.minimum(arrived, 0.0)


def _tensors(structure: Any) -> list[tf.Tensor]:
    leaves = tf.nest.flatten(structure, expand_composites=True)
    # A device-resident batch is timed by its row indices, which are on the host.
    return [getattr(leaf, "rows", leaf) for leaf in leaves if leaf is not None]
