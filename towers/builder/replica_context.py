"""The context in which a tower's copy of a function runs, and which makes the copies exact.

The pattern in `tower` calls a function once for each tower. That N calls compute what one call of
the whole batch computes is the work of this module, and of nothing else in the pattern:

| in a tower | by |
|---|---|
| a draw gives the numbers of the slice's rows of the batch's draw | `draws` |
| BatchNorm takes its moments over all towers' examples | `batch_norm`, by `exchange` |
| what is assigned is recorded, and assigned once for all towers | `assignments`, `merging` |
| losses that layers add stand for the whole batch | `added_losses` |
| attributes of layers are those that one call leaves | `attributes` |
| variables of other machines and GPUs come once | `machines` |
| inner functions are inlined, or the copy is compiled by XLA | `xla` |
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import (
    added_losses,
    batch_norm,
    cross_host,
    device_types,
    diagnostics,
    exactness_checks,
    gather,
    xla,
)
from towers.builder.function_analysis import FunctionAnalysis, parts_of, rehearse
from towers.builder.replica_scope import ReplicaScope, variables_refused
from towers.builder.rng import ReplicaRng
from towers.builder.sharding import Slice, check_devices, is_split
from towers.builder.sync import SyncGroup
from towers.builder.variable_aggregation import assign_once

_PATIENCE_SECONDS = 10.0
_NUM_KEPT = 4  # functions, of a training and its evaluation
_NUM_TRIED = 8  # functions, whose trials are not made again


class ReplicaContext:
    """The context of one tower's copy; it lasts through the forward and the backward pass.

    Enter it around each pass, on the tower's device: a later pass draws and exchanges values where
    the one before has ended. `name` is of the scope of its ops. `own` is {id of a Keras variable:
    what the tower reads in its place}; None, as of `map`, if the function may make variables, and
    assign any, of its own.
    """

    scope: ReplicaScope | None = None  # records what the last call has assigned

    def __init__(self, replicas: "Replicas", tower: int, part: Slice):
        """Set the tower and its slice; `replicas` are the contexts that this is one of."""
        builder, exchange = replicas.builder, replicas.exchange
        self.tower, self.device, self.name = tower, builder.devices[tower], f"tower_{tower}"
        self.part, self.own = part, replicas.own
        self.by_xla = builder.jit_compile and replicas.own is not None
        self.draws = ReplicaRng(part.rows, replicas.found.draws, builder.jit_compile, self.device)
        self._replicas = replicas
        self._sync = exchange.handle(tower, self.by_xla) if exchange else None

    def __enter__(self) -> "ReplicaContext":
        """Draw by example, and read other machines' variables once for all towers of this one."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.draws.drawing())
            stack.enter_context(self._replicas.reads.on(self.device))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the pass."""
        self._stack.__exit__(*error)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[ReplicaScope]:
        """Replace, in the block, what Keras and TensorFlow would do as if there were one tower.

        Yields:
            The scope that records assignments.
        """
        prefetch = self._sync.prefetch if self._sync and not self.by_xla else None
        with contextlib.ExitStack() as stack:
            scope = stack.enter_context(ReplicaScope(self.own, self.device, prefetch=prefetch))
            moments = self._replicas.moments
            stack.enter_context(batch_norm.over_all_towers(self._sync, moments, self.device))
            stack.enter_context(tf_internals.inline_functions(xla.read_outside))
            stack.enter_context(integers_on(self.device))
            if self.own is not None:
                stack.enter_context(variables_refused())
            yield scope

    def call(self, fn: Callable) -> tuple[Any, list[Any]]:
        """Call `fn` on the slice; return the result, and tensors that it leaves in attributes."""
        if self.own is None and self.part.rows is None:  # nothing was split: it is just copied
            return fn(*self.part.batch), []
        fn, rows = self._replicas.found.side_outputs.around(fn), self.part.rows
        with self.replaced() as self.scope:
            with added_losses.record_losses(self.scope, rows, self._replicas.added):
                returned = fn(*self.part.batch)
        self.scope.close(self.part.count)
        return returned

    def added_losses(self) -> list[tf.Tensor]:
        """Return the losses that layers have added in the last call, as rows to be joined."""
        if self.scope is None:
            return []
        return added_losses.left_in(self.scope, self.part.rows, self._replicas.added)

    def compiled(self, compute: Callable, on_read: Callable = lambda *_: None) -> Any:
        """Call `compute`, which returns a structure of tensors, by XLA with `jit_compile`."""
        if not self.by_xla:
            return compute()

        def program() -> tuple[ReplicaScope, Any]:
            results = compute()
            return self.scope, results

        return xla.compiled(program, on_read)[1]

    def kept(self, structure: Any) -> Any:
        """Return results of the slice without the rows that stand in for no example."""
        return tf.nest.map_structure(self.part.kept, structure)

    def close(self, count: Any) -> ReplicaScope:
        """Return the scope of the last call; `count` is that of examples if the slice has none."""
        self.scope.count = self.part.count if isinstance(self.part.count, int) else count
        return self.scope

    def zero_if_empty(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients, zeros if the tower has no example: a mean over none has given NaN."""
        if not self.part.may_be_empty():
            return list(gradients)
        return [gather.zero_if_empty(g, self.part.count) for g in gradients]

    def gradients(self, found: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the tower's gradients without those that are new values, which `scope` records."""
        found = self.scope.without_new_values(found, variables)
        return gather.mark_static_rows(found, variables, self._replicas.found.fixed_rows)


class Replicas:
    """The contexts of all towers' copies of a function, for one slice each."""

    def __init__(
        self,
        builder: Any,
        slices: Sequence[Slice],
        found: FunctionAnalysis,
        own: dict[int, Any] | None = None,
        added: Sequence[added_losses.AddedLoss] = (),
    ):
        """Set the towers' slices, of which the last may have none, and the function's rehearsal.

        `own` is that of each `ReplicaContext`; `added` are the losses that layers add.
        """
        check_devices([*builder.devices, builder.gather_device])
        self.builder, self.found, self.own, self.added = builder, found, own, added
        self.moments, self.exchange = _moments_of(builder), None
        if len(slices) > 1:
            counts = [part.count for part in slices]
            self.exchange = SyncGroup(counts, builder.devices[: len(slices)])
        self.reads = cross_host.WeightBroadcast(builder.devices)
        self._contexts = [ReplicaContext(self, i, part) for i, part in enumerate(slices)]

    def __iter__(self) -> Iterator[ReplicaContext]:
        """Yield each tower's context for a pass; after the last, give them what they exchange."""
        if self.exchange:
            self.exchange.is_open = True
        yield from self._contexts
        if self.exchange:
            if any(replica.draws.num_guessed for replica in self._contexts):
                self.builder.tell([diagnostics.UNFORESEEN_DRAW])
            self.exchange.join(self.builder.gather_device)
        self.reads.join()

    @property
    def scopes(self) -> list[ReplicaScope]:
        """The scopes of the towers' last calls."""
        return [replica.scope for replica in self._contexts if replica.scope]


def call_copies(
    builder: Any,
    fn: Callable,
    slices: Sequence[Slice],
    batch: Sequence[Any],
    to_join: bool = False,
    before: dict[int, tuple[tf.Variable, tf.Tensor]] | None = None,
) -> list[Any]:
    """Call `fn` on each slice; return the results, and make the assignments of all once.

    With `to_join`, what stands in for no example is left out, and the losses that layers add are
    joined, and added to the layers. `before` gets {id of a Keras variable: (its `tf.Variable`, its
    value before)} of what is assigned, unless it has that.
    """
    found = builder.rehearse(fn, *batch, num_slices=len(builder.devices))
    replicas = Replicas(builder, slices, found, added=found.added if to_join else ())
    fn, left, added = tf_internals.converted_as_here(fn), [], []

    def on_tower(replica: ReplicaContext) -> Any:
        result, beside = replica.call(fn)
        if to_join:
            result = replica.kept(result)
            added.append(replica.kept(replica.added_losses()))
        left.append(replica.kept(beside))
        return result

    results = builder.run(on_tower, replicas)
    scopes = replicas.scopes
    if not scopes:  # nothing was split, and nothing is assigned
        return results
    for variable in () if before is None else assigned(scopes):
        if id(variable) not in before:
            before[id(variable)] = variable.value, tf.identity(variable.value)
    assign(builder, scopes, found.policies)
    found.side_outputs.leave(builder.gather(gather.join, left), batch)
    if to_join:
        added_losses.add_to_layers(scopes[0], builder.gather(gather.join, added))
    return results


class FunctionAnalyses:
    """Analyses functions that a builder copies, keeps the last ones, and reports doubts."""

    def __init__(self, num_slices: int, on_doubt: Callable[[str], None]):
        """Set into how many slices batches are split, and who is told."""
        self._num_slices, self._on_doubt = num_slices, on_doubt
        self._told: set[str] = set()
        self._kept: list[tuple[list[Any], FunctionAnalysis]] = []  # the newest first, as the next
        self._tried: list[FunctionAnalysis] = []

    def rehearse(
        self, fn: Callable, *batch: Any, num_slices: int | None = None, silent: bool = False
    ) -> FunctionAnalysis:
        """Find out what a tower function does with its examples; doubts go to `on_doubt`, once.

        The builder's methods do so by themselves, and what was found is kept, also for a function
        that is made anew of the same code around the same model. Values that are known are tried,
        else made-up ones of their type and shape.

        Args:
            fn: the function.
            *batch: its arguments.
            num_slices: of the batch, by default as `gradients` splits it; one needs no analysis.
            silent: tell nothing yet: the function may not come to run on towers.
        """
        tf_internals.refuse_fork()
        if (num_slices or self._num_slices) == 1 or not is_split(batch):
            return FunctionAnalysis()
        parts = parts_of(fn, batch)
        same = (
            rehearsal
            for before, rehearsal in self._kept
            if len(parts) == len(before) and all(map(_is_same, parts, before))
        )
        found = next(same, None)
        if found is None:
            line = "waiting     the model is tried on a few examples, before its towers are made"
            options = {"file": sys.stderr, "flush": True}
            timer = threading.Timer(_PATIENCE_SECONDS, print, [line], options)
            timer.daemon = True
            timer.start()
            try:
                found = rehearse(fn, batch)
            finally:
                timer.cancel()
            self._kept = [(parts, found), *self._kept[: _NUM_KEPT - 1]]
        if not silent:
            self.tell(found.doubts)
        return found

    def try_out(self, found: FunctionAnalysis) -> None:
        """Report what examples of a rehearsed function have from others, or from their place."""
        if not any(found is other for other in self._tried):
            self._tried = [found, *self._tried[:_NUM_TRIED]]
            self.tell(exactness_checks.find_by_trials(found))

    def tell(self, lines: Iterable[str]) -> None:
        """Report lines that have not been reported yet."""
        for line in lines:
            if line not in self._told:
                self._told.add(line)
                self._on_doubt(line)


def _is_same(a: Any, b: Any) -> bool:
    # Tensors cannot be compared by ==.
    return a is b or (isinstance(a, str | int | float) and type(a) is type(b) and a == b)


def _moments_of(builder: Any) -> str:
    """Return "local" for towers that run eagerly, as these wait for no other, else the mode."""
    alone = tf.executing_eagerly() and not builder.jit_compile
    return "local" if alone else builder.batch_norm


def assigned(scopes: Iterable[ReplicaScope]) -> list[Any]:
    """Return the Keras variables that the towers' scopes assign, each once."""
    return list({id(v): v for scope in scopes for v in scope.assigned()}.values())


def assign(builder: Any, scopes: Sequence[ReplicaScope], policies: dict[int, str]) -> None:
    """Make the assignments that the scopes of a builder's towers record; see `assign_once`."""
    found = {id(v): v for v in assigned(scopes)}
    if _moments_of(builder) != builder.batch_norm and len(builder.devices) > 1:
        if any(found.keys() & scope.averages for scope in scopes):
            builder.tell([diagnostics.LOCAL_BATCH_NORM])
    with tf.device(builder.gather_device), tf.name_scope("gather"):
        unknown = assign_once(scopes, policies)
    builder.tell(map(diagnostics.not_put_together, unknown))


def integers_on(device: str) -> contextlib.AbstractContextManager:
    """Make Keras' ops take int64 on a GPU, which leaves int32 to the host."""
    if not device_types.is_gpu(device):
        return contextlib.nullcontext()
    return tf_internals.patch_integer_ops(lambda name: functools.partial(_by_int64, name))


def _by_int64(name: str, own: Callable) -> Callable:
    def wide(value: Any) -> Any:
        if not tf.is_tensor(value) or value.shape.rank == 0:  # single ones are of shapes: the host
            return value
        if name == "signbit" and value.dtype.is_floating:  # which Keras takes of an int32, too
            value = tf.bitcast(tf.cast(value, tf.float32), tf.int32)
        return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value

    def call(*args: Any, **kwargs: Any) -> Any:
        result = own(*map(wide, args), **kwargs)
        if name == "take" and tf.is_tensor(args[0]):  # rows of a table have its type
            result = tf.cast(result, args[0].dtype)
        return result

    return call
