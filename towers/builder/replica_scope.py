"""Records what a tower assigns to Keras variables and the losses that layers add; combines them.

A layer in a tower adds the loss of its slice. A loss that is a sum over examples is scaled to the
whole batch. So the mean over all towers' examples, like that of `gradients`, is the loss of one
device. `concat` returns the added losses beside the outputs, joins them, and adds them to the same
layers outside of the towers.

Policies of losses, by ("loss", place): "mean", weighted by examples; "sum"; "rows": a loss for each
example, which the function adds to that example's loss; None: neither.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import is_gpu
from towers.builder.gather import pack, unpack
from towers.builder.rng import BatchSlice
from towers.errors import InputError

SEED_STATE = "seed_generator_state"  # as Keras names it; it follows no example


@dataclasses.dataclass(frozen=True)
class MovingAverageUpdate:
    """An update of a moving average, to `before * momentum + value * weight`."""

    variable: keras.Variable
    value: tf.Tensor
    momentum: float
    weight: float
    shared: bool  # whether all towers have the same value, that of all examples

    def after(self, before: Any) -> tf.Tensor:
        """Return the updated average."""
        return tf.cast(before, self.value.dtype) * self.momentum + self.value * self.weight


class ReplicaScope(keras.StatelessScope):
    """Records assignments to Keras variables in place of making them, and the losses of layers.

    Weights are read from their masters. Inner graphs (loops, branches, functions of XLA's) read
    copies on the tower's device: XLA cannot read a master on another device, and a loop would fetch
    it in each iteration. Untrained variables, which such a graph may assign, have a stand-in there,
    a `tf.Variable` of this tower.

    Attributes:
        count: the tower's number of examples, once it is closed.
        updates: {id: (variable, value)} of the assignments.
        deferred: {id: MovingAverageUpdate} of the averages that are updated outside of the tower.
        averages: ids of variables that are known to be moving averages: BatchNorm's.
        added: (layer, loss) of each loss that layers add.
        loss_rows: (layer, dtype, by example) of each loss, see `as_rows`.
    """

    def __init__(
        self,
        own: Mapping[int, Any] | None = None,
        device: str = "",
        prefetch: Callable[[tf.Variable], tf.Tensor | None] | None = None,
    ) -> None:
        """Record assignments from here on, in a tower on `device`.

        Args:
            own: {id of a Keras variable: what the tower reads in its place}.
            device: of the tower.
            prefetch: see `replica_context.VariablePrefetch`.
        """
        super().__init__(collect_losses=True)
        self.own, self.device, self.prefetch = own or {}, device, prefetch
        self.outer = tf_internals.open_scope()  # around the towers, as of averages that are read
        self.eager, self.graph = tf.executing_eagerly(), tf.compat.v1.get_default_graph()
        self.updates: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.deferred: dict[int, MovingAverageUpdate] = {}
        self.averages: set[int] = set()
        self.added: list[tuple[keras.Layer, tf.Tensor]] = []
        self.loss_rows: list[tuple[keras.Layer, tf.DType, bool]] = []
        self.copies: dict[int, tf.Tensor] = {}
        self.stand_ins: dict[int, tf.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Record an assignment; Keras calls this."""
        variable, value = update
        self.deferred.pop(id(variable), None)
        if self.is_inside() and id(variable) not in self.stand_ins:
            self._make_stand_in(variable)
        if id(variable) in self.stand_ins:
            assign_by_op(self.stand_ins[id(variable)], value)
        else:
            read = tf.stop_gradient(tf.convert_to_tensor(value))
            if variable.trainable and read.dtype.is_floating:
                # Its gradient is that of the variable.
                before = tf.convert_to_tensor(self._source(variable))
                read += tf.cast(before - tf.stop_gradient(before), read.dtype)
            super().add_update((variable, read))
        self.updates[id(variable)] = update  # `close` reads a stand-in's last value

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Return a variable's value in this tower; Keras calls this."""
        if variable.trainable and tf_internals.value_of(variable) is None:  # not initialized
            raise _creation_error(variable.path)
        if getattr(variable, "overwrite_with_gradient", False):
            raise InputError(f"{new_value_reason(variable)}; to train it, compile the model")
        if id(variable) in self.deferred:
            self._apply_deferred(variable)
        if self.is_inside() and not variable.trainable and id(variable) not in self.stand_ins:
            self._make_stand_in(variable)  # a loop may assign it later, then read it again
        if id(variable) in self.stand_ins:
            return self.stand_ins[id(variable)].read_value()
        value = super().get_current_value(variable)
        if value is not None:
            return value
        if not self.is_inside() or self.eager:
            return self._source(variable)
        if id(variable) not in self.copies:
            with self.graph.as_default():
                self.copies[id(variable)] = tf.identity(self._source(variable))
        return self.copies[id(variable)]

    def _source(self, variable: keras.Variable) -> Any:
        # The value before the tower; None if there is none yet.
        if id(variable) in self.own:
            return self.own[id(variable)]
        value, master = None, tf_internals.value_of(variable)
        if self.outer is not None:
            value = self.outer.get_current_value(variable)
        elif self.prefetch and master is not None:
            value = self.prefetch(master)
        return master if value is None else value

    def defer(self, average: MovingAverageUpdate) -> None:
        """Record an update of an average; apply it once for all towers, or when it is read."""
        if id(average.variable) in self.deferred:
            self._apply_deferred(average.variable)
        self.deferred[id(average.variable)] = average
        if id(average.variable) in self.updates or self.is_inside():
            self._apply_deferred(average.variable)

    def apply_deferred(self) -> None:
        """Convert all deferred updates of averages to assignments of this tower."""
        for average in list(self.deferred.values()):
            self._apply_deferred(average.variable)

    def _apply_deferred(self, variable: keras.Variable) -> None:
        average = self.deferred.pop(id(variable))
        before = self.get_current_value(variable)
        self.add_update((variable, tf.cast(average.after(before), variable.dtype)))

    def value_of(self, variable: keras.Variable) -> tf.Tensor:
        """Return the value that the tower assigns to a variable."""
        if id(variable) in self.deferred:
            with tf.device(self.device):
                self._apply_deferred(variable)
        return self.updates[id(variable)][1]

    def assigned(self) -> list[keras.Variable]:
        """Return the variables that the tower assigns."""
        deferred = [average.variable for average in self.deferred.values()]
        return [variable for variable, _ in self.updates.values()] + deferred

    def close(self, count: Any) -> None:
        """Set the tower's number of examples; read the last values of its stand-ins."""
        self.count = count
        for key in self.stand_ins.keys() & self.updates.keys():
            self.updates[key] = self.updates[key][0], self.stand_ins[key].read_value()

    def check_backward(self, forward: "ReplicaScope") -> None:
        """Raise InputError if this scope, of a backward pass, assigns what `forward` did not.

        A backward pass that makes the forward pass again assigns the same, which is dropped.
        """
        known = set(map(id, forward.assigned()))
        new = [v for v in self.assigned() if id(v) not in known and v.name != SEED_STATE]
        if new:
            raise InputError(
                f"a backward pass assigns {new[0].path}, but towers keep only assignments of the "
                "forward pass; assign it there"
            )

    def _make_stand_in(self, variable: keras.Variable) -> None:
        # Inner graphs can assign it; its first value is set outside of them.
        with tf.init_scope(), tf.device(self.device):
            stand_in = tf_internals.make_variable(tf.zeros(variable.shape, variable.dtype))
        with contextlib.nullcontext() if self.eager else self.graph.as_default():
            value = super().get_current_value(variable)
            assign_by_op(stand_in, self._source(variable) if value is None else value)
        self.stand_ins[id(variable)] = stand_in
        if not self.eager:  # a graph holds no variable by itself
            self.graph.add_to_collection("stand-ins of towers", stand_in)

    def is_inside(self) -> bool:
        """Return whether the current code is in a loop, a branch or an inner function."""
        return tf.compat.v1.get_default_graph() is not self.graph


def new_value_reason(variable: keras.Variable) -> str:
    """Return why a model with such a variable, as a layer in float8 has, runs on one device."""
    return f"the gradient of {variable.path} is its new value, which towers cannot sum"


def assign_by_op(variable: tf.Variable, value: Any) -> None:
    """Assign to a variable by the op itself: `variables_refused` patches the methods.

    Args:
        variable: whose methods `variables_refused` may have patched.
        value: its new one.
    """
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.cast(value, variable.dtype))


def _creation_error(name: str | None) -> InputError:
    return InputError(
        f"a tower creates {f'the variable {name!r}' if name else 'a variable'}, so each would have "
        "its own; build the model before, by calling it once outside the towers"
    )


@contextlib.contextmanager
def variables_refused() -> Iterator[None]:
    """Raise InputError if the block creates a trainable `tf.Variable` or assigns to any."""

    def create(next_creator: Callable, **kwargs: Any) -> tf.Variable:
        if kwargs.get("trainable") is False:
            return next_creator(**kwargs)
        raise _creation_error(kwargs.get("name"))

    def make(name: str) -> Callable:
        def refuse(variable: tf.Variable, *_: Any, **__: Any) -> None:
            raise InputError(
                f"a tower assigns the tf.Variable {variable.name!r} ({name}), so the value of the "
                "last tower would remain; make it a keras.Variable, which is assigned once per "
                "step (add_weight(trainable=False) in a layer)"
            )

        return lambda _: refuse

    with tf.variable_creator_scope(create), tf_internals.patch_assignments(make):
        yield


# Losses that layers add.


@contextlib.contextmanager
def change_losses(change: Callable[[keras.Layer, tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Replace each loss that a layer adds in the block, a float, by `change(layer, loss)`."""

    def as_float(loss: Any) -> tf.Tensor:
        loss = tf.convert_to_tensor(loss)
        return loss if loss.dtype.is_floating else tf.cast(loss, keras.config.floatx())

    def make(before: Callable) -> Callable:
        return lambda layer, loss: before(
            layer, [change(layer, as_float(each)) for each in tf.nest.flatten(loss)]
        )

    with tf_internals.replaced((keras.Layer, "add_loss", make)):
        yield


def record_losses(
    scope: ReplicaScope, rows: BatchSlice | None, policies: Mapping[Any, str | None]
) -> contextlib.AbstractContextManager[None]:
    """Record the losses that layers add in the block; scale those that are sums to the batch.

    Args:
        scope: gets the losses, in `added`.
        rows: the tower's slice; None if the batch is not split.
        policies: see the head of this module.
    """

    def change(layer: keras.Layer, loss: tf.Tensor) -> tf.Tensor:
        if not scope.is_inside():
            if rows and policies.get(("loss", len(scope.added))) == "sum":
                loss /= _share(rows, loss.dtype)
            scope.added.append((layer, loss))
        return loss

    return change_losses(change)


def as_rows(
    scope: ReplicaScope, rows: BatchSlice, policies: Mapping[Any, str | None]
) -> list[tf.Tensor]:
    """Return the losses that layers have added in a tower as rows, to be joined over the towers.

    A layer that is called again by itself drops its earlier losses, as in Keras. The arguments are
    those of `record_losses`; the scope's `loss_rows` are set.

    Args:
        scope: of the tower, whose `loss_rows` are set.
        rows: the tower's share of the batch.
        policies: as for `record_losses`.
    """
    added_rows, current = [], {id(loss) for loss in scope.losses}
    for place, (layer, loss) in enumerate(scope.added):
        if id(loss) not in current:
            continue
        wide, by_example = widen(loss), bool(loss.shape.rank)
        if policies.get(("loss", place)) != "rows":
            wide *= _share(rows, wide.dtype)
        added_rows.append(wide if by_example else tf.expand_dims(wide, 0))
        scope.loss_rows.append((layer, loss.dtype, by_example))
    return added_rows


def add_to_layers(scope: ReplicaScope, joined: Sequence[tf.Tensor]) -> None:
    """Add the losses of the whole batch to their layers, outside of the towers.

    Args:
        scope: of the first tower, for which `as_rows` was called.
        joined: the rows that `as_rows` returned, joined over the towers.
    """
    for (layer, dtype, by_example), rows in zip(scope.loss_rows, joined, strict=True):
        value = rows if by_example else tf.reduce_sum(rows, axis=0)
        # Functional models refuse `add_loss` of their own.
        keras.Layer.add_loss(layer, tf.cast(value, dtype))


def _share(rows: BatchSlice, dtype: tf.DType) -> tf.Tensor:
    if isinstance(rows.size, int) and isinstance(rows.total, int):
        return tf.constant(rows.size / rows.total, dtype)
    return tf.cast(tf.cast(rows.size, tf.float64) / tf.cast(rows.total, tf.float64), dtype)


# The assignments of all towers.


def assign_once(
    scopes: Sequence[ReplicaScope], policies: Mapping[int, str]
) -> list[keras.Variable]:
    """Make the assignments that closed scopes record; return variables without a policy.

    Floats without a policy get the mean, others the first tower's value.
    Towers' copies of a variable get the value that it gets.

    Args:
        scopes: of the towers.
        policies: {id of a variable: policy of `merge`}; others have their own `aggregation`.
    """
    unknown = []
    groups: dict[Any, tuple[str, list[ReplicaScope], list[keras.Variable]]] = {}
    for variable in assigned(scopes):
        key = id(variable)
        writers = [scope for scope in scopes if key in scope.updates or key in scope.deferred]
        policy = policies.get(key) or policy_of(variable)
        averaged = any(key in scope.averages for scope in writers)
        if len(writers) > 1 and not (policy or averaged or variable.name == SEED_STATE):
            unknown.append(variable)
        policy = policy or "mean"
        # A GPU sends its values as one tensor.
        deferred = all(key in scope.deferred for scope in writers)
        packs = (deferred or len(writers) > 1) and policy != "first"
        packs = packs and is_gpu(writers[0].device) and variable.value.dtype.is_floating
        group: Any = (policy, variable.dtype, deferred, *map(id, writers)) if packs else key
        groups.setdefault(group, (policy, writers, []))[2].append(variable)
    for group, (policy, writers, variables) in groups.items():
        if isinstance(group, tuple):
            packed = _merge_packed(policy, writers, variables, deferred=group[2])
            values = unpack(packed, [v.value for v in variables])
        else:
            values = [scope.value_of(variables[0]) for scope in writers]
            if len(values) > 1:
                values, counts = map(tf.convert_to_tensor, values), [s.count for s in writers]
                values = [merge(policy, variables[0].value, list(values), counts)]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
            for copy, scope in copies_of(variable, scopes):
                # A seed advances alike in all towers: nothing need be sent.
                is_own = variable.name == SEED_STATE and scope in writers
                new = scope.value_of(variable) if is_own else value
                with tf.device(copy.device):
                    copy.assign(tf.cast(new, copy.dtype))
    return unknown


def assigned(scopes: Sequence[ReplicaScope]) -> list[keras.Variable]:
    """Return the Keras variables that the towers' scopes assign, each once."""
    return list({id(v): v for scope in scopes for v in scope.assigned()}.values())


def copies_of(
    variable: keras.Variable, scopes: Sequence[ReplicaScope]
) -> list[tuple[tf.Variable, ReplicaScope]]:
    """Return the copies of a master that towers read in its place, each once, and their scopes.

    Args:
        variable: a master.
        scopes: of the towers.
    """
    read = {id(value := scope.own.get(id(variable))): (value, scope) for scope in scopes}.values()
    return [(v, s) for v, s in read if isinstance(v, tf.Variable) and v is not variable.value]


def policy_of(variable: keras.Variable) -> str | None:
    """Return the policy that a variable's own `aggregation` names, None if it names none."""
    policies = {"sum": "sum", "mean": "mean", "only_first_replica": "first"}
    return policies.get(getattr(variable, "aggregation", None))


def merge(policy: str, before: Any, values: Sequence[Any], counts: Sequence[Any]) -> tf.Tensor:
    """Combine the towers' `values` of a variable into one.

    Args:
        policy: "first" tower's; "sum" of the changes; "mean", weighted by examples, unless all are
            equal; "max"; "min".
        before: the variable's value before.
        values: of the towers.
        counts: their numbers of examples.
    """
    if policy in ("sum", "max", "min"):  # a tower without examples may have any value
        neutral, pairs = before if policy == "sum" else values[0], zip(values, counts, strict=True)
        values = [values[0], *(tf.where(n > 0, value, neutral) for value, n in list(pairs)[1:])]
    if policy == "sum":
        return tf.add_n([before, *(value - before for value in values)])
    if policy in ("max", "min"):
        of_bools = {"max": tf.reduce_any, "min": tf.reduce_all}
        of_others = {"max": tf.reduce_max, "min": tf.reduce_min}
        reduce = of_bools if values[0].dtype.is_bool else of_others
        return reduce[policy](tf.stack(values), axis=0)
    if policy == "mean" and values[0].dtype.is_floating:
        wide = [widen(value) for value in values]
        weights = [tf.cast(count, wide[0].dtype) for count in counts]
        weighted = [tf.math.multiply_no_nan(v, w) for v, w in zip(wide, weights, strict=True)]
        mean = tf.add_n(weighted) / tf.add_n(weights)
        # What all towers agree on, as a counter, is kept to the last digit.
        agreed = tf.reduce_all(tf.stack(values[1:]) == values[0], axis=0)
        return tf.where(agreed, tf.cast(values[0], mean.dtype), mean)
    return values[0]


def widen(value: tf.Tensor) -> tf.Tensor:
    """Cast 16-bit floats to float32: sums in 16 bits lose examples."""
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value


def _merge_packed(
    policy: str, scopes: Sequence[ReplicaScope], variables: Sequence[keras.Variable], deferred: bool
) -> tf.Tensor:
    # Returns the merged values of the variables, flat, on the current device.
    def of_elements(numbers: Sequence[float], dtype: tf.DType) -> tf.Tensor:
        sizes = [v.value.shape.num_elements() for v in variables]
        return tf.constant(np.repeat(numbers, sizes), dtype)

    averages = [scopes[0].deferred.get(id(v)) for v in variables]
    one_part = len({scope.device for scope in scopes}) == len(scopes)
    if deferred and one_part and all(average.shared for average in averages):
        scopes = scopes[:1]  # all have the same value
    values = []
    for scope in scopes:
        with tf.device(scope.device):
            if deferred:
                updates = [scope.deferred[id(v)] for v in variables]
                value = pack([average.value for average in updates])
                value *= of_elements([average.weight for average in updates], value.dtype)
            else:
                value = pack([tf.cast(scope.value_of(v), v.dtype) for v in variables])
            values.append(value)
    before = pack([v.value for v in variables])
    if policy == "mean":
        value = _mean(values, scopes)
    else:
        value = merge(policy, before, values, [scope.count for scope in scopes])
    if deferred:
        momenta = of_elements([average.momentum for average in averages], value.dtype)
        value += tf.cast(before, value.dtype) * momenta
    return value


def _mean(values: Sequence[tf.Tensor], scopes: Sequence[ReplicaScope]) -> tf.Tensor:
    # Weighted by examples; each device sends one tensor.
    if len(values) == 1:
        return values[0]
    counts = [scope.count for scope in scopes]
    known = not any(map(tf.is_tensor, counts))
    weighted: dict[str, list[tf.Tensor]] = {}
    for value, scope in zip(values, scopes, strict=True):
        with tf.device(scope.device):
            value = widen(value)
            if not known:
                value = tf.concat([value, tf.ones([1], value.dtype)], axis=0)
            product = tf.math.multiply_no_nan(value, tf.cast(scope.count, value.dtype))
            weighted.setdefault(scope.device, []).append(product)
    sums = []
    for device, products in weighted.items():
        with tf.device(device):
            sums.append(tf.add_n(products))
    total = tf.add_n(sums)
    return total / tf.cast(sum(counts), total.dtype) if known else total[:-1] / total[-1]
