"""Records a tower's assignments to Keras variables; `variable_aggregation` makes them."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.errors import InputError

# A graph holds no variable by itself: stand-ins live as long as the graph that uses them.
_STAND_INS: MutableMapping[tf.Graph, list[tf.Variable]] = weakref.WeakKeyDictionary()
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
        loss_rows: (layer, dtype, by example) of each loss, see `added_losses.as_rows`.
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
            prefetch: see `cross_host.VariablePrefetch`.
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
                f"a backward pass assigns {new[0].path}, and towers make the assignments of their "
                "forward passes alone: assign it in the forward pass"
            )

    def _make_stand_in(self, variable: keras.Variable) -> None:
        # Inner graphs can assign it; its first value is set outside of them.
        with tf.init_scope(), tf.device(self.device):
            stand_in = tf_internals.make_variable(tf.zeros(variable.shape, variable.dtype))
        with contextlib.nullcontext() if self.eager else self.graph.as_default():
            value = super().get_current_value(variable)
            assign_by_op(stand_in, self._source(variable) if value is None else value)
        self.stand_ins[id(variable)] = stand_in
        if not self.eager:
            _STAND_INS.setdefault(self.graph, []).append(stand_in)

    def is_inside(self) -> bool:
        """Return whether the current code is in a loop, a branch or an inner function."""
        return tf.compat.v1.get_default_graph() is not self.graph


def new_value_reason(variable: keras.Variable) -> str:
    """Return why a model with such a variable, as a layer in float8 has, runs on one device."""
    return f"the gradient of {variable.path} is its new value, which towers cannot add"


def assign_by_op(variable: tf.Variable, value: Any) -> None:
    """Assign to a variable by the op itself: `variables_refused` patches the methods.

    Args:
        variable: any.
        value: its new value.
    """
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.cast(value, variable.dtype))


def _creation_error(name: str | None) -> InputError:
    return InputError(
        f"a tower creates {f'the variable {name!r}' if name else 'a variable'}, where each would "
        "have its own: build the model before, by calling it once outside the towers"
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
                f"a tower assigns the tf.Variable {variable.name!r} ({name}), and of several "
                "towers the last would win: make it a keras.Variable, which is assigned once a "
                "step (add_weight(trainable=False) in a layer)"
            )

        return lambda _: refuse

    with tf.variable_creator_scope(create), tf_internals.patch_assignments(make):
        yield
