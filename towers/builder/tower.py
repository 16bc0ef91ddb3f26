"""The tower pattern: copies of one function on several devices, gathered with `add_n`.

    builder = TowerBuilder(["/gpu:0", "/gpu:1"], gather_device="/cpu:0")

    @tf.function
    def train_step(images, labels):
        def loss_fn(images, labels):                 # runs once a tower, on its slice
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))

        loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

A tower function may be called several times in one trace: once for each tower, and before that on
made-up examples, to learn what it does with each. It creates no variables and assigns to no
`tf.Variable`; what it assigns to Keras variables is caught, and assigned once.

The pattern is all here. `replica_context` makes N copies compute what one call computes, `gather`
has the ways to add and to join, and `joined` lets a tape go through what `concat` joins.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towers.builder import gather, joined, losses, machines, splitting
from towers.builder.batch_norm import check_mode
from towers.builder.kinds import HOST, is_gpu
from towers.builder.losses import TowerSums
from towers.builder.merging import with_new_values
from towers.builder.replica_context import FunctionAnalyses, ReplicaContext, Replicas, assign
from towers.builder.splitting import Slice


class Forward:
    """A copy's forward pass, under its tape; `backward` goes back through it."""

    def __init__(self, replica: ReplicaContext, call: Callable, variables: Any = None):
        """Make `call(tape)`, which returns (results, tensors to go back from).

        One can go back to `variables` once; if it is None, to all that is read, again and again.
        """
        self.replica, often = replica, variables is None
        with tf.GradientTape(often, watch_accessed_variables=often) as self.tape:
            self.tape.watch(variables or ())
            self.results, self.outputs = call(self.tape)

    def backward(self, upstream: Any, sources: Sequence[Any]) -> list[Any]:
        """Return the gradients of sources; `upstream` are those of the outputs, None for ones."""
        with self.replica.replaced():  # layers may be called again
            return self.tape.gradient(self.outputs, sources, upstream)


class TowerBuilder:
    """Copies functions onto devices and gathers their results.

    Every tensor of a `batch` (any `tf.nest` structure) is split along axis 0, one slice for each
    tower; where the number of examples does not divide, the first towers get one more. A `PerTower`
    is not split. Without a batch the function is just copied.

        builder = towers.TowerBuilder(["/cpu:0", "/cpu:1"])
        norm = builder.sum(lambda x: tf.reduce_sum(x * x), tf.ones([3, 2]))
    """

    forward = Forward

    def __init__(
        self,
        devices: Sequence[str],
        gather_device: str = "/cpu:0",
        *,
        batch_norm: str = "sync",
        accumulate_steps: int = 1,
        gather_at_variables: bool = False,
        jit_compile: bool = False,
        on_doubt: Callable[[str], None] = warnings.warn,
    ):
        """Set where the towers run and where their results are gathered.

        Args:
            devices: one TensorFlow device for each tower; a device may hold several towers.
            gather_device: the device of splitting, summing and joining.
            batch_norm: what BatchNorm's moments are taken over: "sync" all towers' examples, in a
                `tf.function` (else each tower's, with a warning); "local" the tower's own slice.
            accumulate_steps: `gradients`, and `concat` under a tape, take the batch in so many
                parts, one after the other, each split over the towers: less memory, the same sums.
            gather_at_variables: gather each gradient where its variable lies.
            jit_compile: XLA compiles what these compute in a tower; BatchNorm must be local.
            on_doubt: is told of what several towers may not compute as one device does.

        Raises:
            ValueError: an argument is out of range, or `devices` a string.
        """
        self.devices, self.gather_device = splitting.as_devices(devices), gather_device
        check_mode(batch_norm)
        if accumulate_steps < 1:
            raise ValueError(f"accumulate_steps={accumulate_steps} must be at least 1")
        self.batch_norm, self.jit_compile = batch_norm, jit_compile
        self.accumulate_steps, self.gather_at_variables = accumulate_steps, gather_at_variables
        self.num_slices = len(self.devices) * accumulate_steps  # that `gradients` makes of a batch
        # Told of each tower's gradients (see `joined`), and of the Keras variables to be assigned.
        self.on_gradients: Callable[..., None] | None = None
        self.on_assign: Callable[[list[Any]], None] | None = None
        analyses = FunctionAnalyses(self.num_slices, on_doubt)
        self.rehearse, self.try_out, self.tell = analyses.rehearse, analyses.try_out, analyses.tell

    def map(self, fn: Callable, *batch: Any) -> list[Any]:
        """Return what `fn` returns for each tower, in tower order."""
        return self._run(fn, self.split(batch), batch)

    def sum(self, fn: Callable, *batch: Any) -> Any:
        """Return the sum over towers of what `fn` returns, by `add_n` on the gather device.

        `fn` may return any structure; `IndexedSlices` stay sparse, and `None` counts as nothing.
        """
        results = self._run(fn, splitting.occupied(self.split(batch)), batch)
        return self.gather(
            lambda values: self.add(machines.sums(values, self.devices, self.add)), results
        )

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return what the towers return, joined along axis 0 in tower order: that of the batch.

        A `tf.GradientTape` around it takes it for one op: each gradient goes back to the towers,
        and theirs are summed by `add_n`. So a loss of the joined outputs is exact, whatever it is:

            with tf.GradientTape() as tape:
                loss = any_loss(labels, builder.concat(model, images))
            gradients = tape.gradient(loss, model.trainable_variables)
        """
        return joined.concat(self, fn, batch)

    def gradients(
        self, loss_fn: Callable, variables: Iterable[Any], *batch: Any
    ) -> tuple:
        """Return the mean loss over all examples and its gradients.

        Towers return sums, the gather adds them, one division ends it: uneven slices weigh what
        they should. Keras variables that `loss_fn` assigns are assigned once, after all towers:
        as their `aggregation` says ("sum" of the towers' changes: metrics; "mean", weighted by
        examples; "only_first_replica"); the others as a rehearsal finds it (sums, means, running
        maxima and minima, counters of steps). What cannot be told goes to `on_doubt`.

        Args:
            loss_fn: maps a tower's slice of the batch to its losses, one for each example, `[b]`,
                or to `(losses, outputs)`, a tuple.
            variables: `keras.Variable`s, `tf.Variable`s or a mix. A `PerTower` of `keras.Variable`s
                is one variable with a copy for each tower: `loss_fn` uses the first, and each tower
                reads its own in its place.
            *batch: the global batch.

        Returns:
            The loss, a scalar, and a list like `variables`; then, if `loss_fn` returns any, the
            outputs, joined as by `concat`. The list holds tensors, `IndexedSlices` where all
            towers gave them, or None for a variable that no tower uses; `PerTower`s of these for
            copies, summed by collectives.

        Raises:
            ValueError: `variables` holds something else, or `loss_fn` breaks a rule (see above).
        """
        variables = list(variables)
        self.try_out(self.rehearse(loss_fn, *batch))
        sums = self.tower_sums(loss_fn, variables, *batch)
        loss, gradients = self.gather_sums(sums, variables)
        if isinstance(sums.outputs[0], tuple) and not sums.outputs[0]:
            return loss, gradients
        return loss, gradients, self.gather(gather.join, sums.outputs)

    def tower_sums(self, loss_fn: Callable, variables: Sequence[Any], *batch: Any) -> TowerSums:
        """Return what towers compute for `gradients`; `gather_sums` must follow: it assigns."""
        found = self.rehearse(loss_fn, *batch)
        losses.check_rehearsed(found.by_example)
        masters, totals, scopes, outputs, left = losses.masters_of(variables), [], [], [], []

        def on_tower(replica: ReplicaContext) -> tuple:
            own, replica.own = losses.variables_and_copies(variables, replica.tower)

            def call(_: tf.GradientTape) -> tuple:
                results = replica.call(losses.summed(loss_fn, replica.part))
                return results, results[0][:1]

            def compute() -> tuple:
                forward = Forward(replica, call, own)
                return forward.results, losses.gradients_of_sum(forward, own)

            ((loss, count, rest), beside), gradients = replica.compiled(compute)
            scopes.append(replica.close(count))
            outputs.append(replica.kept(rest))
            left.append(replica.kept(beside))
            return loss, replica.scope.count, replica.gradients(gradients, masters)

        slices = self.split(batch, self.accumulate_steps, never_empty=True)
        for own in splitting.rounds(slices, len(self.devices)):
            with gather.after(totals) if totals else contextlib.nullcontext():
                results = self.run(on_tower, Replicas(self, own, found, {}, found.added))
            totals = gather.add_to(totals, results, losses.places(self)) if totals else results
        sums, counts, gradients = map(list, zip(*totals, strict=True))
        sums = machines.sent_last(sums, gradients, self.devices)
        found.side_outputs.leave(self.gather(gather.join, left), batch)
        return TowerSums(sums, counts, gradients, scopes, found.policies, outputs)

    def gather_sums(self, sums: TowerSums, variables: Sequence[Any]) -> tuple[tf.Tensor, list[Any]]:
        """Return the mean loss and its gradients, as `gradients` does, from the towers' sums."""
        with tf.name_scope("gather"):
            loss, gradients = gather.means(sums, variables, losses.places(self, variables))
            gradients = with_new_values(gradients, losses.masters_of(variables), sums.scopes)
        assign(self, sums.scopes, sums.policies)
        return loss, gradients

    def split(
        self, batch: Sequence[Any], num_parts: int = 1, never_empty: bool = False
    ) -> list[Slice]:
        """Return each tower's slice of `batch`; with parts, those of one after the other's."""
        # Towers get their slices from where the batch is, which is not sent to a GPU as a whole.
        device = HOST if is_gpu(self.gather_device) else self.gather_device
        with tf.device(device), tf.name_scope("split"):
            return splitting.split(batch, len(self.devices), num_parts, never_empty)

    def run(self, fn: Callable, replicas: Replicas) -> list[Any]:
        """Return `fn(replica)` for each tower's context, made on the tower's device."""
        results = []
        for replica in replicas:
            with tf.device(replica.device), tf.name_scope(replica.name) as replica.name, replica:
                results.append(fn(replica))
        replicas.finish()
        return results

    def gather(self, policy: Callable, results: Sequence[Any]) -> Any:
        """Apply `policy` to the per-tower values, on the gather device."""
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return gather.map_towers(policy, results)

    @staticmethod
    def add(values: Sequence[Any]) -> Any:
        """Return the sum of towers' values; None counts as nothing, sparse ones stay sparse."""
        values = [value for value in values if value is not None]
        if all(isinstance(value, int | tf.IndexedSlices) for value in values):
            return gather.add_other(values)
        # The name makes add_n move a single value to the gather device too.
        return tf.add_n([tf.convert_to_tensor(value) for value in values], name="AddN")

    def _run(self, fn: Callable, slices: Sequence[Slice], batch: Sequence[Any]) -> list[Any]:
        """Return what `fn` returns for each slice; make the assignments of all once."""
        found = self.rehearse(fn, *batch, num_slices=len(self.devices))
        replicas, left = Replicas(self, slices, found), []

        def on_tower(replica: ReplicaContext) -> Any:
            result, beside = replica.call(fn)
            left.append(replica.kept(beside))
            return result

        results = self.run(on_tower, replicas)
        replicas.leave(left, batch)
        return results
