"""The tower pattern: copies of one function on several devices, gathered with `add_n`.

    builder = TowerBuilder(["/gpu:0", "/gpu:1"], gather_device="/cpu:0")

    @tf.function
    def train_step(images, labels):
        def loss_fn(images, labels):                 # runs once a tower, on its slice
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))

        loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

The rules of a tower function: it may be called several times in one trace, once for each tower, and
before that on made-up examples, to learn what it does with each of them; it creates no variables;
it assigns to no `tf.Variable`. Keras variables it may assign (BatchNorm statistics, seeds,
metrics): those assignments are caught, and each is made once.

The pattern is all in this file. `replica_context` makes N copies compute what one call computes;
`gather` has the ways of adding and joining; `joined` lets a tape go through what `concat` joins.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder import added_losses, gather, joined, losses, machines
from towers.builder.batch_norm import check_mode
from towers.builder.kinds import HOST, is_gpu
from towers.builder.losses import TowerSums
from towers.builder.merging import with_new_values
from towers.builder.replica_context import FunctionAnalyses, ReplicaContext, Replicas, assign
from towers.builder.splitting import (
    PerTower,
    Slice,
    as_devices,
    is_empty,
    is_split,
    occupied,
    split,
)


class Forward:
    """A copy's forward pass, under its tape: `backward` goes back through it."""

    def __init__(
        self, replica: ReplicaContext, call: Callable, variables: Sequence[Any] | None = None
    ):
        """Make the pass.

        Args:
            replica: the context of the tower's copy.
            call: maps the tape to (what the copy returns, tensors to go back from).
            variables: those of the gradients, to go back once; None: all that are read, and what
                `call` watches, to go back as often as one likes.
        """
        self.replica, by_itself = replica, variables is None
        with tf.GradientTape(by_itself, watch_accessed_variables=by_itself) as self.tape:
            self.tape.watch(variables or ())
            self.results, self.outputs = call(self.tape)

    def backward(
        self,
        upstream: Sequence[tf.Tensor] | None,
        variables: Sequence[Any],
        inputs: Sequence[tf.Tensor] = (),
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Return the gradients of variables and of inputs, from those of the outputs."""
        part = self.replica.part
        with self.replica.replaced():  # functions may be called again
            found = self.tape.gradient(self.outputs, [*inputs, *variables], upstream)
        of_variables, pairs = found[len(inputs) :], zip(inputs, found, strict=False)
        if part.may_be_empty():
            of_variables = [gather.zero_if_empty(g, part.count) for g in of_variables]
        return of_variables, [part.kept(tf.zeros_like(x) if g is None else g) for x, g in pairs]


class TowerBuilder:
    """Copies functions onto devices and gathers their results.

    Every tensor of a `batch` (any `tf.nest` structure) is split along axis 0, one slice for each
    tower; where the number of examples does not divide, the first towers get one more. A `PerTower`
    is not split. Without a batch the function is just copied.

        builder = towers.TowerBuilder(["/cpu:0", "/cpu:1"])
        norm = builder.sum(lambda x: tf.reduce_sum(x * x), tf.ones([3, 2]))
    """

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
            batch_norm: what the moments of Keras' BatchNorm layers are taken over: "sync" all
                towers' examples, in a `tf.function` (else each tower's, with a warning); "local"
                the tower's own slice.
            accumulate_steps: `gradients`, and `concat` under a tape, take the batch in so many
                parts, one after the other, each split over the towers: less memory, the same sums.
            gather_at_variables: gather each gradient where its variable lies.
            jit_compile: XLA compiles what these compute in a tower; BatchNorm must be local.
            on_doubt: is told of what several towers may not compute as one device does.

        Raises:
            ValueError: an argument is out of range, or `devices` a string.
        """
        self.devices = as_devices(devices)
        check_mode(batch_norm)
        if accumulate_steps < 1:
            raise ValueError(f"accumulate_steps={accumulate_steps} must be at least 1")
        self.gather_device = gather_device
        self.batch_norm = batch_norm
        self.accumulate_steps = accumulate_steps
        self.gather_at_variables = gather_at_variables
        self.jit_compile = jit_compile
        self.num_slices = len(self.devices) * accumulate_steps  # that `gradients` makes of a batch
        # Told, while the gradient of `concat` is traced, of each tower's own: (examples [towers],
        # [(what each tower starts from, what it ends with)] forward and backward if the batch is
        # taken in one part, gradients [towers][variables], their sums [variables]).
        self.on_gradients: Callable[..., None] | None = None
        # Told, before towers' assignments are made, of the Keras variables that these are to.
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
        results = self._run(fn, occupied(self.split(batch)), batch)

        def add(values: Sequence[Any]) -> Any:
            return gather.add(machines.sums(values, self.devices, gather.add))

        return self.gather(add, results)

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return what the towers return, joined along axis 0 in tower order: that of the batch.

        A `tf.GradientTape` around it takes it for one op: each gradient goes back to the towers,
        and theirs are summed by `add_n`. So a loss of the joined outputs is exact, whatever it is:

            with tf.GradientTape() as tape:
                loss = any_loss(labels, builder.concat(model, images))
            gradients = tape.gradient(loss, model.trainable_variables)
        """
        if is_split(batch) and tf_private.is_recording():
            return joined.concat(self, fn, batch)
        if is_split(batch):
            self.try_out(self.rehearse(fn, *batch, num_slices=len(self.devices)))
        return self._run(fn, occupied(self.split(batch, never_empty=True)), batch, join=True)

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
        if sums.outputs[0] == ():
            return loss, gradients
        return loss, gradients, self.gather(gather.join, sums.outputs)

    def tower_sums(self, loss_fn: Callable, variables: Sequence[Any], *batch: Any) -> TowerSums:
        """Return what towers compute for `gradients`; `gather_sums` must follow: it assigns."""
        found = self.rehearse(loss_fn, *batch)
        losses.check_rehearsed(found.by_example)
        masters, _ = losses.variables_and_copies(variables, 0)
        scopes, outputs, left = [], [], []

        def on_tower(replica: ReplicaContext) -> tuple:
            own, replica.own = losses.variables_and_copies(variables, replica.tower)
            sum_of_losses = losses.summed(loss_fn, replica.part)

            def call(_: tf.GradientTape) -> tuple:
                results = replica.call(sum_of_losses)
                return results, [results[0][0]]

            def there_and_back() -> tuple:
                forward = Forward(replica, call, own)
                return forward.results, losses.gradients_of_sum(forward, own)

            ((loss, count, rest), beside), gradients = replica.compiled(there_and_back)
            known = isinstance(replica.part.count, int)
            replica.scope.count = replica.part.count if known else count
            scopes.append(replica.scope)
            outputs.append(tf.nest.map_structure(replica.part.kept, rest))
            left.append(tf.nest.map_structure(replica.part.kept, beside))
            return loss, replica.scope.count, replica.gradients(gradients, masters)

        totals: list[Any] = []
        for slices in self.rounds(batch):
            with gather.after(totals) if totals else contextlib.nullcontext():
                results = self.run(on_tower, Replicas(self, slices, found, {}, found.added))
            totals = gather.add_to(totals, results, self.devices) if totals else results
        sums, counts, gradients = map(list, zip(*totals, strict=True))
        sums = machines.sent_last(sums, gradients, self.devices)
        found.side_outputs.leave(self.gather(gather.join, left), batch)
        return TowerSums(sums, counts, gradients, scopes, found.policies, outputs)

    def gather_sums(self, sums: TowerSums, variables: Sequence[Any]) -> tuple[tf.Tensor, list[Any]]:
        """Return the mean loss and its gradients, as `gradients` does, from the towers' sums."""
        with tf.name_scope("gather"):
            places = losses.places(self, variables)
            loss, gradients = gather.means(
                sums.losses, sums.counts, sums.gradients, variables, places
            )
            masters, _ = losses.variables_and_copies(variables, 0)
            gradients = with_new_values(gradients, masters, sums.scopes)
            gradients = [
                PerTower([g] * len(v.values))
                if isinstance(v, PerTower) and not isinstance(g, PerTower)
                else g
                for g, v in zip(gradients, variables, strict=True)
            ]
        assign(self, sums.scopes, sums.policies)
        return loss, gradients

    def forward(self, replica: ReplicaContext, call: Callable) -> Forward:
        """See `Forward`."""
        return Forward(replica, call)

    def run(self, fn: Callable, replicas: Replicas) -> list[Any]:
        """Return `fn(replica)` for each tower's context, made on the tower's device."""
        results = []
        for replica in replicas:
            with tf.device(replica.device), tf.name_scope(replica.name) as replica.name, replica:
                results.append(fn(replica))
        replicas.finish()
        return results

    def _run(
        self, fn: Callable, slices: Sequence[Slice], batch: Sequence[Any], join: bool = False
    ) -> Any:
        """Return what `fn` returns for each slice, or joined; make the assignments of all once."""
        if slices[0].rows is None:
            replicas = Replicas(self, slices, self.rehearse(fn))
            results = self.run(lambda replica: fn(*replica.part.batch), replicas)
            return self.gather(gather.join, results) if join else results
        found = self.rehearse(fn, *batch, num_slices=len(self.devices))
        replicas = Replicas(self, slices, found, added=found.added if join else ())
        left = []

        def on_tower(replica: ReplicaContext) -> Any:
            result, own = replica.call(fn)
            if join:
                result = tf.nest.map_structure(
                    replica.part.kept, (result, replica.added_losses())
                )
            left.append(tf.nest.map_structure(replica.part.kept, own))
            return result

        results = self.run(on_tower, replicas)
        assign(self, replicas.scopes, found.policies)
        found.side_outputs.leave(self.gather(gather.join, left), batch)
        if join:
            results, added = self.gather(gather.join, results)
            added_losses.add_to_layers(replicas.scopes[0], added)
        return results

    def gather(self, policy: Callable, results: list[Any]) -> Any:
        """Apply `policy` to the per-tower values, on the gather device."""
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return gather.map_towers(policy, results)

    def rounds(self, batch: Sequence[Any]) -> list[list[Slice]]:
        """Return the slices of each part of the batch, of which there are `accumulate_steps`."""
        slices, number = self.split(batch, self.accumulate_steps, True), len(self.devices)
        starts = range(0, len(slices), number)
        held = [i for i in starts if not i or not is_empty(slices[i])]
        return [occupied(slices[i : i + number]) for i in held]

    def split(
        self, batch: Sequence[Any], num_parts: int = 1, never_empty: bool = False
    ) -> list[Slice]:
        """Return each tower's slice of `batch`; with parts, those of one after the other's."""
        # Towers get their slices from where the batch is, which is not sent to a GPU as a whole.
        device = HOST if is_gpu(self.gather_device) else self.gather_device
        with tf.device(device), tf.name_scope("split"):
            return split(batch, len(self.devices), num_parts, never_empty)
