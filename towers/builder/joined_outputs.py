"""Joins the towers' outputs so that a tape around `concat` can go back to the towers.

TensorFlow's own tape would create the ops of the backward pass without devices and without the
exchanges between towers. So a tape sees all towers as one op, whose gradient runs on each tower's
device and is summed by `add_n`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import added_losses, gather
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.passes import CopiesError, Passes, TowerGradients
from towers.builder.python_values import PythonValues
from towers.builder.replica_context import (
    ReplicaContext,
    Replicas,
    assign,
    assigned,
    call_copies,
)
from towers.builder.sharding import Slice, is_split, num_rows, occupied, rounds, split
from towers.errors import InputError


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
    analysis = FunctionAnalysis()
    if is_split(batch):
        number = len(builder.devices)
        analysis = builder.analyze(fn, *batch, num_slices=number, backward=False)
        analysis.check_joinable()
    values, slices = PythonValues(analysis), occupied(split(builder, batch, never_empty=True))
    copies = passes.copies(builder, slices) if passes else ()
    note = passes and passes.note
    results = call_copies(builder, fn, slices, batch, values, note=note, copies=copies)
    return values.put_into(builder.gather(gather.join, results))


def _as_one_op(builder: Any, fn: Callable, batch: Sequence[Any], passes: Passes | None) -> Any:
    """Return the joined results as one op for tapes.

    A batch in several parts goes forward twice: for the outputs, from which the loss is computed,
    and again, part by part, when the outputs' gradient is known.
    """
    analysis = builder.analyze(fn, *batch)
    analysis.check_joinable()
    values, side_outputs = PythonValues(analysis), analysis.side_outputs
    fn = values.taken_from(tf_internals.converted_as_here(fn))
    leaves = tf.nest.flatten(batch)
    dense = [i for i, x in enumerate(leaves) if isinstance(x, tf.Tensor) and x.dtype.is_floating]
    watched = [i for i in dense if tf_internals.is_recording([leaves[i]])]
    parts = rounds(builder, batch)
    copies = passes.copies(builder, parts[0]) if passes else ()
    captured: list[tf.Tensor] = []  # other tensors that have gradients
    states: dict[int, tf.Tensor] = {}  # {id of a variable: the value that towers read}

    def inputs_of(replica: ReplicaContext) -> list[tf.Tensor]:
        own = tf.nest.flatten(replica.part.batch)
        return [own[i] for i in watched]

    def on_tower(replica: ReplicaContext) -> tuple[list[tf.Tensor], Any]:
        known = [*captured, *(x for x in replica.copies.values() if isinstance(x, tf.Tensor))]
        replica.tape.watch([*inputs_of(replica), *known])
        with _no_captures([*tf.nest.flatten(replica.part.batch), *known]):
            result = replica.compiled(lambda: (replica.call(fn), replica.added_losses()))
            result = replica.unpadded(result)
        return _values(result), result

    def forward(slices: Sequence[Slice]) -> tuple[Replicas, list[Any]]:
        replicas = Replicas(builder, slices, analysis, states, analysis.policies, copies)
        return replicas, builder.run(lambda r: builder.forward(on_tower, r), replicas)

    while True:
        try:
            passed, results = zip(*map(forward, parts), strict=True)
            break
        except _CapturedError as error:
            # A tape must watch these before they are used: the passes are traced again.
            captured += error.tensors
    replicas = [replica for part in passed for replica in part.contexts]
    outputs, scopes = [replica.outputs for replica in replicas], [r.scope for r in replicas]
    # A second forward pass, as in tf.recompute_grad, begins with the states before the first.
    states |= {id(variable): tf.identity(variable.value) for variable in assigned(scopes)}
    if passes:
        passes.note(scopes)
    assign(builder, scopes, analysis.policies)
    variables = list({id(v): v for replica in replicas for v in replica.read_variables()}.values())
    unsplit = [*captured, *variables]  # each tower reads all of them
    if tf_internals.are_followed(variables) and not builder.checks.observe:
        raise InputError(
            "a tf.autodiff.ForwardAccumulator cannot follow variables through `concat`: join the "
            "results of `map` by tf.concat, or call the function without towers"
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
                    with tf_internals.keep_losses():
                        part, _ = forward(slices)
                of_towers = builder.run(back, part)
            sums = gather.add_to(sums, of_towers, gather.plan_of(builder))
        with tf.name_scope("gather"):
            with tf.device(builder.gather_device):
                inputs = [gather.join(rows) for rows in zip(*of_inputs, strict=True)]
            gathered = gather.sum_gradients(sums, gather.plan_of(builder, unsplit), bool(copies))
        if in_parts:
            # Grappler drops control edges that delay an update until the last part has read a
            # variable.
            with tf.control_dependencies(gather.tensors([inputs, gathered])):
                inputs, gathered = _identities(inputs), list(map(_identities, gathered))
        if passes:
            of_towers = [tower_sums[len(captured) :] for tower_sums in sums]
            of_variables = [of_tower[len(captured) :] for of_tower in gathered]
            counts = [tf.convert_to_tensor(part.count) for part in parts[0]]
            for slices in parts[1:]:
                for i, part in enumerate(slices):
                    counts[i] += tf.cast(part.count, counts[i].dtype)
            batches = [tf.nest.flatten(part.batch) for part in parts[0]]
            phases = [] if in_parts else [(batches, outputs), (rows, of_towers)]
            passes.gradients = TowerGradients(counts, phases, of_towers, of_variables)
        return inputs + gathered[0]

    with tf.device(builder.gather_device), tf.name_scope("gather"):
        with tf.control_dependencies(_checks_of_shapes(outputs)):
            whole = gather.map_towers(gather.join, sum(results, []))
        sources = [leaves[i] for i in watched] + unsplit
        recorded = tf_internals.record_as_one_op("Towers", _values(whole), sources, backward)
        (whole, sides), added = _with_values(whole, recorded)
        side_outputs.assign(sides, leaves)
        added_losses.add_to_layers(scopes[0], added)
    return values.put_into(whole)


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
