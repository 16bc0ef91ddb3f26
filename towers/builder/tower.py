"""The tower pattern: copies of one function on several devices, gathered with `add_n`.

    builder = TowerBuilder(["/gpu:0", "/gpu:1"], gather_device="/cpu:0")
    @tf.function
    def train_step(images, labels):
        def loss_fn(x, y):                           # runs once a tower, on its slice
            return tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

Build models before: functions are first traced on made-up examples. Assign Keras variables only.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towers.builder import checks, gather, joined_outputs, losses, replica_context, sharding, xla
from towers.builder.replica_context import ReplicaContext, Replicas, call_copies


class TowerBuilder:
    """Copies functions onto devices and gathers their results.

    Every tensor of a `batch` (any `tf.nest` structure) is split along axis 0; the first towers get
    one example more if need be. `towers.PerTower([x, y])` in it gives the first tower x, the next
    y. Without a batch each tower calls the function with nothing.

        total = towers.TowerBuilder(["/cpu:0"] * 2).sum(tf.reduce_sum, tf.ones([3, 2]))  # 6.0
    """

    def __init__(
        self,
        devices: Sequence[str],
        gather_device: str = "/cpu:0",
        *,
        batch_norm: str = "sync",
        accumulate_steps: int = 1,
        jit_compile: bool = False,
        on_warning: Callable[[str], None] = warnings.warn,
        check: str = "once",
        on_inexact: str = "warn",
    ):
        """Set where the towers run and where their results are gathered.

        Args:
            devices: one TensorFlow device for each tower; a device may hold several towers.
            gather_device: splits the batch, adds and joins results (for a GPU, the host splits).
            batch_norm: "sync": moments of all towers (needs `tf.function`); "local": of each.
            accumulate_steps: parts into which a batch is cut to compute gradients with less memory.
            jit_compile: compile each tower by XLA; BatchNorm must be local.
            on_warning: called with a line for each way in which towers may differ from one device.
            check: when towers are compared with one device: "once", "always" or "off".
            on_inexact: what to do if they differ: "warn", "stop" or "one_device".
        """
        sharding.check_options(batch_norm, accumulate_steps)
        self.devices, self.gather_device = sharding.as_devices(devices), gather_device
        self.batch_norm, self.jit_compile = batch_norm, jit_compile and xla.tried_out(self.devices)
        self.accumulate_steps = accumulate_steps
        # What a run sets: embeddings' gradients may be dense; sums lie beside spread variables.
        self.dense_gradients = self.gather_at_variables = False
        self.num_slices = len(self.devices) * accumulate_steps  # of a batch of `gradients`
        self.checks = checks.Checks(self, on_warning, check, on_inexact)
        self.analyze, self.warn = self.checks.analyze, self.checks.warn
        self.check, self.forget = self.checks.check, self.checks.forget

    def map(self, fn: Callable, *batch: Any) -> list[Any]:
        """Return the results of `fn` on each tower, in tower order.

        Args:
            fn: maps a tower's slice of the batch to a structure of any values.
            *batch: the global batch.
        """
        return call_copies(self, fn, sharding.split(self, batch), batch)

    def sum(self, fn: Callable, *batch: Any) -> Any:
        """Return the sum over towers of the results of `fn`: `tf.add_n` on the gather device.

        Args:
            fn: maps a tower's slice of the batch to a structure of tensors, alike in all towers.
            *batch: the global batch.
        """
        results = call_copies(self, fn, sharding.occupied(sharding.split(self, batch)), batch)
        return self.gather(gather.add_by_machine(losses.gather_plan(self)), results)

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return the results of `fn` joined along axis 0, in the order of the batch.

        A `tf.GradientTape` around the call gives exact gradients of any loss of the joined outputs.

        Args:
            fn: maps a tower's slice of the batch to tensors with its rows, in any structure.
            *batch: the global batch.
        """
        return joined_outputs.concat(self, fn, batch)

    def gradients(self, loss_fn: Callable, variables: Iterable[Any], *batch: Any) -> tuple:
        """Return the mean loss over all examples and its gradients.

        Keras variables that `loss_fn` assigns (moving averages) are assigned once, for all towers.

        Args:
            loss_fn: maps b examples to their losses, `[b]`, not the mean; or to (losses, outputs).
            variables: of Keras or TensorFlow; each tower reads its own copy of a `PerTower`.
            *batch: the global batch.

        Returns:
            The mean loss, a scalar, and a gradient for each variable: a tensor, `IndexedSlices`, a
            `PerTower` for copies, or None; then the outputs, if any, joined as by `concat`.

        Raises:
            ValueError: another kind of variable, or losses that are not floats of shape `[b]`.
        """
        variables = list(variables)
        sums = self.tower_sums(loss_fn, variables, *batch)
        means = self.gather_sums(sums, variables)
        return (*means, self.gather(gather.join, sums.outputs)) if sums.has_outputs else means

    def tower_sums(self, loss_fn: Callable, variables: Sequence, *batch: Any) -> losses.TowerSums:
        """Return each tower's sums of losses and gradients; `gather_sums` adds them by `add_n`.

        Args:
            loss_fn: as for `gradients`.
            variables: as for `gradients`.
            *batch: as for `gradients`.
        """
        losses.check_by_example(analysis := self.analyze(loss_fn, *batch))
        masters, totals, not_added = losses.masters_of(variables), [], []

        def on_tower(replica: ReplicaContext) -> tuple:
            watched, replica.own = losses.variables_and_copies(variables, replica.tower)
            sum_of_losses = losses.summed(loss_fn, replica.part)

            def compute() -> tuple:
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(watched)
                    result, side = replica.call(sum_of_losses)
                gradients = losses.gradients_of_sum(tape.gradient, result[0], watched, replica)
                return result, side, gradients

            (loss, count, outputs), side, gradients = replica.compiled(compute)
            unpadded = replica.unpadded(outputs), replica.unpadded(side)
            not_added.append((replica.close(count), *unpadded))
            return loss, replica.scope.count, replica.gradients(gradients, masters)

        for slices in sharding.rounds(self, batch):  # the split; `accumulate_steps` rounds
            with gather.after(totals):
                results = self.run(on_tower, Replicas(self, slices, analysis, {}, analysis.added))
            totals = gather.add_to(totals, results, losses.gather_plan(self))  # on each tower
        sums, counts, gradients = map(list, zip(*totals, strict=True))
        scopes, outputs, sides = map(list, zip(*not_added, strict=True))
        analysis.side_outputs.assign(self.gather(gather.join, sides) if any(sides) else [], batch)
        return losses.TowerSums(sums, counts, gradients, scopes, analysis.policies, outputs)

    def gather_sums(self, sums: losses.TowerSums, variables: Sequence[Any]) -> tuple:
        """Return the mean loss and its gradients, as `gradients`; make the towers' assignments.

        Args:
            sums: from `tower_sums`, of the same variables.
            variables: as for `gradients`.
        """
        with tf.name_scope("gather"):
            plan = losses.gather_plan(self, variables)
            loss, gradients = gather.mean_gradients(sums, variables, plan)  # by `add`: tf.add_n
            gradients = losses.finish(gradients, variables)
        replica_context.assign(self, sums.scopes, sums.policies)
        return loss, gradients

    def run(self, fn: Callable, replicas: Replicas) -> list[Any]:
        """Call `fn` under each tower's `tf.device` and name scope; return the results in order.

        Args:
            fn: maps a `ReplicaContext` to any value.
            replicas: the towers' contexts; after the last tower BatchNorm's moments are exchanged.
        """
        results = []
        for replica in replicas:
            with tf.device(replica.device), tf.name_scope(replica.name) as replica.name, replica:
                results.append(fn(replica))
        return results

    def gather(self, policy: Callable, results: Sequence[Any]) -> Any:
        """Apply `policy` to the towers' values, on the gather device.

        Args:
            policy: maps the list of towers' values of one leaf to one value.
            results: of each tower a structure, alike in all.
        """
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return gather.map_towers(policy, results)

    @staticmethod
    def add(values: Sequence[Any]) -> Any:
        """Return `tf.add_n` of the values that are not None; `IndexedSlices` stay sparse."""
        values = [value for value in values if value is not None]
        if all(isinstance(value, int | tf.IndexedSlices) for value in values):
            return gather.add_sparse(values)
        # Without a name, tf.add_n returns a single value as it is, not on the gather device.
        return tf.add_n(list(map(tf.convert_to_tensor, values)), name="AddN")
