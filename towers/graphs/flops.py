"""The arithmetic of a training step: what its convolutions and matrix products add up to."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from towers.data import augment
from towers.graphs.placement import needed_ops


def flop_per_example(
    model: keras.Model, loss_fn: Callable, image_shape: Sequence[int], dtype: tf.DType
) -> int:
    """Return the floating-point operations of one example, forward and backward.

    Counted are the convolutions and matrix products that gradients need, a multiplication and an
    addition as two. What happens inside a loop or a function of the model's own is not seen.
    `loss_fn` leads from (images `[b, H, W, C]`, labels `[b]`, draws) to losses `[b]`.
    """

    @tf.function(autograph=False)
    def gradients(images: tf.Tensor, labels: tf.Tensor, draws: tf.Tensor) -> list[tf.Tensor]:
        weights = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
        pairs = list(zip(model.trainable_variables, weights, strict=True))
        with keras.StatelessScope(pairs), tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(loss_fn(images, labels, draws))
        with keras.StatelessScope():
            return [g for g in tape.gradient(loss, weights) if g is not None]

    graph = gradients.get_concrete_function(
        tf.TensorSpec([1, *image_shape], dtype),
        tf.TensorSpec([1], tf.int32),
        tf.TensorSpec([1, augment.NUM_DRAWS]),
    ).graph
    return sum(map(_flop, needed_ops([tensor.op for tensor in graph.outputs])))


def _flop(op: tf.Operation) -> int:
    """Return the operations of one op, 0 for what is neither convolution nor matrix product."""
    shapes = [tensor.shape for tensor in op.inputs]
    if op.type in ("Conv2D", "DepthwiseConv2dNative"):
        return _of_convolution(op.outputs[0].shape, shapes[1], op.type)
    if op.type.endswith("BackpropInput") and "onv2" in op.type:
        return _of_convolution(shapes[2], shapes[1], op.type)
    if op.type.endswith("BackpropFilter") and "onv2" in op.type:
        return _of_convolution(shapes[2], op.outputs[0].shape, op.type)
    if op.type in ("MatMul", "BatchMatMulV2"):
        transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        return 2 * op.outputs[0].shape.num_elements() * shapes[0][-2 if transposed else -1]
    return 0


def _of_convolution(image: tf.TensorShape, kernel: tf.TensorShape, kind: str) -> int:
    """Return the operations that lead from or to `image`, the output of the forward op.

    The kernel is `[h, w, in, out]`, or `[h, w, in, multiplier]` of a depthwise one, where each
    output sees one channel.
    """
    height, width, channels, _ = kernel
    channels = 1 if kind.startswith("Depthwise") else channels
    return 2 * image.num_elements() * height * width * channels
