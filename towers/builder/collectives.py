"""Sums and stacks of all towers' values by TensorFlow's collective ops.

A collective (NCCL on GPUs, a ring elsewhere) waits for every device of its group, so it needs
towers that run in parallel: in a traced step, each tower on a device of its own.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import are_gpus, are_remote, devices_here
from towers.builder.flatten import grouped, num_bytes, pack, unpack

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
    """Return for each device the values of the first one; the first of them are sent first.

    The others add zeros. TensorFlow's op for a broadcast is dropped on a device that does not use
    what it receives, and the others then wait for it forever.

    Args:
        values: floats on the first device.
        devices: of the towers, each another.
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
    turn = _once(function, "turn", lambda: tf_internals.number_of_place(function, turns))

    def in_loop() -> tf.Tensor:
        # An op that TensorFlow keeps, outside of the towers: it is sent to each of them once.
        with tf.device("/cpu:0"), tf.name_scope(""):
            return tf.raw_ops.PlaceholderWithDefault(input=turn, shape=[])

    return _once(here, "turn in a loop", in_loop)


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

    Automatic control dependencies would order those of different devices, too: a deadlock. It is
    the handle of a variable alone: a function that creates a `tf.Variable` is traced twice.
    """
    with tf.init_scope(), tf.device(device):
        name = f"ordering token of {device}"
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)
