"""What is known of the passes through the towers while a step is traced."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.builder.replica_context import WeightCopies, assigned
from towers.builder.replica_scope import ReplicaScope
from towers.builder.sharding import Slice, num_rows
from towers.builder.variable_aggregation import copies_of


@dataclasses.dataclass(frozen=True)
class TowerGradients:
    """The gradients of one backward pass through all towers."""

    counts: Sequence[tf.Tensor]  # of each tower's examples
    # (each tower's inputs, its outputs) forward and backward; empty for a batch in parts.
    phases: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    of_towers: Sequence[Sequence[Any]]  # each tower's gradients of the variables
    # Their sums, for each tower on its device if towers have copies of the weights; else once.
    gathered: Sequence[Sequence[Any]]
    losses: Sequence[tf.Tensor] = ()  # each tower's sum, if towers have losses

    @classmethod
    def of_one_tower(cls, batch: Any, gradients: Sequence[Any]) -> "TowerGradients":
        """Return what the first tower has, if it is called without the builder.

        Args:
            batch: structure of tensors.
            gradients: that an optimizer gets.
        """
        rows = [x for x in tf.nest.flatten(batch) if tf.is_tensor(x) and x.shape.rank != 0]
        count = tf.convert_to_tensor(num_rows(rows[0]))
        return cls([count], [([rows], [gradients])], [gradients], [gradients])


class CopiesError(Exception):
    """Towers must read the weights themselves, and not variables that are their copies."""


@dataclasses.dataclass
class Passes:
    """A record of the passes through the towers while a step is traced."""

    # {id of a `tf.Variable`: (it, the value before the first assignment)}.
    before: dict[int, tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=dict)
    gradients: TowerGradients | None = None  # of the last backward pass
    # Called with the devices of a pass's towers; returns what they read in place of weights.
    copy: Callable[[Sequence[str]], WeightCopies] | None = None

    def copies(self, builder: Any, slices: Sequence[Slice]) -> WeightCopies:
        """Return what towers read in place of weights.

        Args:
            builder: of the towers.
            slices: one for each tower that takes part.
        """
        return self.copy(builder.devices[: len(slices)]) if self.copy else ()

    def note(self, scopes: Sequence[ReplicaScope]) -> None:
        """Note the values of what the towers' scopes assign, before these assignments are made."""
        for master in assigned(scopes):
            for variable in (master.value, *(copy for copy, _ in copies_of(master, scopes))):
                self.note_value(variable)

    def note_value(self, variable: tf.Variable) -> None:
        """Note the value of a variable before its first assignment."""
        if id(variable) not in self.before:
            with tf.device(variable.device):
                self.before[id(variable)] = variable, tf.identity(variable)
