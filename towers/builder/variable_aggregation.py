"""Aggregates the values that towers assign to a variable, and assigns the result once a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.builder.device_types import is_gpu
from towers.builder.flatten import pack, unpack
from towers.builder.replica_scope import SEED_STATE, ReplicaScope


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
    scopes_of: dict[int, tuple[keras.Variable, list[ReplicaScope]]] = {}
    for scope in scopes:
        for variable in scope.assigned():
            scopes_of.setdefault(id(variable), (variable, []))[1].append(scope)
    unknown = []
    groups: dict[Any, tuple[str, list[ReplicaScope], list[keras.Variable]]] = {}
    for key, (variable, writers) in scopes_of.items():
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


def copies_of(
    variable: keras.Variable, scopes: Sequence[ReplicaScope]
) -> list[tuple[tf.Variable, ReplicaScope]]:
    """Return the copies of a variable that towers read in its place, each once, and their scopes.

    Args:
        variable: the master.
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
        values = [
            values[0],
            *(
                tf.where(count > 0, value, before if policy == "sum" else values[0])
                for value, count in zip(values[1:], counts[1:], strict=True)
            ),
        ]
    if policy == "sum":
        return tf.add_n([before, *(value - before for value in values)])
    if policy in ("max", "min"):
        if values[0].dtype.is_bool:
            reduce = tf.reduce_any if policy == "max" else tf.reduce_all
        else:
            reduce = tf.reduce_max if policy == "max" else tf.reduce_min
        return reduce(tf.stack(values), axis=0)
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
