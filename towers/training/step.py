"""The compiled loop: several steps of a task in one call of TensorFlow."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.builder.kinds import HOST
from towers.builder.tower import TowerBuilder
from towers.monitoring import tower_stats
from towers.training.masters import Masters, counter


def make_train_loop(
    builder: TowerBuilder,
    train_step: Callable,
    names: Sequence[str],
    *,
    telemetry: bool = True,
    masters: Masters | None = None,
) -> "TrainLoop":
    """Return a `TrainLoop`: `train_loop(iterator, num_steps)` makes `num_steps` steps in one call.

    It returns the scalars `names` of its last step. With telemetry it also returns those of a
    measured step, and seconds as sums over its steps: those of the train step,
    "input_wait_seconds", and "update_seconds", which is the rest.

    Args:
        builder: of the towers.
        train_step: see `Task.make_train_step`.
        names: of the scalars that a step returns in any case.
        telemetry: whether steps are measured.
        masters: with them, no step follows one at which they are "stuck", which is returned, too.
            On CPUs the loop ends there, and returns "batch", that of its last step. On GPUs, which
            nothing is to wait for, the remaining steps change nothing.
    """
    ends = masters is not None and not tower_stats.on_gpus(builder)
    rest = tower_stats.Rest(builder) if telemetry and tower_stats.on_gpus(builder) else None
    last = tower_stats.measured_shapes(len(builder.devices)) if telemetry else {}
    sums = tower_stats.timed_shapes(len(builder.devices)) if telemetry else {}
    # What a loop hands on passes by the host, and these may be on a GPU: they stay until somebody
    # looks at them.
    with tf.device(builder.gather_device):
        kept = {name: tf.Variable(0.0, trainable=False, name=name) for name in names}
    counters = counter("asked", HOST), counter("got", HOST)

    @tf.function(autograph=False)
    def train_loop(iterator: tf.data.Iterator, num_steps: tf.Tensor) -> dict[str, tf.Tensor]:
        def body(i: tf.Tensor, before: dict, *_: Any) -> tuple:
            with tf.name_scope("telemetry"):
                measured = i + 1 >= num_steps if telemetry else None
                if rest:
                    measured &= rest.wanted
            values, batch = _next_step(train_step, iterator, counters, measured, rest)
            with tf.name_scope("telemetry"):
                with tf.device(builder.gather_device):
                    for name, variable in kept.items():
                        variable.assign(tf.cast(values[name], tf.float32))
                values = {name: tf.cast(values[name], tf.float32) for name in before}
                values |= {name: before[name] + values[name] for name in sums}
            return i + 1, values, *((~masters.stuck(), batch) if ends else ())

        with tf.device(HOST):
            values = {name: tf.zeros(shape) for name, shape in (last | sums).items()}
            start = tower_stats.time_after([]) if telemetry else None
            end = (~masters.stuck(), _no_batch(iterator.element_spec)) if ends else ()
            _, values, *end = _repeated(body, num_steps, values, *end)
            if telemetry:
                with tf.name_scope("telemetry"):
                    if rest:
                        values |= rest.for_all_steps(values, num_steps)
                    values["update_seconds"] = _rest_of(values, start)
        return values | ({"batch": end[1]} if ends else {})

    return TrainLoop(train_loop, kept, rest, masters, counters)


def _no_batch(spec: Any) -> Any:
    """Return an empty batch of this spec, to begin a loop with."""
    return tf.nest.map_structure(
        lambda s: tf.zeros([0, *(size or 0 for size in s.shape[1:])], s.dtype), spec
    )


def _next_step(
    train_step: Callable,
    iterator: tf.data.Iterator,
    counters: tuple[tf.Variable, tf.Variable],
    measured: tf.Tensor | None,
    rest: tower_stats.Rest | None,
) -> tuple[dict[str, tf.Tensor], Any]:
    """Take a batch and make a step; return what the step returns, and the batch."""
    asked, got = counters
    start = None if measured is None else tower_stats.time_after([])
    with tf.control_dependencies([asked.assign_add(1)]):
        given = batch = iterator.get_next()
    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
        counted = got.assign_add(1)
    with tf.control_dependencies([counted]):  # nothing of the step is done before
        if measured is None:
            return train_step(*batch)[0], given
        arrived = tower_stats.time_after(batch)
        with tf.name_scope("telemetry"):
            waited = arrived - start
        if rest:
            batch = rest.before(batch, measured)
        return train_step(*batch, measured=measured)[0] | {"input_wait_seconds": waited}, given


def _repeated(body: Callable, num_steps: tf.Tensor, values: dict, *end: Any) -> tuple:
    """Run `body` num_steps times in a tf.while_loop; return its final loop variables.

    `end` is whether the loop goes on, and a batch.
    """
    shapes = [tf.nest.map_structure(lambda tensor: tensor.shape, part) for part in (values, *end)]
    if end:  # of a batch, of whatever size
        unknown = lambda tensor: tf.TensorShape([None] * tensor.shape.rank)  # noqa: E731
        shapes[2] = tf.nest.map_structure(unknown, end[1])
    return tf.while_loop(
        lambda i, _, goes=True, *__: (i < num_steps) & goes,
        body,
        (tf.constant(0), values, *end),
        shape_invariants=(tf.TensorShape([]), *shapes),
        parallel_iterations=1,
    )


def _rest_of(values: Mapping[str, tf.Tensor], start: tf.Tensor) -> tf.Tensor:
    """Return the seconds since `start` that belong to no phase."""
    phases = [values[name] for name in tower_stats.PHASES]
    return tf.cast(tower_stats.time_after(values) - start, tf.float32) - tf.add_n(phases)


@dataclasses.dataclass(frozen=True)
class Moment:
    """How many batches the train loop has asked for since it was made, and how many it has got.

    A step changes nothing before it has its batch, and the next batch is asked for at its end.
    """

    asked: int
    got: int

    @property
    def between_steps(self) -> bool:
        """Whether no step is in progress: the loop waits for its input."""
        return self.asked > self.got


class TrainLoop:
    """The function that `make_train_loop` returns."""

    def __init__(
        self,
        function: Any,
        kept: Mapping[str, tf.Variable],
        rest: tower_stats.Rest | None,
        masters: Masters | None,
        counters: tuple[tf.Variable, tf.Variable],
    ):
        """Set the compiled function and its variables."""
        self._function, self._kept, self._rest, self._masters = function, kept, rest, masters
        self._counters = counters
        self.get_concrete_function = function.get_concrete_function
        self.experimental_get_tracing_count = function.experimental_get_tracing_count

    def moment(self) -> Moment:
        """Return the position of the loop, which another thread may read during a call."""
        return Moment(*(int(counter.numpy()) for counter in self._counters))

    def __call__(
        self, iterator: tf.data.Iterator, num_steps: tf.Tensor, measured: bool = True
    ) -> dict[str, tf.Tensor]:
        """Make steps; on GPUs, which measuring stops, none is measured unless `measured`."""
        if self._rest:
            self._rest.wanted.assign(measured)
        values = self._function(iterator, num_steps)
        values |= {name: variable.read_value() for name, variable in self._kept.items()}
        if self._masters is not None:
            values["stuck"] = self._masters.stuck()
        if "data_gradient_norm" in values:
            values.setdefault("gradient_norm", values["data_gradient_norm"])
        return values

