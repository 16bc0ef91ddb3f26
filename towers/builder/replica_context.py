"""The context in which a tower's copy of a function runs, and which makes the copies exact.

`TowerBuilder` calls a function once for each tower. This module makes N calls compute what one call
with the whole batch computes; it also has what `map`, `sum` and `concat` run:

| in a tower | by |
|---|---|
| a random op returns the slice's rows of the batch's numbers | `rng` |
| BatchNorm computes its moments over all towers' examples | `batch_norm`, `sync` |
| assignments are recorded, aggregated, and made once | `replica_scope`, `variable_aggregation` |
| losses that layers add are scaled to the whole batch | `added_losses` |
| attributes of layers get the values of one call | `attributes` |
| variables of other machines and GPUs are sent once | `cross_host` |
| inner functions are inlined, or XLA compiles the copy | `xla` |
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import (
    added_losses,
    batch_norm,
    cross_host,
    device_types,
    diagnostics,
    gather,
    xla,
)
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.replica_scope import ReplicaScope, variables_refused
from towers.builder.rng import ReplicaRng
from towers.builder.sharding import Slice, check_devices
from towers.builder.sync import SyncGroup
from towers.builder.variable_aggregation import assign_once

# (weight, what each tower reads in its place: a tensor or a `tf.Variable` on the tower's device).
WeightCopies = Sequence[tuple[keras.Variable, Sequence[Any]]]


class ReplicaContext:
    """The context of one tower's copy, for the forward and the backward pass.

    Enter it around each pass, on the tower's device: a later pass continues the random numbers and
    the exchanges of the pass before.

    Attributes:
        name: name scope of the tower's ops.
        own: {id of a Keras variable: what the tower reads in its place}; None, as for `map`, if the
            function may create variables and assign any (if its analysis allows it).
        copies: the same of weights, see `Replicas`.
        scope: records the assignments of the last call.
        tape: has recorded the last forward pass of `TowerBuilder.forward`.
        outputs: of that pass, from which `TowerBuilder.backward` goes back.
    """

    scope: ReplicaScope | None = None
    tape: tf.GradientTape | None = None
    outputs: Any = None

    def __init__(self, replicas: "Replicas", tower: int, part: Slice):
        """Set the tower and its slice.

        Args:
            replicas: the contexts of all towers.
            tower: number of the tower.
            part: its slice of the batch.
        """
        builder, sync_group = replicas.builder, replicas.sync_group
        self.tower, self.device, self.name = tower, builder.devices[tower], f"tower_{tower}"
        self.part, self.own = part, replicas.own
        self.copies = {id(v): values[tower] for v, values in replicas.copies}
        self._copied = [(_master(v), values[tower]) for v, values in replicas.copies]
        self.by_xla, self._is_in_program = builder.jit_compile and replicas.own is not None, False
        self._read_by_xla: dict[int, tuple[tf.Variable, tf.Tensor]] = {}  # its value outside
        self.rng = ReplicaRng(part.rows, replicas.analysis.draws, builder.jit_compile, self.device)
        self._replicas = replicas
        self._sync = sync_group.handle(tower, self.by_xla) if sync_group else None

    def __enter__(self) -> "ReplicaContext":
        """Draw random numbers by example; share reads of remote variables on each machine."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.rng.drawing())
            stack.enter_context(self._replicas.weight_broadcast.on(self.device))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the pass."""
        self._stack.__exit__(*error)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[ReplicaScope]:
        """Patch Keras and TensorFlow in the block; yield the scope that records assignments."""
        prefetch = self._sync.prefetch if self._sync and not self.by_xla else None
        with contextlib.ExitStack() as stack:
            own = self.copies | (self.own or {})
            scope = stack.enter_context(ReplicaScope(own, self.device, prefetch=prefetch))
            moments = self._replicas.moments
            stack.enter_context(batch_norm.over_all_towers(self._sync, moments, self.device))
            stack.enter_context(tf_internals.inline_functions(xla.read_outside))
            stack.enter_context(tf_internals.convolve_without_xla())
            stack.enter_context(integers_on(self.device))
            if self.own is not None:
                stack.enter_context(variables_refused())
            yield scope

    def call(self, fn: Callable) -> tuple[Any, list[Any]]:
        """Call `fn` on the slice; return its result, and the tensors that it sets as attributes."""
        if self.own is None and self.part.rows is None:  # nothing was split: it is just copied
            return fn(*self.part.batch), []
        fn, rows = self._replicas.analysis.side_outputs.wrap(fn), self.part.rows
        with self.replaced() as self.scope:
            with added_losses.record_losses(self.scope, rows, self._replicas.added):
                returned = fn(*self.part.batch)
        self.scope.close(self.part.count)
        return returned

    def added_losses(self) -> list[tf.Tensor]:
        """Return the losses that layers have added in the last call, as rows to be joined."""
        if self.scope is None:
            return []
        return added_losses.as_rows(self.scope, self.part.rows, self._replicas.added)

    def compiled(self, compute: Callable) -> Any:
        """Return the tensors that `compute` returns, compiled by XLA with `jit_compile`.

        Args:
            compute: takes nothing, runs `call`, and returns a structure of tensors.
        """
        if not self.by_xla or self._is_in_program:
            return compute()
        tape = self.tape  # of a forward pass around the program

        def program() -> tuple[ReplicaScope, Any]:
            self._is_in_program = True
            results = compute()
            self._is_in_program = False
            return self.scope, results

        def on_read(variable: tf.Variable, value: tf.Tensor) -> None:
            if tape:
                tape.watch(value)
                self._read_by_xla[id(variable)] = variable, value

        return xla.compiled(program, on_read)[1]

    def read_variables(self) -> list[tf.Variable]:
        """Return the variables that the last forward pass has read; of copies the masters."""
        reads = [variable for variable, _ in self._read_by_xla.values()]
        if not self.by_xla:
            reads = self.tape.watched_variables()
        own = {id(copy): master for master, copy in self._copied}
        sent = [master for master, copy in self._copied if isinstance(copy, tf.Tensor)]
        return [own.get(id(variable), variable) for variable in reads] + sent

    def sources(self, variables: Sequence[Any]) -> list[Any]:
        """Return what the tower's tape knows in place of variables: copies, what XLA has read."""
        copies = {id(master): copy for master, copy in self._copied}
        own = [copies.get(id(v), v) for v in variables]
        return [self._read_by_xla.get(id(v), (v, v))[1] for v in own]

    def unpadded(self, structure: Any) -> Any:
        """Return results of the slice without padding rows."""
        return tf.nest.map_structure(self.part.unpadded, structure)

    def close(self, count: Any) -> ReplicaScope:
        """Set the scope's number of examples, `count` unless the slice knows it; return it."""
        self.scope.count = self.part.count if isinstance(self.part.count, int) else count
        return self.scope

    def gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients; mark those that are sparse and have the same rows in each tower.

        They are zeros if the tower has no example: those of padding may be NaN. With the builder's
        `dense_gradients` sparse ones become dense where that has fewer bytes.

        Args:
            gradients: of the tower; None where there is none.
            variables: of the gradients, masters and not copies.
        """
        static, builder = self._replicas.analysis.static_rows, self._replicas.builder
        if self.part.may_be_empty():
            gradients = [gather.zero_if_empty(g, self.part.count) for g in gradients]

        def known(gradient: Any, variable: Any) -> Any:
            if not isinstance(gradient, tf.IndexedSlices):
                return gradient
            values, indices, num_rows = gradient.values, gradient.indices, variable.shape[0]
            most = (values.shape[0] or 0) * len(builder.devices)
            if builder.dense_gradients and num_rows is not None and num_rows <= most:
                return tf.math.unsorted_segment_sum(values, indices, num_rows)
            if id(variable) in static:
                return gather.StaticIndexedSlices(values, indices, gradient.dense_shape)
            return gradient

        return [known(g, variable) for g, variable in zip(gradients, variables, strict=True)]


class Replicas:
    """The contexts of all towers' copies of a function, one for each slice."""

    def __init__(
        self,
        builder: Any,
        slices: Sequence[Slice],
        analysis: FunctionAnalysis,
        own: dict[int, Any] | None = None,
        added: Mapping[Any, str | None] | None = None,
        copies: WeightCopies = (),
    ):
        """Make the contexts.

        Args:
            builder: the `TowerBuilder`.
            slices: one for each tower; the last towers may have none.
            analysis: of the function.
            own: see `ReplicaContext`.
            added: policies of the losses that layers add.
            copies: of weights.
        """
        check_devices([*builder.devices, builder.gather_device])
        self.builder, self.analysis, self.own, self.added = builder, analysis, own, added or {}
        self.copies = copies
        self.moments, self.sync_group = _moments_of(builder), None
        if len(slices) > 1:
            counts = [part.count for part in slices]
            self.sync_group = SyncGroup(counts, builder.devices[: len(slices)])
        self.weight_broadcast = cross_host.WeightBroadcast(builder.devices)
        self.contexts = [ReplicaContext(self, i, part) for i, part in enumerate(slices)]

    def __iter__(self) -> Iterator[ReplicaContext]:
        """Yield each tower's context for a pass, then exchange what BatchNorm needs of all."""
        if self.sync_group:
            self.sync_group.is_open = True
        yield from self.contexts
        if self.sync_group:
            if any(replica.rng.num_guessed for replica in self.contexts):
                self.builder.warn([diagnostics.UNFORESEEN_DRAW])
            # What could not be checked is said when towers could do it: else they have raised why.
            self.builder.warn(self.analysis.lines)
            self.sync_group.join(self.builder.gather_device)

    @property
    def scopes(self) -> list[ReplicaScope]:
        """Scopes of the towers' last calls."""
        return [replica.scope for replica in self.contexts if replica.scope]


def call_copies(
    builder: Any,
    fn: Callable,
    slices: Sequence[Slice],
    batch: Sequence[Any],
    to_join: Any = None,
    note: Callable[[Sequence[ReplicaScope]], None] | None = None,
    copies: WeightCopies = (),
) -> list[Any]:
    """Call `fn` on each slice, make all towers' assignments once, and return the results.

    Args:
        builder: the `TowerBuilder`.
        fn: the towers' function.
        slices: of the batch.
        batch: the arguments of `fn`.
        to_join: the `PythonValues` of results that will be joined: they are taken out of these, and
            padding rows are removed; the losses that layers add are joined and added to the layers.
        note: called with the towers' scopes before their assignments are made.
        copies: of weights.
    """
    options = {"num_slices": len(builder.devices), "backward": tf_internals.is_recording()}
    analysis = builder.analyze(fn, *batch, **options)
    added_too = analysis.policies if to_join else None
    replicas = Replicas(builder, slices, analysis, added=added_too, copies=copies)
    fn, sides, added = tf_internals.converted_as_here(fn), [], []
    fn = to_join.taken_from(fn) if to_join else fn

    def on_tower(replica: ReplicaContext) -> Any:
        result, side = replica.call(fn)
        if to_join:
            result = replica.unpadded(result)
            added.append(replica.unpadded(replica.added_losses()))
        sides.append(replica.unpadded(side))
        return result

    results = builder.run(on_tower, replicas)
    scopes = replicas.scopes
    if not scopes:  # nothing was split, and nothing is assigned
        return results
    if note:
        note(scopes)
    assign(builder, scopes, analysis.policies)
    analysis.side_outputs.assign(builder.gather(gather.join, sides), batch)
    if to_join:
        added_losses.add_to_layers(scopes[0], builder.gather(gather.join, added))
    return results


def _master(weight: Any) -> tf.Variable:
    return weight.value if isinstance(weight, keras.Variable) else weight


def _moments_of(builder: Any) -> str:
    # Eager towers run one after the other and cannot exchange moments.
    eager = tf.executing_eagerly() and not builder.jit_compile
    return "local" if eager else builder.batch_norm


def assigned(scopes: Iterable[ReplicaScope]) -> list[Any]:
    """Return the Keras variables that the towers' scopes assign, each once."""
    return list({id(v): v for scope in scopes for v in scope.assigned()}.values())


def assign(builder: Any, scopes: Sequence[ReplicaScope], policies: dict[int, str]) -> None:
    """Make the assignments that the towers' scopes have recorded; see `assign_once`.

    Args:
        builder: the `TowerBuilder`.
        scopes: of the towers, closed.
        policies: see `assign_once`.
    """
    if builder.checks.observe:
        builder.checks.observe(scopes)
    ids = set(map(id, assigned(scopes)))
    if _moments_of(builder) != builder.batch_norm and len(builder.devices) > 1:
        if any(ids & scope.averages for scope in scopes):
            builder.warn([diagnostics.LOCAL_BATCH_NORM])
    with tf.device(builder.gather_device), tf.name_scope("gather"):
        unknown = assign_once(scopes, policies)
    builder.warn(map(diagnostics.unknown_aggregation, unknown))


def integers_on(device: str) -> contextlib.AbstractContextManager:
    """Make Keras' ops compute int32 tensors as int64 on a GPU: int32 ops run on the host."""
    if not device_types.is_gpu(device):
        return contextlib.nullcontext()

    def make(name: str) -> Callable:
        def wide(value: Any) -> Any:
            if not tf.is_tensor(value) or value.shape.rank == 0:  # a scalar is of a shape: the host
                return value
            if name == "signbit" and value.dtype.is_floating:  # Keras computes it by an int32
                value = tf.bitcast(tf.cast(value, tf.float32), tf.int32)
            return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value

        def patch(keras_op: Callable) -> Callable:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = keras_op(*map(wide, args), **kwargs)
                if name == "take" and tf.is_tensor(args[0]):  # rows of a table have its type
                    result = tf.cast(result, args[0].dtype)
                return result

            return call

        return patch

    return tf_internals.patch_integer_ops(make)
