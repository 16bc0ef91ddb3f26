"""Gathering: pure functions from the towers' values to one value, or to one for each tower.

`add_n` on the gather device is the pattern. Gradients are also summed on every tower, by
collectives (NCCL on GPUs, a ring elsewhere), or beside variables that are spread over the workers
of a cluster. An op on a GPU, a collective and a transfer all have a fixed cost, so many small
values of one type are packed into one flat tensor.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import are_gpus, are_remote, devices_here, is_gpu, machine_of

# Above this an op's work takes a GPU longer than its launch, and a copy costs memory.
LARGE_BYTES = 4 * 2**20
# Most that is packed into one tensor. It takes a GPU about as long as the launch, too, and longer
# ones would save few launches: their copies are what a step needs of memory beside its variables.
GROUP_BYTES = 5 * 2**20


def num_bytes(value: Any) -> int:
    """Return the bytes of a tensor or variable."""
    return value.shape.num_elements() * tf.as_dtype(value.dtype).size


def grouped(
    items: Sequence[Any], kind: Callable, size: Callable[[Any], int] = lambda _: 0
) -> list[list[Any]]:
    """Return items in groups of one kind, of at most GROUP_BYTES, in order of their first.

    Args:
        items: of any type.
        kind: returns an item's key; an item without one (None) is a group of its own.
        size: returns an item's bytes; one of more than LARGE_BYTES is a group of its own, too.
    """
    groups: list[list[Any]] = []
    last: dict[Any, tuple[list[Any], int]] = {}  # of each kind, the last group and its bytes
    for item in items:
        key, num = kind(item), size(item)
        group, total = last.get(key, ([], GROUP_BYTES + 1))
        if key is None or num > LARGE_BYTES or total + num > GROUP_BYTES:
            group, total = [], 0
            groups.append(group)
        group.append(item)
        if key is not None and num <= LARGE_BYTES:
            last[key] = group, total + num
    return groups


def pack(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate the elements of tensors of one type into one tensor `[total]`."""
    flat = [tf.reshape(value, [-1]) for value in values]
    return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]


def unpack(packed: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Split what `pack` returns again, into tensors of the shapes of `like`, in its order.

    Args:
        packed: what `pack` returns.
        like: values of the shapes, in their order.
    """
    sizes = [value.shape.num_elements() for value in like]
    if packed.dtype.is_floating:
        parts = tf.split(packed, sizes) if len(sizes) > 1 else [packed]
    else:  # of other types a GPU has no split
        stops = itertools.accumulate(sizes)
        parts = [packed[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
    return [tf.reshape(part, value.shape) for part, value in zip(parts, like, strict=True)]


class StaticIndexedSlices(tf.IndexedSlices):
    """A sparse gradient whose rows do not depend on the examples, as of a position embedding.

    All towers have the same rows. They are added row by row: optimizers square each row.
    """


def add_sparse(values: Sequence[Any]) -> Any:
    """Return the sum of `IndexedSlices`, sparse; None if there are none."""
    if not values:
        return None
    if all(isinstance(value, StaticIndexedSlices) for value in values):
        rows = tf.add_n([value.values for value in values], name="AddN")
        return StaticIndexedSlices(rows, values[0].indices, values[0].dense_shape)
    rows = tf.concat([value.values for value in values], axis=0)
    indices = tf.concat([value.indices for value in values], axis=0)
    return tf.IndexedSlices(rows, indices, values[0].dense_shape)


def join(values: Sequence[Any]) -> Any:
    """Concatenate per-tower values along axis 0, with their Keras masks, without the Nones."""
    convert = lambda x: x if isinstance(x, tf.RaggedTensor) else tf.convert_to_tensor(x)  # noqa: E731
    values = [convert(value) for value in values if value is not None]
    if not values:
        return None
    if any(value.shape.rank == 0 for value in values):
        raise ValueError("concat cannot join scalars along axis 0; use sum or map")
    joined = tf.concat(values, axis=0)
    masks = [tf_internals.mask_of(value) for value in values]
    if all(mask is not None for mask in masks):
        tf_internals.set_mask(joined, tf.concat(masks, axis=0))
    return joined


def sum_gradients(
    builder: Any, gradients: Sequence[Sequence[Any]], variables: Sequence[Any], on_every_tower: bool
) -> list[list[Any]]:
    """Return the sums of the towers' gradients: for each tower on its device, or else one list.

    Args:
        builder: the `TowerBuilder`.
        gradients: for each tower a list of gradients, and perhaps of other values; None where it
            has none.
        variables: of the gradients, `tf.Variable`s and tensors.
        on_every_tower: whether each tower gets the sums.
    """
    if on_every_tower:
        return _sum_on_every_tower(builder, gradients)
    targets = [builder.gather_device] * len(gradients[0])
    if builder.gather_at_variables:
        for i, variable in enumerate(variables):
            targets[i] = targets[i] if isinstance(variable, tf.Tensor) else variable.device
    return [_sum_on(targets, gradients, builder.devices, builder.add)]


def add_to(builder: Any, totals: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Add each tower's result, a structure of tensors, to its total, on its device; return these.

    The totals are empty before the first round, and the last towers may have no result.

    Args:
        builder: of the towers.
        totals: one for each tower; empty before the first round.
        results: to be added; the last towers may have none.
    """
    if not totals:
        return list(results)
    added = list(totals)
    for i, result in enumerate(results):
        both, devices = [tf.nest.flatten(each) for each in (totals[i], result)], builder.devices
        with tf.name_scope(f"tower_{i}"):
            sums = _sum_on([devices[i]] * len(both[0]), both, [devices[i]] * 2, builder.add)
        added[i] = tf.nest.pack_sequence_as(result, sums)
    return added


def _sum_on(
    targets: Sequence[str],
    gradients: Sequence[Sequence[Any]],
    devices: Sequence[str],
    add: Callable,
) -> list[Any]:
    """Return sums of the towers' gradients on the target's device; GPUs pack them by type."""
    columns = list(zip(*gradients, strict=True))
    packs = [_are_dense(values) and is_gpu(devices[0]) for values in columns]
    kind = lambda i: (targets[i], columns[i][0].dtype) if packs[i] else None  # noqa: E731
    size = lambda i: num_bytes(columns[i][0]) if packs[i] else 0  # noqa: E731
    sums: list[Any] = [None] * len(columns)
    for group in grouped(range(len(columns)), kind, size):
        first, values = group[0], columns[group[0]]
        if packs[first]:
            values = []
            for device, tower_gradients in zip(devices, gradients, strict=False):
                with tf.device(device):
                    values.append(pack([tower_gradients[i] for i in group]))
        values = _sum_of_each_machine(values, devices, add)
        with tf.device(targets[first]):
            total = add(values)
            parts = unpack(total, [columns[i][0] for i in group]) if packs[first] else [total]
        for i, part in zip(group, parts, strict=True):
            sums[i] = part
    return sums


def _sum_of_each_machine(
    values: Sequence[Any], devices: Sequence[str], add: Callable
) -> Sequence[Any]:
    # A machine's values are summed there before they are sent; those of this process stay apart.
    if not are_remote(devices):
        return values
    of_machines: dict[str, list[tuple[Any, str]]] = {}
    for value, device in zip(values, devices, strict=False):
        of_machines.setdefault(machine_of(device), []).append((value, device))
    sums = []
    for pairs in of_machines.values():
        with tf.device(pairs[0][1]):
            own = [value for value, _ in pairs]
            sums.append(own[0] if len(own) == 1 else add(own))
    return sums


def _sum_on_every_tower(builder: Any, gradients: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the sums of the towers' gradients, for each tower on its device, by collectives.

    Collectives cannot add gradients that are sparse, complex, or missing in a tower; `add_n` does.
    It adds all gradients if towers run one after the other or share a device.
    """
    columns, devices = list(zip(*gradients, strict=True)), builder.devices
    apart = len(set(devices)) == len(devices) == len(gradients) and not tf.executing_eagerly()
    packs = [apart and _are_dense(own) and not own[0].dtype.is_complex for own in columns]
    packed = [list(itertools.compress(own, packs)) for own in gradients]
    sums = list(map(iter, all_sum(packed, devices)))
    results: list[list[Any]] = [[] for _ in devices]
    for values, is_packed in zip(columns, packs, strict=True):
        with tf.device(builder.gather_device):
            total = None if is_packed else builder.add(values)
        for result, own in zip(results, sums, strict=True):
            result.append(next(own) if is_packed else total)
    return results


def _are_dense(values: Sequence[Any]) -> bool:
    return all(isinstance(v, tf.Tensor) and v.shape.is_fully_defined() for v in values)


def map_values(fn: Callable, gradient: Any) -> Any:
    """Apply a function to the values of a gradient, dense, sparse or None; return the gradient.

    Args:
        fn: called with the values.
        gradient: dense, sparse or None.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return type(gradient)(fn(gradient.values), gradient.indices, gradient.dense_shape)
    return fn(gradient)


@contextlib.contextmanager
def after(values: Any) -> Iterator[None]:
    """Make each op in the block wait for all these values, by one op in place of many edges."""
    ready = []
    if values := tensors(values):
        with tf.control_dependencies(values):
            ready = [tf.no_op()]
    with tf.control_dependencies(ready):
        yield


def tensors(structure: Any) -> list[tf.Tensor]:
    """Return the tensors in a structure, also the components of sparse and ragged ones."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]


# Collectives wait for every device of a group, so they need towers that run in parallel: in a
# traced step, each tower on a device of its own.

# Far from the keys of tf.distribute, which begin at 1.
_FIRST_GROUP_KEY = 1_000
_NUM_KEYS = 1_024  # of each collective
_first_keys = itertools.count(1_000_000, _NUM_KEYS)


def are_used(devices: Sequence[str]) -> bool:
    """Return whether towers exchange by collectives: several of this process, each on its GPU.

    CPUs share their memory: a gather device is faster there.
    """
    apart = len(set(devices)) == len(devices) > 1
    return apart and are_gpus(devices) and not are_remote(devices)


def all_sum(
    values: Sequence[Sequence[tf.Tensor] | None], devices: Sequence[str], backward: bool = True
) -> list[list[tf.Tensor]]:
    """Return for each tower the sums over all towers, on its own device.

    They are summed in buckets of one type. Each collective costs a round trip, so small tensors are
    packed; but a bucket that is sent while the next is computed costs nothing.

    Args:
        values: for each tower a list of tensors; None for zeros, but not for the first.
        devices: of the towers, each another.
        backward: sum the last ones first, as a backward pass computes gradients in that order.
    """
    like = values[0]
    sums: list[list] = [[None] * len(like) for _ in devices]
    order = range(len(like))[:: -1 if backward else 1]
    for bucket in grouped(order, lambda i: like[i].dtype, lambda i: num_bytes(like[i])):
        collective, first = Collective(devices), [like[i] for i in bucket]
        size = sum(value.shape.num_elements() for value in first)
        for tower, (device, own) in enumerate(zip(devices, values, strict=True)):
            with tf.device(device):
                given = pack([own[i] for i in bucket]) if own else tf.zeros([size], first[0].dtype)
                parts = unpack(collective.sum(given, device), first)
            for i, part in zip(bucket, parts, strict=True):
                sums[tower][i] = part
    return sums


def broadcast(values: Sequence[tf.Tensor], devices: Sequence[str]) -> list[list[tf.Tensor]]:
    """Return for each of the devices the floats of the first one; these are sent in their order.

    The others add zeros. TensorFlow's op for a broadcast is dropped on a device that does not use
    what it receives, and the others then wait for it forever.

    Args:
        values: floats on the first device.
        devices: to which they are sent.
    """
    zeros = [None] * (len(devices) - 1)
    _, *received = all_sum([values, *zeros], devices, backward=False)
    return [list(values), *received]


class Collective:
    """One collective: each device of the group calls the same method once.

    A caller gives a value of the same shape and type as all others, and its own device.
    """

    def __init__(self, devices: Sequence[str]):
        """Set the devices of the group."""
        self._devices = tuple(devices)
        self._first_key, self._turn = next(_first_keys), _turn_of_call()

    def sum(self, value: tf.Tensor, device: str) -> tf.Tensor:
        """Return the sum of all devices' values, on `device`; see `Collective`."""
        op = functools.partial(tf.raw_ops.CollectiveReduceV2, merge_op="Add", final_op="Id")
        return self._launch(op, value, device)

    def stack(self, value: tf.Tensor, device: str) -> tf.Tensor:
        """Return the stack of all devices' values, `[N, ...]`, on `device`; see `Collective`."""
        stacked = self._launch(tf.raw_ops.CollectiveGatherV2, tf.expand_dims(value, 0), device)
        stacked.set_shape([len(self._devices), *value.shape])
        return stacked

    def _launch(self, op: Callable, value: tf.Tensor, device: str) -> tf.Tensor:
        # There is no timeout: TensorFlow implements one by two threads that sleep for so long, for
        # each collective and device, and a process has room for some 32,000. A tower that fails
        # ends the collectives of its step at once without it.
        value.shape.assert_is_fully_defined()  # TensorFlow keeps the shape with the key
        with tf.device(device):
            # TensorFlow's NCCL misreads bfloat16 as float32 of as many elements.
            known = tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value
            result = op(
                input=known,
                group_size=len(self._devices),
                group_key=_group_key(self._devices),
                instance_key=self._turn + self._first_key,
                ordering_token=[_ordering_token(device)],
                communication_hint=_hint(self._devices),
            )
            return tf.cast(result, value.dtype)


def _hint(devices: Sequence[str]) -> str:
    # NCCL needs a card for each device, of which several may be on one.
    num_cards, num_gpus = len(tf.config.get_visible_devices("GPU")), len(devices_here("GPU"))
    on_gpus = all("gpu:" in device.lower() for device in devices)
    return "nccl" if on_gpus and num_cards == num_gpus else "auto"


def _turn_of_call() -> tf.Tensor:
    """Return which of its keys each collective uses in this call of the traced function.

    TensorFlow never forgets a key: it keeps 950 bytes for each, so new keys for each call would be
    a leak. But if two calls use a key at the same time, all collectives of the process end for
    good. So each place where the function is called has keys of its own, in each thread. A call
    that fails leaves nothing of its keys behind, since it ends after all its collectives.
    """
    here = tf.compat.v1.get_default_graph()  # perhaps of a loop in the function
    function = tf_internals.function_of(here)
    turns = itertools.cycle(range(_NUM_KEYS))
    turn = _once(function, "turn", lambda: _number_of_place(function, turns))

    def in_loop() -> tf.Tensor:
        # An op that TensorFlow keeps, outside of the towers: it is sent to each of them once.
        with tf.device("/cpu:0"), tf.name_scope(""):
            return tf.raw_ops.PlaceholderWithDefault(input=turn, shape=[])

    return _once(here, "turn in a loop", in_loop)


def _number_of_place(graph: tf.Graph, numbers: Iterator[int]) -> tf.Tensor:
    """Return a number that tells apart the places where a graph's function is called.

    Each place takes a number when it is first called, and another one in each thread. Calls by a
    program outside of functions are all one place.

    Args:
        graph: in which the number is used.
        numbers: from which each place takes its own.
    """
    kept = threading.local()

    def own() -> tf.Tensor:
        if not hasattr(kept, "number"):
            kept.number = next(numbers)
        with tf.device("/cpu:0"):
            return tf.constant(kept.number, tf.int32)

    if not getattr(graph, "building_function", False):
        return own()

    def value() -> list[tf.Tensor]:
        if tf.executing_eagerly():
            return [own()]
        here = tf_internals.function_of(tf.compat.v1.get_default_graph())
        return [_number_of_place(here, numbers)]

    with graph.as_default(), tf.device("/cpu:0"):
        return tf_internals.captured_by_call(graph, value, tf.TensorSpec([], tf.int32))


def _once(graph: tf.Graph, name: str, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    # Returns a tensor that is made once in a graph, which has those of the graph around it, too.
    tensors = graph.get_collection_ref(f"collectives: {name}")
    tensor = next((tensor for tensor in tensors if tensor.graph is graph), None)
    if tensor is None:
        tensors.append(tensor := make())
    return tensor


@functools.cache
def _group_key(devices: tuple[str, ...]) -> int:
    return _FIRST_GROUP_KEY + _group_key.cache_info().currsize


@functools.cache
def _ordering_token(device: str) -> tf.Tensor:
    """Return a resource that orders the collectives of one device.

    Automatic control dependencies would also order those of different devices, which is a deadlock.
    It is only the handle of a variable, because a function that creates a `tf.Variable` is traced
    twice.
    """
    with tf.init_scope(), tf.device(device):
        name = f"ordering token of {device}"
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)
