"""The passes through the towers: two ways to a loss and its gradients.

* `mean_gradients`: each tower makes the losses of its examples and goes back from their mean.
* `concat`: the towers' outputs are joined, and a tape around it goes back to the towers.
  TensorFlow's own tape would create the ops of the backward pass without devices and without the
  exchanges between towers. So a tape sees all towers as one op, whose gradient runs on each tower's
  device and is summed by `add_n`.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder import gather, replica_scope
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.replica_context import ReplicaContext, Replicas, WeightCopies, assign
from towers.builder.replica_scope import ReplicaScope, assigned, copies_of, widen
from towers.builder.sharding import PerTower, Slice, is_split, num_rows, rounds
from towers.errors import InputError


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
        """Return what the first tower has, if it is called on a batch without the builder.

        Args:
            batch: with which the first tower is called, without the builder.
            gradients: of its weights.
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
        """Return what towers read in place of weights, if there is a slice for each of them.

        Args:
            builder: of the towers.
            slices: that are occupied.
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


# Losses made in the towers.

_NO_LOSSES = (
    "loss_fn must return one loss for each example, shape [b], not {} when traced with {} "
    "examples; reduce all axes but the first (reduction=None in a Keras loss), the builder averages"
)


def mean_gradients(
    builder: Any,
    loss_fn: Callable,
    variables: Sequence[Any],
    batch: Sequence[Any],
    passes: Passes | None = None,
) -> tuple[tf.Tensor, list[list[Any]], Any]:
    """Return the mean loss, its gradients, and joined outputs.

    Each tower goes back from the mean over all examples: its gradients are only added up.

    Args:
        builder: the `TowerBuilder`.
        loss_fn: as for `TowerBuilder.gradients`; outputs are None if it returns losses alone.
        variables: as for `TowerBuilder.gradients`; if some are copied, there is a list of gradients
            for each tower, otherwise one.
        batch: the arguments of `loss_fn`.
        passes: gets a record of the passes, if given.
    """
    _check_by_example(analysis := builder.analyze(loss_fn, *batch))
    loss_fn = tf_internals.converted_as_here(loss_fn)
    masters, copies = _masters_and_copies(variables)
    sums, others, counts = [], [], []

    def forward(replica: ReplicaContext) -> tuple:
        return builder.forward(lambda replica: _losses_of(replica, loss_fn), replica, masters)

    def backward(replica: ReplicaContext) -> list[Any]:
        upstream = _upstream(replica.outputs, replica.part, total)
        return builder.backward(replica, upstream, masters)

    def both(replica: ReplicaContext) -> tuple:
        return replica.compiled(lambda: (forward(replica), backward(replica)))

    def results(replica: ReplicaContext) -> tuple:
        (loss, *rest), gradients = passed[replica.tower]
        others.append((replica.scope, *map(replica.unpadded, rest)))
        return loss, replica.gradients(gradients, masters)

    for slices in rounds(builder, batch, builder.accumulate_steps):
        replicas = Replicas(builder, slices, analysis, {}, analysis.policies, copies)
        with gather.after(sums):
            if slices[0].rows:
                total = slices[0].rows.total
                passed = builder.run(both, replicas)
            else:  # nothing is split: towers have as many examples as they return losses
                there = builder.run(forward, replicas)
                total = sum(replica.scope.count for replica in replicas.contexts)
                passed = list(zip(there, builder.run(backward, replicas), strict=True))
            parts = builder.run(results, replicas)
        counts.append([replica.scope.count for replica in replicas.contexts])
        sums = gather.add_to(builder, sums, parts)  # on each tower
    losses, gradients = map(list, zip(*sums, strict=True))
    counts = list(map(sum, itertools.zip_longest(*counts, fillvalue=0)))
    scopes, outputs, sides = map(list, zip(*others, strict=True))
    analysis.side_outputs.assign(builder.gather(gather.join, sides) if any(sides) else [], batch)
    with tf.name_scope("gather"):
        rows = [[*row, loss] for row, loss in zip(gradients, losses, strict=True)]
        gathered = gather.sum_gradients(builder, rows, masters, bool(copies))
        loss = [row.pop() for row in gathered][0]
        with tf.device(builder.gather_device):
            loss /= tf.cast(total, loss.dtype)
    if passes:
        passes.note(scopes)
        passes.gradients = TowerGradients(counts, [], gradients, gathered, losses)
    assign(builder, scopes, analysis.policies)
    has_none = isinstance(outputs[0], tuple) and not outputs[0]
    return loss, gathered, None if has_none else builder.gather(gather.join, outputs)


def _losses_of(replica: ReplicaContext, loss_fn: Callable) -> tuple[tf.Tensor, tuple]:
    """Call a loss function in a tower; return (losses, (sum, outputs, tensors in attributes)).

    The outputs are () if the function returns losses alone.
    """
    part = replica.part
    returned, side = replica.call(loss_fn)
    losses, outputs = returned if isinstance(returned, tuple) else (returned, ())
    losses = _checked(losses, part)
    total = tf.reduce_sum(losses)
    if part.may_be_empty():
        total = tf.math.multiply_no_nan(total, tf.cast(part.count > 0, total.dtype))
    if part.count is None:
        replica.scope.count = num_rows(losses)
    return losses, (total, outputs, side)


def _upstream(losses: tf.Tensor, part: Slice, total: Any) -> tf.Tensor:
    """Return the gradient of the mean over all `total` examples by a tower's losses, `[b]`."""
    share = 1 / tf.cast(tf.maximum(total, 1), losses.dtype)
    if part.may_be_empty():
        share *= tf.cast(part.count > 0, share.dtype)
    known = losses.shape.is_fully_defined()  # then it is a constant, which costs a GPU nothing
    return tf.fill(losses.shape if known else tf.shape(losses), share)


def _check_by_example(analysis: FunctionAnalysis) -> None:
    """Raise InputError if a loss function's losses or outputs have no row for each example."""
    trace = analysis.trace
    if analysis.by_example is False:
        shape = next(iter(trace.shapes), None)
        raise InputError(_NO_LOSSES.format(shape, trace.size))
    if trace and trace.not_by_example[1:]:
        analysis.check_joinable()


def _checked(losses: Any, part: Slice) -> tf.Tensor:
    losses = tf.convert_to_tensor(losses)
    if not losses.dtype.is_floating:
        raise InputError(
            f"loss_fn must return floating-point losses, not {losses.dtype.name}, which have no "
            "gradients; cast its inputs to float32"
        )
    size = part.rows and part.rows.size
    if not losses.shape.is_compatible_with([size if isinstance(size, int) else None]):
        raise InputError(_NO_LOSSES.format(losses.shape, size))
    if tf.is_tensor(size) or (size is not None and losses.shape[0] is None):
        message = _NO_LOSSES.format("another shape", "other")
        tf.debugging.assert_equal(tf.shape(losses)[0], size, message)
    return widen(losses)


def _masters_and_copies(variables: Sequence[Any]) -> tuple[list[tf.Variable], WeightCopies]:
    """Return the `tf.Variable`s of a builder's variables, of copies the first; and the copies.

    Raises:
        ValueError: there is something else among them.
    """

    def value_of(variable: Any) -> tf.Variable:
        if not isinstance(variable, keras.Variable | tf.Variable):
            raise ValueError(
                "variables must be a list of tf.Variables or keras.Variables, but holds "
                f"{variable!r}"
            )
        return variable.value if isinstance(variable, keras.Variable) else variable

    copied = [v.values for v in variables if isinstance(v, PerTower)]
    copies = [(values[0], list(map(value_of, values))) for values in copied]
    return [value_of(v.values[0] if isinstance(v, PerTower) else v) for v in variables], copies


# Outputs joined.

_TENSOR = object()  # stands for one


def split_python_values(fn: Callable, analysis: FunctionAnalysis) -> tuple[Callable, Callable]:
    """Return a function without the Python values among its results, and one that puts them back.

    They are a width, a name, a flag, an array beside the rows. A value is handed through if every
    tower returns it, and the analysis with another number of examples too. Without the analysis, a
    value 4 could be the size of two slices of four examples.

    Args:
        fn: the towers' function; the one that is returned raises InputError if another call has
            returned other values.
        analysis: of it.
    """
    trace = analysis.trace
    known = [_TENSOR if _is_tensor(x) else x for x in trace.leaves] if trace else []

    def tensors_of(*batch: Any) -> Any:
        result = fn(*batch)
        leaves = tf.nest.flatten(result)
        own = [_TENSOR if _is_tensor(x) else x for x in leaves]
        known[:] = known or own
        for i, (value, other) in enumerate(zip(known, own, strict=False)):
            unknown = analysis.reason and not (other is None or other is _TENSOR)
            if unknown or not _are_alike(value, other):
                raise InputError(
                    "the results of the towers' function cannot be joined along the batch: its "
                    f"output {i} is {_shown(value)} for one part and {_shown(other)} for "
                    "another; return a tensor with a row for each example, or compute it from "
                    "the joined outputs"
                )
        return tf.nest.pack_sequence_as(result, [x if _is_tensor(x) else None for x in leaves])

    def put_back(joined: Any) -> Any:
        if all(value is None or value is _TENSOR for value in known):
            return joined
        pairs = zip(known, tf.nest.flatten(joined), strict=True)
        return tf.nest.pack_sequence_as(joined, [x if v is _TENSOR else v for v, x in pairs])

    return tensors_of, put_back


def _is_tensor(value: Any) -> bool:
    # An array that is made eagerly is of the values of a slice, and has its rows.
    of_values = tf.executing_eagerly() and isinstance(value, np.ndarray) and value.ndim > 0
    return of_values or tf.is_tensor(value)


def _are_alike(one: Any, other: Any) -> bool:
    # By ==, of arrays, too; of the user's own objects that may raise any error.
    try:
        return one is other or (type(one) is type(other) and bool(np.all(one == other)))
    except Exception:
        return False


def _shown(value: Any) -> str:
    return "a tensor" if value is _TENSOR else " ".join(repr(value).split())[:60]


def concat(builder: Any, fn: Callable, batch: Sequence[Any], passes: Passes | None = None) -> Any:
    """Return the results of `fn` for the slices of `batch`, joined; tapes can go back through it.

    Under a tape, the forward pass of a batch in several parts runs twice. The first one gives the
    outputs, from which the loss is computed. The second one runs part by part, when the outputs'
    gradient is known.

    Args:
        builder: the `TowerBuilder`.
        fn: the towers' function.
        batch: its arguments.
        passes: gets a record of the passes, if given.
    """
    recording = is_split(batch) and tf_internals.is_recording()
    number = builder.num_slices if recording else len(builder.devices)
    analysis = builder.analyze(fn, *batch, num_slices=number, backward=recording)
    analysis.check_joinable()
    fn, put_back = split_python_values(tf_internals.converted_as_here(fn), analysis)
    leaves = tf.nest.flatten(batch)
    dense = [i for i, x in enumerate(leaves) if isinstance(x, tf.Tensor) and x.dtype.is_floating]
    watched = [i for i in dense if tf_internals.is_recording([leaves[i]])]
    parts = rounds(builder, batch, builder.accumulate_steps if recording else 1)
    copies = passes.copies(builder, parts[0]) if passes else ()
    captured: dict[int, tf.Tensor] = {}  # other tensors that have gradients, by id
    # {id of a variable: the value that towers read}
    states: dict[int, tf.Tensor] | None = {} if recording else None

    def inputs_of(replica: ReplicaContext) -> list[tf.Tensor]:
        own = tf.nest.flatten(replica.part.batch)
        return [own[i] for i in watched]

    def call(replica: ReplicaContext) -> Any:
        result = replica.compiled(lambda: (replica.call(fn), replica.added_losses()))
        return replica.unpadded(result)

    def under_tape(replica: ReplicaContext) -> tuple[list[tf.Tensor], Any]:
        sent = [x for x in replica.copies.values() if isinstance(x, tf.Tensor)]
        known = [*inputs_of(replica), *sent, *captured.values()]
        replica.tape.watch(known)
        start = len(graph.get_operations())
        result = call(replica)
        new.update(_captures(graph.get_operations()[start:], known))
        return _values(result), result

    def forward(slices: Sequence[Slice]) -> tuple[Replicas, list[Any]]:
        replicas = Replicas(builder, slices, analysis, states, analysis.policies, copies)
        run = (lambda r: builder.forward(under_tape, r)) if recording else call
        return replicas, builder.run(run, replicas)

    graph = tf.compat.v1.get_default_graph()
    while True:  # a tape must watch captured tensors before they are used
        new: dict[int, tf.Tensor] = {}
        passed, results = zip(*map(forward, parts), strict=True)
        if not new:
            break
        captured |= new
    replicas = [replica for part in passed for replica in part.contexts]
    scopes = [replica.scope for replica in replicas if replica.scope]
    if recording:  # a second forward pass begins with the states before the first
        states |= {id(variable): tf.identity(variable.value) for variable in assigned(scopes)}
    if passes:
        passes.note(scopes)
    assign(builder, scopes, analysis.policies)
    outputs = [replica.outputs for replica in replicas]
    taped = replicas if recording else []
    variables = list({id(v): v for replica in taped for v in replica.read_variables()}.values())
    unsplit = [*captured.values(), *variables]  # each tower reads all of them
    if tf_internals.are_followed(variables) and not builder.checks.observe:
        raise InputError(
            "tf.autodiff.ForwardAccumulator cannot follow variables through `concat`; join the "
            "results of `map` with tf.concat, or call the function without towers"
        )

    def backward(*upstream: tf.Tensor) -> list[Any]:
        if tf_internals.is_recording() and any(isinstance(v[-1], tf.Variable) for _, v in copies):
            raise CopiesError("the gradient of a gradient does not see copies of the weights")
        with tf.device(builder.gather_device), tf.name_scope("split"):
            columns = zip(upstream, zip(*outputs, strict=True), strict=True)
            slices = [tf.split(x, list(map(num_rows, outs)), num=len(outs)) for x, outs in columns]
            pieces = iter([list(rows) for rows in zip(*slices, strict=True)])
        of_inputs, sums, in_parts = [], [], len(parts) > 1

        def back(replica: ReplicaContext) -> list[Any]:
            own = inputs_of(replica)
            gradients = builder.backward(replica, rows[replica.tower], [*own, *unsplit])
            pairs = zip(own, gradients, strict=False)
            dense = [tf.zeros_like(x) if g is None else g for x, g in pairs]
            of_inputs.append(list(map(replica.unpadded, dense)))
            return replica.gradients(gradients[len(own) :], unsplit)

        for part, slices in zip(passed, parts, strict=True):
            rows = [next(pieces) for _ in slices]
            with gather.after([rows, sums] if in_parts else []):
                if in_parts:
                    with _keep_losses():
                        part, _ = forward(slices)
                of_towers = builder.run(back, part)
            sums = gather.add_to(builder, sums, of_towers)
        with tf.name_scope("gather"):
            with tf.device(builder.gather_device):
                inputs = [gather.join(rows) for rows in zip(*of_inputs, strict=True)]
            gathered = gather.sum_gradients(builder, sums, unsplit, bool(copies))
        if in_parts:
            # Grappler drops control edges that delay an update until the last part has read a
            # variable.
            with tf.control_dependencies(gather.tensors([inputs, gathered])):
                inputs, gathered = _identities(inputs), list(map(_identities, gathered))
        if passes:
            of_towers = [own[len(captured) :] for own in sums]
            of_variables = [of_tower[len(captured) :] for of_tower in gathered]
            counts = [[part.count for part in slices] for slices in parts]
            counts = list(map(sum, itertools.zip_longest(*counts, fillvalue=0)))
            batches = [tf.nest.flatten(part.batch) for part in parts[0]]
            phases = [] if in_parts else [(batches, outputs), (rows, of_towers)]
            passes.gradients = TowerGradients(counts, phases, of_towers, of_variables)
        return inputs + gathered[0]

    whole = builder.gather(gather.join, sum(results, []))
    with tf.device(builder.gather_device), tf.name_scope("gather"):
        if recording:
            sources = [leaves[i] for i in watched] + unsplit
            recorded = tf_internals.record_as_one_op("Towers", _values(whole), sources, backward)
            whole = _with_values(whole, recorded)
        (whole, sides), added = whole
        analysis.side_outputs.assign(sides, leaves)
        for scope in scopes[:1]:
            replica_scope.add_to_layers(scope, added)
    return put_back(whole)


def _identities(gradients: Sequence[Any]) -> list[Any]:
    return [gather.map_values(tf.identity, gradient) for gradient in gradients]


def _captures(ops: Sequence[tf.Operation], known: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
    """Return the tensors that a tape records, and that ops take from outside, without `known`."""
    names, ids = {op.name for op in ops}, set(map(id, known))
    outside = [x for op in ops for x in op.inputs if x.op.name not in names and id(x) not in ids]
    floats = [x for x in outside if x.dtype.is_floating]
    return {id(x): x for x in floats if tf_internals.is_recording([x])}


def _values(structure: Any) -> list[tf.Tensor]:
    # The floating-point tensors in a structure, of sparse and ragged leaves the values.
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None and leaf.dtype.is_floating]


def _with_values(structure: Any, values: Sequence[tf.Tensor]) -> Any:
    """Return a structure with its `_values` replaced."""
    leaves, values = tf.nest.flatten(structure, expand_composites=True), iter(values)
    for i, leaf in enumerate(leaves):
        if leaf is not None and leaf.dtype.is_floating:
            leaves[i] = next(values)
            tf_internals.set_mask(leaves[i], tf_internals.mask_of(leaf))
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)


@contextlib.contextmanager
def _keep_losses() -> Iterator[None]:
    """Keep the losses of layers that are called again in the block."""
    saved: dict[int, tuple[keras.Layer, list[Any]]] = {}

    def make(before: Callable) -> Callable:
        def clear(layer: keras.Layer) -> None:
            saved.setdefault(id(layer), (layer, list(tf_internals.losses_of(layer))))
            before(layer)

        return clear

    with tf_internals.patch_clearing_of_losses(make):
        yield
    for layer, losses in saved.values():
        tf_internals.losses_of(layer)[:] = losses
