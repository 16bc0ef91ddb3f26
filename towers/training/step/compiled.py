"""The task of a compiled Keras model.

Loss, metrics, optimizer and learning-rate schedule are those that `fit` would use, over the global
batch. If the loss is one of separate examples, it is computed on the towers
(`Task.make_train_step`); otherwise the model's own `train_step` is traced in the run's loop with
its calls on towers (`parallelize`), as its `test_step` is in evaluation.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.passes import TowerGradients
from towers.builder.replica_context import integers_on
from towers.builder.replica_scope import new_value_reason
from towers.builder.tower import TowerBuilder
from towers.data import Data
from towers.errors import InputError
from towers.monitoring import tower_metrics
from towers.options.parts import StepOptions
from towers.training.parallelize import builder_of, method_of, passes_of, put_on
from towers.training.step import fused_update, loss_checks
from towers.training.step.keras_model import floatx_of, overrides
from towers.training.step.optimizers import CLIPS, describe_flags, describe_scale, is_own
from towers.training.step.output_activation import mirrored
from towers.training.step.skip_nonfinite import NonFiniteGuard
from towers.training.step.task import Task
from towers.training.step.train_state import dynamic_scale, optimizers_of, snapshot
from towers.training.step.weight_copies import can_keep, is_linear, like


class Compiled(Task):
    """The task of a compiled model on (x, y, sample_weight)."""

    _analysis: FunctionAnalysis | None = None

    def __init__(self, builder: TowerBuilder, model: keras.Model, options: StepOptions, data: Data):
        """Create all variables that a step needs; see `Task`.

        Raises:
            InputError: an option is not possible with this model.
        """
        super().__init__(builder, model, options, data)
        new_values = [v for v in model.trainable_variables if v.overwrite_with_gradient]
        self._is_on_one_device = bool(new_values)
        if new_values:
            builder.warn([f"{options.model} runs on one device: {new_value_reason(new_values[0])}"])
        else:
            put_on(model, builder, options.variables == "replicated")
        self.recorder = loss_checks.LossRecorder(model)
        self._log_names, self._figures = self._trace_once()
        optimizers = optimizers_of(model)
        scaled = getattr(model.optimizer, "dynamic_scale", None) is not None
        # Else the model's own step runs on the joined outputs of towers.
        follows = options.variables != "replicated" or can_keep(model.optimizer)
        self.by_example = self.recorder.of_examples and follows and not (scaled or new_values)
        self.keeps_copies = self.by_example  # the model's own step updates the master weights alone
        self.squares_rows = not is_linear(model.optimizer)
        self.train_state = self._make_train_state(*optimizers, like=self._like_optimizer)

    def _like_optimizer(self, weights: Sequence[keras.Variable]) -> keras.optimizers.Optimizer:
        with floatx_of(self.options.dtype):
            return like(self.model.optimizer, self.model.trainable_variables, weights)

    def _trace_once(self) -> tuple[list[str], list[str]]:
        """Return the names of the metrics of training and evaluation, "loss" first.

        The step is traced on one device, so that optimizers and metrics create their variables.
        """
        model, options = self.model, self.options
        batches = self.data.train.train_batches(options.batch_size, seed=options.seed)
        is_own = overrides(model, "train_step", "test_step")
        names: list[str] = []
        figures: list[str] = []
        assigned: list[tf.Variable] = []

        def step(example: Any, draws: tf.Tensor) -> None:
            with tf.device(self.builder.gather_device):
                data = self._data(example, draws)
                with self.recorder.record(data[1:2]):
                    names[:] = scalars(method_of(model, "train_step")(data))
                if is_own:  # else they are the same
                    self._check_test_step()
                    data = self._data(example, None)
                    figures[:] = scalars(method_of(model, "test_step")(data))

        with contextlib.ExitStack() as stack:
            stack.enter_context(loss_checks.translate_loss_errors(self, batches))
            stack.enter_context(floatx_of(options.dtype))
            for optimizer in optimizers_of(model):
                stack.enter_context(tf_internals.slots_beside_weights(optimizer))
            stack.enter_context(tf_internals.record_assignments(assigned))
            tf.function(step, autograph=False).get_concrete_function(*batches.element_spec)
        owners = [model, *optimizers_of(model), *model.metrics]
        known = {id(v.value) for owner in owners for v in owner.variables}
        self.unsaved = list({id(v): v.name for v in assigned if id(v) not in known}.values())
        for step_name, found in ("train_step", names), ("test_step", figures if is_own else names):
            if not found:
                raise InputError(
                    f"--model={options.model}: its {step_name} returns no number: return a dict "
                    'such as {"loss": loss}'
                )
        return tuple(sorted(n, key=lambda name: name != "loss") for n in (names, figures or names))

    def _check_test_step(self) -> None:
        """Raise InputError for Keras' own test_step without a loss, after a training step."""
        model, is_own = self.model, overrides(self.model, "test_step", "compute_loss")
        if not is_own and model.loss is None and not model.losses:
            raise InputError(
                f"--model={self.options.model} has a train_step of its own, no test_step, and no "
                "loss by compile, so it cannot be evaluated: give it a test_step that returns a "
                'dict such as {"loss": loss}'
            )

    @property
    def rate_is_set(self) -> bool:
        """See `Task`: flags that compile a model leave the schedule to the run."""
        by_flags = bool(self.options.loss or self.options.metrics)
        return by_flags and not is_own(self.options)

    @property
    def step_names(self) -> Sequence[str]:
        """See `Task`."""
        return ["loss", "penalty", "learning_rate", *self._of_batch()]

    def _of_batch(self) -> list[str]:
        return [f"batch/{name}" for name in self._log_names if name != "loss"]

    def make_train_step(self, learning_rate: Callable) -> Callable:
        """See `Task`; "loss" is that of the model without "penalty", that of regularisation."""
        of_examples = super().make_train_step(learning_rate)
        of_outputs = self._make_step_of_outputs(learning_rate)

        def train_step(
            example: Any, draws: tf.Tensor, measured: tf.Tensor | None = None
        ) -> tuple[dict[str, tf.Tensor], list[Any]]:
            self.analyze(example, draws)
            make = of_examples if self.by_example and builder_of(self.model) else of_outputs
            metrics, _ = make(example, draws, measured)
            return metrics, [None] * len(self.model.trainable_variables)

        return train_step

    def analyze(self, *batch: Any) -> FunctionAnalysis:
        """See `Task`; from here on outputs are joined if the loss mixes examples."""
        if self._is_on_one_device:
            return FunctionAnalysis()
        analysis = super().analyze(*batch)
        if self.by_example and self.builder.num_slices > 1 and analysis is not self._analysis:
            self._analysis, alone = analysis, analysis.trace is not None and analysis.by_example
            if not alone or analysis.reason:
                self.by_example = False
                self.train_state.drop_copies()
                analysis = super().analyze(*batch)
        return analysis

    def update_rules(self) -> StepOptions:
        """See `Task`; clipping and regularisation are the model's own."""
        return dataclasses.replace(self.options, weight_decay=0.0, **dict.fromkeys(CLIPS, 0.0))

    def batch_metrics(self, outputs: Any) -> dict[str, tf.Tensor]:
        """See `Task`."""
        if not self._of_batch():
            return {}
        device, model = self.builder.gather_device, self.model
        with tf.device(device), integers_on(device), floatx_of(self.options.dtype):
            predicted, *targets = outputs
            y, weights = [*targets, None, None][:2]
            for metric in model.metrics:  # they are reported of one batch
                metric.reset_state()
            tf_internals.compiled_loss(model, y, predicted, weights)  # has metrics, too
            logs = scalars(model.compute_metrics(None, y, predicted, weights))
        return {f"batch/{name}": value for name, value in logs.items() if name != "loss"}

    def _make_step_of_outputs(self, learning_rate: Callable) -> Callable:
        builder, train_state, model = self.builder, self.train_state, self.model

        def train_step(
            example: Any, draws: tf.Tensor, measured: tf.Tensor | None = None
        ) -> tuple[dict[str, tf.Tensor], list[Any]]:
            with tf.device(builder.gather_device):
                example = tf.nest.map_structure(tf.convert_to_tensor, example)
                rate = learning_rate(train_state.examples)
                before = self._before()
                scale = dynamic_scale(model)
                guard = NonFiniteGuard(train_state, self.on_update)
                if self.rate_is_set:
                    model.optimizer.learning_rate.assign(rate)
                elif model.optimizer is not None:
                    rate = tf.convert_to_tensor(model.optimizer.learning_rate)
                for metric in model.metrics:  # they are reported of one batch
                    metric.reset_state()
                weights = [v for v in model.trainable_variables if v.regularizer is not None]
                penalties = [v.regularizer(v) for v in weights]  # before the update
                with contextlib.ExitStack() as stack:
                    stack.enter_context(floatx_of(self.options.dtype))
                    stack.enter_context(integers_on(builder.gather_device))
                    stack.enter_context(fused_update.updates_joined(optimizers_of(model), guard))
                    stack.enter_context(guard.record_losses(model))
                    logs = scalars(model.train_step(self._data(example, draws)))
                passes, seen = passes_of(model), {}
                gradients = passes.gradients
                if gradients is None and guard.gradients:  # the first device has made them
                    gradients = TowerGradients.of_one_tower(example, guard.gradients)
                if measured is not None and gradients:
                    with tf.name_scope("telemetry"):
                        seen = tower_metrics.measure_joined(gradients, builder, measured, scale)
                known = {id(variable) for variable, _ in before}
                before += [pair for pair in passes.before.values() if id(pair[0]) not in known]
                names = "loss", *(name for name in logs if "loss" in name), *logs
                loss = logs[next(name for name in names if name in logs)]
                wide = tf.as_dtype(keras.backend.result_type(loss.dtype, "float32"))
                penalty = sum((tf.cast(each, wide) for each in penalties), tf.zeros([], wide))
                rows = tf.shape(tf.nest.flatten(example)[0], tf.int64)[0]
                guard.end_step(loss, before, rows, self.update_rules())
            return {
                "loss": loss - tf.cast(penalty, loss.dtype),
                "penalty": penalty,
                "learning_rate": rate,
                **{f"batch/{name}": value for name, value in logs.items() if name != "loss"},
                **(self._measured(seen) if measured is not None else {}),
            }, [None] * len(model.trainable_variables)

        return train_step

    def _before(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Return (variable, current value) of what a step may change before its finite test.

        Keras' own step makes its one update last. A step of the user's may change any variable.
        """
        model = self.model
        if overrides(model, "train_step", "compute_loss", "compute_metrics"):
            optimizers = optimizers_of(model)  # but not a loss scale, which is lowered anyway
            inner = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
            slots = [v for optimizer in inner for v in optimizer.variables]
            changed = [v.value for v in (*model.trainable_variables, *slots)]
            return [(v, snapshot(v)) for v in changed] + self.train_state.statistics()
        if self.rate_is_set:
            rate = model.optimizer.learning_rate.value
            return [(rate, snapshot(rate))]
        return []

    def finish(self) -> bool:
        """See `Task`; an optimizer with `use_ema` assigns its averages to the weights."""
        optimizer = self.model.optimizer  # as in `fit`, others are left to the model's step
        averages = getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", False)
        if averages:
            optimizer.finalize_variable_values(self.model.trainable_variables)
            self.train_state.set_copies()
        return averages

    def _measured(self, seen: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the telemetry of a step, in which towers have no loss of their own."""
        num_towers = len(self.builder.devices)
        shapes = tower_metrics.measured_shapes(num_towers) | tower_metrics.timed_shapes(num_towers)
        telemetry = {name: tf.zeros(shape) for name, shape in shapes.items()} | seen
        seconds = telemetry.pop("tower_step_seconds", tf.zeros([num_towers]))
        unknown = tf.fill([num_towers], tf.constant(np.nan, tf.float32))
        return telemetry | {
            "tower_loss": unknown,
            "tower_seconds": tf.cast(seconds, tf.float64),
            "compute_seconds": tf.cast(tf.reduce_max(seconds), tf.float64),
            "gather_seconds": tf.zeros([], tf.float64),
        }

    def inputs(self, x: Any, draws: tf.Tensor | None) -> Any:
        """See `Task`; with --augment=off x is what `fit` would give the model."""
        return self.cast(x) if self.options.augment == "off" else super().inputs(x, draws)

    def _data(self, example: Any, draws: tf.Tensor | None) -> tuple:
        x, *rest = example
        return self.inputs(x, draws), *self.cast(rest)

    def tower_function(self, *batch: Any) -> Any:
        """See `Task`; if the loss mixes examples, return a number for each row of the outputs."""
        *example, draws = batch
        if not self.by_example:
            return _rows_of(self.model(self.inputs(example[0], draws), training=True))
        return super().tower_function(*batch)

    def losses_of(self, outputs: Any, *targets: Any) -> tf.Tensor:
        """See `Task`; their mean is the compiled loss."""
        y, weights = [*self.cast(targets), None, None][:2]
        # The scope discards the updates of loss metrics, which are made over the whole batch.
        with keras.StatelessScope(), loss_checks.per_example_losses(self.options.batch_size):
            return tf_internals.compiled_loss(self.model, y, outputs, weights)

    def metric_inputs(self, outputs: Any, targets: Sequence[Any]) -> Any:
        """See `Task`."""
        return (outputs, *self.cast(targets)) if self._of_batch() else ()

    def describe(self) -> str:
        """See `Task`."""
        loss = _loss_text(getattr(self.model, "loss", None) or "its own")
        step = ", a train_step of its own" if overrides(self.model, "train_step") else ""
        metrics = [name for name in self._log_names if name != "loss"]
        return f"compiled: loss {loss}; {', '.join(metrics) or 'no metrics'}{step}"

    def describe_update(self) -> dict[str, str]:
        """See `Task`."""
        scale = getattr(self.model.optimizer, "dynamic_scale", None)
        if self.rate_is_set:
            return describe_flags(self.options, scale)
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        clips = {name: getattr(optimizer, name, None) for name in CLIPS.values()}
        of_all = ", ".join(optimizer.name for optimizer in optimizers_of(self.model))
        return {
            "decay": f"weight decay {getattr(optimizer, 'weight_decay', None) or 0:g}",
            "scale": describe_scale(scale),
            "clips": ", ".join(f"{name}={limit}" for name, limit in clips.items() if limit),
            "clock": f"updates; {of_all or 'no optimizer'}, with the learning rate of its own",
        }

    def metric_directions(self) -> Mapping[str, str | None]:
        """See `Task`."""
        direction = tf_internals.metric_direction
        directions = {
            name: direction(self.model, name)
            or direction(self.model, name.rstrip("0123456789").rstrip("_"))  # of a vector
            for name in self._figures
        }
        return directions | ({"accuracy": "max"} if "accuracy" in directions else {})

    # Evaluation.

    def test_step(self, example: Any, number: tf.Tensor, averaged: bool) -> dict[str, tf.Tensor]:
        """See `Task`: the model's own step, whose calls run on towers."""
        with self._flips():
            return scalars(self.model.test_step(self._data(example, None)))

    def _flips(self) -> contextlib.AbstractContextManager:
        """With `test_time_flip`, average the model's outputs of mirror images in the block."""

        def make(call: Callable) -> Callable:
            def call_twice(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
                if layer is not self.model:
                    return call(layer, *args, **kwargs)
                x, *rest = args
                return mirrored(lambda images: call(layer, images, *rest, **kwargs), x)

            return call_twice

        changes = [(keras.Layer, "__call__", make)] if self.options.test_time_flip else []
        return tf_internals.replaced(*changes)

    def metrics_result(self) -> dict[str, tf.Tensor]:
        """See `Task`."""
        return scalars(self.model.get_metrics_result())

    def _metrics(self) -> Sequence[keras.Variable]:
        return self.model.metrics_variables

    def _reset(self) -> None:
        self.model.reset_metrics()


def _rows_of(outputs: Any) -> tf.Tensor:
    """Return a number for each example, `[b]`, that depends on all outputs of the example."""
    rows = [tf.reshape(output, [tf.shape(output)[0], -1]) for output in tf.nest.flatten(outputs)]
    # Weights that all differ: the plain sum of a softmax would always be 1.
    return sum(tf.linalg.matvec(x, tf.cos(tf.range(tf.shape(x)[1], dtype=x.dtype))) for x in rows)


def _loss_text(loss: Any) -> str:
    if isinstance(loss, Mapping):
        return ", ".join(f"{name}: {_loss_text(part)}" for name, part in loss.items())
    if isinstance(loss, list | tuple):
        return ", ".join(map(_loss_text, loss))
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", None) or loss)


def scalars(logs: Any) -> dict[str, Any]:
    """Return the scalars in Keras' logs, and the elements of its vectors as NAME_0, NAME_1, ..."""
    flat = {"loss": logs} if not isinstance(logs, Mapping) else dict(_leaves(logs))
    numbers = {name: value for name, value in flat.items() if not value.shape.rank}
    for name, value in flat.items():
        if value.shape.rank == 1 and value.shape[0] is not None:
            numbers |= {f"{name}_{i}": value[i] for i in range(value.shape[0])}
    return numbers


def _leaves(logs: Mapping, before: str = "") -> Iterator[tuple[str, tf.Tensor]]:
    for name, value in logs.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}_")
        else:
            yield f"{before}{name}", tf.convert_to_tensor(value)
