"""Parts of a training step as loops of their own: what they take is found by leaving the rest out.

Each is called with a number of steps and makes them in one call of TensorFlow:

* "constant": the whole step on one batch again and again: nothing is read.
* "gather": forward, backward and gather, without the update.
* "control": each tower's forward and backward on weights of its own, and nothing else: no gather,
  no update, no reading. What perfect scaling would give on this machine.
* "matmul": matrix products alone, on each device at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builder import batch_norm
from towers.builder.splitting import PerTower
from towers.options.run import Options
from towers.training.run import Run
from towers.training.step import make_loss_fn, weights_of

Loop = Callable[[tf.Tensor], tf.Tensor]


def make_parts(run: Run, options: Options, matmul_size: int) -> dict[str, Loop]:
    """Return {part: its loop}, in the order above; matrices are `[matmul_size, matmul_size]`."""
    builder = run.builder
    weights, loss_fn = weights_of(run.masters), make_loss_fn(run.masters, options)
    train_step, alone = run.train_step(), _make_alone(run, loss_fn)
    batch = next(iter(run.data.train.train_batches(options.batch_size, seed=options.seed)))
    return {
        "constant": _repeat(lambda *batch: train_step(*batch)[0], batch),
        "gather": _repeat(lambda *batch: builder.gradients(loss_fn, weights, *batch), batch),
        "control": _repeat(alone, batch),
        "matmul": _repeat(_make_matmuls(run, matmul_size), batch),
    }


def _make_alone(run: Run, loss_fn: Callable) -> Callable:
    """Return `alone(images, labels, draws)`: each tower's gradients, from its own weights.

    What a layer assigns is dropped, and BatchNorm's moments are those of the tower's slice: there
    is nothing between the towers.
    """
    variables = run.masters.model.variables
    trainable = {id(v) for v in run.masters.model.trainable_variables}
    copies = []
    for device in run.builder.devices:
        with tf.device(device):
            copies.append([tf.Variable(v.value, trainable=False) for v in variables])

    def backward(own: Sequence[tf.Variable], *part: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        pairs = [(v, tf.convert_to_tensor(copy)) for v, copy in zip(variables, own, strict=True)]
        weights = [value for v, value in pairs if id(v) in trainable]
        with (
            keras.StatelessScope(state_mapping=pairs),
            batch_norm.over_all_towers(None, run.builder.batch_norm),  # by the same kernels
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            tape.watch(weights)
            loss = tf.reduce_sum(loss_fn(*part))
        with keras.StatelessScope():  # what is recomputed here may assign, too
            return loss, tape.gradient(loss, weights)

    return lambda *batch: run.builder.map(backward, PerTower(copies), *batch)


def _make_matmuls(run: Run, size: int) -> Callable:
    """Return `multiply(*_)`: a matrix product `[size, size]` on each device."""
    matrices = []
    for i, device in enumerate(run.builder.devices):
        with tf.device(device):
            matrix = tf.random.stateless_normal([size, size], seed=[i, 0])
            matrix = tf.cast(matrix, run.masters.model.compute_dtype)
            matrices.append(tf.Variable(matrix, trainable=False))
    return lambda *_: run.builder.map(lambda x: tf.matmul(x, x), PerTower(matrices))


def _repeat(step: Callable, batch: Sequence[tf.Tensor]) -> Loop:
    """Return a loop of `step` on one batch.

    The batch comes from an iterator and the weights are read in each step, so nothing can be moved
    out of the loop.
    """
    batches = iter(tf.data.Dataset.from_tensors(tuple(batch)).repeat())
    with tf.device("/cpu:0"):
        sink = tf.Variable(0.0, trainable=False)

    @tf.function(autograph=False)
    def loop(iterator: tf.data.Iterator, num_steps: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor) -> list[tf.Tensor]:
            with tf.device("/cpu:0"):
                batch = iterator.get_next()
            sink.assign_add(_touch(step(*batch)))
            return [i + 1]

        start = [tf.constant(0)]
        tf.while_loop(lambda i: i < num_steps, body, start, parallel_iterations=1)
        return sink.read_value()

    return lambda num_steps: loop(batches, num_steps)


def _touch(results: Any) -> tf.Tensor:
    """Return the sum of the first elements of all results, a scalar: so each must be computed.

    To wait for them by a control dependency would not do: TensorFlow leaves out an op whose value
    nobody takes.
    """
    leaves = tf.nest.flatten(results)
    results = [leaf.values if isinstance(leaf, PerTower) else leaf for leaf in leaves]
    groups: dict[tuple, list[tf.Tensor]] = {}
    for tensor in tf.nest.flatten(results, expand_composites=True):
        if tensor is not None:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    sums = []
    for (device, _), tensors in groups.items():
        with tf.device(device):
            first = tf.concat([tf.reshape(tensor, [-1])[:1] for tensor in tensors], axis=0)
            sums.append(tf.cast(tf.reduce_sum(first), tf.float32))
    return tf.add_n(sums)
