"""Inner products of each tower's gradients with their mean, without sending gradients again.

They are computed where a tower's gradient has arrived for the sum. A machine with several towers
sends only their sum, so the mean is sent back to it.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.builder import cross_host, gather
from towers.builder.device_types import HOST, machine_of
from towers.builder.flatten import is_small, pack, unpack

# {place: {tower: [(its gradient, the mean) of a variable]}}
_Pairs = dict[str, dict[int, list[tuple[Any, Any]]]]


def products_of_towers(
    gradients: Sequence[Sequence[Any]],
    means: Sequence[Sequence[Any]],
    devices: Sequence[str],
    measured: tf.Tensor | None,
) -> tf.Tensor:
    """Return g * g, g * mean and mean * mean for each tower's gradients g, `[towers, 3]`.

    Args:
        gradients: list of gradients of each tower.
        means: list of mean gradients for each tower, on the devices of the sums.
        devices: device of each tower.
        measured: bool scalar: whether to compute the products, else they are 0; None: yes.
    """
    counts = Counter(filter(None, map(machine_of, devices)))
    alone, summed = [], []
    for i, tower in enumerate(zip(gradients, means, devices, strict=False)):
        (summed if counts[machine_of(tower[2])] > 1 else alone).append((i, *tower))
    num_towers = len(alone) + len(summed)
    tables = []
    if alone:
        pairs = _at_means(alone)
        tables.append(_table(pairs, num_towers, measured))
    if summed:
        late = measured
        if measured is not None:  # reaches the towers after their sums, see `_at_means`
            with tf.device(HOST), tf.control_dependencies(gather.tensors(summed[0][2])):
                late = on_current_device(measured)
        tables.append(_cond(late, lambda: _table(_at_towers(summed), num_towers, None), num_towers))
    with tf.device(HOST):
        return tf.add_n(tables)


def _at_means(towers: Sequence[tuple]) -> _Pairs:
    pairs: _Pairs = {}
    for tower, gradients, mean, _ in towers:
        # Sent in the same transfers as for the sum.
        places = ["" if other is None else _values(other).device for other in mean]
        gradients = _send(gradients, places, is_small, after=mean)
        for one, other, place in zip(gradients, mean, places, strict=True):
            if other is None:
                continue
            # After the sum: add_n accumulates into any input buffer without another reader, so
            # that another reader would change the order of its additions at random.
            with tf.device(place), tf.control_dependencies([_values(other)]):
                one = gather.map_values(on_current_device, one)
            pairs.setdefault(place, {}).setdefault(tower, []).append((one, other))
    return pairs


def _at_towers(towers: Sequence[tuple]) -> _Pairs:
    there: dict[str, list[Any]] = {}
    by_device: _Pairs = {}
    for tower, gradients, mean, device in towers:
        machine = machine_of(device)
        if machine not in there:
            there[machine] = _send(mean, [device] * len(mean))
        pairs = zip(gradients, there[machine], strict=True)
        by_device[device] = {tower: [both for both in pairs if both[1] is not None]}
    return by_device


def _cond(measured: tf.Tensor | None, table: Callable, num_towers: int) -> tf.Tensor:
    if measured is None:
        return table()
    return tf.cond(measured, table, lambda: tf.zeros([num_towers, 3]))


def _table(pairs: _Pairs, num_towers: int, measured: tf.Tensor | None) -> tf.Tensor:
    """Return the sums of the products of pairs, `[towers, 3]`; each machine sends one tensor.

    `measured` is sent to each place once, and the branch is decided there: a branch decided
    elsewhere would send it again for its constants.
    """

    def of_place(of_towers: dict[int, list[tuple[Any, Any]]]) -> tf.Tensor:
        rows = []
        for tower in range(num_towers):
            products = [_of_variable(*pair) for pair in of_towers.get(tower, ())]
            sums = [tf.add_n(column) for column in zip(*products, strict=True)]
            rows.append(tf.stack(sums) if sums else tf.zeros([3]))
        return tf.stack(rows)

    parts = []
    for place, of_towers in pairs.items():
        with tf.device(place):
            wanted = None if measured is None else on_current_device(measured)
            parts.append(_cond(wanted, functools.partial(of_place, of_towers), num_towers))
    parts = cross_host.sum_by_machine(parts, list(pairs), tf.add_n)
    with tf.device(HOST):
        return tf.add_n(parts) if parts else tf.zeros([num_towers, 3])


def _send(
    gradients: Sequence[Any],
    devices: Sequence[str],
    packs: Callable = lambda gradient: True,
    after: Sequence[Any] = (),
) -> list[Any]:
    """Return gradients on other devices; dense ones that `packs` accepts are sent as one tensor.

    Each is unpacked after the value at the same position of `after`; see `_at_means`.
    """
    sent, groups = list(gradients), {}
    for i, (gradient, device) in enumerate(zip(gradients, devices, strict=True)):
        dense = isinstance(gradient, tf.Tensor) and gradient.shape.is_fully_defined()
        if dense and machine_of(gradient.device) != machine_of(device) and packs(gradient):
            groups.setdefault((gradient.device, device, gradient.dtype), []).append(i)
    for (place, device, _), group in groups.items():
        members = [gradients[i] for i in group]
        with tf.device(place):
            packed = pack(members)
        waits = [after[i] for i in group] if after else []
        with tf.device(device), tf.control_dependencies(waits):
            for i, part in zip(group, unpack(on_current_device(packed), members), strict=True):
                sent[i] = part
    return sent


def _of_variable(one: Any, other: Any) -> tuple[tf.Tensor, ...]:
    """Return one * one, one * other and other * other of two gradients; None is zero."""
    if isinstance(other, tf.IndexedSlices):
        one, other = _same_rows(one, other)
    elif isinstance(one, tf.IndexedSlices):
        one = tf.math.unsorted_segment_sum(one.values, one.indices, tf.shape(other)[0])
    if one is None:
        return tf.zeros([]), tf.zeros([]), _sum_of_squares(other)
    one, other = tf.cast(one, tf.float32), tf.cast(other, tf.float32)
    return _sum_of_squares(one), tf.reduce_sum(one * other), _sum_of_squares(other)


def _same_rows(one: Any, other: tf.IndexedSlices) -> tuple[tf.Tensor | None, tf.Tensor]:
    """Return two sparse gradients as dense arrays over the union of their rows."""
    parts = [part for part in (one, other) if part is not None]
    rows, places = tf.unique(tf.concat([part.indices for part in parts], axis=0))
    places = tf.split(places, [tf.shape(part.indices)[0] for part in parts])
    arrays = [
        tf.math.unsorted_segment_sum(part.values, segment_ids, tf.size(rows))
        for part, segment_ids in zip(parts, places, strict=True)
    ]
    return (None if one is None else arrays[0]), arrays[-1]


def on_current_device(value: tf.Tensor) -> tf.Tensor:
    """Copy `value` to the current device; Grappler would remove a tf.identity."""
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)


def _sum_of_squares(value: tf.Tensor) -> tf.Tensor:
    return 2.0 * tf.nn.l2_loss(tf.cast(value, tf.float32))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
