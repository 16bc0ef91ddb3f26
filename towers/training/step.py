"""The compiled loop: several steps of a task in one call of TensorFlow."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.builder.tower import TowerBuilder
from towers.monitoring import tower_stats


def make_train_loop(
    builder: TowerBuilder, train_step: Callable, names: Sequence[str], *, telemetry: bool = True
) -> Callable[[tf.data.Iterator, tf.Tensor], dict[str, tf.Tensor]]:
    """Return `train_loop(iterator, num_steps)`, one compiled call that makes `num_steps` steps.

    It returns the scalars `names` of its last step, as `Task.make_train_step` has them; with
    telemetry those of a measured one, and seconds as sums over its steps: those of the train step,
    "input_wait_seconds", and "update_seconds", which is the rest.
    """
    clock, num_towers = builder.gather_device, len(builder.devices)
    last, sums = dict.fromkeys(names, ()), {}
    if telemetry:
        last |= tower_stats.measured_shapes(num_towers)
        sums = tower_stats.timed_shapes(num_towers)

    def next_step(iterator: tf.data.Iterator, measured: tf.Tensor | None) -> dict[str, tf.Tensor]:
        start = tower_stats.time_after([], clock) if telemetry else None
        with tf.device("/cpu:0"):
            batch = iterator.get_next()
        if not telemetry:
            return train_step(*batch)[0]
        arrived = tower_stats.time_after(batch, clock)
        with tf.name_scope("telemetry"):
            waited = arrived - start
        return train_step(*batch, measured=measured)[0] | {"input_wait_seconds": waited}

    @tf.function(autograph=False)
    def train_loop(iterator: tf.data.Iterator, num_steps: tf.Tensor) -> dict[str, tf.Tensor]:
        def body(i: tf.Tensor, before: dict) -> tuple[tf.Tensor, dict]:
            with tf.name_scope("telemetry"):
                measured = i + 1 >= num_steps if telemetry else None
            values = next_step(iterator, measured)
            with tf.name_scope("telemetry"):
                values = {name: tf.cast(values[name], tf.float32) for name in before}
                values |= {name: before[name] + values[name] for name in sums}
            return i + 1, values

        values = {name: tf.zeros(shape) for name, shape in (last | sums).items()}
        start = tower_stats.time_after([], clock) if telemetry else None
        values = tf.while_loop(
            lambda i, _: i < num_steps, body, (tf.constant(0), values), parallel_iterations=1
        )[1]
        if telemetry:
            with tf.name_scope("telemetry"):
                phases = [values[name] for name in tower_stats.PHASES]
                all_of_it = tower_stats.time_after(values, clock) - start
                values["update_seconds"] = tf.cast(all_of_it, tf.float32) - tf.add_n(phases)
        return values

    return train_loop
