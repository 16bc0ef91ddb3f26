"""From gathered gradients to new master weights: rules 2, 3 and 4 of the rule book.

Everything here happens once a step, where the weights lie, and never in a tower: regularisation,
finite test, clipping, the optimizer's update, then the moving average. Copies of the weights get
the same gradients and make the same update. What stands for a weight here may be a `Flat`: weights
on a GPU that are treated alike go as one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builder.gather import map_values
from towers.builder.kinds import is_gpu
from towers.errors import InputError
from towers.options.functions import load_function
from towers.options.run import Options
from towers.training import flat
from towers.training.masters import Masters, Replica

# A loss scale doubles after this many steps without overflow (Micikevicius et al. 2018).
STEPS_TO_DOUBLE = 2000
EMA_EXAMPLES = 128  # `ema_decay` is per so many examples: the tutorial's batch


_K = keras.optimizers
# {name: how it is made}, but for its learning rate
OPTIMIZERS = {
    "sgd": lambda o: _K.SGD,
    "momentum": lambda o: functools.partial(_K.SGD, momentum=o.momentum),
    "nesterov": lambda o: functools.partial(_K.SGD, momentum=o.momentum, nesterov=True),
    "adam": lambda o: _K.Adam,
    "adamw": lambda o: functools.partial(_K.AdamW, weight_decay=o.weight_decay),
    "adamax": lambda o: _K.Adamax,
    "nadam": lambda o: _K.Nadam,
    "lion": lambda o: functools.partial(_K.Lion, weight_decay=o.weight_decay),
    "lamb": lambda o: functools.partial(_K.Lamb, weight_decay=o.weight_decay),
    "rmsprop": lambda o: _K.RMSprop,
    "adagrad": lambda o: _K.Adagrad,
    "adadelta": lambda o: _K.Adadelta,
}
DECAY_APART = ("adamw", "lion", "lamb")  # these decay weights apart from the gradient


def make_optimizer(
    weights: Sequence[keras.Variable], options: Options, **clips: float
) -> keras.optimizers.Optimizer:
    """Return the Keras optimizer that `options` name.

    The learning rate of one in the table is set every step, one of the user's own has its own.
    `clips` are Keras' arguments, for an optimizer that clips by itself.

    Raises:
        InputError: the function of the user's own returns no optimizer.
    """
    if is_own(options):
        optimizer = load_function("optimizer", options.optimizer)()
        if not isinstance(optimizer, _K.Optimizer):
            raise InputError(
                f"--optimizer={options.optimizer} returned {type(optimizer).__name__}; a "
                "keras.optimizers.Optimizer is needed"
            )
        return optimizer
    optimizer = OPTIMIZERS[options.optimizer](options)(options.learning_rate, **clips)
    if options.optimizer in DECAY_APART:
        optimizer.exclude_from_weight_decay(var_list=[v for v in weights if not is_decayed(v)])
    return optimizer


def is_own(options: Options) -> bool:
    """Tell whether the optimizer is made by a function of the user's own."""
    return ":" in options.optimizer


def check_own(options: Options) -> None:
    """Refuse what an optimizer of the user's own says itself.

    Raises:
        InputError: in one line, with both flags.
    """
    names = ("learning_rate", "schedule", "warmup_epochs", "decay_epochs", "momentum")
    for name in names if is_own(options) else ():
        if getattr(options, name) != getattr(Options, name):
            raise InputError(
                f"--{name}={getattr(options, name)}, but the optimizer of "
                f"--optimizer={options.optimizer} has its own: set it there, and leave --{name} out"
            )


def clips_of(options: Options) -> dict[str, float]:
    """Return the arguments by which an optimizer of Keras clips as the options say."""
    names = {"clip_norm": "clipnorm", "clip_value": "clipvalue"}
    names["clip_global_norm"] = "global_clipnorm"
    return {theirs: limit for ours, theirs in names.items() if (limit := getattr(options, ours))}


def is_decayed(weight: keras.Variable) -> bool:
    """Tell whether weight decay acts on a weight: on kernels, not on biases or norms' scales."""
    return len(weight.shape) > 1


def about_flags(options: Options, loss_scale: Any) -> dict[str, str]:
    """Return what the rule book says of an update that the flags describe."""
    apart = options.optimizer in DECAY_APART
    decay = f"{options.optimizer}, apart from the gradient" if apart else "L2"
    rate = f"learning rate {options.learning_rate:g} {options.schedule}"
    if is_own(options):
        rate = "with the learning rate of its own"
    names = ("clip_norm", "clip_value", "clip_global_norm")
    return {
        "decay": f"weight decay {options.weight_decay:g} ({decay})",
        "scale": about_scale(loss_scale),
        "clips": ", ".join(f"{n}={limit}" for n in names if (limit := getattr(options, n))),
        "clock": f"examples; {options.optimizer}, {rate}",
    }


def about_scale(loss_scale: Any) -> str:
    """Return what the rule book says of a loss scale, or of none."""
    if loss_scale is None:
        return ", not needed in this precision"
    return f"; loss scale from {float(loss_scale.numpy()):g}"


def make_update(masters: Masters, options: Options) -> Callable:
    """Return `update(gradients, learning_rates, statistics)`: one step of the master variables.

    For each of `masters.replicas` it takes gathered mean gradients (scaled, where there is a loss
    scale) and a learning rate; and `masters.statistics()` from before the towers ran: a step that
    is skipped puts them back. It returns the scalars "gradient_norm", before clipping, and
    "penalty".
    """
    of_replicas = _same_of(masters.replicas)

    def update(
        gradients: Sequence[list[Any]],
        learning_rates: Sequence[tf.Tensor],
        statistics: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
    ) -> dict[str, tf.Tensor]:
        scale, replicas = masters.loss_scale, masters.replicas
        updates = [
            _replica_update(replica, own, rate, scale, options)
            for replica, own, rate in zip(replicas, gradients, learning_rates, strict=True)
        ]
        penalties, norms, applies = zip(*updates, strict=True)
        penalty, norm = of_replicas(penalties, norms)

        def apply() -> None:
            for apply_replica in applies:
                apply_replica()
            update_averages(masters, options)

        if scale is None:
            apply()
        elif is_gpu(scale.device):
            _apply_and_put_back(masters, norms, apply, statistics)
        else:
            _apply_if_finite(masters, tf.math.is_finite(norm), apply, statistics)
        return {"gradient_norm": norm, "penalty": penalty}

    return update


def _same_of(replicas: Sequence[Replica]) -> Callable:
    """Return `of_replicas(penalties, norms)`: one of each, of which all replicas have the same.

    If one replica alone had to give them, TensorFlow's optimizer would simplify the others'
    arithmetic, and the copies drift apart by roundings. On GPUs the others note theirs, and
    nothing is sent.
    """
    if not is_gpu(replicas[0].device):
        return lambda *numbers: [tf.reduce_max(tf.stack(values)) for values in numbers]
    notes = []
    for replica in replicas[1:]:
        with tf.device(replica.device):
            notes.append(tf.Variable(tf.zeros([2]), trainable=False))

    def of_replicas(*numbers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        first, *others = zip(*numbers, strict=True)
        for note, own in zip(notes, others, strict=True):
            with tf.device(note.device):
                note.assign(tf.stack([tf.cast(value, note.dtype) for value in own]))
        return list(first)

    return of_replicas


def _replica_update(
    replica: Replica,
    gradients: list[Any],
    learning_rate: tf.Tensor,
    loss_scale: tf.Variable | None,
    options: Options,
) -> tuple[tf.Tensor, tf.Tensor, Callable]:
    """Return the regularisation loss, the gradients' norm, and a function that updates weights."""
    optimizer = replica.optimizer
    decayed = functools.partial(_is_penalised, options)
    gradients, weights = flat.packed(gradients, replica.weights, optimizer, decayed)
    if loss_scale is not None:
        # A power of 2: nothing is rounded.
        gradients = _each(lambda g, _: _scale(g, 1.0 / loss_scale), gradients, weights)
    gradients = _each(lambda g, _: _one_slice_a_row(g), gradients, weights)
    with tf.device(replica.device):
        penalty, gradients = regularise(weights, gradients, options)
        used = [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None]
        gradients, weights = [g for g, _ in used], [w for _, w in used]
        norm = global_norm(gradients)

    def apply() -> None:
        with tf.device(replica.device):
            if not is_own(options):
                rate = optimizer.learning_rate
                rate.assign(tf.cast(learning_rate, rate.dtype))
            flat.apply(optimizer, clip(gradients, weights, norm, options), weights)

    return penalty, norm, apply


def _each(fn: Callable, gradients: Sequence[Any], weights: Sequence[keras.Variable]) -> list[Any]:
    """Return `fn(gradient, weight)` for each, computed where the weight lies."""
    results = []
    for gradient, weight in zip(gradients, weights, strict=True):
        with tf.device(weight.value.device):
            results.append(fn(gradient, weight))
    return results


def regularise(
    weights: Sequence[keras.Variable], gradients: list[Any], options: Options
) -> tuple[tf.Tensor, list[Any]]:
    """Return the regularisation loss, and the gradients with its own added.

    It is that of the layers' regularisers and of `weight_decay`, unless the optimizer decays
    weights apart from the gradient.
    """
    total = []

    def add(gradient: Any, weight: Any) -> Any:
        if isinstance(weight, flat.Flat):
            return weight.by_section(add, gradient)
        decayed = _is_penalised(options, weight)
        if weight.regularizer is None and not decayed:
            return gradient
        value = tf.convert_to_tensor(weight.value)
        with tf.GradientTape() as tape:
            tape.watch(value)
            penalty = tf.zeros([], value.dtype)
            if weight.regularizer is not None:
                penalty += tf.cast(weight.regularizer(value), value.dtype)
            if decayed:
                penalty += options.weight_decay * tf.nn.l2_loss(value)
        total.append(penalty)
        of_penalty = tape.gradient(penalty, value)
        return of_penalty if gradient is None else of_penalty + gradient

    sums = _each(add, gradients, weights)
    widest = _widest(total)
    return tf.add_n([tf.cast(t, widest) for t in total]) if total else tf.zeros([]), sums


def _is_penalised(options: Options, weight: Any) -> bool:
    """Tell whether `weight_decay` is an L2 loss of a weight."""
    return options.weight_decay > 0 and options.optimizer not in DECAY_APART and is_decayed(weight)


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the norm of all gradients together, in the widest of their types."""
    widest = _widest(gradients)
    return tf.linalg.global_norm([map_values(lambda g: tf.cast(g, widest), g) for g in gradients])


def _widest(values: Sequence[Any]) -> tf.DType:
    """Return the widest floating type: a layer may have one of its own. 16 bits are too few."""
    return max([tf.float32, *(v.dtype for v in values)], key=lambda dtype: dtype.size)


def clip(
    gradients: list[Any], weights: Sequence[keras.Variable], norm: tf.Tensor, options: Options
) -> list[Any]:
    """Clip gathered gradients as the options say; `norm` is their global norm."""
    if limit := options.clip_norm:
        return _each(lambda g, w: _clip_by_norm(g, w, limit), gradients, weights)
    if limit := options.clip_value:
        return _each(lambda g, _: tf.clip_by_value(g, -limit, limit), gradients, weights)
    if limit := options.clip_global_norm:
        # As tf.clip_by_global_norm, which takes gradients of one type only; NaN if not finite.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / tf.constant(limit, norm.dtype))
        factor += norm - norm
        return _each(lambda g, _: _scale(g, factor), gradients, weights)
    return gradients


def _clip_by_norm(gradient: Any, weight: Any, limit: float) -> Any:
    """Clip the gradient of a weight, or of each in a `Flat`, by its own norm."""
    if not isinstance(weight, flat.Flat):
        return tf.clip_by_norm(gradient, limit)
    parts = weight.split(gradient)
    norms = tf.sqrt(2.0 * tf.stack([tf.nn.l2_loss(part) for part in parts]))
    factors = tf.unstack(limit / tf.maximum(norms, limit))
    return weight.join([part * factor for part, factor in zip(parts, factors, strict=True)])


def update_averages(masters: Masters, options: Options) -> None:
    """Move each average towards its variable, which has just been updated.

    The decay counts examples, and rises from 0.1 as in `tf.train.ExponentialMovingAverage` with
    `num_updates`, so that a short run's average is not its initial weights.
    """
    if not masters.averages:
        return
    batches = tf.cast(masters.examples, tf.float64) / EMA_EXAMPLES
    decay = tf.minimum((1.0 + batches) / (10.0 + batches), options.ema_decay)
    rate = 1.0 - decay ** (options.batch_size / EMA_EXAMPLES)
    pairs = [(variable.value, average) for variable, average in masters.averages]
    for pairs_of_kind in flat.grouped(pairs, lambda pair: flat.kind_of(pair[1])):
        variable, average = (flat.joined(own) for own in zip(*pairs_of_kind, strict=True))
        with tf.device(average.device):
            value = tf.convert_to_tensor(variable)
            average.assign_add((value - average) * tf.cast(rate, value.dtype))
            flat.write(average)


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
    _double_after_good_steps(masters)


def _apply_and_put_back(
    masters: Masters,
    norms: Sequence[tf.Tensor],
    apply: Callable,
    statistics: Sequence[tuple[keras.Variable, tf.Tensor]],
) -> None:
    """Do as `_apply_if_finite`, by choosing between values: a branch would wait for the GPU."""
    all_finite = [tf.math.is_finite(norm) for norm in norms]  # each on its own device
    before = [[tf.identity(v) for v in replica.variables()] for replica in masters.replicas]
    averages = [average for _, average in masters.averages]
    averages_before = [tf.identity(average) for average in averages]
    apply()
    for replica, values, finite in zip(masters.replicas, before, all_finite, strict=True):
        flat.put_back_unless(finite, replica.variables(), values)
    finite = all_finite[0]
    flat.put_back_unless(finite, averages, averages_before)
    flat.put_back_unless(finite, [v.value for v, _ in statistics], [v for _, v in statistics])
    scale, good_steps = masters.loss_scale, masters.good_steps
    with tf.device(scale.device):
        scale.assign(tf.where(finite, scale, tf.maximum(scale / 2.0, 1.0)))
        good_steps.assign((good_steps + 1) * tf.cast(finite, tf.int64))
        _double_after_good_steps(masters)


def _double_after_good_steps(masters: Masters) -> None:
    double = masters.good_steps >= STEPS_TO_DOUBLE
    masters.loss_scale.assign(tf.where(double, masters.loss_scale * 2.0, masters.loss_scale))
    masters.good_steps.assign(masters.good_steps * tf.cast(~double, tf.int64))


def _scale(gradient: Any, factor: tf.Tensor) -> Any:
    """Multiply a dense or sparse gradient, or None, by a scalar."""
    return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)


def _one_slice_a_row(gradient: Any) -> Any:
    """Add up what several examples have for one row: limits and squares are those of the sum."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
