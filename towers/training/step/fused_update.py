"""Fuses the updates of many variables on a GPU.

Launching a kernel takes some microseconds, and Keras' update is a chain of ops for each variable,
most of which are small. Here variables that are treated alike are concatenated. Their gradients,
values and slots are one vector each, and Keras' own arithmetic runs once on them. Then the parts
are assigned, which launches no kernel. Variables, slots and checkpoints stay as they are. Vectors
are short and exist only while they are updated, so a step takes little memory beside its variables.

    gradients, weights = flatten_updates(gradients, weights, optimizer)
    apply(optimizer, gradients, weights)

TensorFlow's fused kernels (ResourceApplyKerasMomentum, ResourceApplyAdam) exist for some optimizers
only, and need one launch for each variable. On CPUs nothing is concatenated: copies cost more than
starting ops there, and SGD uses the fused kernels.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import is_gpu
from towers.builder.gather import grouped, num_bytes, pack, unpack
from towers.training.step.train_state import build, slot_lists, snapshot


class Segment(NamedTuple):
    """Adjacent weights of a `FlatVariable` with the same regularization."""

    value: tf.Tensor
    regularizer: Callable | None
    shape: tf.TensorShape  # of the first weight


@dataclasses.dataclass(eq=False, repr=False)
class FlatVariable:
    """Several variables of one dtype on one device, as one vector during an update.

    It is read and assigned like a tf.Variable; `write` then assigns the parts to the variables.
    Until `read` each use joins the values, for itself. For weights, `segments` groups the Keras
    variables by their regularization.
    """

    variables: Sequence[tf.Variable]  # of one dtype, on one device
    segments: Sequence[Sequence[keras.Variable]] = ()

    constraint = None

    def __post_init__(self) -> None:
        """Take the attributes of the first variable."""
        first = self.variables[0]
        self.dtype, self.device, self.name = first.dtype, first.device, first.name
        self._unique_id = tf_internals.unique_id(first)  # by which an optimizer knows its slots
        self._now = self._before = None

    @property
    def value(self) -> "FlatVariable":
        """The vector itself: a `FlatVariable` replaces the Keras variable, too."""
        return self

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the current vector."""
        value = self.join(self.variables) if self._now is None else self._now
        return tf.convert_to_tensor(value, dtype, name=name)

    def __mul__(self, factor: Any) -> tf.Tensor:
        """Return the product."""
        return self._now * factor

    def assign(self, value: Any) -> None:
        """Set the vector."""
        self._now = tf.convert_to_tensor(value, self.dtype)

    def assign_add(self, value: Any) -> None:
        """Add to the vector."""
        self._now = self._now + value

    def assign_sub(self, value: Any) -> None:
        """Subtract from the vector."""
        self._now = self._now - value

    def join(self, values: Sequence[Any]) -> tf.Tensor:
        """Concatenate values of the variables' shapes."""
        with tf.device(self.device):
            return pack(values)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Split a vector into values of the variables' shapes."""
        with tf.device(self.device):
            return unpack(vector, self.variables)

    def map_segments(self, fn: Callable, gradient: Any) -> Any:
        """Return the results of `fn` on each segment, concatenated.

        Args:
            fn: called as `fn(part of the gradient, Segment)`; returns a vector of the part's size.
            gradient: vector of the variables' total size.
        """
        sizes = [sum(w.value.shape.num_elements() for w in segment) for segment in self.segments]
        with tf.control_dependencies([gradient]):  # not long before, which would cost memory
            value = tf.convert_to_tensor(self)
        parts, values = tf.split(gradient, sizes), tf.split(value, sizes)
        results = [
            fn(part, Segment(value, _regularizer(segment[0]), segment[0].shape))
            for part, value, segment in zip(parts, values, self.segments, strict=True)
        ]
        return tf.concat(results, axis=0)

    def read(self) -> None:
        """Join the variables' values, once for all reads that follow."""
        self._now = self._before = self.join(self.variables)

    def write(self, wanted: tf.Tensor | None = None) -> list[tf.Operation]:
        """Assign the parts to the variables, or their former values if `wanted` is False."""
        if wanted is not None:
            with tf.device(self.device):
                self._now = tf.where(wanted, self._now, self._before)
        pairs = zip(self.variables, self.split(self._now), strict=True)
        return [variable.assign(part, read_value=False) for variable, part in pairs]


def flatten_updates(
    gradients: Sequence[Any],
    weights: Sequence[keras.Variable],
    optimizer: keras.optimizers.Optimizer,
    is_tested: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Return gradients and weights, concatenated where possible into a `FlatVariable`.

    These weights are not concatenated: those on CPUs, large ones, and those with a constraint or a
    regularizer that is not elementwise. None are if the optimizer is not elementwise (LAMB).

    Args:
        gradients: one for each weight: dense, sparse or None.
        weights: Keras variables.
        optimizer: of the weights.
        is_tested: whether updates wait for the test of all gradients; then large weights are each a
            `FlatVariable`, too. Else Keras updates these, in place.
    """

    def kind(pair: tuple[Any, keras.Variable]) -> tuple | None:
        gradient, weight = pair
        if not isinstance(gradient, tf.Tensor) or not can_join(weight):
            return None
        return *kind_of(weight.value), tf_internals.decays(optimizer, weight), gradient.dtype

    def can_join(weight: keras.Variable) -> bool:
        alone = weight.constraint is not None or weight.overwrite_with_gradient
        known = slots is not None and factors(weight.regularizer) is not None
        return kind_of(weight.value) is not None and known and not alone

    def known(gradient: Any, weight: keras.Variable) -> Any:
        if gradient is None and can_join(weight) and any(factors(weight.regularizer)):
            return tf.zeros(weight.shape, weight.dtype)
        return gradient

    if not all(map(can_follow, weights)):  # the scope of a joined update drops what they assign
        return list(gradients), list(weights)
    slots = _elementwise_slots(optimizer)
    pairs = [(known(g, w), w) for g, w in zip(gradients, weights, strict=True)]
    new_gradients, new_weights = [], []
    for group in grouped(pairs, kind, lambda pair: num_bytes(pair[1])):
        gradient, weight = group[0]
        if len(group) > 1 or (is_tested and kind(group[0])):
            segments = grouped(group, lambda pair: factors(pair[1].regularizer))
            group = [pair for segment in segments for pair in segment]
            weight_segments = [[weight for _, weight in segment] for segment in segments]
            weight = FlatVariable([weight.value for _, weight in group], weight_segments)
            gradient = weight.join([g for g, _ in group])
        new_gradients.append(gradient)
        new_weights.append(weight)
    return new_gradients, new_weights


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    weights: Sequence[Any] | None,
    finite: tf.Tensor | None = None,
) -> None:
    """Call a Keras optimizer's `apply`, also on `FlatVariable`s.

    Args:
        optimizer: with slots for each Keras variable.
        gradients: one for each weight.
        weights: Keras variables or `FlatVariable`s; None: those that the optimizer was built for.
        finite: a bool scalar; if it is False, no variable changes. None: it is not tested.
    """
    flats = [weight for weight in weights or () if isinstance(weight, FlatVariable)]
    slots: dict[FlatVariable, list[FlatVariable]] = {flat: [] for flat in flats}
    scope = keras.StatelessScope() if flats else contextlib.nullcontext()
    for flat in flats:
        for of_weight in _elementwise_slots(optimizer):
            parts = [of_weight[tf_internals.unique_id(v)] for v in flat.variables]
            slots[flat].append(FlatVariable([slot.value for slot in parts]))
            scope.add_update((parts[0], slots[flat][-1]))
    vectors = [*flats, *itertools.chain(*slots.values())]
    joined = {id(variable) for vector in vectors for variable in vector.variables}
    alone = [v.value for v in (*optimizer.variables, *filter(_is_variable, weights or ()))]
    if _is_variable(optimizer.learning_rate):  # which no update changes
        joined.add(id(optimizer.learning_rate.value))
    alone = [] if finite is None else [variable for variable in alone if id(variable) not in joined]
    before = [(variable, snapshot(variable)) for variable in alone]
    fused = _fused_sgd(optimizer, lambda variable: not is_gpu(variable.device))
    scalars = [v for v in (optimizer.iterations, optimizer.learning_rate) if _is_variable(v)]
    read_once = _read_once([scalar.value for scalar in scalars])
    decays: dict[FlatVariable, Callable] = {}
    last: dict[str, list[tf.Operation]] = {}  # of each device, the last assignments

    def update(flat: FlatVariable, fn: Callable, *args: Any) -> None:
        """Read a vector and its slots, call Keras' function on it and assign the parts.

        The vectors exist once the gradient does. If that waits for the test of all gradients, one
        vector waits for another.
        """
        if not args:  # Keras decays all weights before it updates the first
            decays[flat] = fn
            return
        gradient, rate = args
        with tf.control_dependencies([gradient, *last.get(flat.device, [])]):
            gradient = tf.identity(gradient)
            for vector in (flat, *slots[flat]):
                vector.read()
        if flat in decays:
            decays[flat](flat)
        fn(flat, gradient, rate)
        written = [op for vector in (flat, *slots[flat]) for op in vector.write(finite)]
        if finite is not None:
            last[flat.device] = written

    with scope, _each_update_apart(optimizer, update), fused, read_once:
        optimizer.apply(gradients, weights)
    for variable in (optimizer.iterations, *filter(_is_variable, weights)) if flats else ():
        value = scope.get_current_value(variable)
        if value is not None:  # assigned within the scope
            variable.assign(value)
    restore_unless(finite, before)


# Keras' optimizers that update each element by itself.
_ELEMENTWISE = (
    keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adamax,
    keras.optimizers.Nadam, keras.optimizers.Lion, keras.optimizers.RMSprop,
    keras.optimizers.Adagrad, keras.optimizers.Adadelta, keras.optimizers.Ftrl,
)  # fmt: skip
_OF_ITS_OWN = "clipnorm", "use_ema", "loss_scale_factor", "gradient_accumulation_steps"


def _elementwise_slots(
    optimizer: keras.optimizers.Optimizer,
) -> list[dict[str, keras.Variable]] | None:
    """Return {`unique_id` of a weight: slot} for each kind of slot of an elementwise optimizer.

    None if it is of another class, or also clips each weight, averages or scales.
    """
    if type(optimizer) not in _ELEMENTWISE or any(getattr(optimizer, n) for n in _OF_ITS_OWN):
        return None
    keys = [tf_internals.unique_id(w.value) for w in tf_internals.weights_of(optimizer)]
    return [dict(zip(keys, slots, strict=True)) for slots in slot_lists(optimizer)]


@contextlib.contextmanager
def _each_update_apart(
    optimizer: keras.optimizers.Optimizer, update_flat: Callable
) -> Iterator[None]:
    """Compute each update of a Keras optimizer on its variable's device, as soon as possible.

    Keras sends all gradients through one op on one device.

    Args:
        optimizer: of Keras.
        update_flat: updates a stand-in for variables: (stand-in, Keras' function, *arguments).
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)

    def make(update: Callable) -> Callable:  # which Keras hands each variable
        def update_there(variable: Any, fn: Callable, *args: Any, **kwargs: Any) -> Any:
            with tf.device(variable.device):
                if isinstance(variable, tf.Variable):
                    return update(variable, fn, *args, **kwargs)
                return update_flat(variable, fn, *kwargs.get("args", ()))

        return update_there

    extended = tf.distribute.get_strategy().extended
    with tf_internals.replaced((extended, "update", make)), tf_internals.gradients_kept(optimizer):
        yield


def _fused_sgd(
    optimizer: keras.optimizers.Optimizer, suits: Callable[[tf.Variable], bool]
) -> tf_internals.Block:
    """Update variables by TensorFlow's fused kernels in Keras' SGD.

    These compute the same as Keras' chain of ops in one pass over memory. Those of Adam and RMSprop
    do not, because they compute 1 - beta in the weights' dtype. In float32 1 - 0.999 is off by
    5e-5. Adagrad's adds epsilon after the root. Keras still does clipping, decay, averages,
    constraints, and sparse gradients.

    Args:
        optimizer: SGD itself, also in a LossScaleOptimizer; others stay as they are.
        suits: returns whether a variable, of float32 or float64, is updated so.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if type(optimizer) is not keras.optimizers.SGD:
        return contextlib.nullcontext()

    def make(update_step: Callable) -> Callable:
        def update(gradient: Any, variable: Any, learning_rate: Any) -> None:
            fits = isinstance(variable, tf.Variable) and isinstance(gradient, tf.Tensor)
            if not (fits and variable.dtype in (tf.float32, tf.float64) and suits(variable)):
                update_step(gradient, variable, learning_rate)
                return
            rate, delta = (keras.ops.cast(v, variable.dtype) for v in (learning_rate, gradient))
            if optimizer.momentum == 0:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=rate, delta=delta
                )
                return
            slot = optimizer.momentums[tf_internals.index_of(optimizer, variable)]
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle, accum=slot.value.handle, lr=rate, grad=delta,
                momentum=keras.ops.cast(optimizer.momentum, variable.dtype),
                use_nesterov=optimizer.nesterov,
            )  # fmt: skip

        return update

    return tf_internals.replaced((optimizer, "update_step", make))


@contextlib.contextmanager
def _read_once(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Read variables once in the block, unless they are assigned there.

    TensorFlow then merges what an optimizer computes of them for each weight.
    """
    values = {id(variable): tf.convert_to_tensor(variable) for variable in variables}

    def read(variable: tf.Variable, original: Callable) -> tf.Tensor:
        value = values.get(id(variable))
        return original(variable) if value is None else value

    def forgetting(name: str) -> Callable:
        def make(original: Callable) -> Callable:
            def assign(variable: tf.Variable, *args: Any, **options: Any) -> Any:
                values.pop(id(variable), None)
                return original(variable, *args, **options)

            return assign

        return make

    with tf_internals.patch_reads(read), tf_internals.patch_assignments(forgetting):
        yield


@contextlib.contextmanager
def updates_joined(
    optimizers: Iterable[keras.optimizers.Optimizer], guarded: Callable
) -> Iterator[None]:
    """Fuse the updates of Keras optimizers in the block, as in a `train_step`.

    Optimizers that are not built yet create their slots beside the weights.

    Args:
        optimizers: of a model; those of an enclosing block are skipped.
        guarded: called as `guarded(optimizer, gradients, weights, update)` for each update; calls
            `update(finite)`, see `apply`.
    """
    optimizers = [optimizer for optimizer in optimizers if "apply" not in vars(optimizer)]

    def joining(optimizer: keras.optimizers.Optimizer) -> Callable:
        def apply_joined(grads: Any, trainable_variables: Any = None) -> None:
            grads, weights = list(grads), list(trainable_variables or ())
            if weights:
                build(optimizer, weights)

            def update(finite: tf.Tensor | None = None) -> None:
                if not weights or any(gradient is None for gradient in grads):
                    apply(optimizer, grads, weights or None, finite)
                else:
                    parts = flatten_updates(grads, weights, optimizer, finite is not None)
                    apply(optimizer, *parts, finite)

            vars(optimizer).pop("apply")  # Keras' own, from here on
            try:
                guarded(optimizer, grads, weights, update)
            finally:
                vars(optimizer)["apply"] = apply_joined

        return apply_joined

    try:
        for optimizer in optimizers:
            vars(optimizer)["apply"] = joining(optimizer)
        yield
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("apply", None)


def kind_of(variable: tf.Variable) -> tuple | None:
    """Return the key by which variables are concatenated, or None if this one cannot be."""
    if not is_gpu(variable.device) or not variable.dtype.is_floating:
        return None
    return variable.device, variable.dtype


def as_flat(variables: Sequence[tf.Variable]) -> Any:
    """Return variables of one kind as a `FlatVariable`, a single one as it is."""
    if len(variables) == 1:
        return variables[0]
    flat = FlatVariable(variables)
    flat.read()
    return flat


def set_value(variable: Any, value: tf.Tensor) -> list[tf.Operation]:
    """Assign a variable; return the assignments.

    Args:
        variable: a `tf.Variable`, or a `FlatVariable`, whose parts are assigned.
        value: of its shape.
    """
    if not isinstance(variable, FlatVariable):
        return [variable.assign(value, read_value=False)]
    variable.assign(value)
    return variable.write()


def restore_unless(wanted: tf.Tensor, pairs: Sequence[tuple[tf.Variable, tf.Tensor]]) -> None:
    """Restore variables unless their new values are wanted, without synchronization.

    Args:
        wanted: a bool scalar.
        pairs: each variable with its value before.
    """
    last: list[tf.Operation] = []
    for group in grouped(pairs, lambda p: kind_of(p[0]), lambda p: num_bytes(p[0])):
        with tf.control_dependencies(last):  # one group after the other, see `apply`
            now, old = as_flat([variable for variable, _ in group]), [value for _, value in group]
            with tf.device(now.device):
                was = now.join(old) if len(old) > 1 else old[0]
                last = set_value(now, tf.where(wanted, now, was))


def _is_variable(value: Any) -> bool:
    return isinstance(value, keras.Variable)


def _regularizer(weight: keras.Variable) -> Callable | None:
    """Return an L1L2 with Python numbers; Keras' L1 has a tensor on the host."""
    l1_l2 = factors(weight.regularizer)
    return keras.regularizers.L1L2(*l1_l2) if any(l1_l2) else None


def can_follow(weight: keras.Variable) -> bool:
    """Return whether the regularizer and constraint of a weight do the same with a copy of it.

    They do not if they are random, or read or assign other variables.
    """
    with contextlib.suppress(Exception), tf.init_scope():  # one that does not take a tensor
        spec, ops = tf.TensorSpec(weight.shape, weight.dtype), []
        for function in filter(None, (weight.regularizer, weight.constraint)):
            traced = tf.function(function, autograph=False).get_concrete_function(spec)
            ops += traced.graph.get_operations()
        return not any(op.op_def.is_stateful for op in ops)
    return False


def factors(regularizer: Any) -> tuple[float, float] | None:
    """Return the factors of L1 and L2, rounded as in Keras; None for other classes."""
    regularizers = keras.regularizers
    if regularizer is None:
        return 0.0, 0.0
    if type(regularizer) not in (regularizers.L1, regularizers.L2, regularizers.L1L2):
        return None
    config = regularizer.get_config()
    rounded = np.float32 if _rounds_factors() else np.float64
    return float(rounded(config.get("l1", 0.0))), float(rounded(config.get("l2", 0.0)))


@functools.cache
def _rounds_factors() -> bool:
    """Return whether Keras rounds the factors of regularizers to float32, as newer ones do."""
    with tf.init_scope(), tf.device("/cpu:0"):
        return float(keras.regularizers.L2(0.1)(tf.ones([1], tf.float64))) != 0.1
