"""The reference of `towers verify`: a run's steps in plain Keras, on one device.

The model is called as Keras calls it, under one tape, and updated by the optimizer's own `apply`.
Options, data, model function, optimizer and schedule are those of the run. The step is written here
once more, so that a fault of the builder, of the loss or of the update is on one side only.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.commands.verify.runner import Arrays, Runner, evaluation_arrays
from towers.data import augment
from towers.errors import RunError
from towers.options.run import Options
from towers.training.run.model import build_model
from towers.training.run.setup import RunContext
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step.compiled import scalars
from towers.training.step.evaluation import AVERAGED
from towers.training.step.keras_model import floatx_of
from towers.training.step.optimizers import DECAY_APART, is_own, make_optimizer
from towers.training.step.output_activation import mirrored
from towers.training.step.train_state import TrainState, move_all, optimizers_of, restore_after

_EMA_EXAMPLES = 128  # per which `ema_decay` applies
_STEPS_TO_DOUBLE = 2000  # the loss scale


class PlainRunner(Runner):
    """A run in plain Keras. A batch is (example, draws), as for `TrainRunner`."""

    num_towers, builder = 1, None

    def __init__(self, run: RunContext, options: Options, device: str, loss_scaling: bool):
        """Build the model anew, and trace its step.

        Args:
            run: the same run on towers, which has the data and the schedule.
            options: of the run, as they were given.
            device: that computes all.
            loss_scaling: whether a classifier has a loss scale.
        """
        self.data, self._rate_after, self.dtype = run.data, run.learning_rate, options.dtype
        self.options, self._device = options, device
        spec = run.data.train.train_batches(options.batch_size, seed=options.seed).element_spec
        with self._on_device(), tf_internals.named_as_in_a_new_process():
            self.model, self.options = build_model(options, run.data, exact=True)
            move_all(self.model.variables, device)
            self._is_classifier = not self.model.compiled
            if self._is_classifier:
                step = tf.function(self._gradients, autograph=False)
                optimizers = [make_optimizer(self.model.trainable_variables, options)]
            else:
                step = tf.function(self._train_step, autograph=False)
                step.get_concrete_function(*spec)  # makes the optimizers' variables
                optimizers = optimizers_of(self.model)
            self.state = TrainState(
                self.model, *optimizers, ema=options.ema_decay > 0,
                loss_scaling=loss_scaling and self._is_classifier, device=device,
            )  # fmt: skip
            self._step = step.get_concrete_function(*spec)
        self._test_step = tf.function(self._metrics, autograph=False)
        self.named = self.state.variables()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        plain, errors = tf_internals.convolve_without_xla(), user_facing_errors(self.options)
        with errors, tf.device(self._device), plain:
            yield

    def graph(self, batch: Any) -> tf.Graph:
        """See `Runner`."""
        return self._step.graph

    def make_step(self, batch: Any) -> Arrays:
        """See `Runner`; the gradients are those of the data's loss, times its scale."""
        state, options, before = self.state, self.options, self.variables()
        with self._on_device():
            by_flags = self._is_classifier or options.loss or options.metrics
            if by_flags and not is_own(options):
                state.optimizers[0].learning_rate.assign(self._rate_after(state.examples))
            if self._is_classifier:
                arrays, gradients = self._step(*batch)
                is_finite = self._update(arrays["loss"], gradients)
            else:
                self.model.reset_metrics()  # they are reported of one batch
                arrays = self._step(*batch)
                gradients = [None] * len(self.model.trainable_variables)
                is_finite = bool(tf.math.is_finite(arrays["loss"]))
            if is_finite:
                self._move_averages()
            elif state.loss_scale is not None and state.loss_scale > 1.0:  # too high a scale
                seeds = {n: v for n, v in self.variables().items() if v.dtype.kind != "f"}
                self.assign(before | seeds)
            else:
                raise RunError(
                    f"step {int(state.step)} is not finite on one device, so there is nothing to "
                    "compare; type a smaller --learning_rate"
                )
            if state.loss_scale is not None:
                good_steps = (int(state.good_steps) + 1) * is_finite
                factor = 0.5 if not is_finite else 2.0 if good_steps == _STEPS_TO_DOUBLE else 1.0
                state.loss_scale.assign(state.loss_scale * factor)
                state.good_steps.assign(good_steps % _STEPS_TO_DOUBLE)
            state.step.assign_add(1)
            state.examples.assign_add(len(batch[1]))
        return self.results(arrays, gradients)

    def _train_step(self, example: Any, draws: tf.Tensor) -> dict[str, tf.Tensor]:
        """Make the step of a compiled model, with its update; return loss and metrics."""
        penalty = sum(self._penalties(), 0.0)
        with floatx_of(self.options.dtype):
            logs = scalars(self.model.train_step(self._prepared(example, draws)))
        names = "loss", *(name for name in logs if "loss" in name), *logs
        loss = logs[next(name for name in names if name in logs)]
        arrays = {f"metric/{name}": value for name, value in logs.items() if name != "loss"}
        return {"loss": loss - tf.cast(penalty, loss.dtype), **arrays}

    def _gradients(self, example: Any, draws: tf.Tensor) -> tuple[dict[str, tf.Tensor], list]:
        """Return a classifier's loss and gradients, without the penalties of weights."""
        (x, *targets), smoothing = self._prepared(example, draws), self.options.label_smoothing
        with floatx_of(self.options.dtype), tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            loss = tf.reduce_mean(_cross_entropy(logits, *targets, smoothing=smoothing))
            added = self.model.losses  # those of regularizers are the last
            for each in added[: len(added) - len(self._penalties())]:
                loss += tf.cast(each, loss.dtype)
            scale = self.state.loss_scale
            scaled = loss if scale is None else loss * tf.cast(scale, loss.dtype)
        gradients = tape.gradient(scaled, [v.value for v in self.model.trainable_variables])
        # A run adds up the rows of sparse gradients before its update.
        return {"loss": loss}, [g if g is None else tf.convert_to_tensor(g) for g in gradients]

    def _penalties(self) -> list[tf.Tensor]:
        return [v.regularizer(v) for v in self.model.trainable_variables if v.regularizer]

    def _update(self, loss: tf.Tensor, gradients: Sequence[Any]) -> bool:
        """Penalise, clip and apply the gradients if loss and gradients are finite; return if so."""
        options, scale = self.options, self.state.loss_scale
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            penalties = self._penalties()
            if options.weight_decay and options.optimizer not in DECAY_APART:
                kernels = [tf.convert_to_tensor(v.value) for v in weights if len(v.shape) > 1]
                penalties += [options.weight_decay * tf.nn.l2_loss(kernel) for kernel in kernels]
        values = [v.value for v in weights]
        of_penalties = tape.gradient(penalties, values) if penalties else [None] * len(values)
        pairs = []
        for gradient, of_penalty, weight in zip(gradients, of_penalties, weights, strict=True):
            if gradient is not None and scale is not None:
                gradient /= tf.cast(scale, gradient.dtype)
            if parts := [part for part in (gradient, of_penalty) if part is not None]:
                pairs.append((tf.add_n(parts), weight))
        total, weights = zip(*pairs, strict=True)
        if not bool(tf.math.is_finite(loss) & tf.math.is_finite(tf.linalg.global_norm(total))):
            return False
        if limit := options.clip_norm:
            total = [tf.clip_by_norm(g, limit) for g in total]
        elif limit := options.clip_value:
            total = [tf.clip_by_value(g, -limit, limit) for g in total]
        elif limit := options.clip_global_norm:
            total, _ = tf.clip_by_global_norm(total, limit)
        self.state.optimizers[0].apply(total, weights)
        return True

    def _move_averages(self) -> None:
        seen = float(self.state.examples) / _EMA_EXAMPLES
        decay = min((1.0 + seen) / (10.0 + seen), self.options.ema_decay)
        rate = 1.0 - decay ** (self.options.batch_size / _EMA_EXAMPLES)
        for variable, average in self.state.averages:
            average.assign_add((variable.value - average) * rate)

    def evaluate(self, batch: Any) -> Arrays:
        """See `Runner`."""
        (example, counted), averages = batch, self.state.averages
        number = int(tf.reduce_sum(counted))  # the others are padding
        example = tf.nest.map_structure(lambda t: t[:number], example)
        results = self._evaluation(example)
        with restore_after(variable for variable, _ in averages):
            for variable, average in averages:
                variable.assign(average)
            of_averages = self._evaluation(example) if averages else {}
        return results | {f"{name}{AVERAGED}": value for name, value in of_averages.items()}

    def _evaluation(self, example: Any) -> Arrays:
        twice = lambda call: lambda x, **how: mirrored(functools.partial(call, **how), x)  # noqa: E731
        flips = [(self.model, "call", twice)] if self.options.test_time_flip else []
        with self._on_device(), tf_internals.replaced(*flips):
            if not self._is_classifier:
                self.model.reset_metrics()
            metrics = self._test_step(example)
        return evaluation_arrays(metrics, self.options)

    def _metrics(self, example: Any) -> dict[str, tf.Tensor]:
        data = self._prepared(example, None)
        with floatx_of(self.options.dtype):
            if not self._is_classifier:
                return scalars(self.model.test_step(data))
            logits = self.model(data[0], training=False)
        losses = tf.cast(_cross_entropy(logits, *data[1:]), tf.float64)
        right = tf.argmax(logits, -1, data[1].dtype) == data[1]
        accuracy = tf.reduce_mean(tf.cast(right, tf.float64))
        return {"accuracy": accuracy, "loss": tf.reduce_mean(losses)}

    def _prepared(self, example: Any, draws: tf.Tensor | None) -> tuple:
        """Return (x, y) or (x, y, weights) for the model; `draws` augment images in training."""
        (x, *rest), kind, dtype = example, self.options.augment, self.options.input_dtype
        cast = lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t  # noqa: E731
        as_it_is = self.data.image_shape is None or (not self._is_classifier and kind == "off")
        if as_it_is:
            x = tf.nest.map_structure(cast, x)
        elif draws is None:
            x = augment.eval_images(x, kind, dtype)
        else:
            x = augment.train_images(x, draws, kind, dtype)
        return x, *tf.nest.map_structure(cast, rest)


def _cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, weights: Any = 1.0, smoothing: float = 0.0
) -> tf.Tensor:
    """Return the loss of each example, times its weight."""
    logits = tf.cast(logits, tf.float32) if logits.dtype.size < 4 else logits
    rest = smoothing / logits.shape[-1]
    targets = tf.one_hot(labels, logits.shape[-1], 1.0 - smoothing + rest, rest, dtype=logits.dtype)
    losses = tf.nn.softmax_cross_entropy_with_logits(targets, logits)
    return losses * tf.cast(weights, losses.dtype)
