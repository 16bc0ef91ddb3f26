"""The update: from gathered gradients to new weights, if all is finite.

Regularization, finite test, clipping, the optimizer's update and moving averages are computed once
a step on the weights' devices, never in a tower. Copies of the weights get the same gradients and
make the same update. A `FlatVariable` may stand for several weights on a GPU.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import is_gpu
from towers.builder.gather import grouped, num_bytes
from towers.training.step import fused_update
from towers.training.step.train_state import TrainState, WeightCopy

EMA_EXAMPLES = 128  # per which `ema_decay` applies: the tutorial's batch size
Before = Sequence[tuple[tf.Variable, tf.Tensor]]  # variables, each with its value before the step


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a run that a step and an evaluation read, by their names."""

    model: str  # these two for messages
    loss: str
    dtype: str
    batch_size: int
    seed: int
    variables: str  # where the master weights are: cpu, replicated or spread
    ema_decay: float
    on_nan: str
    most_nonfinite: int  # steps in a row that are not finite, at which the run ends
    makes_own_optimizer: bool  # whether a function of the user's makes it
    test_time_flip: bool


class FiniteRule:
    """Makes the updates of one traced step, unless a loss or a gradient is not finite.

    A step that is not finite leaves all variables as they were. `train_state.limit` such steps in a
    row, and no step changes anything from there on. A `LossScaleOptimizer` skips an update itself
    while its scale is above 1, and lowers the scale; such a step is tolerated. Updates inside of a
    user's own loop or branch are made without a test.
    """

    def __init__(
        self, train_state: TrainState, rules: StepOptions, losses: Sequence[tf.Tensor] = ()
    ):
        """Begin a step.

        Args:
            train_state: the variables that the step changes.
            rules: `ema_decay` and `batch_size`.
            losses: that are computed already.
        """
        self._train_state, self._rules = train_state, rules
        self._graph = tf.compat.v1.get_default_graph()
        self._on_gpu = is_gpu(train_state.replicas[0].device)
        self._losses = list(losses)
        self._tests: list[list[tf.Tensor]] = []  # of each update, one on each replica's device
        self._scales: list[tf.Tensor] = []  # before the step
        self.gradients: Sequence[Any] = ()  # of the last update
        self.norm = tf.zeros([])  # of these

    @contextlib.contextmanager
    def record_losses(self, model: keras.Model) -> Iterator[None]:
        """Test each loss that a model computes in the block."""

        def make(compute: Callable) -> Callable:
            def noting(*args: Any, **kwargs: Any) -> Any:
                loss = compute(*args, **kwargs)
                if self._is_here() and tf.is_tensor(loss):
                    self._losses.append(loss)
                return loss

            return noting

        with tf_internals.replaced((model, "compute_loss", make)):
            yield

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
        weights: Sequence[keras.Variable],
        update: Callable,
    ) -> None:
        """Make an update of Keras' step; see `fused_update.updates_joined` for the arguments."""
        if not self._is_here():
            update()
            return
        self.gradients = gradients
        scale = getattr(optimizer, "dynamic_scale", None)
        if scale is not None:
            scale = tf.convert_to_tensor(scale.value)
            self._scales.append(scale)
        self.norm = global_norm([g for g in gradients if g is not None])
        self.update([self.norm], lambda finite: update(*finite), scale)

    def update(
        self, norms: Sequence[tf.Tensor], update: Callable, scale: tf.Tensor | None = None
    ) -> None:
        """Make an update, if it and all earlier ones in the step are finite.

        Args:
            norms: of the gradients, one on each replica's device, or one for all.
            update: called with a value for each replica: on GPUs whether it is updated, a bool
                scalar to wait for without a branch; otherwise None, in a branch.
            scale: the loss scale of an optimizer that tests its gradients itself.
        """
        self._tests.append([self._test(i, norm) for i, norm in enumerate(norms)])
        finite = list(map(_all, zip(*self._tests, strict=True)))
        if scale is not None:
            finite = [each | (scale > 1.0) for each in finite]
        if self._on_gpu:
            update(finite)
        else:
            _if(finite[0], lambda: update([None] * len(self._train_state.replicas)))

    def _test(self, replica: int, norm: tf.Tensor | None) -> tf.Tensor:
        """Return whether norm and losses are finite, a bool scalar on the replica's device."""
        in_a_row, losses = self._train_state.in_a_row[replica], self._losses
        if len(losses) > 1:
            losses = [tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float64)) for loss in losses])]
        with tf.device(in_a_row.device):
            finite = in_a_row < self._train_state.limit
            for value in (norm, *losses):
                if value is not None:
                    value = value if value.shape.rank == 0 else tf.reduce_sum(value)
                    finite &= tf.math.is_finite(value)
            return finite

    def end_step(self, before: Before, num_examples: Any, loss: tf.Tensor | None = None) -> None:
        """Move the averages and count the step, or restore what it has changed.

        After a tolerated overflow the scale is lowered, and random seeds advance. After any other
        step that is not finite seeds are restored, too.

        Args:
            before: of what the step may have changed beside its updates.
            num_examples: of the batch.
            loss: of the step, to be tested; None: its losses are recorded.
        """
        train_state, rows = self._train_state, tf.cast(num_examples, tf.int64)
        if loss is not None:
            self._losses = [loss]
            self._tests.append([self._test(0, None)])
        finite = list(map(_all, zip(*self._tests, strict=True)))
        tolerated, moves = None, finite[0]
        if self._scales:  # floats, as moving means, then keep their new values, as in `fit`
            tolerated = tf.reduce_any(tf.stack(self._scales) > 1.0)
            moves = finite[0] | (tolerated & self._tests[-1][0])
        if self._on_gpu:
            update_averages(train_state, self._rules, moves)
        elif train_state.averages:
            _if(moves, lambda: update_averages(train_state, self._rules))
        advances = []
        for i, replica in enumerate(train_state.replicas):
            is_finite, in_a_row = finite[min(i, len(finite) - 1)], train_state.in_a_row[i]
            with tf.device(replica.device):
                if tolerated is None and train_state.limit == 1:  # the fewest kernels on GPUs
                    in_a_row.assign(tf.cast(~is_finite, tf.int64))
                    advances.append(tf.cast(is_finite, tf.int64))
                else:
                    is_good = is_finite if tolerated is None else is_finite | tolerated
                    is_bad = tf.cast(~is_good, tf.int64)
                    in_a_row.assign((in_a_row + is_bad) * tf.cast(~is_finite, tf.int64))
                    advances.append(tf.cast(in_a_row < train_state.limit, tf.int64))
                replica.examples.assign_add(rows * advances[-1])
        with tf.device(train_state.step.device):
            train_state.step.assign_add(advances[0])
        _restore_unless(moves, [pair for pair in before if pair[0].dtype.is_floating])
        others = [pair for pair in before if not pair[0].dtype.is_floating]
        _restore_unless(finite[0] if tolerated is None else finite[0] | tolerated, others)

    def _is_here(self) -> bool:
        return tf.compat.v1.get_default_graph() is self._graph


def _all(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return values[0] if len(values) == 1 else tf.reduce_all(tf.stack(values))


def _if(condition: tf.Tensor, apply: Callable) -> None:
    """Call a function in a branch of the graph, on the host."""
    tf.cond(condition, lambda: (apply(), tf.no_op())[1], tf.no_op)


def make_update(
    train_state: TrainState,
    rules: StepOptions,
    rate_is_set: bool = True,
    squares_rows: bool = False,
) -> Callable:
    """Return `update(gradients, learning_rates, statistics, loss, num_examples)`: one step.

    The function updates the weights and their averages, counts the step and its examples, and
    returns the scalars "gradient_norm" (before clipping) and "penalty". If `loss` or the norm is
    not finite it changes no weight, and restores the variables in `statistics`. Its arguments:

        gradients: for each of `train_state.replicas`, the mean gradients.
        learning_rates: one for each replica.
        statistics: (variable, value before the step) of what the towers assigned.
        loss: the gathered loss.
        num_examples: of the batch.

    Args:
        train_state: the variables that the step changes.
        rules: `ema_decay` and `batch_size`.
        rate_is_set: whether `learning_rates` are assigned to the optimizers.
        squares_rows: whether optimizers get sparse gradients, each row of which they square;
            otherwise dense ones.
    """
    reduce_replicas = _make_replica_reducer(train_state.replicas)

    def update(
        gradients: Sequence[list[Any]],
        learning_rates: Sequence[tf.Tensor],
        statistics: Sequence[tuple[tf.Variable, tf.Tensor]] = (),
        loss: tf.Tensor | None = None,
        num_examples: Any = 0,
    ) -> dict[str, tf.Tensor]:
        replicas = train_state.replicas
        rates = learning_rates if rate_is_set else [None] * len(replicas)
        updates = [
            _replica_update(replica, replica_gradients, rate, squares_rows)
            for replica, replica_gradients, rate in zip(replicas, gradients, rates, strict=True)
        ]
        penalties, norms, applies = zip(*updates, strict=True)
        penalty, norm = reduce_replicas(penalties, norms)
        rule = FiniteRule(train_state, rules, [] if loss is None else [loss])

        def apply(finite: Sequence[tf.Tensor | None]) -> None:
            for apply_replica, is_finite in zip(applies, finite, strict=True):
                apply_replica(is_finite)

        rule.update(norms if is_gpu(replicas[0].device) else [norm], apply)
        rule.end_step(statistics, num_examples)
        return {"gradient_norm": norm, "penalty": penalty}

    return update


def _restore_unless(finite: tf.Tensor, pairs: Sequence[tuple[tf.Variable, tf.Tensor]]) -> None:
    """Restore each (variable, value before) unless `finite`, a bool scalar."""
    if not pairs:
        return
    if any(is_gpu(variable.device) for variable, _ in pairs):  # a branch would wait for the GPU
        fused_update.restore_unless(finite, pairs)
        return

    def put_back() -> tf.Operation:
        for variable, value in pairs:
            variable.assign(value)
        return tf.no_op()

    tf.cond(finite, tf.no_op, put_back)


def _make_replica_reducer(replicas: Sequence[WeightCopy]) -> Callable:
    """Return a function from the replicas' numbers, (penalties, norms), to (penalty, norm).

    All replicas' are equal. If only the first one's were used, TensorFlow's graph optimizer would
    simplify the others' arithmetic, and the copies would drift apart by roundings. On GPUs the
    others store theirs on their own device.
    """
    if not is_gpu(replicas[0].device):
        return lambda *numbers: [tf.reduce_max(tf.stack(values)) for values in numbers]
    notes = []
    for replica in replicas[1:]:
        with tf.device(replica.device):
            notes.append(tf.Variable(tf.zeros([2]), trainable=False))

    def reduce_replicas(*numbers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        first, *others = zip(*numbers, strict=True)
        for note, values in zip(notes, others, strict=True):
            with tf.device(note.device):
                note.assign(tf.stack([tf.cast(value, note.dtype) for value in values]))
        return list(first)

    return reduce_replicas


def _replica_update(
    replica: WeightCopy,
    gradients: list[Any],
    learning_rate: tf.Tensor | None,
    squares_rows: bool,
) -> tuple[tf.Tensor, tf.Tensor, Callable]:
    """Return the regularization loss, the gradients' norm, and `apply(finite)`, the update."""
    optimizer = replica.optimizer
    if not squares_rows:
        gradients = _each(_dense, gradients, replica.weights)
    parts = fused_update.flatten_updates(gradients, replica.weights, optimizer, True)
    gradients, weights = parts
    with tf.device(replica.device):
        penalties, gradients = _regularize(weights, gradients)
        used = [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None]
        gradients, weights = [g for g, _ in used], [w for _, w in used]
        penalty, norm = _sum(penalties), global_norm(gradients)

    def apply(finite: tf.Tensor | None) -> None:
        with tf.device(replica.device):
            if learning_rate is not None:
                rate = optimizer.learning_rate
                value = tf.cast(learning_rate, rate.dtype)
                rate.assign(value if finite is None else tf.where(finite, value, rate))
            fused_update.apply(optimizer, gradients, weights, finite)

    return penalty, norm, apply


def _dense(gradient: Any, weight: keras.Variable) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, weight.shape[0])


def _each(fn: Callable, gradients: Sequence[Any], weights: Sequence[keras.Variable]) -> list[Any]:
    """Return `fn(gradient, weight)` for each pair, computed on the weight's device."""
    results = []
    for gradient, weight in zip(gradients, weights, strict=True):
        with tf.device(weight.value.device):
            results.append(fn(gradient, weight))
    return results


def _regularize(
    weights: Sequence[keras.Variable], gradients: list[Any]
) -> tuple[list[tf.Tensor], list[Any]]:
    """Return the terms of the regularization loss, and the gradients with its gradients added."""
    total = []

    def add(gradient: Any, weight: Any) -> Any:
        if isinstance(weight, fused_update.FlatVariable):
            return weight.map_segments(add, gradient)
        if weight.regularizer is None:
            return gradient
        value = tf.convert_to_tensor(weight.value)
        l1, l2 = fused_update.factors(weight.regularizer) or (None, 0.0)
        if l1 == 0.0:  # a tape would need a further pass for a tensor of ones
            total.append(2.0 * l2 * tf.nn.l2_loss(value))
            return 2.0 * l2 * value if gradient is None else 2.0 * l2 * value + gradient
        with tf.GradientTape() as tape:
            tape.watch(value)
            penalty = tf.cast(weight.regularizer(value), value.dtype)
        total.append(penalty)
        of_penalty = tape.gradient(penalty, value)
        return of_penalty if gradient is None else of_penalty + gradient

    sums = _each(add, gradients, weights)
    return total, sums


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the norm of all gradients together, in the widest of their types."""
    widest, halves = _widest(gradients), []
    for gradient in gradients:
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        with tf.device(values.device):
            halves.append(tf.nn.l2_loss(tf.cast(values, widest)))
    return tf.sqrt(2.0 * _sum(halves))


def _sum(scalars: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of scalars in the widest of their types, 0 if there are none."""
    widest = _widest(scalars)
    return tf.add_n([tf.cast(each, widest) for each in scalars]) if scalars else tf.zeros([])


def _widest(values: Sequence[Any]) -> tf.DType:
    """Return the widest dtype, float32 at least: 16 bits are too few for sums."""
    return max([tf.float32, *(v.dtype for v in values)], key=lambda dtype: dtype.size)


def update_averages(
    train_state: TrainState, rules: StepOptions, finite: tf.Tensor | None = None
) -> None:
    """Move each average toward its variable, which has just been updated.

    The decay goes by examples, and rises from 0.1 as in `tf.train.ExponentialMovingAverage` with
    `num_updates`.

    Args:
        train_state: with the averages.
        rules: `ema_decay` and `batch_size`.
        finite: a bool scalar; if it is False, averages stay. None: it is not tested.
    """
    if not train_state.averages:
        return
    batches = tf.cast(train_state.examples, tf.float64) / EMA_EXAMPLES
    decay = tf.minimum((1.0 + batches) / (10.0 + batches), rules.ema_decay)
    rate = 1.0 - decay ** (rules.batch_size / EMA_EXAMPLES)
    pairs = [(variable.value, average) for variable, average in train_state.averages]
    kind = lambda pair: fused_update.kind_of(pair[1])  # noqa: E731
    for group in grouped(pairs, kind, lambda pair: num_bytes(pair[1])):
        variables, averages = zip(*group, strict=True)
        with tf.device(averages[0].device):
            value = tf.convert_to_tensor(fused_update.as_flat(variables))
            with tf.control_dependencies([value]):  # joined after the update, not before
                average = fused_update.as_flat(averages)
            change = (value - average) * tf.cast(rate, value.dtype)
            if finite is None:
                average.assign_add(change)
            else:
                fused_update.set_value(average, tf.where(finite, average + change, average))
