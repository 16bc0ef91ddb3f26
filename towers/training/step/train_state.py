"""The state of training: weights, optimizer slots, averages and counters.

Weights are on the host ("cpu"), or on the first tower, with a copy of weights and slots on each
other tower ("replicated"). With workers each is on one of the towers ("spread"), with its slots and
its average, so that a step sends the fewest bytes. The rest is on the host, or on the first GPU if
weights are on GPUs, so that a step copies none of it to the host.
"""

import contextlib
import dataclasses
import functools
import gc
import operator
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import HOST, are_gpus, are_remote, is_device
from towers.builder.gather import num_bytes
from towers.builder.tower import TowerBuilder
from towers.errors import InputError

_OF_A_STEP = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics",
              "make_train_function", "make_test_function", "make_predict_function")  # fmt: skip
VARIABLES = ("cpu", "replicated")


@dataclasses.dataclass(frozen=True)
class WeightCopy:
    """Weights and the optimizer that updates them. A run's first are the master weights."""

    weights: Sequence[keras.Variable]  # the model's trainable variables, or copies in that order
    optimizer: keras.optimizers.Optimizer  # its slots are beside the weights
    device: str  # of everything else
    examples: tf.Variable  # int64, number of examples seen: the clock of the learning rate

    def variables(self) -> list[tf.Variable]:
        """Return all variables that an update changes."""
        return [*(v.value for v in (*self.weights, *self.optimizer.variables)), self.examples]


class TrainState:
    """All variables that a step changes and a checkpoint holds, independent of towers.

    Attributes:
        replicas: the master weights, then the copies on other towers; each step updates all.
        optimizers: the model's, one as a rule.
        averages: list of (variable, its moving average); empty without EMA.
        step: int64, updates so far.
        examples: int64, examples seen so far: the clock of every schedule.
        in_a_row: int64, one on the device of each replica: non-finite steps in a row, without those
            of a loss scale that can still be lowered. At `limit` of them no further step changes
            anything. It is not saved.
    """

    def __init__(
        self,
        model: keras.Model,
        *optimizers: keras.optimizers.Optimizer,
        ema: bool = False,
        device: str = HOST,
        copies: Sequence[WeightCopy] = (),
        limit: int = 1,
    ):
        """Build the optimizer's slots, the averages (equal to the weights) and the counters.

        Args:
            model: whose weights these are.
            *optimizers: that update them.
            ema: whether to keep moving averages of the weights.
            device: of counters and of the averages.
            copies: of the weights on other towers.
            limit: number of non-finite steps in a row after which a step changes nothing.
        """
        self.model, self.optimizers, self.limit = model, optimizers, limit
        self.examples = counter("examples", device)
        first = next(iter(optimizers), None)
        self.replicas = [
            WeightCopy(model.trainable_variables, first, device, self.examples),
            *copies,
        ]
        for replica in self.replicas if optimizers else ():
            with tf.device(replica.device):
                build(replica.optimizer, replica.weights)
        with tf.device(device):
            # BatchNorm statistics are averaged, too: they must match the averaged weights.
            averaged = [v for v in variables_of(model) if ema and v.value.dtype.is_floating]
            self.averages = [(v, copy_beside(v.value)) for v in averaged]
            self.step = counter("step", device)
        self.in_a_row = [counter("in_a_row", replica.device) for replica in self.replicas]
        self._sums: list[Callable[[], tf.Tensor]] | None = None
        self.set_copies()  # of an optimizer that is built already: its slots are not 0

    def statistics(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Return (variable, current value) of all model variables that no optimizer updates."""
        values = [v.value for v in variables_of(self.model) if not v.trainable]
        return [(v, snapshot(v)) for v in values if v.dtype != tf.string]

    def stuck(self) -> tf.Tensor:
        """Return whether the limit of non-finite steps in a row is reached, a bool scalar."""
        return self.in_a_row[0] >= self.limit

    def set_copies(self) -> None:
        """Assign the values of the master weights to the copies."""
        values = self.replicas[0].variables()
        for replica in self.replicas[1:]:
            for variable, value in zip(replica.variables(), values, strict=True):
                variable.assign(value)

    def drop_copies(self) -> None:
        """Forget the copies: a step updates the master weights alone."""
        del self.replicas[1:], self.in_a_row[1:]

    def make_copies_equal(self) -> tuple[str, str, str] | None:
        """Assign the values of the master weights to the copies if their checksums differ.

        Returns:
            (name, device of the master, device of the copy) of the first difference, or None.
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
        """Return {name: master variable}; names depend neither on towers nor on devices."""
        named = [(f"model/{v.path}", v.value) for v in variables_of(self.model)]
        slots = [v for optimizer in self.optimizers for v in optimizer.variables]
        named += [(f"optimizer/{v.path}", v.value) for v in slots]
        named += [(f"average/{v.path}", average) for v, average in self.averages]
        named += [("step", self.step), ("examples", self.examples)]
        return by_unique_name(named)


def not_finite(named: Mapping[str, Any]) -> list[str]:
    """Return the names of variables or tensors that have an infinity or NaN."""
    names = []
    for name, value in named.items():
        with tf.device(value.device):
            if value.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(value))):
                names.append(name)
    return names


def by_unique_name(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return {name: value}; a second value of the same name is called "name~2"."""
    result: dict[str, Any] = {}
    for name, value in named:
        unique, count = name, 1
        while unique in result:
            count += 1
            unique = f"{name}~{count}"
        result[unique] = value
    return result


@contextlib.contextmanager
def restore_after(variables: Iterable[Any]) -> Iterator[None]:
    """Restore the values of variables when the block ends."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def record_assignments(assigned: list[tf.Variable]) -> tf_internals.Block:
    """Append each `tf.Variable` that is assigned in the block to `assigned`."""

    def assign(before: Callable, variable: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        assigned.append(variable)
        return before(variable, *args, **kwargs)

    make = lambda before: functools.partial(assign, before)  # noqa: E731
    return tf_internals.patch_assignments(lambda _: make)


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of a model without those of its metrics."""
    metrics = {id(v) for v in model.metrics_variables} if model.compiled else ()
    return [v for v in model.variables if id(v) not in metrics]


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers in a model's attributes, and the built ones of its submodels."""
    optimizers = list(_optimizers_in(vars(model)))
    for layer in tf_internals.layers_of(model):
        if isinstance(layer, keras.Model) and layer is not model:
            optimizers += [each for each in _optimizers_in(vars(layer)) if each.built]
    return list({id(optimizer): optimizer for optimizer in optimizers}.values())


def build(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> None:
    """Create an optimizer's variables, named as in Keras' `apply`, each slot beside its weight.

    Args:
        optimizer: nothing is done if it is built.
        weights: that it will update.
    """
    beside = slots_beside_weights(optimizer)
    with keras.name_scope(optimizer.name, caller=optimizer), beside:
        if not optimizer.built:
            optimizer.build(list(weights))


def slots_beside_weights(
    optimizer: keras.optimizers.Optimizer,
) -> tf_internals.Block:
    """Create an optimizer's slots on their weights' devices."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer

    def make(add: Callable) -> Callable:
        def beside(reference_variable: keras.Variable, *args: object, **kwargs: object) -> object:
            with tf.device(reference_variable.value.device):
                return add(reference_variable, *args, **kwargs)

        return beside

    return tf_internals.replaced((optimizer, "add_variable_from_reference", make))


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """Return (slot, its weight) for each slot of an optimizer that is built."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    weights = tf_internals.weights_of(optimizer)
    pairs = [pair for kind in slot_lists(optimizer) for pair in zip(kind, weights, strict=True)]
    return [(slot, w) for slot, w in pairs if isinstance(slot, keras.Variable) and slot is not w]


def slot_lists(optimizer: keras.optimizers.Optimizer) -> list[list[Any]]:
    """Return the lists of a built optimizer that have a slot for each of its weights."""
    weights = tf_internals.weights_of(optimizer)
    lists = [v for k, v in vars(optimizer).items() if isinstance(v, list) and k != "_variables"]
    lists = [v for v in lists if len(v) == len(weights) and v is not weights]
    return [v for v in lists if any(isinstance(slot, keras.Variable) for slot in v)]


def dynamic_scale(model: keras.Model) -> tf.Tensor | float:
    """Return the current scale of a model's `LossScaleOptimizer`, 1.0 without one."""
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return 1.0 if scale is None else tf.convert_to_tensor(scale)


def _optimizers_in(value: Any) -> Iterator[keras.optimizers.Optimizer]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _optimizers_in(part)


# Placing.


def placement(variables: str, devices: Sequence[str]) -> tuple[str, str]:
    """Return where weights are, "spread" or one of VARIABLES, and the device for all the rest.

    Args:
        variables: "default" or one of VARIABLES.
        devices: of the towers.

    Raises:
        InputError: towers on these devices cannot each have a copy of the weights.
    """
    distinct = len(set(devices)) == len(devices)
    if variables == "default":
        variables = "replicated" if are_gpus(devices) and distinct else "cpu"
        variables = "spread" if are_remote(devices) else variables
    if variables == "replicated" and (are_remote(devices) or not distinct):
        raise InputError(
            "--variables=replicated needs a device for each tower, all on this machine; type "
            "--variables=cpu, or call "
            f"towers.devices.tower_devices({len(devices)}) before anything creates a tensor"
        )
    return variables, devices[0] if variables == "replicated" and are_gpus(devices) else HOST


def place(model: keras.Model, builder: TowerBuilder, variables: str) -> None:
    """Move the variables of a compiled model to where a run has them.

    Args:
        model: compiled.
        builder: of the towers.
        variables: "cpu", "replicated" or "spread".
    """
    parts = [*model.metrics, *optimizers_of(model)]
    others = [*model.non_trainable_variables, *(v for part in parts for v in part.variables)]
    move_all(others, builder.gather_device)
    if variables == "replicated":
        move_all(model.trainable_variables, builder.devices[0])
    elif variables == "spread":
        shard(model.trainable_variables, builder.devices)
        builder.gather_at_variables = True
    # Of optimizers that are built already, as those of a model that was loaded.
    slots = [p for optimizer in optimizers_of(model) for p in slots_of(optimizer)]
    move([(slot, tf_internals.value_of(weight).device) for slot, weight in slots])


def move_all(variables: Iterable[keras.Variable], device: str) -> list[keras.Variable]:
    """Move Keras variables to one device; return those that cannot be moved, see `move`.

    Args:
        variables: any; those of int32 and strings are left alone: TensorFlow keeps them in the
            host's memory, on GPUs too.
        device: name of the device.
    """
    on_host = tf.int32, tf.string
    return move([(v, device) for v in variables if tf_internals.value_of(v).dtype not in on_host])


def copy_on(device: str, weights: Sequence[keras.Variable], like: Callable) -> WeightCopy:
    """Return a copy of the weights on a device, with an optimizer of its own.

    Args:
        device: of the copy.
        weights: the master weights.
        like: returns the optimizer for a copy's weights.
    """
    twins = copy(weights, device)
    with tf.device(device):
        return WeightCopy(twins, like(twins), device, counter("examples", device))


def counter(name: str, device: str) -> tf.Variable:
    """Return a new int64 variable, 0 at first.

    Args:
        name: name of the variable.
        device: device of the variable.
    """
    with tf.device(device):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name=name)


def shard(weights: Sequence[keras.Variable], devices: Sequence[str]) -> None:
    """Move weights to devices, balanced by bytes.

    Args:
        weights: each goes to the device with the fewest bytes, the largest first.
        devices: of the towers.
    """
    held, places = dict.fromkeys(devices, 0), []
    for weight in sorted(weights, key=lambda v: -num_bytes(v)):
        device = min(held, key=lambda name: held[name])
        held[device] += num_bytes(weight)
        places.append((weight, device))
    move(places)


def move(places: Sequence[tuple[keras.Variable, str]]) -> list[keras.Variable]:
    """Give Keras variables a new `tf.Variable` on a device; return those that stay.

    A variable stays if something else holds its `tf.Variable`, such as a function that was traced
    before, because that would keep using the old one.
    """
    moves = {id(v): (v, device) for v, device in places}.values()  # a variable may be listed twice
    moves = [(v, to) for v, to in moves if not is_device(tf_internals.value_of(v).device, to)]
    held = held_elsewhere([v for v, _ in moves]) if moves else []
    for variable, device in moves:
        if not any(variable is other for other in held):
            before = tf_internals.value_of(variable)  # also within a stateless scope
            with tf.device(device):
                value = tf.Variable(before, trainable=variable.trainable, name=variable.name)
            tf_internals.set_value_of(variable, value)
    return held


def held_elsewhere(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Return the variables whose `tf.Variable` is held by more than the Keras variable.

    A function that was traced holds the handles that it reads.
    """

    def references(variable: Any) -> tuple[int, int]:
        value = tf_internals.value_of(variable)
        return sys.getrefcount(value), sys.getrefcount(value.handle)

    with tf.init_scope():
        alone = references(types.SimpleNamespace(_value=tf_internals.make_variable(tf.zeros([]))))

    def held() -> list[keras.Variable]:
        return [v for v in variables if any(map(operator.gt, references(v), alone))]

    for pause in (0.0, 0.01, 0.1):  # gc.collect returns at once while another thread collects
        if not held():
            break
        time.sleep(pause)
        gc.collect()  # functions that are gone are in cycles
    return held()


def copy(weights: Sequence[keras.Variable], device: str) -> list[keras.Variable]:
    """Return copies of the weights, with the same paths, which optimizers may use.

    Args:
        weights: Keras variables.
        device: of the copies.
    """
    copies = []
    for weight in weights:
        with tf.device(device), contextlib.ExitStack() as scopes:
            for part in weight.path.split("/")[:-1]:
                scopes.enter_context(keras.name_scope(part))
            value = tf.identity(weight.value)  # of a tf.Variable itself Keras makes no copy
            kind = dict(trainable=weight.trainable, dtype=weight.dtype, name=weight.name)
            twin = keras.Variable(value, **kind)
        twin.regularizer, twin.constraint = weight.regularizer, weight.constraint
        copies.append(twin)
    return copies


def _sums_of_bits(replica: WeightCopy) -> Callable[[], tf.Tensor]:
    """Return a function that returns a checksum of each variable: its bits, added as integers."""
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

    return sums.get_concrete_function()


def copy_beside(variable: tf.Variable) -> tf.Variable:
    """Return a new variable with the same value on the same device."""
    with tf.device(variable.device):
        return tf.Variable(variable, trainable=False, name="average")


def snapshot(variable: tf.Variable) -> tf.Tensor:
    """Return a variable's value on its device, which later assignments do not change."""
    with tf.device(variable.device):
        return tf.identity(variable)


def overrides(model: keras.Model, *names: str) -> bool:
    """Return whether a model or its class overrides a method of `keras.Model`.

    Args:
        model: any Keras model; methods that towers replace do not count.
        *names: names of methods; one that is overridden is enough.
    """
    of_class = (getattr(type(model), name) is not getattr(keras.Model, name) for name in names)
    return any(of_class) or not methods_set_on(model).keys().isdisjoint(names)


def methods_set_on(model: keras.Model) -> dict[str, Callable]:
    """Return {name: method} of a step that were set on the model itself, not by towers."""
    methods, steps = vars(model), vars(model).get("_tower_steps")
    if steps:
        methods = {n: x for n, x in methods.items() if n not in steps.REPLACED} | steps.of_instance
    return {name: methods[name] for name in _OF_A_STEP if name in methods}
