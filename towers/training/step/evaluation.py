"""Evaluation: a model's own `test_step`, with its weights and with their moving averages."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builder.replica_context import integers_on
from towers.errors import InputError
from towers.training.step.on_towers import traced
from towers.training.step.train_state import copy_beside

AVERAGED = "_ema"  # ends the names of metrics of the averages
Stop = Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of evaluating a split."""

    metrics: Mapping[str, float]  # the model's; those of the moving averages end in "_ema"
    examples: int  # their number


class TestStep:
    """Evaluates batches by a model's own `test_step`, whose calls run on towers."""

    def __init__(
        self,
        model: keras.Model,
        test_step: Callable[[Any], dict[str, tf.Tensor]],
        averages: Sequence[tuple[keras.Variable, tf.Variable]],
        home: str,
        without_penalty: bool,
    ):
        """Set what is evaluated.

        Args:
            model: that is evaluated.
            test_step: updates the model's metrics by an example, and returns them as scalars.
            averages: (variable, its moving average); empty without any.
            home: the device of all that is not on towers.
            without_penalty: whether "loss" is without the penalties of weights that Keras adds.
        """
        self._model, self._averages = model, averages
        weights = model.trainable_variables if without_penalty else ()
        self._penalized = [v for v in weights if v.regularizer is not None]
        metrics = model.metrics_variables if averages else ()
        self._of_averages = [(v, copy_beside(v.value)) for v in metrics]  # a second state of them

        def step(example: Any) -> list[dict[str, tf.Tensor]]:
            with tf.device(home), integers_on(home):
                results = [test_step(example)]
                if averages:
                    with self._averages_used():
                        results.append(test_step(example))
            return results

        # Keras weighs the loss of an output by the size of the batch, if that is static. TensorFlow
        # counts the traces of a function's code, which all runs of a program would share.
        self._step = tf.function(functools.partial(step), autograph=False)

    def evaluate(
        self, batches: Iterable[Any], examples: int, stop: Stop = lambda: False
    ) -> Evaluation | None:
        """Evaluate the current weights, and their averages if there are any, in one pass.

        Args:
            batches: of (example, counted): `[B]`, 1 for each example and 0 for padding, which
                comes last.
            examples: their number.
            stop: called before each batch; if it returns True, None is returned.
        """
        self._model.reset_metrics()
        for variable, other in self._of_averages:
            other.assign(variable.value)
        logs: Sequence[dict[str, tf.Tensor]] = []
        for example, counted in batches:
            if stop():
                return None
            number = int(tf.reduce_sum(counted))
            example = tf.nest.map_structure(lambda t, n=number: t[:n], example)
            logs = traced(self._model, lambda x=example: self._step(x))
        metrics = self._totals(logs[0])
        if self._averages:
            with self._averages_used():
                of_averages = self._totals(logs[1])
            metrics |= {f"{name}{AVERAGED}": value for name, value in of_averages.items()}
        return Evaluation(metrics, examples)

    def _totals(self, logs: dict[str, tf.Tensor]) -> dict[str, float]:
        """Return the metrics over all batches, or `logs` if the model's own step has others."""
        metrics = scalars(self._model.get_metrics_result())
        metrics = metrics if metrics.keys() == logs.keys() else logs
        totals = {name: float(value) for name, value in metrics.items()}
        for weight in self._penalized:
            totals["loss"] -= float(weight.regularizer(weight))
        return totals

    @contextlib.contextmanager
    def _averages_used(self) -> Iterator[None]:
        """Read averages in place of variables in the block, and update their own metrics."""
        pairs = [(v, tf.convert_to_tensor(x)) for v, x in (*self._averages, *self._of_averages)]
        with keras.StatelessScope(pairs) as scope:
            yield
        for variable, other in self._of_averages:
            other.assign(scope.get_current_value(variable))


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
            # Keras 3.12 makes results Python's numbers, of 64 bits.
            exact = tf.float64 if isinstance(value, float) else None
            yield f"{before}{name}", tf.convert_to_tensor(value, exact)


def check_rows(output: Any) -> None:
    """Raise InputError for an output, symbolic or not, that has no single row for each image."""
    if tf.TensorShape(output.shape).rank != 2:
        raise InputError(
            "--test_time_flip needs one row of numbers for each image, but the model's outputs "
            f"have shape {output.shape}; leave it out"
        )


def mirrored(call: Callable, images: tf.Tensor) -> Any:
    """Return the mean outputs for images and their mirror images, float32 at least.

    Args:
        call: a model: from images to an output `[b, n]`, or a structure of such.
        images: `[b, H, W, C]`.

    Raises:
        InputError: an output has another rank.
    """

    def mean(output: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        check_rows(output)
        dtype = tf.float32 if output.dtype.size < 4 else output.dtype
        return (tf.cast(output, dtype) + tf.cast(other, dtype)) / 2

    return tf.nest.map_structure(mean, call(images), call(tf.reverse(images, [2])))
