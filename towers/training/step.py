"""The compiled steps: towers -> gather -> one update, several steps in a call; and evaluation."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers.builder.assignments import TowerScope
from towers.builder.splitting import PerTower
from towers.builder.tower import TowerBuilder
from towers.data import augment
from towers.monitoring import tower_stats
from towers.options.run import Options
from towers.tf_private import added_losses
from towers.training.masters import Masters
from towers.training.model import floatx_of
from towers.training.update import make_update

METRICS = ("loss", "penalty", "gradient_norm", "learning_rate")


def make_train_loop(
    builder: TowerBuilder, train_step: Callable, *, telemetry: bool = True
) -> Callable[[tf.data.Iterator, tf.Tensor], dict[str, tf.Tensor]]:
    """Return `train_loop(iterator, num_steps)`, one compiled call that makes `num_steps` steps.

    It returns the metrics of its last step, as `make_train_step` has them; with telemetry those of
    a measured one, and seconds as sums over its steps: those of `make_train_step`,
    "input_wait_seconds", and "update_seconds", which is the rest.
    """
    clock, num_towers = builder.gather_device, len(builder.devices)
    last, sums = dict.fromkeys(METRICS, ()), {}
    if telemetry:
        last |= tower_stats.measured_shapes(num_towers)
        sums = tower_stats.timed_shapes(num_towers)

    def next_step(iterator: tf.data.Iterator, measured: tf.Tensor | None) -> dict[str, tf.Tensor]:
        start = tower_stats.time_after([], clock) if telemetry else None
        with tf.device("/cpu:0"):
            batch = iterator.get_next()
        if not telemetry:
            return train_step(*batch)[0]
        arrived = tower_stats.time_after(batch, clock)
        with tf.name_scope("telemetry"):
            waited = arrived - start
        return train_step(*batch, measured=measured)[0] | {"input_wait_seconds": waited}

    @tf.function(autograph=False)
    def train_loop(iterator: tf.data.Iterator, num_steps: tf.Tensor) -> dict[str, tf.Tensor]:
        def body(i: tf.Tensor, before: dict) -> tuple[tf.Tensor, dict]:
            with tf.name_scope("telemetry"):
                measured = i + 1 >= num_steps if telemetry else None
            values = next_step(iterator, measured)
            with tf.name_scope("telemetry"):
                values = {name: tf.cast(values[name], tf.float32) for name in before}
                values |= {name: before[name] + values[name] for name in sums}
            return i + 1, values

        values = {name: tf.zeros(shape) for name, shape in (last | sums).items()}
        start = tower_stats.time_after([], clock) if telemetry else None
        values = tf.while_loop(
            lambda i, _: i < num_steps, body, (tf.constant(0), values), parallel_iterations=1
        )[1]
        if telemetry:
            with tf.name_scope("telemetry"):
                phases = [values[name] for name in tower_stats.PHASES]
                all_of_it = tower_stats.time_after(values, clock) - start
                values["update_seconds"] = tf.cast(all_of_it, tf.float32) - tf.add_n(phases)
        return values

    return train_loop


def make_train_step(
    builder: TowerBuilder, masters: Masters, options: Options, learning_rate: Callable
) -> Callable[..., tuple[dict[str, tf.Tensor], list[Any]]]:
    """Return `train_step(images, labels, draws, measured=None)`: one update, to be compiled.

    It returns the scalars "loss" (mean over the examples of all towers), "penalty"
    (regularisation), "gradient_norm" and "learning_rate"; and the gathered gradients of the data's
    loss, in the order of the trainable variables. With `measured`, a bool scalar that tells whether
    norms are wanted, there are also the values of `tower_stats.timed_shapes` and
    `measured_shapes`.
    `learning_rate` gives that after a number of examples.
    """
    loss_fn = make_loss_fn(masters, options)
    update = make_update(masters, options)

    def train_step(
        images: tf.Tensor, labels: tf.Tensor, draws: tf.Tensor, measured: tf.Tensor | None = None
    ) -> tuple[dict[str, tf.Tensor], list[Any]]:
        scale, seen = masters.loss_scale, {}
        statistics = masters.statistics() if scale is not None else []
        variables = weights_of(masters)
        with floatx_of(options.dtype):  # backward, too: layers may be called again there
            sums = builder.tower_sums(loss_fn, variables, images, labels, draws)
        loss, gradients = builder.gather_sums(sums, variables)
        gradients = [_of_replica(gradients, i) for i in range(len(masters.replicas))]
        if measured is not None:
            with tf.name_scope("telemetry"):
                batch = images, labels, draws
                seen = tower_stats.measure(batch, sums, loss, gradients, builder, measured, scale)
        with tf.device(builder.gather_device), tf.name_scope("update"):
            if scale is not None:
                loss = loss / tf.cast(scale, loss.dtype)
            rate = learning_rate(masters.examples)
            metrics = update(gradients, rate, statistics)
            masters.step.assign_add(1)
            masters.examples.assign_add(tf.shape(labels, tf.int64)[0])
        return metrics | {"loss": loss, "learning_rate": rate} | seen, gradients[0]

    return train_step


def weights_of(masters: Masters) -> list[Any]:
    """Return the trainable variables as the builder takes them: with their copies, if any."""
    if len(masters.replicas) == 1:
        return masters.model.trainable_variables
    return [PerTower(own) for own in zip(*(r.weights for r in masters.replicas), strict=True)]


def _of_replica(gradients: list[Any], replica: int) -> list[Any]:
    """Return the gradients of one replica of the weights."""
    return [g.values[replica] if isinstance(g, PerTower) else g for g in gradients]


def make_loss_fn(masters: Masters, options: Options) -> Callable:
    """Return the towers' function: (images, labels, draws) of a slice -> losses [b].

    What layers add by `add_loss` or an activity regularizer is a part of each example's loss, where
    a scope collects it.
    """

    def loss_fn(images: tf.Tensor, labels: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        inputs = augment.train_images(images, draws, options.augment, options.input_dtype)
        before = len(added_losses())
        with floatx_of(options.dtype):
            logits = masters.model(inputs, training=True)
        losses = _cross_entropy(labels, logits, options.label_smoothing)
        # Keras has them over the batch. In the mean over all examples, towers weigh by theirs.
        for added in added_losses()[before:]:
            losses += tf.reduce_sum(tf.cast(added, losses.dtype))
        if masters.loss_scale is None:
            return losses
        return losses * tf.cast(masters.loss_scale, losses.dtype)

    return loss_fn


def make_eval_step(builder: TowerBuilder, masters: Masters, options: Options) -> Callable:
    """Return `eval_step(images, labels, weights)`, compiled.

    `weights` are 1 for an example and 0 for padding, which counts nowhere. It returns {"raw": sums,
    "ema": sums}, "ema" only where there are averages; sums are {"loss": sum of losses, float64
    scalar, "correct": int64 [classes]}, and under "examples" int64 [classes]. And for each example,
    padding too, with the averages where there are any: "predicted", the class, int32 [b], and
    "confidence", its probability, float32 [b].
    """

    @floatx_of(options.dtype)
    def forward(images: tf.Tensor) -> dict[str, tf.Tensor]:
        inputs = augment.eval_images(images, options.augment, options.input_dtype)
        with TowerScope():  # a layer that counts its calls, or draws, changes no master
            outputs = {"raw": masters.model(inputs, training=False)}
        if masters.averages:
            averages = [(v, tf.convert_to_tensor(average)) for v, average in masters.averages]
            with keras.StatelessScope(averages):
                outputs["ema"] = masters.model(inputs, training=False)
        return outputs

    def sums(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> dict[str, tf.Tensor]:
        losses = tf.cast(_cross_entropy(labels, logits), tf.float64)
        # where() and not a product: padding may well give NaN
        losses = tf.where(weights > 0, losses, tf.zeros_like(losses))
        right = tf.argmax(logits, axis=-1, output_type=labels.dtype) == labels
        return {
            "loss": tf.reduce_sum(losses),
            "correct": _count(labels, tf.logical_and(right, weights > 0), logits.shape[-1]),
        }

    @tf.function(autograph=False)
    def eval_step(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> dict[str, Any]:
        outputs = builder.concat(forward, images)
        with tf.device(builder.gather_device):
            result: dict[str, Any] = {
                name: sums(logits, labels, weights) for name, logits in outputs.items()
            }
            num_classes = outputs["raw"].shape[-1]
            shown = outputs.get("ema", outputs["raw"])
            return result | {
                "examples": _count(labels, weights > 0, num_classes),
                "predicted": tf.argmax(shown, axis=-1, output_type=tf.int32),
                "confidence": tf.reduce_max(tf.nn.softmax(tf.cast(shown, tf.float32)), axis=-1),
            }

    return eval_step


def _cross_entropy(labels: tf.Tensor, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Return the cross entropy of each example, [b], computed in float32 at least.

    Smoothed labels (Szegedy et al. 2016) are 1 - `smoothing` of the right class, and the rest is
    spread over all classes.
    """
    logits = tf.cast(logits, tf.float32) if logits.dtype.size < 4 else logits
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    if not smoothing:
        return losses
    of_all = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return (1.0 - smoothing) * losses + smoothing * of_all


def _count(labels: tf.Tensor, selected: tf.Tensor, num_classes: int) -> tf.Tensor:
    """Count the selected examples of each class, int64 [num_classes]."""
    return tf.math.bincount(
        tf.boolean_mask(labels, selected),
        minlength=num_classes,
        maxlength=num_classes,
        dtype=tf.int64,
    )
