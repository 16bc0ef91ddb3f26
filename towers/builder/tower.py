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

from towers import tf_internals
from towers.builder import checks, device_names, gather, passes, sharding
from towers.builder.replica_context import ReplicaContext, Replicas, call_copies
from towers.builder.sharding import PerTower


class TowerBuilder:
    """Copies functions onto devices and gathers their results.

    Every tensor of a `batch` (any `tf.nest` structure) is split along axis 0; if the sizes differ,
    the first towers get one example more. `towers.PerTower([x, y])` in it gives the first tower x,
    the second y. Without a batch, each tower calls the function without arguments.

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
            gather_device: where batches are split, and results summed and concatenated (for a GPU,
                the host splits the batch).
            batch_norm: batch statistics of all towers ("sync", needs `tf.function`), or of each
                tower ("local").
            accumulate_steps: number of microbatches in which `gradients` computes a batch, to save
                memory.
            jit_compile: compile each tower by XLA; BatchNorm must be local.
            on_warning: called with a message for each way in which towers may differ from one
                device.
            check: when towers are compared with one device: "once", "always" or "off".
            on_inexact: what to do if they differ: "warn", "stop" or "one_device".
        """
        if batch_norm not in ("sync", "local"):
            raise ValueError(f"batch_norm={batch_norm!r} must be 'sync' or 'local'")
        if accumulate_steps < 1:
            raise ValueError(f"accumulate_steps={accumulate_steps} must be at least 1")
        self.devices, self.gather_device = device_names.as_devices(devices), gather_device
        self.batch_norm, self.jit_compile = batch_norm, jit_compile
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
            fn: maps a tower's slice of the batch to a structure of tensors, the same in all towers.
            *batch: the global batch.
        """
        results = call_copies(self, fn, sharding.occupied(sharding.split(self, batch)), batch)
        return self.gather(self.add, results)

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return the results of `fn` concatenated along axis 0, in the order of the batch.

        A `tf.GradientTape` around the call gives exact gradients of any loss of these outputs.

        Args:
            fn: maps a tower's slice of the batch to tensors with its rows, in any structure.
            *batch: the global batch.
        """
        return passes.concat(self, fn, batch)

    def gradients(self, loss_fn: Callable, variables: Iterable[Any], *batch: Any) -> tuple:
        """Return the mean loss over all examples and its gradients.

        Keras variables that `loss_fn` assigns (moving averages) are assigned once, for all towers.

        Args:
            loss_fn: maps b examples to one loss for each, `[b]`, not the mean; or to (losses,
                outputs).
            variables: Keras or TensorFlow variables; each tower reads its own copy of a `PerTower`.
            *batch: the global batch.

        Returns:
            The mean loss, a scalar, and a gradient for each variable: a tensor, `IndexedSlices`, a
            `PerTower` for copies, or None; then the outputs, if any, joined as by `concat`.

        Raises:
            ValueError: another kind of variable, or losses that are not floats of shape `[b]`.
        """
        variables = list(variables)
        loss, by_tower, outputs = passes.mean_gradients(self, loss_fn, variables, batch)
        gradients = [
            PerTower(values) if isinstance(variable, PerTower) else values[0]
            for variable, *values in zip(variables, *by_tower, strict=True)
        ]
        return (loss, gradients) if outputs is None else (loss, gradients, outputs)

    def forward(self, fn: Callable, replica: ReplicaContext, variables: Any = None) -> Any:
        """Run the forward pass of `fn` in a tower, under the tape that `backward` uses.

        Args:
            fn: maps the replica to (the outputs with a gradient, a value that is returned).
            replica: the context of the tower, which keeps the tape and the outputs.
            variables: the variables for which `backward` is called once. None: whatever `fn` reads
                or watches, any number of times.
        """
        anything = variables is None
        tape = tf.GradientTape(persistent=anything, watch_accessed_variables=anything)
        with tape as replica.tape, tf_internals.gradients_of_outer_tapes(tape):
            tape.watch(replica.sources(variables or []))
            replica.outputs, value = fn(replica)
        return value

    def backward(self, replica: ReplicaContext, upstream: Any, variables: Sequence[Any]) -> list:
        """Return a tower's part of the gradients, to be added to the parts of the others.

        Args:
            replica: the context of the tower, after `forward`.
            upstream: the gradient of the loss of the whole batch by the tower's outputs.
            variables: variables, of copies the first, and tensors.
        """
        with replica.replaced() as scope:  # layers may be called again
            sources = replica.sources(variables)
            gradients = replica.tape.gradient(replica.outputs, sources, upstream)
        scope.check_backward(replica.scope)
        return gradients

    def run(self, fn: Callable, replicas: Replicas) -> list[Any]:
        """Call `fn` under each tower's `tf.device` and name scope; return the results in order.

        Args:
            fn: maps a `ReplicaContext` to any value.
            replicas: the towers' contexts; after the last tower BatchNorm's moments are exchanged.
        """
        results = []
        for replica in replicas:
            with tf.device(replica.device), tf.name_scope(replica.name) as replica.name:
                results.append(fn(replica))
        return results

    def gather(self, policy: Callable, results: Sequence[Any]) -> Any:
        """Apply `policy` to the towers' values, on the gather device.

        Args:
            policy: maps the list of towers' values of one leaf to one value.
            results: of each tower a structure, alike in all.
        """
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return tf.nest.map_structure(lambda *values: policy(values), *results)

    @staticmethod
    def add(values: Sequence[Any]) -> Any:
        """Return `tf.add_n` of the values that are not None; `IndexedSlices` stay sparse."""
        values = [value for value in values if value is not None]
        if all(isinstance(value, tf.IndexedSlices) for value in values):
            return gather.add_sparse(values)
        # Without a name, tf.add_n returns a single value as it is, not on the gather device.
        return tf.add_n(list(map(tf.convert_to_tensor, values)), name="AddN")
