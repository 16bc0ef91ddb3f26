"""From gathered gradients to new master weights: rules 2, 3 and 4 of the rule book.

Everything here happens once a step, on the gather device, and never in a tower: regularisation,
finite test, clipping, the optimizer's update, then the moving average.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.masters import Masters
from towers.options import Options

# A loss scale doubles after this many steps without overflow (Micikevicius et al. 2018).
STEPS_TO_DOUBLE = 2000
EMA_EXAMPLES = 128  # `ema_decay` is per so many examples: the tutorial's batch


def make_optimizer(model: keras.Model, options: Options) -> keras.optimizers.Optimizer:
    """Return the Keras optimizer that `options` name; its learning rate is set every step."""
    if options.optimizer == "adamw":
        optimizer = keras.optimizers.AdamW(options.learning_rate, weight_decay=options.weight_decay)
        decayed = {id(v) for v in decayed_variables(model)}
        optimizer.exclude_from_weight_decay(
            var_list=[v for v in model.trainable_variables if id(v) not in decayed]
        )
        return optimizer
    return keras.optimizers.SGD(
        options.learning_rate,
        momentum=0.0 if options.optimizer == "sgd" else options.momentum,
        nesterov=options.optimizer == "nesterov",
    )


def decayed_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that weight decay acts on: kernels, not biases or norms' scales."""
    return [v for v in model.trainable_variables if len(v.shape) > 1]


def make_update(masters: Masters, options: Options) -> Callable:
    """Return `update(gradients, learning_rate, statistics)`: one step of the master variables.

    That function takes gathered mean gradients (scaled, where there is a loss scale), the
    learning rate and, where there is a loss scale, `masters.statistics()` from before the towers
    ran: a step that is skipped puts them back. It returns {"gradient_norm": norm before clipping,
    "penalty": the regularisation loss}, both scalars.
    """

    def update(
        gradients: list[Any],
        learning_rate: tf.Tensor,
        statistics: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
    ) -> dict[str, tf.Tensor]:
        if masters.loss_scale is not None:
            gradients = [_scale(g, 1.0 / masters.loss_scale) for g in gradients]  # a power of 2
        gradients = [_one_slice_a_row(g) for g in gradients]
        penalty, gradients = regularise(masters.model, gradients, options)
        pairs = zip(gradients, masters.model.trainable_variables, strict=True)
        pairs = [(g, v) for g, v in pairs if g is not None]
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        norm = tf.linalg.global_norm(gradients)

        def apply() -> None:
            masters.optimizer.learning_rate.assign(
                tf.cast(learning_rate, masters.optimizer.learning_rate.dtype)
            )
            masters.optimizer.apply(clip(gradients, norm, options), variables)
            _update_averages(masters, options)

        if masters.loss_scale is None:
            apply()
        else:
            _apply_if_finite(masters, tf.math.is_finite(norm), apply, statistics)
        return {"gradient_norm": norm, "penalty": penalty}

    return update


def regularise(
    model: keras.Model, gradients: list[Any], options: Options
) -> tuple[tf.Tensor, list[Any]]:
    """Add the regularisation's gradients to those of the data, once, on the master variables.

    Returns:
        The regularisation loss of the layers' regularisers and of `weight_decay` (zero for adamw,
        which decays apart from the gradient), and the gradients of the whole loss.
    """
    decay = 0.0 if options.optimizer == "adamw" else options.weight_decay
    decayed = {id(v) for v in decayed_variables(model)} if decay else set()
    total, sums = [], []
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        value = tf.convert_to_tensor(variable.value)
        if variable.regularizer is None and id(variable) not in decayed:
            sums.append(gradient)
            continue
        with tf.GradientTape() as tape:
            tape.watch(value)
            penalty = tf.zeros([], value.dtype)
            if variable.regularizer is not None:
                penalty += tf.cast(variable.regularizer(value), value.dtype)
            if id(variable) in decayed:
                penalty += decay * tf.nn.l2_loss(value)
        total.append(penalty)
        of_penalty = tape.gradient(penalty, value)
        sums.append(of_penalty if gradient is None else of_penalty + gradient)
    return tf.add_n(total) if total else tf.zeros([]), sums


def clip(gradients: list[Any], norm: tf.Tensor, options: Options) -> list[Any]:
    """Clip gathered gradients as the options say; `norm` is their global norm."""
    if options.clip_norm:
        return [tf.clip_by_norm(g, options.clip_norm) for g in gradients]
    if options.clip_value:
        return [tf.clip_by_value(g, -options.clip_value, options.clip_value) for g in gradients]
    if options.clip_global_norm:
        return tf.clip_by_global_norm(gradients, options.clip_global_norm, use_norm=norm)[0]
    return gradients


def _update_averages(masters: Masters, options: Options) -> None:
    """Move each average towards its variable, which has just been updated.

    The decay counts examples, and rises from 0.1 as in `tf.train.ExponentialMovingAverage` with
    `num_updates`, so that a short run's average is not its initial weights.
    """
    if not masters.averages:
        return
    batches = tf.cast(masters.examples, tf.float64) / EMA_EXAMPLES
    decay = tf.minimum((1.0 + batches) / (10.0 + batches), options.ema_decay)
    rate = 1.0 - decay ** (options.batch_size / EMA_EXAMPLES)
    for variable, average in masters.averages:
        value = tf.convert_to_tensor(variable.value)
        average.assign_add((value - average) * tf.cast(rate, value.dtype))


def _apply_if_finite(
    masters: Masters,
    finite: tf.Tensor,
    apply: Callable,
    statistics: Sequence[tuple[keras.Variable, tf.Tensor]],
) -> None:
    """Apply the update, or skip it for all towers and halve the loss scale."""

    def good() -> None:
        apply()
        masters.good_steps.assign_add(1)

    def bad() -> None:
        masters.loss_scale.assign(tf.maximum(masters.loss_scale / 2.0, 1.0))
        masters.good_steps.assign(0)
        for variable, value in statistics:
            variable.assign(value)

    tf.cond(finite, lambda: (good(), tf.no_op())[1], lambda: (bad(), tf.no_op())[1])
    double = masters.good_steps >= STEPS_TO_DOUBLE
    masters.loss_scale.assign(tf.where(double, masters.loss_scale * 2.0, masters.loss_scale))
    masters.good_steps.assign(masters.good_steps * tf.cast(~double, tf.int64))


def _scale(gradient: Any, factor: tf.Tensor) -> Any:
    """Multiply a dense or sparse gradient, or None, by a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _one_slice_a_row(gradient: Any) -> Any:
    """Add up the slices of a sparse gradient that are of one row.

    A row that several examples look up is there once for each of them. Norms, limits and AdamW's
    squares are those of the sum.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
