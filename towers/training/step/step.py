"""The training step of a compiled Keras model, from a batch to the update, and its evaluation.

A batch is (example, draws). The example is (x, y) or (x, y, sample_weight), each any structure of
tensors whose axis 0 is the batch. The draws are the random numbers of augmentation.

Loss, metrics and optimizer are those that `fit` would use, over the global batch. Each tower
augments its examples and computes their losses, so that only gradients leave it; these are added,
and one update is made. A model with a `train_step` of its own, or a loss that mixes examples, has
its `train_step` traced in place of this step, with its calls on towers (`parallelize`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.passes import Passes, TowerGradients, mean_gradients
from towers.builder.replica_context import integers_on
from towers.builder.replica_scope import new_value_reason
from towers.builder.sharding import PerTower, num_rows
from towers.builder.tower import TowerBuilder
from towers.errors import InputError
from towers.monitoring import tower_metrics
from towers.training.step import fused_update
from towers.training.step.evaluation import Evaluation, Stop, TestStep, mirrored, scalars
from towers.training.step.losses import LossRecorder, per_example_losses
from towers.training.step.on_towers import builder_of, method_of, passes_of, put_on
from towers.training.step.train_state import (
    TrainState,
    build,
    copy_on,
    dynamic_scale,
    optimizers_of,
    overrides,
    place,
    record_assignments,
    slots_beside_weights,
    snapshot,
)
from towers.training.step.update import FiniteRule, StepOptions, make_update
from towers.training.step.weight_copies import can_keep, is_linear, like


class Task:
    """The training and the evaluation of a compiled Keras model.

    Attributes:
        train_state: the variables that a step changes.
        by_example: whether towers compute losses of separate examples; else the model's own step is
            traced over towers.
        squares_rows: whether optimizers get sparse gradients, as in Keras; else dense ones.
        rate_is_set: whether the run sets the learning rate in each step; else the optimizer does.
        step_names: names of the scalars that every step returns.
        figures: names of the metrics of an evaluation, "loss" first.
    """

    def __init__(
        self,
        builder: TowerBuilder,
        model: keras.Model,
        options: StepOptions,
        data: Any,
        prepare: Callable,
        recorder: LossRecorder,
        by_flags: bool = False,
        reports_metrics: bool = True,
    ):
        """Place the model's variables, and create those that a step needs.

        Args:
            builder: of the towers.
            model: the compiled model to train.
            options: of the run.
            data: of the run, a `towers.data.Data`.
            prepare: returns what the model is given for (example, draws), see
                `towers.data.augment.preparation`.
            recorder: of the model, which records its losses.
            by_flags: whether the flags of the run have compiled the model.
            reports_metrics: whether steps compute the metrics of their batch.

        Raises:
            InputError: an option is not possible with this model.
        """
        self.builder, self.model, self.options, self.data = builder, model, options, data
        self.prepare, self.recorder, self.by_flags = prepare, recorder, by_flags
        self.rate_is_set = by_flags and not options.makes_own_optimizer
        place(model, builder, options.variables)
        new_values = [v for v in model.trainable_variables if v.overwrite_with_gradient]
        self._is_on_one_device = bool(new_values)
        if new_values:
            builder.warn([f"{options.model} runs on one device: {new_value_reason(new_values[0])}"])
        else:
            put_on(model, builder, options.variables == "replicated")
        log_names, self.figures = self._trace_once()
        self._of_batch = [f"batch/{n}" for n in log_names if n != "loss" and reports_metrics]
        self.step_names = ["loss", "penalty", "gradient_norm", "learning_rate", *self._of_batch]
        scaled = getattr(model.optimizer, "dynamic_scale", None) is not None
        follows = options.variables != "replicated" or can_keep(model.optimizer)
        self.by_example = self.recorder.of_examples and follows and not (scaled or new_values)
        self.squares_rows = not is_linear(model.optimizer)
        self.train_state = TrainState(
            model,
            *optimizers_of(model),
            ema=options.ema_decay > 0,
            device=builder.gather_device,
            copies=self._copies_of_weights(),
            limit=options.most_nonfinite,
        )
        self._analysis: FunctionAnalysis | None = None

    def _copies_of_weights(self) -> list:
        """Return each other tower's copy of the weights, which a step updates, too."""
        model, weights = self.model, self.model.trainable_variables
        if not self.by_example or self.options.variables != "replicated":
            return []
        if not all(map(fused_update.can_follow, weights)):
            return []

        def like_optimizer(twins: Sequence[keras.Variable]) -> keras.optimizers.Optimizer:
            with floatx_of(self.options.dtype):
                return like(model.optimizer, weights, twins)

        self.builder.dense_gradients = not self.squares_rows
        return [copy_on(name, weights, like_optimizer) for name in self.builder.devices[1:]]

    def _trace_once(self) -> tuple[list[str], list[str]]:
        """Return the names of the metrics of training and evaluation, "loss" first.

        The step is traced on one device, so that optimizers and metrics create their variables.
        """
        model, options = self.model, self.options
        batches = self.data.train.train_batches(options.batch_size, seed=options.seed)
        has_own = overrides(model, "train_step", "test_step")
        names: list[str] = []
        figures: list[str] = []
        assigned: list[tf.Variable] = []

        def no_gradient(_: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            return tf.nest.map_structure(tf.zeros_like, sources)

        def build_only(optimizer: keras.optimizers.Optimizer) -> Callable:
            return lambda _: lambda gradients, weights: build(optimizer, weights)

        # The backward pass of Keras' own step would take most of the time, and tells nothing.
        left_out = [(tf.GradientTape, "gradient", lambda _: no_gradient)]
        left_out += [(o, "apply", build_only(o)) for o in optimizers_of(model)]
        left_out = [] if overrides(model, "train_step", "compute_loss") else left_out

        def step(example: Any, draws: tf.Tensor) -> None:
            outside = tf.variable_creator_scope(tf_internals.created_outside)
            with tf.device(self.builder.gather_device), tf_internals.replaced(*left_out), outside:
                data = self.prepare(example, draws)
                with self.recorder.record(data[1:2]):
                    names[:] = scalars(method_of(model, "train_step")(data))
                if has_own:  # else they are the same
                    self.recorder.check_test_step()
                    data = self.prepare(example, None)
                    figures[:] = scalars(method_of(model, "test_step")(data))

        with contextlib.ExitStack() as stack:
            stack.enter_context(floatx_of(options.dtype))
            for optimizer in optimizers_of(model):
                stack.enter_context(slots_beside_weights(optimizer))
            stack.enter_context(record_assignments(assigned))
            tf.function(step, autograph=False).get_concrete_function(*batches.element_spec)
        owners = [model, *optimizers_of(model), *model.metrics]
        known = {id(v.value) for owner in owners for v in owner.variables}
        self.unsaved = list({id(v): v.name for v in assigned if id(v) not in known}.values())
        for step_name, found in ("train_step", names), ("test_step", figures if has_own else names):
            if not found:
                raise InputError(
                    f"--model={options.model}: its {step_name} returns no numbers; return a dict "
                    'such as {"loss": loss}'
                )
        return tuple(sorted(n, key=lambda name: name != "loss") for n in (names, figures or names))

    # Training.

    def make_train_step(self, learning_rate: Callable) -> Callable:
        """Return `train_step(example, draws, measured=None)`: one update, to be compiled.

        It returns a dict of tensors, with the scalars in `step_names`: "loss" is the mean over all
        examples, "penalty" that of regularization. With `measured`, a bool scalar, it also has the
        keys of `tower_metrics.measured_shapes` and `timed_shapes`; norms are computed if it is
        True. Otherwise they are 0, and on GPUs all values.
        """
        of_losses = self._make_step_of_losses(learning_rate)
        of_outputs = self._make_step_of_outputs(learning_rate)

        def train_step(
            example: Any, draws: tf.Tensor, measured: tf.Tensor | None = None
        ) -> dict[str, tf.Tensor]:
            self.analyze(example, draws)
            make = of_losses if self.by_example and builder_of(self.model) else of_outputs
            return make(example, draws, measured)

        return train_step

    def analyze(self, *batch: Any) -> FunctionAnalysis:
        """Analyze the towers' function on (example, draws), before steps are traced without any.

        If the losses turn out to mix examples, steps join the outputs from here on.
        """
        if self._is_on_one_device:
            return FunctionAnalysis()

        def analysis_of_now() -> FunctionAnalysis:
            example, draws = batch
            return self.builder.analyze(self.tower_function, *example, draws, silent=True)

        analysis = analysis_of_now()
        if self.by_example and self.builder.num_slices > 1 and analysis is not self._analysis:
            self._analysis, alone = analysis, analysis.trace is not None and analysis.by_example
            if not alone or analysis.reason:
                self.by_example = False
                self.train_state.drop_copies()
                analysis = analysis_of_now()
        return analysis

    def _make_step_of_losses(self, learning_rate: Callable) -> Callable:
        builder, train_state = self.builder, self.train_state
        update = make_update(train_state, self.options, self.rate_is_set, self.squares_rows)

        def rate_of(replica: Any) -> tf.Tensor:
            with tf.device(replica.device):
                if self.rate_is_set:
                    return learning_rate(replica.examples)
                return tf.convert_to_tensor(replica.optimizer.learning_rate)

        def train_step(
            example: Any, draws: tf.Tensor, measured: tf.Tensor | None
        ) -> dict[str, tf.Tensor]:
            passes, seen = Passes(), {}
            # Without this a tower may finish before the clock is read.
            start = [] if measured is None else [tower_metrics.time_after((example, draws))]
            with tf.control_dependencies(start):
                with floatx_of(self.options.dtype):  # the backward pass may call layers, too
                    loss, gradients, outputs = mean_gradients(
                        builder, self.tower_function, self._weights(), (*example, draws), passes
                    )
                if measured is not None:
                    with tf.name_scope("telemetry"):
                        seen = tower_metrics.measure(
                            passes.gradients, builder, measured, 1.0, *start, loss
                        )
                with tf.device(builder.gather_device), tf.name_scope("update"):
                    rates = list(map(rate_of, train_state.replicas))
                    rows = num_rows(draws)
                    metrics = update(gradients, rates, list(passes.before.values()), loss, rows)
                metrics |= self._metrics_of_batch(outputs)
            return metrics | {"loss": loss, "learning_rate": rates[0]} | seen

        return train_step

    def _weights(self) -> list[Any]:
        """Return the trainable variables for the builder, each with its copies, if any."""
        replicas = self.train_state.replicas
        if len(replicas) == 1:
            return self.model.trainable_variables
        return [PerTower(copies) for copies in zip(*(r.weights for r in replicas), strict=True)]

    def tower_function(self, *batch: Any) -> Any:
        """Return one tower's losses `[b]` for (*example, draws).

        Losses added by layers (`add_loss`, activity regularizers) are added to each example's. If
        the step has metrics, a tuple (losses, their inputs) is returned; if the loss mixes
        examples, a number for each row of the outputs.
        """
        *example, draws = batch
        inputs, *targets = self.prepare(example, draws)
        if not self.by_example:
            return _rows_of(self.model(inputs, training=True))
        before = len(_added_losses())
        with floatx_of(self.options.dtype):
            outputs = self.model(inputs, training=True)
            losses = self.losses_of(outputs, *targets)
        # They are of the tower's batch: the mean over all examples weighs each by its size.
        for added in _added_losses()[before:]:
            losses += tf.reduce_sum(tf.cast(added, losses.dtype))
        return (losses, (outputs, *targets)) if self._of_batch else losses

    def losses_of(self, outputs: Any, *targets: Any) -> tf.Tensor:
        """Return the losses of a tower's examples, `[b]`, whose mean is the compiled loss."""
        y, weights = [*targets, None, None][:2]
        # The scope discards the updates of loss metrics, which are made over the whole batch.
        with keras.StatelessScope(), per_example_losses(self.options.batch_size):
            return tf_internals.compiled_loss(self.model, y, outputs, weights)

    def _metrics_of_batch(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return the metrics of a step's batch, from the towers' joined outputs and targets."""
        if not self._of_batch:
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
        """Return the step that traces the model's own, with its calls on towers."""
        builder, train_state, model = self.builder, self.train_state, self.model

        def train_step(
            example: Any, draws: tf.Tensor, measured: tf.Tensor | None
        ) -> dict[str, tf.Tensor]:
            with tf.device(builder.gather_device):
                example = tf.nest.map_structure(tf.convert_to_tensor, example)
                rate = learning_rate(train_state.examples)
                before = self._before()
                scale = dynamic_scale(model)
                rule = FiniteRule(train_state, self.options)
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
                    stack.enter_context(
                        fused_update.updates_joined(optimizers_of(model), rule.apply)
                    )
                    stack.enter_context(rule.record_losses(model))
                    logs = scalars(model.train_step(self.prepare(example, draws)))
                passes, seen = passes_of(model), {}
                gradients = passes.gradients
                if gradients is None and rule.gradients:  # the first device has made them
                    gradients = TowerGradients.of_one_tower(example, rule.gradients)
                if measured is not None:
                    with tf.name_scope("telemetry"):
                        seen = tower_metrics.measure(gradients, builder, measured, scale)
                known = {id(variable) for variable, _ in before}
                before += [pair for pair in passes.before.values() if id(pair[0]) not in known]
                names = "loss", *(name for name in logs if "loss" in name), *logs
                loss = logs[next(name for name in names if name in logs)]
                wide = tf.as_dtype(keras.backend.result_type(loss.dtype, "float32"))
                penalty = sum((tf.cast(each, wide) for each in penalties), tf.zeros([], wide))
                rows = tf.shape(tf.nest.flatten(example)[0], tf.int64)[0]
                rule.end_step(before, rows, loss)
            return {
                "loss": loss - tf.cast(penalty, loss.dtype),
                "penalty": penalty,
                "gradient_norm": rule.norm / tf.cast(scale, rule.norm.dtype),
                "learning_rate": rate,
                **{name: logs[name.removeprefix("batch/")] for name in self._of_batch},
                **seen,
            }

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

    def num_skipped(self) -> int | None:
        """Return the number of steps without an update; None if none is ever skipped.

        It is 0 for a model's own step with several updates.
        """
        optimizers = self.train_state.optimizers
        scaled = any(getattr(each, "dynamic_scale", None) is not None for each in optimizers)
        if not scaled and self.options.on_nan != "skip":
            return None
        updates = optimizers[0].iterations if optimizers else self.train_state.step
        return max(int(self.train_state.step.numpy()) - int(updates.numpy()), 0)

    def finish(self) -> bool:
        """Finalize the weights after the last step; return whether any changed.

        An optimizer with `use_ema` assigns its averages to the weights.
        """
        optimizer = self.model.optimizer  # as in `fit`, others are left to the model's step
        averages = getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", False)
        if averages:
            optimizer.finalize_variable_values(self.model.trainable_variables)
            self.train_state.set_copies()
        return averages

    # Evaluation.

    def make_evaluator(self, split: Any) -> Callable[[Stop], Evaluation | None]:
        """Return `evaluator(stop)`, see `TestStep.evaluate`, of the current master variables."""
        batches = split.eval_batches(self.options.batch_size)
        return functools.partial(self.test_step.evaluate, batches, split.size)

    @functools.cached_property
    def test_step(self) -> TestStep:
        """The compiled step of evaluations."""

        def test_step(example: Any) -> dict[str, tf.Tensor]:
            with floatx_of(self.options.dtype), self._flips():
                return scalars(self.model.test_step(self.prepare(example, None)))

        averages, home = self.train_state.averages, self.builder.gather_device
        return TestStep(self.model, test_step, averages, home, without_penalty=self.by_flags)

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


def _rows_of(outputs: Any) -> tf.Tensor:
    """Return a number for each example, `[b]`, that depends on all outputs of the example."""
    rows = [tf.reshape(output, [tf.shape(output)[0], -1]) for output in tf.nest.flatten(outputs)]
    # Weights that all differ: the plain sum of a softmax would always be 1.
    return sum(tf.linalg.matvec(x, tf.cos(tf.range(tf.shape(x)[1], dtype=x.dtype))) for x in rows)


def _added_losses() -> list[Any]:
    """Return what `add_loss` and activity regularizers have added in the open scope so far."""
    return list(getattr(tf_internals.open_scope(), "losses", []))


# Precision.


@contextlib.contextmanager
def floatx_set(dtype: str) -> Iterator[None]:
    """Set floatx in the block, except in Keras' augmentation.

    Those layers mix floatx with float32: in Keras 3.15 RandomRotation and RandAugment raise a
    TypeError unless floatx is float32. They still compute in their own dtype policy.
    """

    @contextlib.contextmanager
    def floatx(value: str) -> Iterator[None]:
        before = keras.config.floatx()
        keras.config.set_floatx(value)
        try:
            yield
        finally:
            keras.config.set_floatx(before)

    make = floatx("float32")  # a decorator, too
    with tf_internals.patched(("DataLayer.__call__", make)), floatx(dtype):
        yield


@contextlib.contextmanager
def floatx_of(dtype: str) -> Iterator[None]:
    """Make float64 Keras' default type, if `dtype` is float64, where layers are built or called."""
    keras.config.dtype_policy()  # if none is set, Keras takes it from floatx and keeps it
    with floatx_set(dtype) if dtype == "float64" else contextlib.nullcontext():
        yield
