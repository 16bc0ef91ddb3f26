"""What towers assign to a variable makes one value, which is assigned once a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.builder.assignments import SEED_STATE, TowerScope
from towers.builder.kinds import is_gpu
from towers.builder.packed import pack, unpack
from towers.builder.splitting import PerTower


def assign_once(
    scopes: Sequence[TowerScope], policies: Mapping[int, str]
) -> list[keras.Variable]:
    """Make the assignments that the towers' scopes keep, one for each variable.

    What nobody knows better is taken for an average if it is a float, else for a counter of steps.

    Args:
        scopes: of the towers, closed.
        policies: {id of a variable: how the towers' values make one, see `merge`}, for those that
            do not say it themselves.

    Returns:
        The variables of which nothing said how several values make one.
    """
    found: dict[int, tuple[keras.Variable, list[TowerScope]]] = {}
    for scope in scopes:
        for variable in scope.assigned():
            found.setdefault(id(variable), (variable, []))[1].append(scope)
    unknown = []
    groups: dict[Any, tuple[str, list[TowerScope], list[keras.Variable]]] = {}
    for key, (variable, own) in found.items():
        policy = policy_of(variable) or policies.get(key)
        averaged = any(key in scope.averages for scope in own)
        if len(own) > 1 and not (policy or averaged or variable.name == SEED_STATE):
            unknown.append(variable)
        policy = policy or "mean"
        group: Any = _packs_with(variable, policy, own) or key
        groups.setdefault(group, (policy, own, []))[2].append(variable)
    for group, (policy, own, variables) in groups.items():
        if isinstance(group, tuple):
            values = unpack(_packed(policy, own, variables), [v.value for v in variables])
        else:
            values = [_merged(policy, own, variables[0])]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    return unknown


def policy_of(variable: keras.Variable) -> str | None:
    """Return how a variable itself says that the values of several towers make one, or None."""
    policies = {"sum": "sum", "mean": "mean", "only_first_replica": "first"}
    return policies.get(getattr(variable, "aggregation", None))


def merge(policy: str, before: Any, values: Sequence[Any], counts: Sequence[Any]) -> tf.Tensor:
    """Return the one value that the towers' `values` of a variable make.

    Args:
        policy: "first" tower's; "sum" of the changes; "mean", weighted by examples; "max"; "min".
        before: what the variable was.
        values: of the towers.
        counts: their numbers of examples.
    """
    if policy in ("sum", "max", "min"):  # of a tower without examples it may be anything
        values = [values[0], *(
            tf.where(count > 0, value, before if policy == "sum" else values[0])
            for value, count in zip(values[1:], counts[1:], strict=True)
        )]
    if policy == "sum":
        return tf.add_n([before, *(value - before for value in values)])
    if policy == "max":
        return tf.reduce_max(tf.stack(values), axis=0)
    if policy == "min":
        return tf.reduce_min(tf.stack(values), axis=0)
    if policy == "mean" and values[0].dtype.is_floating:
        values = [widen(value) for value in values]
        weights = [tf.cast(count, values[0].dtype) for count in counts]
        weighted = [tf.math.multiply_no_nan(v, w) for v, w in zip(values, weights, strict=True)]
        return tf.add_n(weighted) / tf.add_n(weights)
    return values[0]


def with_new_values(
    gradients: Sequence[Any], masters: Sequence[tf.Variable], scopes: Sequence[TowerScope]
) -> list[Any]:
    """Return gathered gradients, with new values in the place of those that are no gradients.

    Of several towers' new values the largest is taken, as Keras does when it accumulates gradients,
    unless the variable says otherwise: these are scales, and the largest numbers that were seen.
    """
    found = list(gradients)
    for i, master in enumerate(masters):
        own = [scope for scope in scopes if id(master) in scope.new_values]
        if own:
            policy = policy_of(own[0].overwritten[id(master)]) or "max"
            values = [scope.new_values[id(master)] for scope in own]
            value = merge(policy, master, values, [scope.count for scope in own])
            copies = isinstance(found[i], PerTower)
            found[i] = PerTower([value] * len(found[i].values)) if copies else value
    return found


def widen(value: tf.Tensor) -> tf.Tensor:
    """Return `value` in float32 at least: sums in 16 bits lose examples."""
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value


def _merged(policy: str, scopes: Sequence[TowerScope], variable: keras.Variable) -> Any:
    """Return the one value that towers' values of a variable make."""
    values = [scope.value_of(variable) for scope in scopes]
    if len(values) == 1:
        return values[0]
    values = [tf.convert_to_tensor(value) for value in values]
    return merge(policy, variable.value, values, [scope.count for scope in scopes])


# What GPUs assign leaves each of them as one tensor.


def _packs_with(
    variable: keras.Variable, policy: str, scopes: Sequence[TowerScope]
) -> tuple | None:
    """Return what tells which others a variable goes with, None if it goes by itself."""
    moved = all(id(variable) in scope.moved for scope in scopes)
    needed = (moved or len(scopes) > 1) and policy != "first"
    if needed and is_gpu(scopes[0].device) and variable.value.dtype.is_floating:
        return policy, variable.dtype, moved, *map(id, scopes)
    return None


def _packed(
    policy: str, scopes: Sequence[TowerScope], variables: Sequence[keras.Variable]
) -> tf.Tensor:
    """Return the values of variables that pack together, flat, on the current device."""
    moved = all(id(variables[0]) in scope.moved for scope in scopes)
    averages = [scopes[0].moved.get(id(v)) for v in variables]
    one_part = len({scope.device for scope in scopes}) == len(scopes)
    if moved and one_part and all(average.shared for average in averages):
        scopes = scopes[:1]  # all have the same
    values = []
    for scope in scopes:
        with tf.device(scope.device):
            if moved:
                own = [scope.moved[id(v)] for v in variables]
                weights = _of_each([average.weight for average in own], variables)
                value = pack([average.value for average in own])
                values.append(value * tf.constant(weights, value.dtype))
            else:
                values.append(pack([tf.cast(scope.value_of(v), v.dtype) for v in variables]))
    before = pack([v.value for v in variables])
    if policy == "mean":
        value = _mean(values, scopes)
    else:
        value = merge(policy, before, values, [scope.count for scope in scopes])
    if moved:
        momenta = _of_each([average.momentum for average in averages], variables)
        value += tf.cast(before, value.dtype) * tf.constant(momenta, value.dtype)
    return value


def _of_each(numbers: Sequence[float], variables: Sequence[keras.Variable]) -> np.ndarray:
    """Return a number for each element of packed variables, from one for each variable."""
    return np.repeat(numbers, [v.value.shape.num_elements() for v in variables])


def _mean(values: Sequence[tf.Tensor], scopes: Sequence[TowerScope]) -> tf.Tensor:
    """Return the mean of flat values, weighted by the scopes' examples; each device sends once."""
    if len(values) == 1:
        return values[0]
    counts = [scope.count for scope in scopes]
    known = not any(map(tf.is_tensor, counts))
    weighted: dict[str, list[tf.Tensor]] = {}
    for value, scope in zip(values, scopes, strict=True):
        with tf.device(scope.device):
            value, count = widen(value), scope.count
            if not known:
                value = tf.concat([value, tf.ones([1], value.dtype)], axis=0)
            product = tf.math.multiply_no_nan(value, tf.cast(count, value.dtype))
            weighted.setdefault(scope.device, []).append(product)
    sums = []
    for device, own in weighted.items():
        with tf.device(device):
            sums.append(tf.add_n(own))
    total = tf.add_n(sums)
    return total / tf.cast(sum(counts), total.dtype) if known else total[:-1] / total[-1]
