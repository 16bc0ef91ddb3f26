"""The compiled loop: several steps of a task in one call of TensorFlow."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from towers.builder.device_names import HOST
from towers.monitoring import tower_metrics
from towers.training.step.step import Task
from towers.training.step.train_state import TrainState, counter


def make_train_loop(task: Task, train_step: Callable, *, telemetry: bool = True) -> "TrainLoop":
    """Return a `TrainLoop`: `train_loop(iterator, num_steps)` makes `num_steps` steps in one call.

    It returns the scalars `task.step_names` of its last step, and "stuck": whether the limit of
    non-finite steps is reached, from where on steps change nothing. With telemetry it also returns
    the scalars of a measured step, and sums of seconds over its steps: those of the train step,
    "input_wait_seconds", and "update_seconds", the remainder.

    Args:
        task: of the run.
        train_step: see `Task.make_train_step`.
        telemetry: whether steps are measured.
    """
    builder = task.builder
    num_towers, barrier = len(builder.devices), None
    if telemetry and tower_metrics.on_gpus(builder):
        barrier = tower_metrics.GpuIdleBarrier(builder)
    last = tower_metrics.measured_shapes(num_towers) if telemetry else {}
    sums = tower_metrics.timed_shapes(num_towers) if telemetry else {}
    # Loop variables pass through the host; these stay on their device until they are read.
    with tf.device(builder.gather_device):
        scalars = {name: tf.Variable(0.0, trainable=False, name=name) for name in task.step_names}
    requested, received = counter("requested", HOST), counter("received", HOST)

    def next_step(iterator: tf.data.Iterator, measured: tf.Tensor | None) -> dict[str, tf.Tensor]:
        """Take a batch and make a step; return the step's values."""
        start = tower_metrics.time_after([]) if telemetry else None
        with tf.control_dependencies([requested.assign_add(1)]):
            batch = iterator.get_next()
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            counted = received.assign_add(1)
        with tf.control_dependencies([counted]):  # the step starts after this
            if not telemetry:
                return train_step(*batch)
            arrived = tower_metrics.time_after(batch)
            with tf.name_scope("telemetry"):
                waited = arrived - start
            if barrier:
                batch = barrier.before(batch, measured)
            values = train_step(*batch, measured=measured)
            return values | {"input_wait_seconds": waited}

    @tf.function(autograph=False)
    def train_loop(iterator: tf.data.Iterator, num_steps: tf.Tensor) -> dict[str, tf.Tensor]:
        def body(i: tf.Tensor, before: dict) -> tuple:
            with tf.name_scope("telemetry"):
                measured = i + 1 >= num_steps if telemetry else None
                if barrier:
                    measured &= barrier.wanted
            values = next_step(iterator, measured)
            with tf.name_scope("telemetry"):
                with tf.device(builder.gather_device):
                    for name, variable in scalars.items():
                        variable.assign(tf.cast(values[name], tf.float32))
                values = {name: tf.cast(values[name], tf.float32) for name in before}
                values |= {name: before[name] + values[name] for name in sums}
            return i + 1, values

        with tf.device(HOST):
            first = [tf.constant(0), {name: tf.zeros(size) for name, size in (last | sums).items()}]
            start = tower_metrics.time_after([]) if telemetry else None
            _, values = tf.while_loop(
                lambda i, _: i < num_steps, body, first, parallel_iterations=1
            )
            if telemetry:
                with tf.name_scope("telemetry"):
                    if barrier:
                        values |= barrier.for_all_steps(values, num_steps)
                    seconds = tf.cast(tower_metrics.time_after(values) - start, tf.float32)
                    phases = [values[name] for name in tower_metrics.PHASES]
                    values["update_seconds"] = seconds - tf.add_n(phases)
        return values

    return TrainLoop(train_loop, scalars, barrier, task.train_state, (requested, received))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainLoop:
    """The function that `make_train_loop` returns."""

    function: Any  # compiled
    scalars: Mapping[str, tf.Variable]  # values of the last step
    barrier: tower_metrics.GpuIdleBarrier | None  # waits for GPUs before the clock is read
    train_state: TrainState
    counters: tuple[tf.Variable, tf.Variable]  # batches that were requested and received

    @property
    def get_concrete_function(self) -> Any:
        """The method of the compiled function."""
        return self.function.get_concrete_function

    def position(self) -> tuple[int, int]:
        """Return the numbers of batches requested and received; may be called from any thread.

        If they differ, no step is in progress, as a step changes nothing before it has its batch.
        """
        return tuple(int(counter.numpy()) for counter in self.counters)

    def between_steps(self) -> bool:
        """Return whether no step is in progress: the loop waits for its input."""
        requested, received = self.position()
        return requested > received

    def __call__(
        self, iterator: tf.data.Iterator, num_steps: tf.Tensor, measured: bool = True
    ) -> dict[str, tf.Tensor]:
        """Make steps. On GPUs, which a measurement stalls, measure one only if `measured`."""
        if self.barrier:
            self.barrier.wanted.assign(measured)
        values = self.function(iterator, num_steps)
        values |= {name: variable.read_value() for name, variable in self.scalars.items()}
        values["stuck"] = self.train_state.stuck()
        return values
