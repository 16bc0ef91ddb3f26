"""What a tower assigns is kept, and assigned once: the state of Keras variables in a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf


class TowerScope(keras.StatelessScope):
    """Keeps assignments to Keras variables in place of making them.

    Weights are read from their masters. Only the inner graphs of a compiled step (loops, functions)
    get copies, on the tower's device: XLA cannot read a master that lies on another, and a loop
    would fetch it each time round.
    """

    def __init__(self, own: Mapping[int, tf.Variable] | None = None) -> None:
        """Keep assignments from here on.

        Args:
            own: {id of a Keras variable: what the tower reads in its place}.
        """
        super().__init__(collect_losses=True)
        self.own = own or {}
        self.eager = tf.executing_eagerly()
        self.graph = tf.compat.v1.get_default_graph()
        self.updates: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.copies: dict[int, tf.Tensor] = {}

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Keep an assignment; Keras calls this."""
        variable, _ = update
        if self._is_inside():
            raise ValueError(
                f"a tower cannot see the assignment of {variable.path!r} inside a tf.function, "
                "loop or branch of loss_fn: make a tf.function of the whole step instead"
            )
        super().add_update(update)
        self.updates[id(variable)] = update

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Return what a variable is in this tower, None for the master; Keras calls this."""
        if variable.trainable and variable._value is None:  # not initialized
            raise _creation_error(variable.path)
        value = super().get_current_value(variable)
        if value is not None:
            return value
        source = self.own.get(id(variable))
        if self._is_inside() and not self.eager:
            if id(variable) not in self.copies:
                with self.graph.as_default():
                    self.copies[id(variable)] = tf.identity(
                        variable._value if source is None else source
                    )
            return self.copies[id(variable)]
        return source

    def close(self, count: tf.Tensor) -> None:
        """Note the tower's number of examples, and that it makes no more use of its copies."""
        self.count = count
        self.num_uses = self._count_uses()

    def check_copies(self) -> None:
        """Raise an error if another tower has used this one's copies since it was closed."""
        if self._count_uses() != self.num_uses:
            raise ValueError(
                "a tf.function that loss_fn calls was traced for one tower, and would use its "
                "weights in the others: make a tf.function of the whole step instead"
            )

    def _count_uses(self) -> int:
        return sum(len(copy.consumers()) for copy in self.copies.values())

    def _is_inside(self) -> bool:
        return tf.compat.v1.get_default_graph() is not self.graph


def refuse_variable(next_creator: Callable, **kwargs: Any) -> tf.Variable:
    """Let no trainable `tf.Variable` be created, by a `tf.variable_creator_scope`."""
    if kwargs.get("trainable") is False:
        return next_creator(**kwargs)
    raise _creation_error(kwargs.get("name"))


def _creation_error(name: str | None) -> ValueError:
    return ValueError(
        f"loss_fn creates the variable {name!r}, which `variables` cannot hold: "
        "build the model before, by calling it once outside the towers"
    )


def assign_once(scopes: Sequence[TowerScope]) -> None:
    """Make the assignments that the towers' scopes keep, one for each variable."""
    found = {}
    for scope in scopes:
        scope.check_copies()
        for key, (variable, value) in scope.updates.items():
            _, values, counts = found.setdefault(key, (variable, [], []))
            values.append(value)
            counts.append(scope.count)
    for variable, values, counts in found.values():
        variable.assign(_merge(variable, values, counts))


def _merge(variable: keras.Variable, values: list[tf.Tensor], counts: list[tf.Tensor]) -> tf.Tensor:
    """Return the one value for a variable that the towers assigned."""
    if len(values) == 1:
        return values[0]
    if variable.aggregation == "sum":
        return tf.add_n([variable.value, *(value - variable.value for value in values)])
    if not variable.value.dtype.is_floating or variable.aggregation == "only_first_replica":
        return values[0]
    values = [widen(value) for value in values]
    weights = [tf.cast(count, values[0].dtype) for count in counts]
    weighted = [tf.math.multiply_no_nan(v, w) for v, w in zip(values, weights, strict=True)]
    return tf.add_n(weighted) / tf.add_n(weights)


def widen(value: tf.Tensor) -> tf.Tensor:
    """Return `value` in float32 at least: sums in 16 bits lose examples."""
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value
