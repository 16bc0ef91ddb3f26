"""The task of a model that gives logits, and of labels, one for each example."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.builder.assignments import TowerScope
from towers.builder.splitting import PerTower
from towers.builder.tower import TowerBuilder
from towers.data import Data, Split
from towers.options.run import Options
from towers.training.evaluation import Answers, Evaluation, accuracy_of_classes, behind
from towers.training.masters import Masters
from towers.training.model import floatx_of
from towers.training.task import Stop, Task
from towers.training.update import about_flags, is_own


class Classification(Task):
    """Softmax cross entropy of logits `[b, classes]` and labels, integers `[b]`."""

    step_names = ("loss", "penalty", "gradient_norm", "learning_rate")
    _eval_step: Callable | None = None

    def __init__(self, builder: TowerBuilder, masters: Masters, options: Options, data: Data):
        """Set the parts of the run."""
        super().__init__(builder, masters.model, options, data)
        self.masters = masters

    @property
    def rate_is_set(self) -> bool:
        """See `Task`."""
        return not is_own(self.options)

    def loss(self, *batch: Any) -> tf.Tensor:
        """See `Task`: of each example."""
        return self._losses_and_outputs(*batch)[0]

    def losses_of(self, outputs: Any, labels: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        """See `Task`."""
        losses = _cross_entropy(labels, outputs, self.options.label_smoothing)
        for weight in weights:
            losses *= tf.cast(weight, losses.dtype)
        return losses

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
            for (example, counted), found in behind(batches, lambda b: eval_step(b[0]), stop):
                if found is None:
                    return None
                rows, real = found.numpy(), counted.numpy() > 0
                labels = example[1].numpy()
                own = self._sums(rows, labels, real)
                sums = tf.nest.map_structure(np.add, sums, own) if sums else own
                said, confidence = rows[:, -2].astype(np.int32), rows[:, -1]
                images = example[0] if is_image else None
                with tf.device("/cpu:0"):  # where the batch is
                    answers.add(images, labels, said, confidence, real)
            return self._evaluation(sums, answers)

        return evaluator

    def _sums(self, rows: np.ndarray, labels: np.ndarray, counted: np.ndarray) -> dict[str, Any]:
        """Add up what `eval_step` says of the examples that count.

        Returns:
            {"raw": sums, "ema": sums}, "ema" only where there are averages; sums are {"loss",
            float64 scalar, "correct", int64 [classes]}; and under "examples" int64 [classes].
        """
        labels, num_classes = labels[counted], self.data.num_classes
        found: dict[str, Any] = {"examples": np.bincount(labels, minlength=num_classes)}
        for i, name in enumerate(self._weights()):
            loss, said = rows[counted, 2 * i], rows[counted, 2 * i + 1]
            correct = np.bincount(labels[said == labels], minlength=num_classes)
            found[name] = {"loss": loss.sum(dtype=np.float64), "correct": correct}
        return found

    def _weights(self) -> list[str]:
        """Return which weights are evaluated."""
        return ["raw", "ema"] if self.masters.averages else ["raw"]

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
        sums = self.eval_sums(example, counted)
        found = {"examples": sums["examples"]}
        for weights, ending in {"raw": "", "ema": "_ema"}.items():
            found |= {f"{n}{ending}": value for n, value in sums.get(weights, {}).items()}
        return found

    def eval_sums(self, example: Any, counted: tf.Tensor) -> dict[str, Any]:
        """Evaluate a batch; return what `_sums` does of it."""
        rows = self.eval_step()(example).numpy()
        return self._sums(rows, np.asarray(example[1]), np.asarray(counted) > 0)

    def eval_step(self) -> Callable:
        """Return `eval_step(example)`, compiled once: one tensor, so that one crosses.

        It is float32 or float64, [b, columns]: of the weights, and of their averages where there
        are any, the loss and the class that is said; and the probability of the last said class.
        """
        if self._eval_step is None:
            self._eval_step = self._make_eval_step()
        return self._eval_step

    def _make_eval_step(self) -> Callable:
        builder, masters = self.builder, self.masters
        copies = [PerTower([r.weights for r in masters.replicas])] * (len(masters.replicas) > 1)

        @floatx_of(self.options.dtype)
        def forward(x: Any, copies: Sequence[keras.Variable] = ()) -> list[tf.Tensor]:
            inputs, own = self.inputs(x, None), TowerScope()
            if copies:
                pairs = zip(self.model.trainable_variables, copies, strict=True)
                own = keras.StatelessScope([(v, tf.convert_to_tensor(c.value)) for v, c in pairs])
            with own:  # a layer that counts its calls, or draws, changes no master
                outputs = [logits_of(self.model, inputs, self.options)]
            if masters.averages:
                averages = [(v, tf.convert_to_tensor(average)) for v, average in masters.averages]
                with keras.StatelessScope(averages):
                    outputs.append(logits_of(self.model, inputs, self.options))
            return outputs

        @tf.function(autograph=False)
        def eval_step(example: Any) -> tf.Tensor:
            x, labels, *weights = example
            outputs = builder.concat(forward, x, *copies)
            with tf.device(builder.gather_device):
                columns = []
                for logits in outputs:
                    losses = _cross_entropy(labels, logits)
                    for weight in weights:
                        losses *= tf.cast(weight, losses.dtype)
                    columns += [losses, tf.argmax(logits, axis=-1)]
                chances = tf.nn.softmax(tf.cast(outputs[-1], tf.float32))
                columns.append(tf.reduce_max(chances, axis=-1))
                return tf.stack([tf.cast(c, columns[0].dtype) for c in columns], axis=1)

        return eval_step


def logits_of(model: keras.Model, inputs: Any, options: Options) -> Any:
    """Return the outputs of a run's model for evaluation.

    With `test_time_flip` they are the mean of the logits of images and of their mirror images.
    """
    outputs = model(inputs, training=False)
    if not options.test_time_flip:
        return outputs
    outputs, mirrored = (
        tf.cast(logits, tf.float32) if logits.dtype.size < 4 else logits
        for logits in (outputs, model(tf.reverse(inputs, [2]), training=False))
    )
    return (outputs + mirrored) / 2


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

