"""The results of an evaluation: metrics, and the model's predictions."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.formatting import figure
from towers.monitoring.pictures import Mistake, Predictions
from towers.training.step.train_state import copy_beside, snapshot

NUM_MISTAKES = 16
AVERAGED = "_ema"  # ends the names of metrics of the averages


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of evaluating a split."""

    # "accuracy" and "loss" (mean cross entropy in nats) of a classifier, the metrics of a compiled
    # model; those of the moving averages end in "_ema".
    metrics: Mapping[str, float | None]
    examples: int  # their number
    # {class name: accuracy}, None for a class without examples; None without classes.
    class_accuracy: dict[str, float | None] | None = None
    class_accuracy_ema: dict[str, float | None] | None = None  # that of the averages
    predictions: Predictions | None = dataclasses.field(default=None, compare=False, repr=False)

    def figures(self) -> dict[str, Any]:
        """Return the JSON of `towers evaluate`."""
        report = dict(self.metrics)
        if self.class_accuracy is not None:
            report["class_accuracy"] = self.class_accuracy
            report["class_accuracy_ema"] = self.class_accuracy_ema
        return report | {"examples": self.examples}

    def table(self) -> list[str]:
        """Return the metrics as the lines of a table."""
        names = [name for name in self.metrics if not name.endswith("_ema")]
        rows = [(name, self.metrics[name], self.metrics.get(f"{name}_ema")) for name in names]
        ema = self.class_accuracy_ema or {}
        by_class = self.class_accuracy or {}
        rows += [(f"  accuracy of {name}", v, ema.get(name)) for name, v in by_class.items()]
        averaged = any(average is not None for *_, average in rows)
        lines, width = [], max(12, *(len(name) for name, *_ in rows))
        for name, *cells in [("", "weights", "EMA"), *rows]:
            shown = [figure(c) if isinstance(c, float) else c or "-" for c in cells[: 1 + averaged]]
            lines.append(f"{name:{width}}" + "".join(f" {text:>9}" for text in shown))
        return lines


class MetricState:
    """A second state of the metrics, for evaluating the averages of the weights."""

    def __init__(self, variables: Iterable[keras.Variable]):
        """Create a second variable for each variable of the metrics."""
        self._twins = [(v, copy_beside(v.value)) for v in variables]
        self._unknown: list[tuple[tf.Variable, tf.Variable]] = []

    def add_unknown(self, variables: Iterable[tf.Variable]) -> None:
        """Add variables outside of Keras that a traced step assigns, as a user's metric may."""
        known = {id(v) for v, _ in self._unknown}
        with tf.init_scope():
            self._unknown += [(v, copy_beside(v)) for v in variables if id(v) not in known]

    def reset(self) -> None:
        """Copy the initial state from the metrics, which have been reset."""
        for variable, twin in self._twins:
            twin.assign(variable.value)
        for variable, twin in self._unknown:
            twin.assign(variable)

    @contextlib.contextmanager
    def used(self, averages: Iterable[tuple[keras.Variable, tf.Variable]]) -> Iterator[None]:
        """Read averages in place of variables in the block, and update this state."""
        before = [snapshot(variable) for variable, _ in self._unknown]
        for variable, twin in self._unknown:
            variable.assign(twin)
        pairs = [*averages, *self._twins]
        with keras.StatelessScope([(v, tf.convert_to_tensor(new)) for v, new in pairs]) as scope:
            yield
        for variable, twin in self._twins:
            twin.assign(scope.get_current_value(variable))
        for (variable, twin), value in zip(self._unknown, before, strict=True):
            twin.assign(variable)
            variable.assign(value)


class PredictionCollector:
    """Collects a model's predictions for a split, and its most confident mistakes."""

    def __init__(self, averaged: bool):
        """Set whether the predictions are those of the moving averages."""
        self.averaged = averaged
        self._labels: list[np.ndarray] = []
        self._predictions: list[np.ndarray] = []
        self._mistakes: list[Mistake] = []

    def add(
        self, images: Any, true: np.ndarray, predicted: np.ndarray, confidence: np.ndarray
    ) -> None:
        """Add a batch.

        Args:
            images: `[b, H, W, C]`, or None.
            true: classes, `[b]`.
            predicted: predicted classes, `[b]`.
            confidence: probabilities of these, `[b]`.
        """
        self._labels.append(true)
        self._predictions.append(predicted)
        if images is None:
            return
        # Only images that are among the worst so far are copied. NaN compares as False, so a broken
        # model has no confident mistakes.
        worst = self._mistakes
        least = worst[-1].confidence if len(worst) == NUM_MISTAKES else -1.0
        rows = np.flatnonzero((true != predicted) & (confidence > least))
        for i in rows[np.argsort(-confidence[rows], kind="stable")[:NUM_MISTAKES]]:
            image = np.asarray(images[i])
            worst.append(Mistake(image, int(true[i]), int(predicted[i]), float(confidence[i])))
        worst.sort(key=lambda mistake: -mistake.confidence)
        del worst[NUM_MISTAKES:]

    def predictions(self) -> Predictions | None:
        """Return all predictions, None if there are none."""
        if not self._labels:
            return None
        labels, predicted = np.concatenate(self._labels), np.concatenate(self._predictions)
        return Predictions(labels, predicted, self._mistakes, self.averaged)
