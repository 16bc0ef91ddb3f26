"""The training step, from a batch to the update, and evaluation.

A batch is (example, draws): example is (x, y) or (x, y, sample_weight), each any structure of
tensors whose axis 0 is the batch; draws are the random numbers of augmentation. Each tower augments
its examples and computes their losses, so that only gradients leave it. These are summed, and one
update is made. The kinds of tasks:

* `Classifier`: a model that returns logits, and labels.
* `compiled.Compiled`: a compiled Keras model. If its loss is not one of separate examples, its own
  `train_step` is traced over towers in place of this step.
"""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.losses import mean_gradients
from towers.builder.passes import Passes
from towers.builder.replica_context import integers_on
from towers.builder.replica_scope import ReplicaScope
from towers.builder.sharding import PerTower, num_rows
from towers.builder.tower import TowerBuilder
from towers.data import Data, Split, augment
from towers.monitoring import tower_metrics
from towers.monitoring.results import parse_monitor
from towers.options.parts import StepOptions
from towers.tf_internals import added_losses, slots_of, value_of
from towers.training.parallelize import traced
from towers.training.step.evaluation import AVERAGED, Evaluation, MetricState
from towers.training.step.fused_update import can_follow
from towers.training.step.keras_model import floatx_of
from towers.training.step.optimizer_step import make_update
from towers.training.step.optimizers import (
    MOST_SKIPPED,
    describe_flags,
    is_own,
    make_optimizer,
    rules_of,
)
from towers.training.step.output_activation import cross_entropy, logits_of
from towers.training.step.train_state import (
    TrainState,
    WeightCopy,
    copy_on,
    move,
    move_all,
    optimizers_of,
    shard,
)

Stop = Callable[[], bool]


class Task(abc.ABC):
    """What a model is trained to do, and how that is measured."""

    train_state: TrainState  # the variables that a step changes
    # Called with (gradients, weights) of each update while a step is traced.
    on_update: Callable[[list[Any], Sequence[Any]], None] | None = None
    squares_rows = False  # whether optimizers get sparse gradients, as in Keras; else dense ones
    keeps_copies = True  # whether a step updates each tower's copy of the weights, if there are any
    pads = False  # whether `test_step` takes a padded last batch
    names_averages = False  # whether an evaluation has None for averages if there are none

    def __init__(self, builder: TowerBuilder, model: keras.Model, options: StepOptions, data: Data):
        """Set the parts of the run, and place the model's variables.

        Args:
            builder: of the towers.
            model: the model to train.
            options: of the run.
            data: of the run.
        """
        self.builder, self.model, self.options, self.data = builder, model, options, data
        parts = [*model.metrics, *optimizers_of(model)] if model.compiled else []
        others = [*model.non_trainable_variables, *(v for part in parts for v in part.variables)]
        move_all(others, builder.gather_device)
        weights, names = model.trainable_variables, builder.devices
        if options.variables == "replicated":
            move_all(weights, names[0])
        elif options.variables == "spread":
            shard(weights, names)
            builder.gather_at_variables = True
        # Of optimizers that are built already, as those of a model that was loaded.
        slots = [p for o in optimizers_of(model) for p in slots_of(o)]
        move([(slot, value_of(weight).device) for slot, weight in slots])

    def _make_train_state(
        self, *optimizers: keras.optimizers.Optimizer, like: Callable, loss_scaling: bool = False
    ) -> TrainState:
        """Return the state of training; `like(weights)` makes the optimizer of other copies."""
        copies, weights = [], self.model.trainable_variables
        keeps_copies = self.keeps_copies and self.options.variables == "replicated"
        if keeps_copies and all(map(can_follow, weights)):
            copies = [copy_on(name, weights, like) for name in self.builder.devices[1:]]
            self.builder.dense_gradients = not self.squares_rows
        return TrainState(
            self.model,
            *optimizers,
            ema=self.options.ema_decay > 0,
            loss_scaling=loss_scaling,
            device=self.builder.gather_device,
            copies=copies,
            limit=MOST_SKIPPED if self.options.on_nan == "skip" else 1,
        )

    def make_train_step(self, learning_rate: Callable) -> Callable:
        """Return `train_step(example, draws, measured=None)`: one update, to be compiled.

        It returns a dict of tensors, and the gathered gradients of the data's loss, times its
        scale if there is one, in the order of the trainable variables (None where they are not
        known). The dict has the scalars in `step_names`: "loss" is the mean over all examples,
        "penalty" that of regularisation. With `measured`, a bool scalar, it also has the keys of
        `tower_metrics.measured_shapes` and `timed_shapes`; norms are computed if it is True. Else
        they are 0, and on GPUs all is.
        """
        builder, train_state = self.builder, self.train_state
        update = make_update(train_state, self.update_rules(), self.rate_is_set, self.squares_rows)

        def train_step(
            example: Any, draws: tf.Tensor, measured: tf.Tensor | None = None
        ) -> tuple[dict[str, tf.Tensor], list[Any]]:
            scale, seen, passes = train_state.loss_scale, {}, Passes()
            # Without this a tower may finish before the clock is read.
            start = [] if measured is None else [tower_metrics.time_after((example, draws))]
            with tf.control_dependencies(start):
                with floatx_of(self.options.dtype):  # the backward pass may call layers, too
                    loss, gradients, outputs = mean_gradients(
                        builder, self.tower_function, self.weights(), (*example, draws), passes
                    )
                if measured is not None:
                    with tf.name_scope("telemetry"):
                        seen = tower_metrics.measure(
                            *start, passes.gradients, loss, builder, measured, scale
                        )
                if self.on_update:
                    self.on_update(gradients[0], self.model.trainable_variables)
                with tf.device(builder.gather_device), tf.name_scope("update"):
                    if scale is not None:
                        loss = loss / tf.cast(scale, loss.dtype)
                    rates = [self._rate(learning_rate, replica) for replica in train_state.replicas]
                    rows = num_rows(draws)
                    metrics = update(gradients, rates, list(passes.before.values()), loss, rows)
                metrics |= self.batch_metrics(outputs)
            return metrics | {"loss": loss, "learning_rate": rates[0]} | seen, gradients[0]

        return train_step

    def update_rules(self) -> StepOptions:
        """Return what an update does beside the optimizer's arithmetic."""
        return rules_of(self.options)

    def batch_metrics(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return metrics of a step's batch, from the towers' joined `metric_inputs`."""
        return {}

    def _rate(self, learning_rate: Callable, replica: WeightCopy) -> tf.Tensor:
        with tf.device(replica.device):
            if self.rate_is_set:
                return learning_rate(replica.examples)
            return tf.convert_to_tensor(replica.optimizer.learning_rate)

    def weights(self) -> list[Any]:
        """Return the trainable variables for the builder, each with its copies, if any."""
        replicas = self.train_state.replicas
        if len(replicas) == 1:
            return self.model.trainable_variables
        return [PerTower(copies) for copies in zip(*(r.weights for r in replicas), strict=True)]

    def analyze(self, *batch: Any) -> FunctionAnalysis:
        """Analyze the towers' function on (example, draws), before steps are traced without any."""
        example, draws = batch
        return self.builder.analyze(self.tower_function, *example, draws, silent=True)

    @property
    @abc.abstractmethod
    def step_names(self) -> Sequence[str]:
        """The names of the scalars that every step returns."""

    @property
    @abc.abstractmethod
    def rate_is_set(self) -> bool:
        """Whether the run sets the learning rate in each step; else the optimizer does."""

    def num_skipped(self) -> int | None:
        """Return the number of steps without an update; None if none is ever skipped.

        It is 0 for a model's own step with several updates.
        """
        optimizers = self.train_state.optimizers
        scaled = any(getattr(each, "dynamic_scale", None) is not None for each in optimizers)
        if not scaled and self.train_state.loss_scale is None and self.options.on_nan != "skip":
            return None
        updates = optimizers[0].iterations if optimizers else self.train_state.step
        return max(int(self.train_state.step.numpy()) - int(updates.numpy()), 0)

    def finish(self) -> bool:
        """Finalize the weights after the last step; return whether any changed."""
        return False

    def tower_function(self, x: Any, *rest: Any) -> Any:
        """Return one tower's losses `[b]` for (*example, draws), times the loss scale if any.

        Losses added by layers (`add_loss`, activity regularisers) are added to each example's. If
        the step has metrics, a tuple (losses, `metric_inputs`) is returned.
        """
        *targets, draws = rest
        inputs, before = self.inputs(x, draws), len(added_losses())
        with floatx_of(self.options.dtype):
            outputs = self.model(inputs, training=True)
            losses = self.losses_of(outputs, *targets)
        # They are of the tower's batch: the mean over all examples weighs each by its size.
        for added in added_losses()[before:]:
            losses += tf.reduce_sum(tf.cast(added, losses.dtype))
        if (scale := self.train_state.loss_scale) is not None:
            losses *= tf.cast(scale, losses.dtype)
        measured = self.metric_inputs(outputs, targets)
        return losses if measured == () else (losses, measured)

    @abc.abstractmethod
    def losses_of(self, outputs: Any, *targets: Any) -> tf.Tensor:
        """Return the losses of a tower's examples, `[b]`."""

    def metric_inputs(self, outputs: Any, targets: Sequence[Any]) -> Any:
        """Return a tower's inputs of metrics, each `[b, ...]`; () for none.

        Args:
            outputs: of the model.
            targets: y and, if there are any, sample weights.
        """
        return ()

    # Evaluation.

    def make_evaluator(self, split: Split) -> Callable[[Stop], Evaluation | None]:
        """Return `evaluator(stop)`, which evaluates the current master variables.

        Weights and their moving averages are evaluated in one pass over the split. `stop` is called
        before each batch; if it returns True, the evaluator returns None. It is compiled once.
        """
        batches = split.eval_batches(self.options.batch_size)

        def evaluator(stop: Stop = lambda: False) -> Evaluation | None:
            self._reset_metrics()
            logs: Sequence[dict] = []
            for batch in batches:
                if stop():
                    return None
                logs = self._evaluate(batch)
            return self._evaluation(split, logs)

        return evaluator

    def eval_arrays(self, example: Any, counted: tf.Tensor) -> dict[str, np.ndarray]:
        """Return the metrics of one batch; those of the averages end in "_ema".

        Args:
            example: of the batch, which may be padded.
            counted: `[B]`, 1 for each example and 0 for padding, which comes last.
        """
        self._reset_metrics()
        named = zip(("", AVERAGED), self._evaluate((example, counted)), strict=False)
        return {f"{n}{ending}": v.numpy() for ending, metrics in named for n, v in metrics.items()}

    @abc.abstractmethod
    def test_step(self, example: Any, number: tf.Tensor, averaged: bool) -> dict[str, tf.Tensor]:
        """Update the metrics by the first `number` examples of a batch; to be traced.

        Args:
            example: of the batch.
            number: of examples that count; the others are padding.
            averaged: whether variables have the values of their averages.

        Returns:
            The metrics so far, each a scalar.
        """

    @abc.abstractmethod
    def metrics_result(self) -> dict[str, tf.Tensor]:
        """Return the metrics, each a scalar, over all batches since the reset."""

    @abc.abstractmethod
    def _metrics(self) -> Sequence[keras.Variable]:
        """Return the variables of the metrics."""

    @abc.abstractmethod
    def _reset(self) -> None:
        """Reset the metrics."""

    def _reset_metrics(self) -> None:
        self._reset()
        self._averages_state.reset()

    @functools.cached_property
    def _averages_state(self) -> MetricState:
        return MetricState(self._metrics() if self.train_state.averages else ())

    def _evaluate(self, batch: Any) -> list[dict[str, tf.Tensor]]:
        """Return the results of `_traced_test_step` for a batch, which may be padded."""
        example, counted = batch
        number = tf.cast(tf.reduce_sum(counted), tf.int32)
        if not self.pads:
            example = tf.nest.map_structure(lambda t: t[: int(number)], example)
        return traced(self.model, lambda: self._traced_test_step(example, number))

    @functools.cached_property
    def _traced_test_step(self) -> Callable:
        """The compiled `test_step` with weights and averages; without padding, one for each size.

        Keras weighs the loss of an output by the size of the batch, if that is static.
        """
        home = self.builder.gather_device

        def test_step(example: Any, number: tf.Tensor) -> list[dict[str, tf.Tensor]]:
            with tf.device(home), integers_on(home), floatx_of(self.options.dtype):
                results = [self.test_step(example, number, averaged=False)]
                if self.train_state.averages:
                    with self._averages_state.used(self.train_state.averages):
                        results.append(self.test_step(example, number, averaged=True))
            return results

        return tf.function(test_step, autograph=False)

    def _evaluation(self, split: Split, logs: Sequence[dict]) -> Evaluation:
        """Return the result of an evaluation; `logs` are the metrics of the last batch."""
        figures = [self._final_metrics(logs[0])]
        if self.train_state.averages:
            with self._averages_state.used(self.train_state.averages):
                figures.append(self._final_metrics(logs[1]))
        metrics: dict[str, float | None] = {}
        for name, value in figures[0].items():
            metrics[name] = value
            if self.train_state.averages or self.names_averages:
                metrics[f"{name}{AVERAGED}"] = figures[1][name] if len(figures) == 2 else None
        return Evaluation(metrics, split.size)

    def _final_metrics(self, logs: Mapping[str, tf.Tensor]) -> dict[str, float]:
        """Return the metrics over all batches, or `logs` if the model's own step has others."""
        metrics = self.metrics_result()
        metrics = metrics if metrics.keys() == logs.keys() else logs
        return {name: float(value) for name, value in metrics.items()}

    @abc.abstractmethod
    def describe(self) -> str:
        """Return a short description for the run's summary."""

    @abc.abstractmethod
    def describe_update(self) -> dict[str, str]:
        """Return the summary's texts for "decay", "scale", "clips" and "clock"."""

    @abc.abstractmethod
    def metric_directions(self) -> Mapping[str, str | None]:
        """Return {metric: "max" or "min", whichever is better, or None if unknown}."""

    def inputs(self, x: Any, draws: tf.Tensor | None) -> Any:
        """Return the model's inputs: images as floats; other data change in precision only.

        Args:
            x: of a batch, `[b, ...]`, as the data set stores it.
            draws: random numbers by which images are augmented; None: they are not.
        """
        kind, dtype = self.options.augment, self.options.input_dtype
        if self.data.image_shape is None:
            return self.cast(x)
        if draws is None:
            return augment.eval_images(x, kind, dtype)
        return augment.train_images(x, draws, kind, dtype)

    def cast(self, structure: Any) -> Any:
        """Return a structure of tensors with floats cast to the run's input dtype."""
        dtype = tf.as_dtype(self.options.input_dtype)
        return tf.nest.map_structure(
            lambda t: tf.cast(t, dtype) if t.dtype.is_floating and t.dtype != dtype else t,
            structure,
        )

    def objective(self) -> tuple[str, str]:
        """Return the metric that selects the best evaluation, and "max" or "min".

        Raises:
            InputError: `options.monitor` is no metric of this task, or its direction is unknown.
        """
        known = self.metric_directions()
        if not self.options.monitor:
            candidates = [name for name in known if name != "loss" and known[name]]
            rest = "loss" if "loss" in known else next(iter(known))
            name = "accuracy" if "accuracy" in candidates else next(iter(candidates), rest)
            return name, known[name] or "min"
        return parse_monitor(self.options.monitor, known)


class Classifier(Task):
    """Softmax cross entropy of logits `[b, classes]` and integer labels `[b]`.

    In evaluation it has no label smoothing, regularisation or losses added by layers.
    """

    pads = names_averages = True

    def __init__(
        self,
        builder: TowerBuilder,
        model: keras.Model,
        options: StepOptions,
        data: Data,
        loss_scaling: bool = False,
        batch_accuracy: bool = False,
    ):
        """See `Task`; with `loss_scaling` the loss is scaled.

        With `batch_accuracy` a step also returns the accuracy of its batch.
        """
        super().__init__(builder, model, options, data)
        self._batch_accuracy, names = batch_accuracy, ("accuracy", "loss")
        make = functools.partial(make_optimizer, options=options)
        with tf.device(builder.gather_device):  # sums of a million examples need float64
            optimizer = make(model.trainable_variables)
            self._means = {name: keras.metrics.Mean(name, dtype="float64") for name in names}
        self.train_state = self._make_train_state(optimizer, like=make, loss_scaling=loss_scaling)

    @property
    def step_names(self) -> Sequence[str]:
        """See `Task`."""
        names = "loss", "penalty", "gradient_norm", "learning_rate"
        return [*names, "batch/accuracy"] if self._batch_accuracy else names

    @property
    def rate_is_set(self) -> bool:
        """See `Task`."""
        return not is_own(self.options)

    def losses_of(self, outputs: Any, labels: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        """See `Task`."""
        losses = cross_entropy(labels, outputs, self.options.label_smoothing)
        for weight in weights:
            losses *= tf.cast(weight, losses.dtype)
        return losses

    def metric_inputs(self, outputs: Any, targets: Sequence[Any]) -> Any:
        """See `Task`: whether each example is classified correctly, for `batch_accuracy`."""
        if not self._batch_accuracy:
            return ()
        labels = targets[0]
        predicted = tf.argmax(outputs, axis=-1, output_type=labels.dtype)
        return (tf.cast(predicted == labels, tf.float32),)

    def batch_metrics(self, outputs: Any) -> dict[str, tf.Tensor]:
        """See `Task`."""
        if not self._batch_accuracy:
            return {}
        with tf.device(self.builder.gather_device), tf.name_scope("gather"):
            return {"batch/accuracy": tf.reduce_mean(outputs[0])}

    def describe(self) -> str:
        """See `Task`."""
        return f"classification: cross entropy of logits, {self.data.num_classes} classes"

    def describe_update(self) -> dict[str, str]:
        """See `Task`."""
        return describe_flags(self.options, self.train_state.loss_scale)

    def metric_directions(self) -> Mapping[str, str | None]:
        """See `Task`."""
        return {"accuracy": "max", "loss": "min"}

    def test_step(self, example: Any, number: tf.Tensor, averaged: bool) -> dict[str, tf.Tensor]:
        """See `Task`."""
        x, *targets = example
        replicas = self.train_state.replicas
        copies = [] if averaged else [PerTower([r.weights for r in replicas])][: len(replicas) - 1]
        logits = self.builder.concat(self._logits, x, *copies)
        logits, labels, *weights = tf.nest.map_structure(lambda t: t[:number], (logits, *targets))
        losses = cross_entropy(labels, logits)
        for weight in weights:
            losses *= tf.cast(weight, losses.dtype)
        predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
        self._means["accuracy"].update_state(tf.cast(predicted == labels, tf.float64))
        self._means["loss"].update_state(losses)
        return self.metrics_result()

    @functools.cached_property
    def _logits(self) -> Callable:
        """A tower's function from examples to logits, with its copy of the weights if any."""
        model = self.model

        def logits(x: Any, copies: Sequence[keras.Variable] = ()) -> tf.Tensor:
            weights = model.trainable_variables[: len(copies)]
            values = {id(v): c.value for v, c in zip(weights, copies, strict=True)}
            with ReplicaScope(values):  # discards assignments, as of seeds
                return logits_of(model, self.inputs(x, None), self.options.test_time_flip)

        return logits

    def metrics_result(self) -> dict[str, tf.Tensor]:
        """See `Task`."""
        return {name: mean.result() for name, mean in self._means.items()}

    def _metrics(self) -> Sequence[keras.Variable]:
        return [v for mean in self._means.values() for v in mean.variables]

    def _reset(self) -> None:
        for mean in self._means.values():
            mean.reset_state()
