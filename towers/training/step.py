"""The compiled loop: several steps of a task in one call of TensorFlow."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.builder.kinds import HOST
from towers.builder.tower import TowerBuilder
from towers.monitoring import tower_stats


def make_train_loop(
    builder: TowerBuilder, train_step: Callable, names: Sequence[str], *, telemetry: bool = True
) -> "TrainLoop":
    """Return `train_loop(iterator, num_steps)`, one compiled call that makes `num_steps` steps.

    It returns the scalars `names` of its last step, as `Task.make_train_step` has them; with
    telemetry those of a measured one, and seconds as sums over its steps: those of the train step,
    "input_wait_seconds", and "update_seconds", which is the rest.
    """
    rest = tower_stats.Rest(builder) if telemetry and tower_stats.on_gpus(builder) else None
    last = tower_stats.measured_shapes(len(builder.devices)) if telemetry else {}
    sums = tower_stats.timed_shapes(len(builder.devices)) if telemetry else {}
    # What a loop hands on passes by the host, and these may be on a GPU: they stay until somebody
    # looks at them.
    with tf.device(builder.gather_device):
        kept = {name: tf.Variable(0.0, trainable=False, name=name) for name in names}

    def next_step(iterator: tf.data.Iterator, measured: tf.Tensor | None) -> dict[str, tf.Tensor]:
        start = tower_stats.time_after([]) if telemetry else None
        batch = iterator.get_next()
        if not telemetry:
            return train_step(*batch)[0]
        arrived = tower_stats.time_after(batch)
        with tf.name_scope("telemetry"):
            waited = arrived - start
        if rest:
            batch = rest.before(batch, measured)
        return train_step(*batch, measured=measured)[0] | {"input_wait_seconds": waited}

    @tf.function(autograph=False)
    def train_loop(iterator: tf.data.Iterator, num_steps: tf.Tensor) -> dict[str, tf.Tensor]:
        def body(i: tf.Tensor, before: dict) -> tuple[tf.Tensor, dict]:
            with tf.name_scope("telemetry"):
                measured = i + 1 >= num_steps if telemetry else None
                if rest:
                    measured &= rest.wanted
            values = next_step(iterator, measured)
            with tf.name_scope("telemetry"):
                with tf.device(builder.gather_device):
                    for name, variable in kept.items():
                        variable.assign(tf.cast(values[name], tf.float32))
                values = {name: tf.cast(values[name], tf.float32) for name in before}
                values |= {name: before[name] + values[name] for name in sums}
            return i + 1, values

        with tf.device(HOST):
            values = {name: tf.zeros(shape) for name, shape in (last | sums).items()}
            start = tower_stats.time_after([]) if telemetry else None
            values = tf.while_loop(
                lambda i, _: i < num_steps, body, (tf.constant(0), values), parallel_iterations=1
            )[1]
            if telemetry:
                with tf.name_scope("telemetry"):
                    if rest:
                        values |= rest.for_all_steps(values, num_steps)
                    values["update_seconds"] = _rest_of(values, start)
        return values

    return TrainLoop(train_loop, kept, rest)


def _rest_of(values: Mapping[str, tf.Tensor], start: tf.Tensor) -> tf.Tensor:
    """Return the seconds since `start` that are of no phase."""
    phases = [values[name] for name in tower_stats.PHASES]
    return tf.cast(tower_stats.time_after(values) - start, tf.float32) - tf.add_n(phases)


class TrainLoop:
    """See `make_train_loop`."""

    def __init__(
        self, function: Any, kept: Mapping[str, tf.Variable], rest: tower_stats.Rest | None
    ):
        """Set the compiled function, what it leaves, and what GPUs are measured by."""
        self._function, self._kept, self._rest = function, kept, rest
        self.get_concrete_function = function.get_concrete_function
        self.experimental_get_tracing_count = function.experimental_get_tracing_count

    def __call__(
        self, iterator: tf.data.Iterator, num_steps: tf.Tensor, measured: bool = True
    ) -> dict[str, tf.Tensor]:
        """Make steps; where a measured one makes GPUs wait, the last is one only if `measured`."""
        if self._rest:
            self._rest.wanted.assign(measured)
        values = self._function(iterator, num_steps)
        values |= {name: variable.read_value() for name, variable in self._kept.items()}
        if "data_gradient_norm" in values:
            values.setdefault("gradient_norm", values["data_gradient_norm"])
        return values

