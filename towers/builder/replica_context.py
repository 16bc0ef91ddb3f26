"""The context in which a tower's copy of a function runs, and which makes the copies exact.

`TowerBuilder` calls a function once for each tower. This module makes N calls compute what one call
with the whole batch computes; it also has what `map`, `sum` and `concat` run:

| in a tower | by |
|---|---|
| a random op returns the slice's rows of the batch's numbers | `rng` |
| BatchNorm computes its moments over all towers' examples | `batch_norm` |
| assignments and added losses are recorded, combined, and made once | `replica_scope` |
| attributes of layers get the values of one call | `attributes` |
| variables of other machines and GPUs are sent once, also to XLA's programs | this module |
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import batch_norm, function_analysis, gather, replica_scope
from towers.builder.batch_norm import SyncGroup
from towers.builder.device_names import check_devices, is_device, is_gpu, machine_of
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.gather import grouped, pack, unpack
from towers.builder.replica_scope import ReplicaScope, assign_once, variables_refused
from towers.builder.rng import ReplicaRng, functions_inlined
from towers.builder.sharding import Slice

# (weight, what each tower reads in its place: a tensor or a `tf.Variable` on the tower's device).
WeightCopies = Sequence[tuple[keras.Variable, Sequence[Any]]]


class ReplicaContext:
    """The context of one tower's copy, for the forward and the backward pass.

    A later pass continues the random numbers and the exchanges of the pass before.

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
        """Set the number of the tower and its slice; `replicas` are the contexts of all towers.

        Args:
            replicas: the contexts of all towers.
            tower: its number.
            part: its slice.
        """
        builder, self._replicas = replicas.builder, replicas
        self.tower, self.device, self.name = tower, builder.devices[tower], f"tower_{tower}"
        self.part, self.own = part, replicas.own
        self.copies = {id(v): values[tower] for v, values in replicas.copies}
        self._copied = [(_master(v), values[tower]) for v, values in replicas.copies]
        self.by_xla = builder.jit_compile and replicas.own is not None
        self.rng = ReplicaRng(part.rows, replicas.analysis.draws, builder.jit_compile, self.device)
        self.prefetch = VariablePrefetch(self.device)
        self._sync = replicas.sync_group.handles[tower] if replicas.sync_group else None

    @contextlib.contextmanager
    def replaced(self) -> Iterator[ReplicaScope]:
        """Patch Keras and TensorFlow in the block; yield the scope that records assignments."""
        mode, own = self._replicas.builder.batch_norm, self.copies | (self.own or {})
        with (
            self.rng.drawing(),
            self._replicas.weight_broadcast.on(self.device),
            ReplicaScope(own, self.device, self.prefetch.prefetch) as scope,
            batch_norm.over_all_towers(self._sync, mode, self.device),
            functions_inlined(read_outside),
            tf_internals.convolve_without_xla(),
            integers_on(self.device),
            contextlib.nullcontext()
            if is_gpu(self.device)
            else tf_internals.bias_gradients_alone(),
            contextlib.nullcontext() if self.own is None else variables_refused(),
        ):
            yield scope

    def call(self, fn: Callable) -> tuple[Any, list[Any]]:
        """Call `fn` on the slice; return its result, and the tensors that it sets as attributes."""
        if self.own is None and self.part.rows is None:  # nothing was split: it is just copied
            return fn(*self.part.batch), []
        fn, rows = self._replicas.analysis.side_outputs.wrap(fn), self.part.rows
        with self.replaced() as self.scope:
            with replica_scope.record_losses(self.scope, rows, self._replicas.added):
                returned = fn(*self.part.batch)
        self.scope.close(self.part.count)
        return returned

    def added_losses(self) -> list[tf.Tensor]:
        """Return the losses that layers have added in the last call, as rows to be joined."""
        if self.scope is None:
            return []
        return replica_scope.as_rows(self.scope, self.part.rows, self._replicas.added)

    def compiled(self, compute: Callable) -> Any:
        """Return the tensors that `compute` returns, compiled by XLA with `jit_compile`."""
        if not self.by_xla:
            return compute()

        def program() -> tuple[Any, list[tf.Tensor]]:
            results = compute()
            self.scope.apply_deferred()  # which reads the moving averages
            return results, [value for _, value in self.scope.updates.values()]

        results, assigned = compiled_by_xla(program)
        updates = self.scope.updates
        for (key, (variable, _)), value in zip(updates.items(), assigned, strict=True):
            updates[key] = variable, value
        return results

    def read_variables(self) -> list[tf.Variable]:
        """Return the variables that the last forward pass has read; of copies the masters."""
        own = {id(copy): master for master, copy in self._copied}
        sent = [master for master, copy in self._copied if isinstance(copy, tf.Tensor)]
        return [own.get(id(v), v) for v in self.tape.watched_variables()] + sent

    def sources(self, variables: Sequence[Any]) -> list[Any]:
        """Return what the tower's tape knows in place of variables: their copies, if any."""
        copies = {id(master): copy for master, copy in self._copied}
        return [copies.get(id(v), v) for v in variables]

    def unpadded(self, structure: Any) -> Any:
        """Return results of the slice without padding rows."""
        return tf.nest.map_structure(self.part.unpadded, structure)

    def gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return gradients of masters; mark the sparse ones that have the same rows in each tower.

        They are zeros if the tower has no example: those of padding may be NaN. With the builder's
        `dense_gradients` sparse ones become dense where that has fewer bytes.

        Args:
            gradients: of the tower.
            variables: the masters, in the same order.
        """
        static, builder = self._replicas.analysis.static_rows, self._replicas.builder
        if self.part.may_be_empty():
            used = self.part.count > 0
            zeroed = lambda x: tf.math.multiply_no_nan(x, tf.cast(used, x.dtype))  # noqa: E731
            gradients = [gather.map_values(zeroed, gradient) for gradient in gradients]

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
        self.copies, self.sync_group = copies, None
        if len(slices) > 1:
            counts = [part.count for part in slices]
            self.sync_group = SyncGroup(counts, builder.devices[: len(slices)])
        self.weight_broadcast = WeightBroadcast(builder.devices)
        self.contexts = [ReplicaContext(self, i, part) for i, part in enumerate(slices)]

    def __iter__(self) -> Iterator[ReplicaContext]:
        """Yield each tower's context for a pass, then exchange what BatchNorm needs of all."""
        if self.sync_group:
            self.sync_group.is_open = True
        yield from self.contexts
        if self.sync_group:
            if any(replica.rng.num_guessed for replica in self.contexts):
                self.builder.warn([function_analysis.UNFORESEEN_DRAW])
            # What could not be checked is said when towers could do it: else they have raised why.
            self.builder.warn(self.analysis.lines)
            self.sync_group.join(self.builder.gather_device)
        for replica in self.contexts:
            replica.prefetch.join()


def call_copies(
    builder: Any, fn: Callable, slices: Sequence[Slice], batch: Sequence[Any]
) -> list[Any]:
    """Call `fn` on each slice of `batch`, make the assignments once, and return the results.

    Args:
        builder: of the towers.
        fn: the tower function.
        slices: one for each tower that has rows.
        batch: the whole arguments.
    """
    options = {"num_slices": len(builder.devices), "backward": tf_internals.is_recording()}
    analysis = builder.analyze(fn, *batch, **options)
    replicas, sides = Replicas(builder, slices, analysis), []
    fn = tf_internals.converted_as_here(fn)

    def on_tower(replica: ReplicaContext) -> Any:
        result, side = replica.call(fn)
        sides.append(replica.unpadded(side))
        return result

    results = builder.run(on_tower, replicas)
    scopes = [replica.scope for replica in replicas.contexts if replica.scope]
    if scopes:  # else nothing was split, and nothing is assigned
        assign(builder, scopes, analysis.policies)
        analysis.side_outputs.assign(builder.gather(gather.join, sides), batch)
    return results


def _master(weight: Any) -> tf.Variable:
    return weight.value if isinstance(weight, keras.Variable) else weight


def assign(builder: Any, scopes: Sequence[ReplicaScope], policies: dict[int, str]) -> None:
    """Make the assignments that the towers' closed scopes have recorded; see `assign_once`."""
    if builder.checks.observe:
        builder.checks.observe(scopes)
    with tf.device(builder.gather_device), tf.name_scope("gather"):
        unknown = assign_once(scopes, policies)
    builder.warn([function_analysis.UNKNOWN_AGGREGATION.format(v.path) for v in unknown])


def integers_on(device: str) -> tf_internals.Block:
    """Make Keras' ops compute int32 tensors as int64 on a GPU: int32 ops run on the host.

    Embedding calls `take`, argmax `signbit`.
    """

    def wide(name: str, value: Any) -> Any:
        if not tf.is_tensor(value) or value.shape.rank == 0:  # a scalar is of a shape: the host
            return value
        if name == "signbit" and value.dtype.is_floating:  # Keras computes it by an int32
            value = tf.bitcast(tf.cast(value, tf.float32), tf.int32)
        return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value

    def make(name: str) -> Callable:
        def call(keras_op: Callable, *args: Any, **kwargs: Any) -> Any:
            result = keras_op(*(wide(name, value) for value in args), **kwargs)
            if name == "take" and tf.is_tensor(args[0]):  # rows of a table have its type
                result = tf.cast(result, args[0].dtype)
            return result

        return lambda keras_op: functools.partial(call, keras_op)

    return tf_internals.patch_integer_ops(make) if is_gpu(device) else contextlib.nullcontext()


# Reads of variables across devices and machines, with as few transfers as possible. XLA cannot read
# a variable on another device, as masters are: what a compiled program reads is read outside of it,
# once, and passed in as a tensor.


def compiled_by_xla(compute: Callable) -> Any:
    """Compile a function without arguments by XLA; return the structure of tensors that it does."""
    with read_outside():
        # Of a partial TensorFlow does not say that it is traced too often, as each time it must be.
        return tf.function(functools.partial(compute), jit_compile=True, autograph=False)()


@contextlib.contextmanager
def read_outside() -> Iterator[None]:
    """Make functions that the block calls read variables outside, on the block's device."""
    eager, graph = tf.executing_eagerly(), tf.compat.v1.get_default_graph()
    outside, values = tf.init_scope if eager else graph.as_default, {}

    def read(variable: tf.Variable, original: Callable) -> tf.Tensor:
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph() is graph:
            return original(variable)
        if id(variable) not in values:
            with outside():
                values[id(variable)] = tf.identity(original(variable))
        return values[id(variable)]

    with tf_internals.patch_reads(read):
        yield


class WeightBroadcast:
    """Reads of variables on other machines, for the towers of a traced step."""

    def __init__(self, devices: Sequence[str]):
        """Set the towers' devices; nothing is read yet."""
        self._graph = tf.compat.v1.get_default_graph()
        self._first = {machine_of(device): device for device in reversed(devices)}
        self._copies: dict[tuple[str, int], tf.Tensor] = {}

    def on(self, device: str) -> tf_internals.Block:
        """Make reads in the block, for the tower on `device`, use its machine's one copy."""
        machine = machine_of(device)
        if tf.executing_eagerly() or not machine:
            return contextlib.nullcontext()

        def read(variable: tf.Variable, original: Callable) -> tf.Tensor:
            inside = tf.compat.v1.get_default_graph() is not self._graph  # of a loop, a branch
            if inside or machine_of(variable.device) == machine:
                return original(variable)
            key = machine, id(variable)
            if key not in self._copies:
                value = original(variable)
                with tf.device(self._first[machine]):
                    self._copies[key] = _stand_in(value)
            with tf.device(device):
                return tf.identity(self._copies[key])

        return tf_internals.patch_reads(read)


class VariablePrefetch:
    """Reads of untrained variables on other devices, for a tower on a GPU, as one transfer."""

    def __init__(self, device: str):
        """Set the tower's device; nothing is read yet."""
        self._device, self._graph = device, tf.compat.v1.get_default_graph()
        self._reads: dict[int, tuple[tf.Variable, tf.Tensor]] = {}

    def prefetch(self, variable: tf.Variable) -> tf.Tensor | None:
        """Return a stand-in for a variable's value, None if reading it costs no transfer."""
        packs = variable.dtype.is_floating or variable.dtype in (tf.int64, tf.uint32)
        if variable.trainable or not packs or not is_gpu(self._device):
            return None
        here = is_device(variable.device, self._device)
        if here or tf.executing_eagerly() or tf.compat.v1.get_default_graph() is not self._graph:
            return None
        if id(variable) not in self._reads:
            stand_in = _stand_in(tf.zeros(variable.shape, variable.dtype))
            self._reads[id(variable)] = variable, stand_in
        return self._reads[id(variable)][1]

    def join(self) -> None:
        """Replace the stand-ins by the packed values."""
        reads = list(self._reads.values())
        for group in grouped(reads, lambda read: (read[0].device, read[0].dtype)):
            variables, stand_ins = zip(*group, strict=True)
            with tf.device(variables[0].device), tf.name_scope("fetch"):
                packed = pack([tf.convert_to_tensor(variable) for variable in variables])
            with tf.device(self._device), tf.name_scope("fetch"):
                values = unpack(packed, variables)
            for stand_in, value in zip(stand_ins, values, strict=True):
                tf_internals.set_input(stand_in.op, value)
        self._reads.clear()


def _stand_in(value: tf.Tensor) -> tf.Tensor:
    # An op that TensorFlow keeps and does not fold: else each tower would fetch the value, and a
    # shape that is computed from it would be that of the zeros.
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)
