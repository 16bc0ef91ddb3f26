"""The arithmetic of a training step: what its convolutions and matrix products add up to."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers.graphs.placement import needed_ops
from towers.graphs.traffic import FUNCTIONS


def flop_per_example(model: keras.Model, loss: Callable, batch: Any) -> int:
    """Return the floating-point operations of one example, forward and backward.

    Counted are the convolutions and matrix products that gradients need, a multiplication and an
    addition as two. What happens inside a loop or a function of the model's own is not seen.
    `loss` is that of a task, of (*example, draws); `batch` has the specs of (example, draws).
    """
    return sum(map(_flop, gradient_ops(model, loss, batch)))


def has_unseen(model: keras.Model, loss: Callable, batch: Any) -> bool:
    """Tell whether there are loops or functions, as in an LSTM, which are not counted."""
    return any(op.type in FUNCTIONS for op in gradient_ops(model, loss, batch))


def gradient_ops(model: keras.Model, loss: Callable, batch: Any) -> list[tf.Operation]:
    """Return the ops that the gradients of one example need."""

    @tf.function(autograph=False)
    def gradients(example: Any, draws: tf.Tensor) -> list[tf.Tensor]:
        weights = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
        pairs = list(zip(model.trainable_variables, weights, strict=True))
        with keras.StatelessScope(pairs), tf.GradientTape() as tape:
            tape.watch(weights)
            total = tf.reduce_sum(loss(*example, draws))
        with keras.StatelessScope():
            return [g for g in tape.gradient(total, weights) if g is not None]

    one = tf.nest.map_structure(lambda s: tf.TensorSpec([1, *s.shape[1:]], s.dtype), batch)
    graph = gradients.get_concrete_function(*one).graph
    return needed_ops([tensor.op for tensor in graph.outputs])


def _flop(op: tf.Operation) -> int:
    """Return the operations of one op, 0 for what is neither convolution nor matrix product."""
    shapes, out = [tensor.shape for tensor in op.inputs], op.outputs[:1] and op.outputs[0].shape
    if op.type in ("MatMul", "BatchMatMulV2"):
        transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        return 2 * out.num_elements() * shapes[0][-2 if transposed else -1]
    # The image that the forward op gives out, and its kernel: [h, w, in, out]. Of a depthwise one,
    # [h, w, in, multiplier], each output sees one channel.
    if op.type in ("Conv2D", "DepthwiseConv2dNative"):
        image, kernel = out, shapes[1]
    elif op.type.endswith("BackpropInput") and "onv2" in op.type:
        image, kernel = shapes[2], shapes[1]
    elif op.type.endswith("BackpropFilter") and "onv2" in op.type:
        image, kernel = shapes[2], out
    else:
        return 0
    channels = 1 if op.type.startswith("Depthwise") else kernel[2]
    return 2 * image.num_elements() * kernel[0] * kernel[1] * channels
