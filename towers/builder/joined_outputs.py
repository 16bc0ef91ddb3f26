"""Joins the towers' outputs so that a tape around `concat` can go back to the towers.

TensorFlow's own tape would create the ops of the backward pass without devices and without the
exchanges between towers. So a tape sees all towers as one op, whose gradient runs on each tower's
device and is summed by `add_n`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import added_losses, attributes, gather
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.losses import gather_plan
from towers.builder.replica_context import (
    ReplicaContext,
    Replicas,
    WeightCopies,
    assign,
    assigned,
    call_copies,
)
from towers.builder.sharding import Slice, is_split, num_rows, occupied, rounds, split
from towers.errors import InputError


@dataclasses.dataclass(frozen=True)
class TowerGradients:
    """The gradients of one backward pass through the joined towers."""

    counts: Sequence[tf.Tensor]  # of each tower's examples
    # (each tower's inputs, its outputs) forward and backward; empty for a batch in parts.
    phases: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    of_towers: Sequence[Sequence[Any]]  # each tower's gradients of the variables
    # Their sums, for each tower on its device if towers have copies of the weights; else once.
    gathered: Sequence[Sequence[Any]]


class CopiesError(Exception):
    """Towers must read the weights themselves, and not variables that are their copies."""


@dataclasses.dataclass
class Passes:
    """A record of the passes of `concat` while a step is traced."""

    # {id of a Keras variable: (its `tf.Variable`, the value before the first assignment)}.
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


def concat(builder: Any, fn: Callable, batch: Sequence[Any], passes: Passes | None = None) -> Any:
    """Return the results of `fn` for the slices of `batch`, joined; tapes can go back through it.

    Args:
        builder: the `TowerBuilder`.
        fn: the towers' function.
        batch: its arguments.
        passes: gets a record of the passes, if given.
    """
    if is_split(batch) and tf_internals.is_recording():
        return _as_one_op(builder, fn, batch, passes)
    if is_split(batch):
        analysis = builder.analyze(fn, *batch, num_slices=len(builder.devices))
        analysis.check_joinable()
    slices = occupied(split(builder, batch, never_empty=True))
    before = passes.before if passes else None
    copies = passes.copies(builder, slices) if passes else ()
    results = call_copies(builder, fn, slices, batch, to_join=True, before=before, copies=copies)
    return builder.gather(gather.join, results)


@attributes.joins_towers
def _as_one_op(builder: Any, fn: Callable, batch: Sequence[Any], passes: Passes | None) -> Any:
    """Return the joined results as one op for tapes.

    A batch in several parts goes forward twice: for the outputs, from which the loss is computed,
    and again, part by part, when the outputs' gradient is known.
    """
    analysis = builder.analyze(fn, *batch)
    analysis.check_joinable()
    fn, side_outputs = tf_internals.converted_as_here(fn), analysis.side_outputs
    leaves = tf.nest.flatten(batch)
    dense = [i for i, x in enumerate(leaves) if isinstance(x, tf.Tensor) and x.dtype.is_floating]
    watched = [i for i in dense if tf_internals.is_recording([leaves[i]])]
    all_slices = rounds(builder, batch)
    copies = passes.copies(builder, all_slices[0]) if passes else ()
    parts = [_Part(builder, fn, slices, analysis, watched, copies) for slices in all_slices]
    captured: list[tf.Tensor] = []
    while True:
        try:
            results = [result for part in parts for result in part.forward()]
            break
        except _CapturedError as error:
            # A tape must watch these before they are used: the passes are traced again.
            captured += error.tensors
            for part in parts:
                part.captured = captured
    outputs = [values for part in parts for values in part.outputs]
    scopes = [scope for part in parts for scope in part.replicas.scopes]
    changed = assigned(scopes)
    # A second forward pass, as in tf.recompute_grad, begins with the states before the first.
    states = {id(variable): tf.identity(variable.value) for variable in changed}
    for variable in changed if passes else ():
        passes.before.setdefault(id(variable), (variable.value, states[id(variable)]))
    for part in parts:
        part.states = states
    assign(builder, scopes, analysis.policies)
    reads = [item for part in parts for by_id in part.reads for item in by_id.items()]
    variables = [variable for variable, _ in dict(reads).values()]
    unsplit = [*captured, *variables]  # each tower reads all of them
    if tf_internals.are_followed(variables) and not builder.checks.observe:
        raise InputError(
            "a tf.autodiff.ForwardAccumulator cannot follow variables through `concat`: join the "
            "results of `map` by tf.concat, or call the function without towers"
        )

    @attributes.joins_towers
    def backward(*upstream: tf.Tensor) -> list[Any]:
        attributes.refuse_uses()
        if tf_internals.is_recording() and any(isinstance(v[-1], tf.Variable) for _, v in copies):
            raise CopiesError("the gradient of a gradient does not see copies of the weights")
        with tf.device(builder.gather_device), tf.name_scope("split"):
            columns = zip(upstream, zip(*outputs, strict=True), strict=True)
            slices = [tf.split(x, list(map(num_rows, outs)), num=len(outs)) for x, outs in columns]
            pieces = iter([list(rows) for rows in zip(*slices, strict=True)])
        of_inputs, sums = [], []
        for part in parts:
            rows = [next(pieces) for _ in part.slices]
            with gather.after([rows, sums] if len(parts) > 1 else []):
                if len(parts) > 1:
                    with tf_internals.keep_losses():
                        part.forward()
                of_slices = part.backward(rows, unsplit)
            of_inputs += [inputs for inputs, _ in of_slices]
            sums = gather.add_to(sums, [shared for _, shared in of_slices], gather_plan(builder))
        with tf.name_scope("gather"):
            with tf.device(builder.gather_device):
                inputs = [gather.join(rows) for rows in zip(*of_inputs, strict=True)]
            plan = gather_plan(builder, unsplit)
            on_all = gather.sum_on_every_tower
            gathered = on_all(sums, plan) if copies else [gather.reduce_to(sums, plan)]
        if len(parts) > 1:
            # Grappler drops control edges that delay an update until the last part has read a
            # variable.
            with tf.control_dependencies(gather.tensors([inputs, gathered])):
                inputs, gathered = _identities(inputs), list(map(_identities, gathered))
        if passes:
            of_towers = [tower_sums[len(captured) :] for tower_sums in sums]
            of_variables = [of_tower[len(captured) :] for of_tower in gathered]
            counts = [tf.convert_to_tensor(part.count) for part in parts[0].slices]
            for part in parts[1:]:
                for i, tower_slice in enumerate(part.slices):
                    counts[i] += tf.cast(tower_slice.count, counts[i].dtype)
            batches = [tf.nest.flatten(part.batch) for part in parts[0].slices]
            phases = [(batches, parts[0].outputs), (rows, of_towers)]
            phases = phases if len(parts) == 1 else []
            passes.gradients = TowerGradients(counts, phases, of_towers, of_variables)
        return inputs + gathered[0]

    with tf.device(builder.gather_device), tf.name_scope("gather"):
        with tf.control_dependencies(_checks_of_shapes(outputs)):
            whole = gather.map_towers(gather.join, results)
        sources = [leaves[i] for i in watched] + unsplit
        values = tf_internals.record_as_one_op("Towers", _values(whole), sources, backward)
        (whole, sides), added = _with_values(whole, values)
        side_outputs.assign(sides, leaves)
        added_losses.add_to_layers(scopes[0], added)
        return whole


class _Part:
    """A part of the batch, one slice for each tower, with its forward and backward pass."""

    def __init__(
        self, builder: Any, fn: Callable, slices: Sequence[Slice], analysis: FunctionAnalysis,
        watched: Sequence[int], copies: WeightCopies,
    ):  # fmt: skip
        self.builder, self.fn, self.slices, self.copies = builder, fn, slices, copies
        self.analysis, self.watched = analysis, watched  # numbers of leaves that have gradients
        self.captured: Sequence[tf.Tensor] = ()  # other tensors that have gradients
        self.states: dict[int, tf.Tensor] = {}  # {id of a variable: the value that towers read}

    def forward(self) -> list[Any]:
        """Return for each slice the function's result and the losses that layers add."""
        given = self.builder, self.slices, self.analysis, self.states
        self.replicas = Replicas(*given, self.analysis.added, self.copies)
        self.reads: list[dict[int, tuple]] = []  # {id of a variable: (it, the tensor on the tape)}
        self.inputs: list[list[tf.Tensor]] = []
        self.tapes: list[tf.GradientTape] = []
        results = self.builder.run(self._forward, self.replicas)
        self.outputs = list(map(_values, results))
        return results

    def _forward(self, replica: ReplicaContext) -> Any:
        leaves, reads = tf.nest.flatten(replica.part.batch), {}
        inputs = [leaves[i] for i in self.watched]

        def on_read(variable: tf.Variable, value: tf.Tensor) -> None:
            tape.watch(value)
            reads[id(variable)] = variable, value

        copies = [(weight.value, values[replica.tower]) for weight, values in self.copies]
        sent = [value for _, value in copies if isinstance(value, tf.Tensor)]
        with tf.GradientTape(persistent=True) as tape:  # backward may go through it several times
            tape.watch([*inputs, *self.captured, *sent])
            with _no_captures([*leaves, *self.captured, *sent]):
                result = replica.compiled(
                    lambda: (replica.call(self.fn), replica.added_losses()), on_read
                )
                result = replica.unpadded(result)
        if not replica.by_xla:
            reads = {id(v): (v, v) for v in tape.watched_variables()}
        for weight, value in copies:
            if isinstance(value, tf.Tensor):
                reads[id(weight)] = weight, value
            elif id(value) in reads:
                reads[id(weight)] = weight, reads.pop(id(value))[1]
        self.reads.append(reads)
        self.inputs.append(inputs)
        self.tapes.append(tape)
        return result

    def backward(
        self, upstream: Sequence[Sequence[tf.Tensor]], variables: Sequence[Any]
    ) -> list[tuple[list, list]]:
        """Return for each slice the gradients of its inputs and of `variables`."""

        def back(replica: ReplicaContext) -> tuple[list, list]:
            i, replica.own = replica.tower, self.states
            inputs, reads = self.inputs[i], [self.reads[i].get(id(v), (v, v))[1] for v in variables]
            with replica.replaced():  # layers may be called again
                gradients = self.tapes[i].gradient(self.outputs[i], [*inputs, *reads], upstream[i])
            of_variables = replica.zero_if_empty(gradients[len(inputs) :])
            of_inputs = [
                replica.unpadded(tf.zeros_like(x) if g is None else g)
                for x, g in zip(inputs, gradients, strict=False)
            ]
            return of_inputs, replica.gradients(of_variables, variables)

        return self.builder.run(back, self.replicas)


def _identities(gradients: Sequence[Any]) -> list[Any]:
    return [gather.map_values(tf.identity, gradient) for gradient in gradients]


class _CapturedError(Exception):
    def __init__(self, tensors: Sequence[tf.Tensor]):
        super().__init__()
        self.tensors = tensors


@contextlib.contextmanager
def _no_captures(known: Sequence[Any]) -> Iterator[None]:
    """Raise _CapturedError if the block uses other watched tensors from outside than `known`.

    The tape around the towers would silently ignore them: a wrong gradient.
    """
    known_ids = {id(x) for x in tf.nest.flatten(list(known), expand_composites=True)}
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    yield
    ops = graph.get_operations()[num_before:]
    names, captured = {op.name for op in ops}, {}
    for op in ops:
        for x in op.inputs:
            old = x.op.name not in names and id(x) not in known_ids
            if old and x.dtype.is_floating and tf_internals.is_recording([x]):
                captured[id(x)] = x
    if captured:
        raise _CapturedError(list(captured.values()))


def _checks_of_shapes(outputs: Sequence[Sequence[tf.Tensor]]) -> list[tf.Operation]:
    """Check that slices' outputs differ in axis 0 alone; return ops that check unknown shapes."""
    message = (
        "towers return outputs of several shapes, which cannot be joined along the batch: an axis "
        "depends on the examples of a slice, as by to_tensor() of ragged rows; give it a fixed size"
    )
    checks = []
    for first, *others in zip(*outputs, strict=True):
        for other in others:
            if not first.shape[1:].is_compatible_with(other.shape[1:]):
                raise InputError(message)
            if not first.shape[1:].is_fully_defined():
                sizes = tf.shape(first)[1:], tf.shape(other)[1:]
                checks.append(tf.debugging.assert_equal(*sizes, message))
    return [check for check in checks if check is not None]  # None: statically equal


def _values(structure: Any) -> list[tf.Tensor]:
    # The floating-point tensors in a structure, of sparse and ragged leaves the values.
    values = map(_value, tf.nest.flatten(structure))
    return [value for value in values if value is not None and value.dtype.is_floating]


def _value(leaf: Any) -> tf.Tensor | None:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.flat_values
    return leaf.values if isinstance(leaf, tf.SparseTensor) else leaf


def _with_values(structure: Any, values: Sequence[tf.Tensor]) -> Any:
    """Return a structure with its `_values` replaced."""
    values = iter(values)

    def replaced(leaf: Any) -> Any:
        value = _value(leaf)
        if value is None or not value.dtype.is_floating:
            return leaf
        value = next(values)
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.with_flat_values(value)
        if isinstance(leaf, tf.SparseTensor):
            return tf.SparseTensor(leaf.indices, value, leaf.dense_shape)
        tf_internals.attach(value, "mask", tf_internals.attached(leaf, "mask"))
        return value

    return tf.nest.map_structure(replaced, structure)
