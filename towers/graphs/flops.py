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
