"""The tower pattern: copies of one function on several devices, gathered with `add_n`.

    builder = TowerBuilder(["/gpu:0", "/gpu:1"], gather_device="/cpu:0")

    @tf.function
    def train_step(images, labels):
        def loss_fn(images, labels):                 # runs once a tower, on its slice
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
        loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

A tower function is called once for each tower, and before that on synthetic examples, to analyze
it; it must create no variables, and may assign only Keras variables.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towers.builder import cross_host, gather, joined_outputs, losses, replica_context, sharding
from towers.builder.device_types import HOST, is_gpu
from towers.builder.losses import TowerSums
from towers.builder.replica_context import ReplicaContext, Replicas, call_copies


class Forward:
    """One copy's forward pass under a tape, and the backward pass through it."""

    def __init__(self, replica: ReplicaContext, call: Callable, variables: Any = None):
        """Run `call(tape)`; None watches all variables, for several backward passes."""
        self.replica, persistent = replica, variables is None
        with tf.GradientTape(persistent, watch_accessed_variables=persistent) as self.tape:
            self.tape.watch(variables or ())
            self.results = call(self.tape)

    def backward(self, targets: Any, upstream: Any, sources: Sequence[Any]) -> list[Any]:
        """Return the gradients of `targets`, weighted by `upstream` unless it is None."""
        with self.replica.replaced():  # layers may be called again
            return self.tape.gradient(targets, sources, upstream)


class TowerBuilder:
    """Copies functions onto devices and gathers their results.

    Every tensor of a `batch` (any `tf.nest` structure) is split along axis 0; the first towers get
    one example more if need be. A `PerTower` is not split; without a batch the function is copied.

        sums = towers.TowerBuilder(["/cpu:0", "/cpu:1"]).sum(tf.reduce_sum, tf.ones([3, 2]))
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
        on_warning: Callable[[str], None] = warnings.warn,
        on_doubt: Callable[[str], None] | None = None,
    ):
        """Set where the towers run and where their results are gathered.

        Args:
            devices: one TensorFlow device for each tower; a device may hold several towers.
            gather_device: the device of splitting, summing and joining.
            batch_norm: BatchNorm's moments: "sync" over all towers, in a `tf.function`; "local".
            accumulate_steps: number of parts of a batch that `gradients`, and `concat` under a
                tape, process one after the other: less memory, the same sums.
            gather_at_variables: sum each gradient on its variable's device.
            jit_compile: compile each tower by XLA; BatchNorm must be local.
            on_warning: called with each line on what towers may compute otherwise than one device.
            on_doubt: the former name of `on_warning`.
        """
        if batch_norm not in ("sync", "local"):
            raise ValueError(f"batch_norm={batch_norm!r} must be 'sync' or 'local'")
        if accumulate_steps < 1:
            raise ValueError(f"accumulate_steps={accumulate_steps} must be at least 1")
        self.devices, self.gather_device = sharding.as_devices(devices), gather_device
        self.batch_norm, self.jit_compile = batch_norm, jit_compile
        self.accumulate_steps, self.gather_at_variables = accumulate_steps, gather_at_variables
        self.num_slices = len(self.devices) * accumulate_steps  # of a batch of `gradients`
        analyses = replica_context.FunctionAnalyses(self.num_slices, on_doubt or on_warning)
        self.analyze, self.warn = analyses.analyze, analyses.warn
        self.check_exactness, self.forget = analyses.check_exactness, analyses.forget

    def map(self, fn: Callable, *batch: Any) -> list[Any]:
        """Return the results of `fn` on each tower, in tower order."""
        return call_copies(self, fn, self.split(batch), batch)

    def sum(self, fn: Callable, *batch: Any) -> Any:
        """Return the sum over towers of the results of `fn`, a structure of tensors; see `add`."""
        results = call_copies(self, fn, sharding.occupied(self.split(batch)), batch)
        return self.gather(gather.add_by_machine(losses.gather_plan(self)), results)

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return the results of `fn` joined along axis 0, in the order of the batch.

        A `tf.GradientTape` around it sees one op: each gradient goes back to the towers, and theirs
        are summed by `add_n`. So a loss of the joined outputs is exact, whatever it is.
        """
        return joined_outputs.concat(self, Forward, fn, batch)

    def gradients(self, loss_fn: Callable, variables: Iterable[Any], *batch: Any) -> tuple:
        """Return the mean loss over all examples and its gradients.

        Keras variables that `loss_fn` assigns are assigned once, after all towers, by their
        `aggregation` or the one that the analysis finds; if it finds none, with a warning.

        Args:
            loss_fn: maps a tower's slice of the batch to its losses, one for each example, `[b]`,
                or to `(losses, outputs)`, a tuple.
            variables: `keras.Variable`s, `tf.Variable`s or a mix. A `PerTower` of `keras.Variable`s
                is one variable with copies: `loss_fn` names the first, each tower reads its own.
            *batch: the global batch.

        Returns:
            The mean loss, a scalar, and a gradient for each variable: a tensor, `IndexedSlices` if
            all towers gave these, None if no tower uses the variable, a `PerTower` for copies; then
            the outputs of `loss_fn`, if any, joined as by `concat`.

        Raises:
            ValueError: `variables` holds something else, or `loss_fn` returns other losses.
        """
        variables = list(variables)
        self.check_exactness(self.analyze(loss_fn, *batch))
        sums = self.tower_sums(loss_fn, variables, *batch)
        means = self.gather_sums(sums, variables)
        no_outputs = isinstance(sums.outputs[0], tuple) and not sums.outputs[0]
        return means if no_outputs else (*means, self.gather(gather.join, sums.outputs))

    def tower_sums(self, loss_fn: Callable, variables: Sequence[Any], *batch: Any) -> TowerSums:
        """Return each tower's sums for `gradients`; call `gather_sums` next."""
        losses.check_by_example(analysis := self.analyze(loss_fn, *batch))
        masters, totals, rest = losses.masters_of(variables), [], []

        def on_tower(replica: ReplicaContext) -> tuple:
            tower_variables, replica.own = losses.variables_and_copies(variables, replica.tower)
            sum_of_losses = losses.summed(loss_fn, replica.part)

            def compute() -> tuple:
                forward = Forward(replica, lambda _: replica.call(sum_of_losses), tower_variables)
                return forward.results, losses.gradients_of_sum(forward, tower_variables)

            ((loss, count, outputs), side), gradients = replica.compiled(compute)
            rest.append((replica.close(count), replica.unpadded(outputs), replica.unpadded(side)))
            return loss, replica.scope.count, replica.gradients(gradients, masters)

        slices = self.split(batch, self.accumulate_steps, never_empty=True)
        for occupied in sharding.rounds(slices, len(self.devices)):
            with gather.after(totals):
                results = self.run(on_tower, Replicas(self, occupied, analysis, {}, analysis.added))
            totals = gather.add_to(totals, results, losses.gather_plan(self))
        sums, counts, gradients = map(list, zip(*totals, strict=True))
        scopes, outputs, sides = map(list, zip(*rest, strict=True))
        analysis.side_outputs.assign(self.gather(gather.join, sides), batch)
        sums = cross_host.send_after_gradients(sums, gradients, self.devices)
        return TowerSums(sums, counts, gradients, scopes, analysis.policies, outputs)

    def gather_sums(self, sums: TowerSums, variables: Sequence[Any]) -> tuple[tf.Tensor, list[Any]]:
        """Return the mean loss and its gradients; make the towers' assignments."""
        with tf.name_scope("gather"):
            plan = losses.gather_plan(self, variables)
            loss, gradients = gather.mean_gradients(sums, variables, plan)
            gradients = losses.finish(gradients, variables, sums.scopes)
        replica_context.assign(self, sums.scopes, sums.policies)
        return loss, gradients

    def split(self, batch: Any, rounds: int = 1, never_empty: bool = False) -> list[Any]:
        """Return each tower's slice of `batch`, round by round; see `sharding.split`."""
        home = HOST if is_gpu(self.gather_device) else self.gather_device  # where the batch is
        with tf.device(home), tf.name_scope("split"):
            return sharding.split(batch, len(self.devices), rounds, never_empty)

    def run(self, fn: Callable, replicas: Replicas) -> list[Any]:
        """Return `fn(replica)` for each tower's context, run on the tower's device."""
        results = []
        for replica in replicas:  # at its end all stand-ins are replaced
            with tf.device(replica.device), tf.name_scope(replica.name) as replica.name, replica:
                results.append(fn(replica))
        return results

    def gather(self, policy: Callable, results: Sequence[Any]) -> Any:
        """Apply `policy` to the towers' values, on the gather device."""
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return gather.map_towers(policy, results)

    @staticmethod
    def add(values: Sequence[Any]) -> Any:
        """Return the sum of towers' values without the Nones; `IndexedSlices` stay sparse."""
        values = [value for value in values if value is not None]
        if all(isinstance(value, int | tf.IndexedSlices) for value in values):
            return gather.add_other(values)
        # With a name add_n moves a single value to the gather device, too.
        return tf.add_n(list(map(tf.convert_to_tensor, values)), name="AddN")
