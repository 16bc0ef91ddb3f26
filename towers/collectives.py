"""All-sums between the towers of one step, on TensorFlow's own collective ops.

A collective waits for every member, so it works only where the towers run side by side: in a
compiled step. Members are told apart by their devices, one tower each.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

TIMEOUT_SECONDS = 300.0  # of a member that does not come, as when its tower has failed

# Keys are of the whole process: far from those of tf.distribute, which begin at 1. A collision
# would end all collectives for good: TensorFlow asks to restart the program.
_instance_keys = itertools.count(1_000_000)
_FIRST_GROUP_KEY = 1_000


class Group:
    """The towers that take part in the collectives of one step.

    Each call of a member's `all_sum` meets the calls in the same place of the other members: all
    must make the same calls in the same order, as copies of one function do.
    """

    def __init__(self, devices: Sequence[str]):
        """Take the devices of the towers, in tower order."""
        self.devices = tuple(devices)
        self._keys: list[int] = []

    def all_sum(self, member: int) -> Callable[[tf.Tensor], tf.Tensor]:
        """Return tower `member`'s function that sums a tensor over all towers.

        It can be differentiated: every tower's sum depends on every tower's value.
        """
        if len(self.devices) == 1:
            return lambda value: value
        places = itertools.count()

        @tf.custom_gradient
        def all_sum(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            forward, backward = self._key(next(places)), self._key(next(places))
            gradient = functools.partial(self._reduce, member, backward)
            return self._reduce(member, forward, value), gradient

        return all_sum

    def all_gather(self, member: int) -> Callable[[tf.Tensor], tf.Tensor]:
        """Return tower `member`'s function that stacks what each tower has, [N, ...].

        It is an all-sum of stacks that are zero but for the member's own place.
        """
        all_sum, others = self.all_sum(member), len(self.devices) - 1 - member

        def all_gather(value: tf.Tensor) -> tf.Tensor:
            paddings = [[member, others], *([[0, 0]] * value.shape.rank)]
            return all_sum(tf.pad(value[tf.newaxis], paddings))

        return all_gather

    def _key(self, place: int) -> int:
        """Return the key of a place in the towers' function: unique in the process."""
        while len(self._keys) <= place:
            self._keys.append(next(_instance_keys))
        return self._keys[place]

    def _reduce(self, member: int, instance_key: int, value: tf.Tensor) -> tf.Tensor:
        """Sum a value over the towers."""
        if tf.executing_eagerly():
            raise ValueError(
                "towers that run one after the other cannot wait for each other: make a "
                "tf.function of the step, or leave BatchNorm local (batch_norm='local')"
            )
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(
                f"towers sum over {self.devices}, but each needs a device of its own: leave "
                "BatchNorm local (batch_norm='local')"
            )
        with tf.device(self.devices[member]):
            return tf.raw_ops.CollectiveReduceV2(
                input=value,
                group_size=len(self.devices),
                group_key=_group_key(self.devices),
                instance_key=instance_key,
                ordering_token=[_ordering_token(self.devices[member]).handle],
                merge_op="Add",
                final_op="Id",
                timeout_seconds=TIMEOUT_SECONDS,
            )


@functools.cache
def _group_key(devices: tuple[str, ...]) -> int:
    """Return the key of a set of devices."""
    return _FIRST_GROUP_KEY + _group_key.cache_info().currsize


@functools.cache
def _ordering_token(device: str) -> tf.Variable:
    """Return a variable by which the collectives of a device, and only those, are ordered.

    Automatic control dependencies would order those of different devices, too: each would then wait
    for one that waits for it.
    """
    with tf.init_scope(), tf.device(device):
        return tf.Variable(0.0, trainable=False, name="ordering_token")
