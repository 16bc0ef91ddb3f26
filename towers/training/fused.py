"""TensorFlow's fused kernels in the place of Keras' chains of ops, where weights are on a CPU.

Keras computes an update by an op for each of its operations, and each reads and writes the whole
weight; a kernel reads everything once, and computes the same numbers to a rounding. Slots, counters
and checkpoints stay Keras' own.

    with by_kernels(optimizer):
        optimizer.apply(gradients, weights)

For the CIFAR-10 CNN (1.07 million weights, float32) on 2 cores of an AMD EPYC, alone on them,
`python scripts/update_speed.py`: see that page of scripts/README.md.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from towers import tf_private
from towers.builder.kinds import is_gpu

_DTYPES = (tf.float32, tf.float64)


@contextlib.contextmanager
def by_kernels(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Let SGD, Adam and AdamW of Keras update by kernels; others, and sparse gradients, as ever."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    update = _UPDATES.get(type(optimizer))
    slots = tf_private.elementwise_slots(optimizer) if update else None
    if slots is None or getattr(optimizer, "amsgrad", False):
        yield
        return
    constants: dict[Any, Any] = {}  # computed once for each type and device

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not _is_dense(gradient, variable):
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return
        key = tf_private.unique_id(variable)
        own = [of_weight[key].value.handle for of_weight in slots]
        kind = variable.dtype, variable.device
        if kind not in constants:
            constants[kind] = _constants(optimizer, learning_rate, variable.dtype)
        gradient = tf.cast(gradient, variable.dtype)
        update(optimizer, variable.handle, own, gradient, constants[kind])

    optimizer.update_step = update_step
    try:
        yield
    finally:
        del optimizer.update_step


def _is_dense(gradient: Any, variable: Any) -> bool:
    """Tell whether a kernel takes an update: of a dense gradient, on a CPU."""
    dense = isinstance(variable, tf.Variable) and not isinstance(gradient, tf.IndexedSlices)
    return dense and variable.dtype in _DTYPES and not is_gpu(variable.device)


def _constants(optimizer: Any, learning_rate: Any, dtype: tf.DType) -> dict[str, tf.Tensor]:
    """Return what the kernels take of an optimizer, but for its slots; with Keras' own roundings.

    `keras.ops.cast` takes a number by way of float32.
    """
    cast = lambda value: keras.ops.cast(value, dtype.name)  # noqa: E731
    if type(optimizer) is keras.optimizers.SGD:
        return {"lr": cast(learning_rate), "momentum": cast(optimizer.momentum)}
    step = cast(optimizer.iterations + 1)
    return {
        "lr": cast(learning_rate),
        "beta1_power": cast(optimizer.beta_1) ** step,
        "beta2_power": cast(optimizer.beta_2) ** step,
        "beta1": tf.constant(optimizer.beta_1, dtype),
        "beta2": tf.constant(optimizer.beta_2, dtype),
        "epsilon": tf.constant(optimizer.epsilon, dtype),
    }


def _sgd(
    optimizer: keras.optimizers.SGD,
    handle: tf.Tensor,
    slots: list[tf.Tensor],
    gradient: tf.Tensor,
    constants: dict[str, tf.Tensor],
) -> None:
    if not slots:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=handle, alpha=constants["lr"], delta=gradient
        )
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=handle, accum=slots[0], grad=gradient, use_nesterov=optimizer.nesterov, **constants
    )


def _adam(
    optimizer: keras.optimizers.Adam,
    handle: tf.Tensor,
    slots: list[tf.Tensor],
    gradient: tf.Tensor,
    constants: dict[str, tf.Tensor],
) -> None:
    tf.raw_ops.ResourceApplyAdam(var=handle, m=slots[0], v=slots[1], grad=gradient, **constants)


_UPDATES: dict[type, Callable] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
}
