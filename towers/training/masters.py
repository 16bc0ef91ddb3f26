"""The master variables: the one true copy of weights, slots and averages.

They lie on the host ("cpu"); or each weight with its slots and its average on one of the towers
("sharded"); or on the first tower, with a copy of weights and slots on each other ("replicated").
What is of no weight in particular lies on the host, but on the first GPU where weights are on GPUs:
nothing then goes from there to the host in a step.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_private
from towers.builder.kinds import HOST, are_gpus
from towers.builder.splitting import is_device

VARIABLES = ("cpu", "sharded", "replicated")
INITIAL_LOSS_SCALE = 2.0**15


@dataclasses.dataclass(frozen=True)
class Replica:
    """Weights and the optimizer that updates them; the first of a run's are the masters.

    `weights` are the model's trainable variables, or copies in that order; the optimizer has its
    slots beside them, and what is of no weight in particular lies on `device`: as `examples`, the
    number of those seen, int64, which the learning rate follows.
    """

    weights: Sequence[keras.Variable]
    optimizer: keras.optimizers.Optimizer
    device: str
    examples: tf.Variable

    def variables(self) -> list[tf.Variable]:
        """Return all that an update changes."""
        return [*(v.value for v in (*self.weights, *self.optimizer.variables)), self.examples]


class Masters:
    """All that a step changes and a checkpoint holds; it knows nothing of towers.

    Attributes:
        replicas: what each step updates: the masters, then the copies on other towers.
        optimizers: the model's, one as a rule.
        averages: list of (variable, its moving average); empty without EMA.
        step: int64, updates so far.
        examples: int64, examples seen so far: the clock of every schedule.
        loss_scale: float32, or None where the precision needs none.
        good_steps: int64, steps since the loss scale last changed.
        in_a_row: int64, one where each replica is: steps in a row whose loss or gradient was not
            finite, a loss scale that can still be lowered apart. At `limit` of them no further step
            changes anything. It is of this process, and not saved.
    """

    def __init__(
        self,
        model: keras.Model,
        *optimizers: keras.optimizers.Optimizer,
        ema: bool = False,
        loss_scaling: bool = False,
        device: str = HOST,
        copies: Sequence[Replica] = (),
        limit: int = 1,
    ):
        """Build the optimizer's slots, the averages (equal to the weights) and the counters."""
        self.model, self.optimizers, self.limit = model, optimizers, limit
        self.examples = counter("examples", device)
        first = next(iter(optimizers), None)
        self.replicas = [Replica(model.trainable_variables, first, device, self.examples), *copies]
        for replica in self.replicas if optimizers else ():
            beside = tf_private.slots_beside_weights(replica.optimizer)
            with tf.device(replica.device), beside:
                if not replica.optimizer.built:
                    replica.optimizer.build(list(replica.weights))
        with tf.device(device):
            # BatchNorm statistics are averaged, too: they belong to the weights of their time.
            averaged = [v for v in variables_of(model) if ema and v.value.dtype.is_floating]
            self.averages = [(v, copy_beside(v.value)) for v in averaged]
            self.step = counter("step", device)
            self.loss_scale = self.good_steps = None
            if loss_scaling:
                self.loss_scale = tf.Variable(INITIAL_LOSS_SCALE, trainable=False)
                self.good_steps = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.in_a_row = [counter("in_a_row", replica.device) for replica in self.replicas]
        self._sums: list[Callable[[], tf.Tensor]] | None = None

    def statistics(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Return (variable, its value now) of all that an optimizer leaves alone."""
        values = [v.value for v in variables_of(self.model) if not v.trainable]
        return [(v, now(v)) for v in values if v.dtype != tf.string]

    def stuck(self) -> tf.Tensor:
        """Tell whether so many steps in a row were not finite that no more are made, a scalar."""
        return self.in_a_row[0] >= self.limit

    def set_copies(self) -> None:
        """Give the copies the values of the masters, after these were set."""
        values = self.replicas[0].variables()
        for replica in self.replicas[1:]:
            for variable, value in zip(replica.variables(), values, strict=True):
                variable.assign(value)

    def make_copies_equal(self) -> tuple[str, str, str] | None:
        """Give the copies the values of the masters if they have others.

        Each device adds up the bits of its own, and sends one number for each variable.

        Returns:
            (name, device of the masters, device of the copy) of the first that differed, or None.
        """
        if len(self.replicas) == 1:
            return None
        if self._sums is None:  # traced once
            self._sums = [_sums_of_bits(replica) for replica in self.replicas]
        first, *others = [sums().numpy() for sums in self._sums]
        for replica, sums in zip(self.replicas[1:], others, strict=True):
            differ = (sums != first).nonzero()[0]
            if len(differ):
                self.set_copies()
                name = self.replicas[0].variables()[differ[0]].name.partition(":")[0]
                return name, self.replicas[0].device, replica.device
        return None

    def variables(self) -> dict[str, tf.Variable]:
        """Return every master variable by a name that does not depend on towers or devices."""
        named = [(f"model/{v.path}", v.value) for v in variables_of(self.model)]
        slots = [v for optimizer in self.optimizers for v in optimizer.variables]
        named += [(f"optimizer/{v.path}", v.value) for v in slots]
        named += [(f"average/{v.path}", average) for v, average in self.averages]
        named += [("step", self.step), ("examples", self.examples)]
        if self.loss_scale is not None:
            named += [("loss_scale", self.loss_scale), ("good_steps", self.good_steps)]
        return by_unique_name(named)


def not_finite(named: Mapping[str, Any]) -> list[str]:
    """Return the names of variables, or of their values, that hold an infinity or NaN."""
    found = []
    for name, value in named.items():
        with tf.device(value.device):
            if value.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(value))):
                found.append(name)
    return found


def by_unique_name(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return {name: value}; two layers may bear one name: the second is "name~2"."""
    result: dict[str, Any] = {}
    for name, value in named:
        unique, count = name, 1
        while unique in result:
            count += 1
            unique = f"{name}~{count}"
        result[unique] = value
    return result


@contextlib.contextmanager
def kept(variables: Iterable[Any]) -> Iterator[None]:
    """Let variables have after the block the values that they had before."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of a model; what the metrics of a compiled one count is not of it."""
    metrics = {id(v) for v in model.metrics_variables} if model.compiled else ()
    return [v for v in model.variables if id(v) not in metrics]


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizer of a model, and others that it keeps as attributes, or in such.

    Those of models inside of it are among them if they have been used.
    """
    found = list(_optimizers_in(vars(model)))
    for layer in tf_private.layers_of(model):
        if isinstance(layer, keras.Model) and layer is not model:
            found += [own for own in _optimizers_in(vars(layer)) if own.built]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _optimizers_in(value: Any) -> Iterator[keras.optimizers.Optimizer]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _optimizers_in(part)


# Placing.


def home_of(variables: str, devices: Sequence[str]) -> str:
    """Return the device of what is of no weight in particular, and of what towers gather.

    Args:
        variables: one of VARIABLES.
        devices: of the towers.
    """
    return devices[0] if variables != "cpu" and are_gpus(devices) else HOST


def settle(variables: Iterable[keras.Variable], home: str) -> None:
    """Move Keras variables to the home of a run; nothing may have read them before.

    int32 stays where it is: TensorFlow keeps it in the host's memory, on GPUs too.
    """
    for variable in variables:
        if tf_private.value_of(variable).dtype not in (tf.int32, tf.string):
            move(variable, home)


def place(weights: Sequence[keras.Variable], variables: str, devices: Sequence[str]) -> None:
    """Move weights to where they are to lie; nothing may have read them before.

    Args:
        weights: of a model, on the host.
        variables: one of VARIABLES.
        devices: of the towers.
    """
    if variables == "sharded":
        shard(weights, devices)
    if variables == "replicated":
        for weight in weights:
            move(weight, devices[0])


def copies_on(
    devices: Sequence[str], weights: Sequence[keras.Variable], make_optimizer: Callable
) -> list[Replica]:
    """Return a copy of the weights on each device, each with `make_optimizer(its weights)`."""
    copies = []
    for name in devices:
        own = copy(weights, name)
        with tf.device(name):
            copies.append(Replica(own, make_optimizer(own), name, counter("examples", name)))
    return copies


def counter(name: str, device: str) -> tf.Variable:
    """Return a new counter, int64, which is 0."""
    with tf.device(device):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name=name)


def shard(weights: Sequence[keras.Variable], devices: Sequence[str]) -> None:
    """Move each weight to one of the devices, the largest first, each to where the least lies."""
    held = dict.fromkeys(devices, 0)
    for weight in sorted(weights, key=lambda v: -_num_bytes(v)):
        device = min(held, key=lambda name: held[name])
        held[device] += _num_bytes(weight)
        move(weight, device)


def move(variable: keras.Variable, device: str) -> None:
    """Move a Keras variable's value to a device, if it is elsewhere; nothing may have read it."""
    before = tf_private.value_of(variable)  # its own, whatever a scope reads in its place
    if is_device(before.device, device):
        return
    with tf.device(device):
        value = tf.Variable(before, trainable=variable.trainable, name=variable.name)
    tf_private.set_value_of(variable, value)


def copy(weights: Sequence[keras.Variable], device: str) -> list[keras.Variable]:
    """Return copies of the weights on a device, of the same paths: optimizers may go by them."""
    copies = []
    for weight in weights:
        with tf.device(device), contextlib.ExitStack() as scopes:
            for part in weight.path.split("/")[:-1]:
                scopes.enter_context(keras.name_scope(part))
            value = tf.identity(weight.value)  # of a tf.Variable itself Keras makes no copy
            twin = keras.Variable(value, dtype=weight.dtype, name=weight.name)
        twin.regularizer, twin.constraint = weight.regularizer, weight.constraint
        twin.overwrite_with_gradient = weight.overwrite_with_gradient
        copies.append(twin)
    return copies


def _sums_of_bits(replica: Replica) -> Callable[[], tf.Tensor]:
    """Return a function that gives the sum of the bits of each variable as integers, int64."""
    variables = replica.variables()
    of_size = {2: tf.int16, 4: tf.int32, 8: tf.int64}

    @tf.function(autograph=False)
    def sums() -> tf.Tensor:
        with tf.device(replica.device):  # int32 would be added up on the host
            bits = [
                tf.bitcast(v, of_size[v.dtype.size]) if v.dtype.is_floating else v
                for v in variables
            ]
            return tf.stack([tf.reduce_sum(tf.cast(each, tf.int64)) for each in bits])

    return sums


def copy_beside(variable: tf.Variable) -> tf.Variable:
    """Return a new variable of the same value on the same device."""
    with tf.device(variable.device):
        return tf.Variable(variable, trainable=False, name="average")


def now(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a variable where it is; later assignments change nothing of it."""
    with tf.device(variable.device):
        return tf.identity(variable)


def _num_bytes(variable: keras.Variable) -> int:
    value = tf_private.value_of(variable)
    return value.shape.num_elements() * value.dtype.size
