"""The compiled steps: towers -> gather -> one update, several steps in a call; and evaluation."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers.data import augment
from towers.masters import Masters
from towers.options import Options
from towers.schedules import schedule
from towers.tower import PerTower, TowerBuilder
from towers.update import make_update

METRICS = ("loss", "penalty", "gradient_norm", "learning_rate")


def make_train_loop(
    builder: TowerBuilder,
    masters: Masters,
    options: Options,
    *,
    train_size: int,
    total_epochs: float,
) -> Callable[[tf.data.Iterator, tf.Tensor], dict[str, tf.Tensor]]:
    """Return `train_loop(iterator, num_steps)`, one compiled call that makes `num_steps` steps.

    Args:
        builder: where the towers are.
        masters: what the steps change.
        options: of the run.
        train_size: examples of an epoch.
        total_epochs: what the learning-rate schedule goes over.

    Returns:
        A function that returns the metrics of its last step, as `make_train_step` has them.
    """
    train_step = make_train_step(
        builder, masters, options, train_size=train_size, total_epochs=total_epochs
    )

    @tf.function(autograph=False)
    def train_loop(iterator: tf.data.Iterator, num_steps: tf.Tensor) -> dict[str, tf.Tensor]:
        def body(i: tf.Tensor, _: dict) -> tuple[tf.Tensor, dict]:
            with tf.device("/cpu:0"):
                batch = iterator.get_next()
            metrics, _ = train_step(*batch)
            return i + 1, {name: tf.cast(value, tf.float32) for name, value in metrics.items()}

        start = (tf.constant(0), {name: tf.zeros([]) for name in METRICS})
        return tf.while_loop(lambda i, _: i < num_steps, body, start, parallel_iterations=1)[1]

    return train_loop


def make_train_step(
    builder: TowerBuilder,
    masters: Masters,
    options: Options,
    *,
    train_size: int,
    total_epochs: float,
) -> Callable[..., tuple[dict[str, tf.Tensor], list[Any]]]:
    """Return `train_step(images, labels, draws)`: one update, to be compiled.

    Args as of `make_train_loop`.

    Returns:
        A function that returns the scalars "loss" (mean over the examples of all towers),
        "penalty" (regularisation), "gradient_norm" and "learning_rate"; and the gathered gradients
        of the data's loss, in the order of the trainable variables.
    """
    rate_at = schedule(
        options.schedule,
        peak=options.learning_rate,
        total_epochs=total_epochs,
        warmup_epochs=options.warmup_epochs,
        decay_epochs=options.decay_boundaries(),
        decay_factor=options.decay_factor,
    )
    loss_fn = make_loss_fn(masters, options)
    update = make_update(masters, options)

    def train_step(
        images: tf.Tensor, labels: tf.Tensor, draws: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], list[Any]]:
        statistics = masters.statistics() if masters.loss_scale is not None else []
        loss, gradients = builder.gradients(loss_fn, weights_of(masters), images, labels, draws)
        gradients = [_of_replica(gradients, i) for i in range(len(masters.replicas))]
        with tf.device(builder.gather_device), tf.name_scope("update"):
            if masters.loss_scale is not None:
                loss = loss / tf.cast(masters.loss_scale, loss.dtype)
            rate = rate_at(tf.cast(masters.examples, tf.float64) / train_size)
            metrics = update(gradients, rate, statistics)
            masters.step.assign_add(1)
            masters.examples.assign_add(tf.shape(labels, tf.int64)[0])
        return metrics | {"loss": loss, "learning_rate": rate}, gradients[0]

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
    """Return the towers' function: (images, labels, draws) of a slice -> losses [b]."""
    dtype = tf.float64 if options.dtype == "float64" else tf.float32

    def loss_fn(images: tf.Tensor, labels: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        inputs = augment.train_images(images, draws, options.augment, dtype=dtype)
        logits = masters.model(inputs, training=True)
        losses = _cross_entropy(labels, logits, options.label_smoothing)
        if masters.loss_scale is None:
            return losses
        return losses * tf.cast(masters.loss_scale, losses.dtype)

    return loss_fn


def make_eval_step(builder: TowerBuilder, masters: Masters, options: Options) -> Callable:
    """Return `eval_step(images, labels, weights)`, compiled.

    Its towers return logits, which are joined in the order of the batch. `weights` are 1 for an
    example and 0 for padding, which counts nowhere.

    Returns:
        A function that returns {"raw": sums, "ema": sums}, "ema" only where there are averages;
        sums are {"loss": sum of losses, float64 scalar, "correct": int64 [classes]}, and under
        "examples" int64 [classes].
    """
    dtype = tf.float64 if options.dtype == "float64" else tf.float32

    def forward(images: tf.Tensor) -> dict[str, tf.Tensor]:
        inputs = augment.eval_images(images, options.augment, dtype=dtype)
        with keras.StatelessScope():  # a layer that counts its calls, or draws, changes no master
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
            return result | {"examples": _count(labels, weights > 0, num_classes)}

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
