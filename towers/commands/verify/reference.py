"""The reference of `towers verify`: a run's steps in plain Keras, on one device.

The model's own `train_step` is called as Keras calls it, and its optimizer makes the update.
Options, data, model function, optimizer and schedule are those of the run. Augmentation, averages
and penalties are written here once more, so that a fault of the step is on one side only.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.commands.verify.runner import Arrays, Runner, evaluation_arrays
from towers.errors import RunError
from towers.options.run import Options
from towers.training.run.model import build_model
from towers.training.run.setup import RunContext
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step.evaluation import AVERAGED, mirrored, scalars
from towers.training.step.step import floatx_of
from towers.training.step.train_state import (
    TrainState,
    dynamic_scale,
    move_all,
    optimizers_of,
    restore_after,
)

_EMA_EXAMPLES = 128  # per which `ema_decay` applies


class PlainRunner(Runner):
    """A run in plain Keras. A batch is (example, draws), as for `TrainRunner`."""

    num_towers, builder = 1, None

    def __init__(self, run: RunContext, options: Options, device: str):
        """Build the model again, and trace its step.

        Args:
            run: the same run on towers, which has the data and the schedule.
            options: of the run, as they were given.
            device: that computes all.
        """
        self._prepare, self._rate_after = run.task.prepare, run.learning_rate
        self.dtype = options.dtype
        self.options, self._device = options, device
        spec = run.data.train.train_batches(options.batch_size, seed=options.seed).element_spec
        with self._on_device(), tf_internals.named_as_in_a_new_process():
            built = build_model(options, run.data, exact=True)
            self.model, self._by_flags = built.network, built.by_flags
            move_all(self.model.variables, device)
            step = tf.function(self._train_step, autograph=False)
            step.get_concrete_function(*spec)  # makes the optimizers' variables
            ema, optimizers = options.ema_decay > 0, optimizers_of(self.model)
            self.state = TrainState(self.model, *optimizers, ema=ema, device=device)
            self._step = step.get_concrete_function(*spec)
        self._test_step = tf.function(self._metrics, autograph=False)
        self.named = self.state.variables()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        plain, errors = tf_internals.convolve_without_xla(), user_facing_errors()
        with errors, tf.device(self._device), plain:
            yield

    def graph(self, batch: Any) -> tf.Graph:
        """See `Runner`."""
        return self._step.graph

    def make_step(self, batch: Any) -> Arrays:
        """See `Runner`."""
        state, scale = self.state, float(dynamic_scale(self.model))
        with self._on_device():
            if self._by_flags and not self.options.makes_own_optimizer:
                self.model.optimizer.learning_rate.assign(self._rate_after(state.examples))
            self.model.reset_metrics()  # they are reported of one batch
            arrays = self._step(*batch)
            if bool(tf.math.is_finite(arrays["loss"])):
                self._move_averages()
            elif scale == 1.0:
                raise RunError(
                    f"step {int(state.step)} is not finite on one device, so there is nothing to "
                    "compare; try a lower --learning_rate"
                )
            state.step.assign_add(1)
            state.examples.assign_add(len(batch[1]))
        return self.results(arrays)

    def _train_step(self, example: Any, draws: tf.Tensor) -> dict[str, tf.Tensor]:
        """Make the model's step, with its update; return loss, without penalties, and metrics."""
        penalty = self._penalty()
        with floatx_of(self.options.dtype):
            logs = scalars(self.model.train_step(self._prepare(example, draws)))
        names = "loss", *(name for name in logs if "loss" in name), *logs
        loss = logs[next(name for name in names if name in logs)]
        arrays = {f"metric/{name}": value for name, value in logs.items() if name != "loss"}
        return {"loss": loss - tf.cast(penalty, loss.dtype), **arrays}

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
        self.model.reset_metrics()
        with self._on_device(), tf_internals.replaced(*flips):
            metrics = self._test_step(example)
            if self._by_flags:
                metrics["loss"] -= tf.cast(self._penalty(), metrics["loss"].dtype)
        return evaluation_arrays(metrics, self.options)

    def _penalty(self) -> tf.Tensor:
        weights = self.model.trainable_variables
        return tf.add_n([v.regularizer(v) for v in weights if v.regularizer] or [tf.zeros([])])

    def _metrics(self, example: Any) -> dict[str, tf.Tensor]:
        with floatx_of(self.options.dtype):
            return scalars(self.model.test_step(self._prepare(example, None)))
