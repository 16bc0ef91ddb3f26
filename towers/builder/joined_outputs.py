"""Joins the towers' outputs so that a tape around `concat` can go back to the towers.

TensorFlow's own tape would create the ops of the backward pass without devices and without the
exchanges between towers. So a tape sees all towers as one op, whose gradient runs on each tower's
device and is summed by `add_n`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import added_losses, gather
from towers.builder.passes import CopiesError, Passes, TowerGradients
from towers.builder.python_values import PythonValues
from towers.builder.replica_context import (
    ReplicaContext,
    Replicas,
    assign,
    assigned,
)
from towers.builder.sharding import Slice, is_split, num_rows, rounds
from towers.errors import InputError


def concat(builder: Any, fn: Callable, batch: Sequence[Any], passes: Passes | None = None) -> Any:
    """Return the results of `fn` for the slices of `batch`, joined; tapes can go back through it.

    Under a tape, a batch in several parts goes forward twice: for the outputs, from which the loss
    is computed, and again, part by part, when the outputs' gradient is known.

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
    values = PythonValues(analysis)
    fn = values.taken_from(tf_internals.converted_as_here(fn))
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
            added_losses.add_to_layers(scope, added)
    return values.put_into(whole)


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
            tf_internals.attach(leaves[i], "mask", tf_internals.attached(leaf, "mask"))
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
