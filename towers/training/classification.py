"""The task of a model that gives logits, and of labels, one for each example."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.builder import gather
from towers.builder.assignments import TowerScope
from towers.builder.splitting import PerTower
from towers.builder.tower import TowerBuilder
from towers.data import Data, Split
from towers.monitoring import tower_stats
from towers.options.run import Options
from towers.tf_private import added_losses
from towers.training.evaluation import Answers, Evaluation, accuracy_of_classes
from towers.training.masters import Masters
from towers.training.model import floatx_of
from towers.training.task import Stop, Task
from towers.training.update import about_flags, is_own, make_update


class Classification(Task):
    """Softmax cross entropy of logits `[b, classes]` and labels, integers `[b]`."""

    step_names = ("loss", "penalty", "gradient_norm", "learning_rate")
    _eval_step: Callable | None = None

    def __init__(self, builder: TowerBuilder, masters: Masters, options: Options, data: Data):
        """Set the parts of the run."""
        super().__init__(builder, masters.model, options, data)
        self.masters = masters

    def make_train_step(self, learning_rate: Callable) -> Callable:
        """See `Task`; "loss" is the mean over all examples, "penalty" that of regularisation."""
        builder, masters, options = self.builder, self.masters, self.options
        update = make_update(masters, options)

        def train_step(
            example: Any, draws: tf.Tensor, measured: tf.Tensor | None = None
        ) -> tuple[dict[str, tf.Tensor], list[Any]]:
            scale, seen = masters.loss_scale, {}
            statistics = masters.statistics() if scale is not None else []
            variables = self.weights()
            with floatx_of(options.dtype):  # backward, too: layers may be called again there
                sums = builder.tower_sums(self.tower_function, variables, *example, draws)
            loss, gradients = builder.gather_sums(sums, variables)
            gradients = [_of_replica(gradients, i) for i in range(len(masters.replicas))]
            if measured is not None:
                with tf.name_scope("telemetry"):
                    batch = *example, draws
                    seen = tower_stats.measure(
                        batch, sums, loss, gradients, builder, measured, scale
                    )
            with tf.device(builder.gather_device), tf.name_scope("update"):
                if scale is not None:
                    loss = loss / tf.cast(scale, loss.dtype)
                rate = learning_rate(masters.examples)
                if is_own(options):
                    rate = tf.convert_to_tensor(masters.optimizers[0].learning_rate)
                metrics = update(gradients, rate, statistics)
                masters.step.assign_add(1)
                masters.examples.assign_add(tf.shape(example[1], tf.int64)[0])
            return metrics | {"loss": loss, "learning_rate": rate} | seen, gradients[0]

        return train_step

    def weights(self) -> list[Any]:
        """Return the trainable variables as the builder takes them: with their copies, if any."""
        replicas = self.masters.replicas
        if len(replicas) == 1:
            return self.model.trainable_variables
        return [PerTower(own) for own in zip(*(r.weights for r in replicas), strict=True)]

    def loss(self, *batch: Any) -> tf.Tensor:
        """Return the losses `[b]` of (x, y, draws) or (x, y, weights, draws).

        What layers add by `add_loss` or an activity regularizer is a part of each example's loss,
        where a scope collects it.
        """
        x, labels, *weights, draws = batch
        inputs, before = self.inputs(x, draws), len(added_losses())
        with floatx_of(self.options.dtype):
            logits = self.model(inputs, training=True)
        losses = _cross_entropy(labels, logits, self.options.label_smoothing)
        for weight in weights:
            losses *= tf.cast(weight, losses.dtype)
        # Keras has them over the batch. In the mean over all examples, towers weigh by theirs.
        for added in added_losses()[before:]:
            losses += tf.reduce_sum(tf.cast(added, losses.dtype))
        return losses

    def tower_function(self, *batch: Any) -> tf.Tensor:
        """Return the losses `[b]`, scaled where the precision needs that."""
        losses, scale = self.loss(*batch), self.masters.loss_scale
        return losses if scale is None else losses * tf.cast(scale, losses.dtype)

    def gradients(self, *batch: Any) -> list[Any]:
        """See `Task`."""
        scale = self.masters.loss_scale
        with floatx_of(self.options.dtype):
            _, found = self.builder.gradients(self.tower_function, self.weights(), *batch)
        factor = 1.0 if scale is None else 1.0 / scale
        return [
            gather.map_values(lambda g: g * tf.cast(factor, g.dtype), gradient)
            for gradient in _of_replica(found, 0)
        ]

    def about(self) -> str:
        """See `Task`."""
        return f"classification: cross entropy of logits, {self.data.num_classes} classes"

    def about_update(self) -> dict[str, str]:
        """See `Task`."""
        return about_flags(self.options, self.masters.loss_scale)

    def metric_directions(self) -> Mapping[str, str | None]:
        """See `Task`."""
        return {"accuracy": "max", "loss": "min"}

    # Evaluation.

    def make_evaluator(self, split: Split) -> Callable[[Stop], Evaluation | None]:
        """See `Task`."""
        eval_step = self.eval_step()
        batches = split.eval_batches(self.options.batch_size)
        is_image = self.data.image_shape is not None

        def evaluator(stop: Stop = lambda: False) -> Evaluation | None:
            sums: Any = None
            answers = Answers(averaged=bool(self.masters.averages))
            for example, counted in batches:
                if stop():
                    return None
                found = eval_step(example, counted)
                found = tf.nest.map_structure(lambda t: t.numpy(), found)
                said, confidence = found.pop("predicted"), found.pop("confidence")
                sums = tf.nest.map_structure(np.add, sums, found) if sums else found
                images = example[0] if is_image else None
                with tf.device("/cpu:0"):  # where the batch is
                    answers.add(images, example[1].numpy(), said, confidence, counted.numpy() > 0)
            return self._evaluation(sums, answers)

        return evaluator

    def _evaluation(self, sums: Mapping[str, Any], answers: Answers) -> Evaluation:
        metrics, of_class, examples = {}, {}, sums["examples"]
        for name, ending in {"raw": "", "ema": "_ema"}.items():
            own = sums.get(name)
            correct = own and float(own["correct"].sum() / examples.sum())
            metrics[f"accuracy{ending}"] = correct
            metrics[f"loss{ending}"] = own and float(own["loss"] / examples.sum())
            names = self.data.class_names
            of_class[name] = own and accuracy_of_classes(own["correct"], examples, names)
        in_order = ("accuracy", "accuracy_ema", "loss", "loss_ema")
        return Evaluation(
            {name: metrics[name] for name in in_order},
            int(examples.sum()),
            of_class["raw"],
            of_class["ema"],
            answers.predictions(),
        )

    def eval_arrays(self, example: Any, counted: tf.Tensor) -> dict[str, np.ndarray]:
        """See `Task`: sums, those of the moving average with "_ema" at their end."""
        sums = self.eval_step()(example, counted)
        found = {"examples": sums["examples"].numpy()}
        for weights, ending in {"raw": "", "ema": "_ema"}.items():
            found |= {f"{n}{ending}": value.numpy() for n, value in sums.get(weights, {}).items()}
        return found

    def eval_step(self) -> Callable:
        """Return `eval_step(example, counted)`, compiled once.

        `counted` is 1 for an example and 0 for padding, which counts nowhere. It returns {"raw":
        sums, "ema": sums}, "ema" only where there are averages; sums are {"loss": sum of losses,
        float64 scalar, "correct": int64 [classes]}, and under "examples" int64 [classes]. And for
        each example, padding too, with the averages where there are any: "predicted", the class,
        int32 [b], and "confidence", its probability, float32 [b].
        """
        if self._eval_step is None:
            self._eval_step = self._make_eval_step()
        return self._eval_step

    def _make_eval_step(self) -> Callable:
        builder, masters, num_classes = self.builder, self.masters, self.data.num_classes

        @floatx_of(self.options.dtype)
        def forward(x: Any) -> dict[str, tf.Tensor]:
            inputs = self.inputs(x, None)
            with TowerScope():  # a layer that counts its calls, or draws, changes no master
                outputs = {"raw": self.model(inputs, training=False)}
            if masters.averages:
                averages = [(v, tf.convert_to_tensor(average)) for v, average in masters.averages]
                with keras.StatelessScope(averages):
                    outputs["ema"] = self.model(inputs, training=False)
            return outputs

        def sums(
            logits: tf.Tensor, labels: tf.Tensor, weights: Sequence[tf.Tensor], counts: tf.Tensor
        ) -> dict[str, tf.Tensor]:
            losses = tf.cast(_cross_entropy(labels, logits), tf.float64)
            for weight in weights:
                losses *= tf.cast(weight, tf.float64)
            # where() and not a product: padding may well give NaN
            losses = tf.where(counts, losses, tf.zeros_like(losses))
            right = tf.argmax(logits, axis=-1, output_type=labels.dtype) == labels
            return {
                "loss": tf.reduce_sum(losses),
                "correct": _count(labels, tf.logical_and(right, counts), num_classes),
            }

        @tf.function(autograph=False)
        def eval_step(example: Any, counted: tf.Tensor) -> dict[str, Any]:
            x, labels, *weights = example
            outputs = builder.concat(forward, x)
            with tf.device(builder.gather_device):
                counts = counted > 0
                result: dict[str, Any] = {
                    name: sums(logits, labels, weights, counts) for name, logits in outputs.items()
                }
                shown = outputs.get("ema", outputs["raw"])
                return result | {
                    "examples": _count(labels, counts, num_classes),
                    "predicted": tf.argmax(shown, axis=-1, output_type=tf.int32),
                    "confidence": tf.reduce_max(tf.nn.softmax(tf.cast(shown, tf.float32)), axis=-1),
                }

        return eval_step


def _of_replica(gradients: list[Any], replica: int) -> list[Any]:
    """Return the gradients of one replica of the weights."""
    return [g.values[replica] if isinstance(g, PerTower) else g for g in gradients]


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
